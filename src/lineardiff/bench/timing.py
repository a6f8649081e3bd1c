"""The clock behind every speed in this package: calls timed in interleaved rounds."""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple, TypeVar

import torch

__all__ = ["BUSY", "LEAST_ROUNDS", "Timing", "call_seconds", "interleaved", "seconds_running"]

Key = TypeVar("Key")

LEAST_ROUNDS = 3
"""Rounds made whatever the time limit, except past a deadline."""

BUSY = 0.25
"""Interquartile range over median above which a time is reported as disturbed by other work.

Of the 232 times in docs/measured, recorded on two cores of a shared server without other load, 2 % exceed it, and at
most 8 % of those in one file.
"""


class Timing(NamedTuple):
    """Seconds per call over the rounds of a measurement."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    rounds: int


def interleaved(
    calls: Mapping[Key, Callable[[], object]],
    *,
    rounds: int = 9,
    seconds: float = 0.0,
    limit: float | None = None,
    deadline: float = math.inf,
    devices: Iterable[torch.device] = (),
    before: Callable[[Key], object] | None = None,
    warm_up: bool = True,
) -> dict[Key, Timing]:
    """Time calls in interleaved rounds, so that a disturbance of the machine affects all of them.

    Before the rounds each call runs twice, to warm up and to find how many calls fit in `seconds`. Every other round
    reverses the order.

    Args:
        calls: The calls to time, by any key.
        rounds: Measurements of each call, at least 2.
        seconds: Approximate duration of one measurement. A longer call is made once.
        limit: Seconds after which no further round begins, once there are three. None sets no limit.
        deadline: Value of `time.perf_counter()` after which no further call is made. Calls without two measurements
            by then are missing from the result.
        devices: Devices the calls compute on; the clock synchronizes with those other than the CPU.
        before: Called with the key before each measurement, outside the measured time.
        warm_up: False if the calls have been made before.

    Returns:
        The timing of each call.

    Raises:
        ValueError: There are fewer than two rounds.
    """
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}; a spread needs at least 2.")
    devices = list(devices)

    def measure(key: Key, *, repeats: int = 1) -> float:
        if before is not None:
            before(key)
        return call_seconds(calls[key], devices, repeats=repeats) / repeats

    repeats: dict[Key, int] = {}
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for key in [*calls, *calls] if warm_up else calls:
        if time.perf_counter() >= deadline:
            return {}
        repeats[key] = max(1, round(seconds / max(measure(key), 1e-9)))
    start = time.perf_counter()
    for turn in range(rounds):
        if limit is not None and turn >= LEAST_ROUNDS and time.perf_counter() - start > limit:
            break
        for key in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            if time.perf_counter() < deadline:
                times[key].append(measure(key, repeats=repeats[key]))
    return {key: _summary(measured) for key, measured in times.items() if len(measured) > 1}


def _summary(measured: list[float]) -> Timing:
    low, _, high = quantiles(measured, n=4, method="inclusive")
    return Timing(median(measured), low, high, len(measured))


def call_seconds(
    call: Callable[[], object], devices: Iterable[torch.device] = (), *, repeats: int = 1
) -> float:
    """Return the seconds that `repeats` calls take together."""
    waits = {device for device in devices if device.type != "cpu"}
    for device in waits:
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    for device in waits:
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def seconds_running() -> float:
    """Return the seconds since this process began; outside Linux its CPU time, a lower bound."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.process_time()
