"""Peak memory in a process of its own, against allocations of known size."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

from lineardiff.bench.memory import CallFailed, can_measure, peak_memory

CPU = torch.device("cpu")
MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def inputs_and_call(inputs_mib: int, *peaks_mib: int) -> Callable[[], object]:
    inputs = torch.ones(inputs_mib * MIB // 4)

    def call() -> float:
        for mib in peaks_mib:  # one after another, so the largest is the peak
            inputs[:1] += torch.ones(mib * MIB // 4)[-1:]
        return inputs[0].item()

    return call


def failing_call(how: str) -> Callable[[], object]:
    def call() -> None:
        if how == "raises":
            raise RuntimeError("no such\n  kernel")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)

    return call


def waiting_call() -> Callable[[], object]:
    import time

    return lambda: time.sleep(60)


def test_the_peak_is_the_largest_allocation_beyond_the_inputs() -> None:
    held_here = torch.ones(400 * MIB // 4)  # of this process, not of the one that is measured
    peak = peak_memory(partial(inputs_and_call, 100, 30, 80, 10), device=CPU)
    assert 80 * MIB <= peak < 84 * MIB
    assert held_here[0] == 1


def test_failures_in_the_process_are_reported() -> None:
    with pytest.raises(CallFailed, match="^RuntimeError: no such kernel$"):
        peak_memory(partial(failing_call, "raises"), device=CPU)
    with pytest.raises(CallFailed, match="its process exited with code 9$"):
        peak_memory(partial(failing_call, "exits"), device=CPU)
    with pytest.raises(CallFailed, match="exited with code -9, probably out of memory"):
        peak_memory(partial(failing_call, "is killed"), device=CPU)
    with pytest.raises(CallFailed, match="no result after 1 s"):
        peak_memory(waiting_call, device=CPU, limit=1.0)


def test_devices_without_a_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_measure(CPU)
    assert can_measure(torch.device("cuda"))
    assert not can_measure(torch.device("mps"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_measure(CPU)
