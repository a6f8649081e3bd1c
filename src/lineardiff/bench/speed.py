"""Images per second of several models, measured side by side."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from lineardiff.bench.timing import Timing, interleaved

Mode = Literal["inference", "training"]


@dataclass(frozen=True)
class Speed:
    """Images per second over the rounds of one measurement."""

    median: float
    low: float
    """First quartile of the rounds."""
    high: float
    """Third quartile of the rounds."""
    rounds: int
    mode: Mode
    batch_size: int
    threads: int
    """Threads PyTorch computes with on a CPU."""
    device: str


def images_per_second(
    models: Mapping[str, nn.Module],
    *,
    image_size: int | tuple[int, int],
    batch_size: int,
    mode: Mode = "inference",
    in_chans: int = 3,
    rounds: int = 9,
    seconds: float = 0.3,
) -> dict[str, Speed]:
    """Measure models in turn, round after round, so that a disturbance of the machine meets all of them.

    A copy of each model runs where its parameters are, in their precision, on random images. "inference" is
    one forward pass without gradients, "training" one step: forward, cross-entropy, backward, AdamW.

    Args:
        models: Name to model; each takes images (batch_size, in_chans, height, width) and gives logits
            (batch_size, classes).
        image_size: Pixels of a side, or (height, width).
        rounds: Measurements of each model; the order of the models turns round in every other one.
        seconds: About how long one measurement lasts.

    Returns:
        Name to its :class:`Speed`.

    Raises:
        ValueError: Without a model, or with fewer than two rounds.
    """
    if not models:
        raise ValueError("images_per_second needs at least one model, got an empty mapping")
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    devices = {name: next(model.parameters()).device for name, model in models.items()}
    steps = {name: _step(model, mode, (batch_size, in_chans, *size)) for name, model in models.items()}
    timings = interleaved(steps, rounds=rounds, seconds=seconds, devices=devices.values())
    return {name: _speed(timing, mode, batch_size, devices[name]) for name, timing in timings.items()}


def _speed(timing: Timing, mode: Mode, batch_size: int, device: torch.device) -> Speed:
    return Speed(
        median=batch_size / timing.median,
        low=batch_size / timing.high,
        high=batch_size / timing.low,
        rounds=timing.rounds,
        mode=mode,
        batch_size=batch_size,
        threads=torch.get_num_threads(),
        device=str(device),
    )


def _step(model: nn.Module, mode: Mode, shape: tuple[int, ...]) -> Callable[[], object]:
    model = copy.deepcopy(model).train(mode == "training")
    first = next(model.parameters())
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(first)
    if mode == "inference":
        return torch.inference_mode()(lambda: model(images))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    labels = torch.zeros(shape[0], dtype=torch.long, device=first.device)

    def train_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return train_step
