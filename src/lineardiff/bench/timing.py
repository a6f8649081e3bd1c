"""How long calls take, measured in turn: the one clock of every speed in this package."""

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median, quantiles
from typing import NamedTuple

import torch

LEAST_ROUNDS = 3  # fewer give no spread worth the name


class Timing(NamedTuple):
    """Seconds of one call over the rounds of a measurement."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    rounds: int


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    seconds: float = 0.0,
    limit: float | None = None,
    devices: Iterable[torch.device] = (),
) -> dict[str, Timing]:
    """Time calls in turn, round after round, so that a disturbance of the machine meets all of them.

    Each call is made once to warm up and once to tell how many fit in `seconds`, before the rounds begin; the
    order turns round in every other round.

    Args:
        calls: Name to what is timed.
        rounds: Measurements of each call.
        seconds: About how long one measurement lasts; a call that takes longer is made once.
        limit: Seconds after which no new round begins, once there are three; None sets no limit.
        devices: What the calls compute on; the clock waits for those that are no CPU.

    Returns:
        Name to its :class:`Timing`.

    Raises:
        ValueError: With fewer than two rounds.
    """
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}; a spread needs at least 2")
    waits = {device for device in devices if device.type != "cpu"}
    for call in calls.values():
        call_seconds(call, waits)
    repeats = {name: max(1, round(seconds / call_seconds(call, waits))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(rounds):
        if limit is not None and turn >= LEAST_ROUNDS and time.perf_counter() - start > limit:
            break
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(call_seconds(calls[name], waits, repeats=repeats[name]) / repeats[name])
    return {name: _summary(measured) for name, measured in times.items()}


def _summary(measured: list[float]) -> Timing:
    low, _, high = quantiles(measured, n=4, method="inclusive")
    return Timing(median(measured), low, high, len(measured))


def call_seconds(
    call: Callable[[], object], devices: Iterable[torch.device] = (), *, repeats: int = 1
) -> float:
    """Seconds of `repeats` calls together."""
    waits = {device for device in devices if device.type != "cpu"}
    _wait(waits)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(waits)
    return time.perf_counter() - start


def _wait(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.accelerator.synchronize(device)
