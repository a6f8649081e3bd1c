"""Whole models side by side: python -m benchmarks.model swin_tiny_patch4_window7_224 vca_swin_tiny_patch4_224

Milliseconds of one batch (inference or a training step), interleaved round by round in one process, medians with
quartiles; then the peak memory of each, in a process of its own: how far the resident memory rises above that of the
model alone. --csv FILE writes the table.
"""

import argparse
import csv
import os
import platform
import subprocess
import sys
from pathlib import Path

import timm
import torch

import lineardiff  # registers the models
from lineardiff.evaluate import images_per_second

COLUMNS = ("model", "image", "batch", "mode", "dtype", "threads", "ms", "low_ms", "high_ms", "peak_mib")


def build(name: str, image_size: int, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, img_size=image_size, dtype=dtype)
    except TypeError:  # a model of any size
        model = timm.create_model(name, dtype=dtype)
    return model.eval()


def peak_mib(arguments: argparse.Namespace, name: str) -> float:
    """Of a fresh process, as the kernel counts it."""
    words = [sys.executable, "-m", "benchmarks.model", name, "--image-size", str(arguments.image_size)]
    words += ["--batch-size", str(arguments.batch_size), "--mode", arguments.mode, "--dtype", arguments.dtype]
    words += ["--threads", str(arguments.threads), "--only-memory"]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def print_memory(arguments: argparse.Namespace, name: str) -> None:
    model = build(name, arguments.image_size, getattr(torch, arguments.dtype))
    x = torch.rand(arguments.batch_size, 3, arguments.image_size, arguments.image_size).to(
        next(model.parameters())
    )
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * os.sysconf("SC_PAGE_SIZE")
    if arguments.mode == "inference":
        with torch.inference_mode():
            model(x)
    else:
        model.train()(x).sum().backward()
    # not getrusage's ru_maxrss, which a new process inherits from its parent
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    print((int(peak.split()[1]) * 1024 - before) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--mode", choices=("inference", "training"), default="inference")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--csv", help="also write the rows to this file")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only_memory:
        print_memory(arguments, arguments.models[0])
        return
    print(
        f"torch {torch.__version__}, timm {timm.__version__}, lineardiff {lineardiff.__version__}, "
        f"{arguments.threads} threads of {os.cpu_count()} {platform.machine()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )
    models = {n: build(n, arguments.image_size, getattr(torch, arguments.dtype)) for n in arguments.models}
    speeds = images_per_second(
        models,
        image_size=arguments.image_size,
        batch_size=arguments.batch_size,
        mode=arguments.mode,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
    )
    del models
    rows = []
    for name, speed in speeds.items():
        times = (1000 * arguments.batch_size / rate for rate in (speed.median, speed.high, speed.low))
        rows.append(
            (
                name,
                arguments.image_size,
                arguments.batch_size,
                arguments.mode,
                arguments.dtype,
                arguments.threads,
                *(f"{t:.1f}" for t in times),
                f"{peak_mib(arguments, name):.0f}",
            )
        )
    form = "{:<32} " + "{:>9} " * (len(COLUMNS) - 1)
    for row in (COLUMNS, *rows):
        print(form.format(*row))
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    sys.exit(main())
