"""A DiT or SiT against its VCA form: python -m benchmarks.generator sit_s_2 vca_sit_s_2 --latents 32 64 128

Milliseconds of one sampling step (the network once, without gradients) and of one training step (forward, mean
square, backward, AdamW), interleaved round by round in one process, medians with quartiles. --csv FILE writes the
table.
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

from lineardiff.models import create_generator

COLUMNS = (
    "step",
    "latent",
    "tokens",
    "batch",
    "dtype",
    "threads",
    "model",
    "ms",
    "low_ms",
    "high_ms",
    "ratio",
)


def steps(
    model: torch.nn.Module, latent: int, batch: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """One sampling step and one training step of a model."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 4, latent, latent, generator=generator).to(dtype)
    t = torch.rand(batch, generator=generator)
    y = torch.arange(batch) % 1000
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def sampling() -> None:
        with torch.inference_mode():
            model.eval()(x, t, y)

    def training() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.train()(x, t, y).sample.float().square().mean().backward()
        optimizer.step()

    return {"sampling": sampling, "training": training}


def interleaved(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call; the order turns round in every other round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for turn in range(rounds):
        for name in list(functions)[:: 1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            functions[name]()
            times[name].append(1000 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--latents", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads of {os.cpu_count()} {platform.machine()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )
    form = "{:>9} " * 6 + "{:<14} " + "{:>9} " * 4
    print(form.format(*COLUMNS))
    rows = []
    for latent in arguments.latents:
        torch.manual_seed(0)
        models = {name: create_generator(name, sample_size=latent).to(dtype) for name in arguments.models}
        tokens = (latent // next(iter(models.values())).config.patch_size) ** 2
        all_steps = {n: steps(m, latent, arguments.batch_size, dtype) for n, m in models.items()}
        for step in ("sampling", "training"):
            times = interleaved({name: s[step] for name, s in all_steps.items()}, arguments.rounds)
            first = statistics.median(times[arguments.models[0]])
            for name, measured in times.items():
                low, middle, high = statistics.quantiles(measured, n=4, method="inclusive")
                numbers = (f"{x:.1f}" for x in (middle, low, high))
                row = (
                    step,
                    latent,
                    tokens,
                    arguments.batch_size,
                    arguments.dtype,
                    arguments.threads,
                    name,
                    *numbers,
                )
                rows.append((*row, f"{first / middle:.2f}"))
                print(form.format(*map(str, rows[-1])), flush=True)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    sys.exit(main())
