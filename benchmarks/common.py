"""What the benchmarks share: their arguments, the files they write, and whole models side by side."""

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import timm
import torch
from torch.nn import functional as F

import lineardiff  # registers the models  # noqa: F401
from lineardiff.bench import environment, images_per_second, peak_memory
from lineardiff.bench.memory import can_measure
from lineardiff.bench.speed import Mode
from lineardiff.cli.bench import machine_line
from lineardiff.table import format_table

# (B, heads, N, d, n): DeiT-T, SiT-S/2 at 256 pixels, larger images, the first stage of VCA-PVT and VCA-Swin
SHAPES = (
    (8, 3, 196, 64, 49),
    (8, 6, 256, 64, 64),
    (1, 6, 1024, 64, 64),
    (1, 6, 4096, 64, 64),
    (1, 3, 3136, 32, 9),
)
SWEEP = tuple((1, 6, N, 64, 49) for N in (49, 196, 784, 3136, 16384, 65536))
MODEL_COLUMNS = (
    "model",
    "image",
    "batch",
    "mode",
    "dtype",
    "threads",
    "ms",
    "low_ms",
    "high_ms",
    "ratio",
    "peak_mib",
)


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--csv", type=Path, help="also write the rows to this file, the hardware to a .json beside it"
    )
    return parser


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")


def print_machine() -> None:
    print(machine_line(environment()), flush=True)


def save(path: Path | None, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    if path is None:
        return
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    path.with_suffix(".json").write_text(json.dumps({"environment": environment()}, indent=1) + "\n")


def measure_models(names: Sequence[str], arguments: argparse.Namespace, *, mode: Mode) -> list[tuple]:
    """Time models side by side, then the peak memory of each in a process of its own; prints the table.

    Rows as :data:`MODEL_COLUMNS`; `ratio` is the time of the first model over that of the row.
    """
    a = arguments
    models = {name: build(name, a.image_size, a.dtype) for name in names}
    speeds = images_per_second(
        models,
        image_size=a.image_size,
        batch_size=a.batch_size,
        mode=mode,
        rounds=a.rounds,
        seconds=a.seconds,
    )
    del models
    rows = []
    for name, speed in speeds.items():
        times = [f"{1000 * a.batch_size / rate:.1f}" for rate in (speed.median, speed.high, speed.low)]
        ratio = f"{speed.median / speeds[names[0]].median:.2f}"
        what = (name, a.image_size, a.batch_size, mode, a.dtype, speed.threads)
        rows.append((*what, *times, ratio, peak_mib(name, a, mode)))
    print(format_table(MODEL_COLUMNS, [tuple(map(str, row)) for row in rows]), flush=True)
    return rows


def build(name: str, image_size: int, dtype: str) -> torch.nn.Module:
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, img_size=image_size, dtype=getattr(torch, dtype))
    except TypeError:  # a model of any size
        model = timm.create_model(name, dtype=getattr(torch, dtype))
    return model.eval()


def peak_mib(name: str, arguments: argparse.Namespace, mode: Mode) -> str:
    """How far memory rises above that of the model and the images."""
    cpu = torch.device("cpu")
    if not can_measure(cpu):
        return "n/a"
    a = arguments
    call = partial(_model_call, name, a.image_size, a.batch_size, a.dtype, mode)
    return f"{peak_memory(call, device=cpu) / 2**20:.0f}"


def _model_call(name: str, image_size: int, batch_size: int, dtype: str, mode: Mode) -> Callable[[], object]:
    model = build(name, image_size, dtype)
    x = torch.rand(batch_size, 3, image_size, image_size).to(next(model.parameters()))
    if mode == "inference":
        return torch.inference_mode()(lambda: model(x))
    labels = torch.zeros(batch_size, dtype=torch.long)
    model.train()
    return lambda: F.cross_entropy(model(x), labels).backward()
