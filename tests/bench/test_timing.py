import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench_support import FakeClock

from lineardiff.bench.timing import interleaved


def test_calls_take_turns_and_the_order_turns_round() -> None:
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    timings = interleaved(calls, rounds=4)
    # one warm-up of each, one to tell how many fit, then the rounds
    assert "".join(made) == "abc" + "abc" + "abc" + "cba" + "abc" + "cba"
    assert {timing.rounds for timing in timings.values()} == {4}


def test_medians_and_quartiles_are_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    durations = iter([9.0, 0.5, *[1.0] * 2, *[5.0] * 2, *[3.0] * 2, *[2.0] * 2, *[4.0] * 2])

    def call() -> None:
        clock.advance(next(durations))

    timing = interleaved({"a": call}, rounds=5, seconds=1.0)["a"]  # 2 calls of 0.5 s fit in a second
    assert timing == (3.0, 2.0, 4.0, 5)


def test_a_limit_ends_the_rounds_after_three() -> None:
    slow = {"slow": lambda: time.sleep(0.02)}
    assert interleaved(slow, rounds=9, limit=0.0)["slow"].rounds == 3
    assert interleaved(slow, rounds=4, limit=10.0)["slow"].rounds == 4
    assert 0.02 <= interleaved(slow, rounds=3)["slow"].median < 1.0


def test_no_call_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    calls = {"a": lambda: clock.advance(1.0), "b": lambda: clock.advance(2.0)}
    timings = interleaved(calls, rounds=9, deadline=10.5)  # 6 s before the rounds, then a b b
    assert {name: timing.rounds for name, timing in timings.items()} == {"b": 2}
    assert clock.now == 11.0
    assert interleaved(calls, rounds=9, deadline=clock.now) == {}
    assert clock.now == 11.0


def test_preparation_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    prepared: list[str] = []

    def before(name: str) -> None:
        prepared.append(name)
        clock.advance(100.0)

    timings = interleaved({"a": lambda: clock.advance(1.0)}, rounds=2, before=before, warm_up=False)
    assert timings["a"].median == 1.0
    assert prepared == ["a"] * 3


def test_one_round_has_no_spread() -> None:
    with pytest.raises(ValueError, match="rounds is 1; a spread needs at least 2"):
        interleaved({"a": lambda: None}, rounds=1)


def test_the_clock_waits_for_devices_that_are_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: order.append(str(device)))
    devices = [torch.device("cpu"), torch.device("cuda:1")]
    interleaved({"a": lambda: order.append("call")}, rounds=2, devices=devices)
    assert order == ["cuda:1", "call", "cuda:1"] * 4


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_the_age_of_a_process() -> None:
    code = "import time, lineardiff.bench.timing as t; a = t.seconds_running(); time.sleep(1)"
    code += "; print(a, t.seconds_running())"
    start = time.perf_counter()
    first, second = map(float, subprocess.check_output([sys.executable, "-c", code]).split())
    assert 1.0 <= second - first
    assert 0.0 < first < second <= time.perf_counter() - start + 0.1  # a tick is 0.01 s
