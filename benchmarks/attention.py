"""The op against fused self-attention on the same q, k, v: python -m benchmarks.attention

Forward passes without gradients, interleaved round by round in one process, medians with quartiles. Prints a table
and the hardware; --csv FILE writes it. `mhsa` is `scaled_dot_product_attention`, which timm's attention calls.
"""

import argparse
import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lineardiff import visual_contrast_attention

SHAPES = (
    (8, 3, 196, 64, 49),
    (8, 6, 256, 64, 64),
    (1, 6, 1024, 64, 64),
    (1, 6, 4096, 64, 64),
    (1, 3, 3136, 32, 9),
)
COLUMNS = ("dtype", "B", "heads", "N", "d", "n", "mhsa_ms", "vca_ms", "vca_low_ms", "vca_high_ms", "ratio")


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple, dict]:
    """q, k, v as views of one packed projection, and the contrast tokens."""
    B, heads, N, d, n = shape
    q, k, v = (x.transpose(1, 2) for x in torch.randn(B, N, 3, heads, d).to(dtype).unbind(2))
    pos, neg = torch.randn(2, B, heads, n, d).to(dtype).unbind(0)
    rest = {
        "lambdas": (torch.tensor(0.3), torch.tensor(0.4)),
        "gains": (torch.ones(d), torch.ones(d)),
        "lambda_inits": (0.2, 0.2),
    }
    return (q, k, v, pos, neg), rest


def interleaved(functions: dict[str, Callable[[], object]], *, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of every call, all functions once a round, for about `seconds` in all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function(), function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(1000 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    parser.add_argument("--csv", help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    print(
        f"torch {torch.__version__}, {arguments.threads} threads of {os.cpu_count()} {platform.machine()} cores, ",
        end="",
    )
    print(f"{torch.backends.cpu.get_cpu_capability()}, backend {arguments.backend}")
    print(("{:>9} " * len(COLUMNS)).format(*COLUMNS))
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            tensors, rest = inputs(shape, dtype)
            functions = {
                "mhsa": lambda t=tensors: F.scaled_dot_product_attention(*t[:3]),
                "vca": lambda t=tensors, r=rest: visual_contrast_attention(
                    *t, backend=arguments.backend, **r
                ),
            }
            with torch.inference_mode():
                times = interleaved(functions, seconds=arguments.seconds)
            mhsa, vca = (statistics.median(times[name]) for name in ("mhsa", "vca"))
            low, _, high = statistics.quantiles(times["vca"], n=4)
            row = (str(dtype)[6:], *shape, *(f"{x:.2f}" for x in (mhsa, vca, low, high, mhsa / vca)))
            rows.append(row)
            print(("{:>9} " * len(COLUMNS)).format(*row), flush=True)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    sys.exit(main())
