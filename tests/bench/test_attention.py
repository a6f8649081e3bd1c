"""What is measured, what is not run and why, and the crossover."""

import csv
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_support import FakeClock, bench_row
from torch import Tensor

from lineardiff.bench import attention
from lineardiff.bench.attention import Limits, measure_attention
from lineardiff.bench.candidates import SDPA, Candidate, Shape, op_candidates
from lineardiff.bench.rows import EXTRAPOLATED, MEASURED, Row, busy, crossover, crossovers, write_rows

FAST = Limits(rounds=2, seconds=0.0)


def rows_of(times: Callable[[int], float], candidate: str, sizes: Sequence[int]) -> list[Row]:
    return [bench_row(candidate, N, times(N)) for N in sizes]


def sleeper(name: str, seconds: Callable[[int], float], *, quadratic: bool = False) -> Candidate:
    """An op that takes a known time for N tokens."""

    def build(
        shape: Shape, dtype: torch.dtype, device: torch.device
    ) -> tuple[Callable[..., Tensor], list[Tensor]]:
        def attend(q: Tensor, *rest: Tensor) -> Tensor:
            time.sleep(seconds(shape.N))
            return q * 1

        return attend, []

    return Candidate(name, "op", build, quadratic)


def measured(
    candidates: list[Candidate], sizes: Sequence[int], limits: Limits = FAST, **options: object
) -> dict:
    shapes = [Shape(1, 1, N, 2, 1) for N in sizes]
    options = {"modes": ["forward"], "dtypes": [torch.float32], "memory": False, "limits": limits, **options}
    groups = list(measure_attention(candidates, shapes, **options))
    return {(r.candidate, r.N): r for group in groups for r in group}


@pytest.mark.parametrize(("a", "b"), [(1e-3, 0.5), (2e-5, 0.37), (1e-3, 3.0)])
def test_power_laws_cross_where_algebra_says(a: float, b: float) -> None:
    sizes = (49, 196, 1024, 4096, 65536)
    rows = rows_of(lambda N: a * N**2, SDPA, sizes) + rows_of(lambda N: b * N, "linear", sizes)
    at = crossover(rows, "linear")
    assert at is not None
    assert at.N == pytest.approx(b / a)  # a N^2 = b N
    assert (at.first, at.last, str(at)) == (49, 65536, f"{b / a:.0f}")


def test_curves_that_do_not_cross() -> None:
    sizes = (49, 196)
    sdpa = rows_of(lambda N: N**2, SDPA, sizes)
    assert str(crossover(sdpa + rows_of(lambda N: 2 * N**2, "x", sizes), "x")) == "none up to N = 196"
    assert str(crossover(sdpa + rows_of(lambda N: N, "x", sizes), "x")) == "49 or below"
    assert crossover(sdpa, "x") is None


def test_the_last_crossing_counts_and_only_measured_times_do() -> None:
    sdpa = [bench_row(SDPA, N, 1.0) for N in (10, 100, 1000, 10000)]
    other = [
        bench_row("x", N, ms) for N, ms in zip((10, 100, 1000, 10000), (0.5, 2.0, 0.5, 0.5), strict=True)
    ]
    at = crossover(sdpa + other, "x")
    assert at is not None
    assert at.N == pytest.approx(math.sqrt(100 * 1000))
    unsure = [*sdpa[:2], replace(sdpa[2], status=EXTRAPOLATED), replace(sdpa[3], status=EXTRAPOLATED)]
    assert str(crossover(unsure + other, "x")) == "none up to N = 100"


def test_crossovers_are_of_one_series_each() -> None:
    rows = [
        bench_row(SDPA, 10, 1.0),
        bench_row(SDPA, 100, 4.0),
        bench_row("x", 10, 2.0),
        bench_row("x", 100, 2.0),
    ]
    rows += [replace(r, dtype="bfloat16", ms=r.ms if r.candidate == SDPA else 9.0) for r in rows]
    rows += [bench_row(SDPA, 10, 1.0, heads=7), bench_row("x", 10, 2.0, heads=7)]  # one N: nothing to cross
    found = crossovers(rows)
    assert [(f["dtype"], f["heads"], f["text"]) for f in found] == [
        ("float32", 2, "32"),
        ("bfloat16", 2, "none up to N = 100"),
    ]


def test_the_file_holds_the_rows(tmp_path: Path) -> None:
    measured = bench_row(
        SDPA, 49, 0.125, low_ms=0.12, high_ms=0.13, rounds=9, ratio=1.0, ratio_status=MEASURED
    )
    write_rows(tmp_path / "op.csv", [measured, bench_row("x", 49, None, "not run: out of time")])
    with open(tmp_path / "op.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first)[:5] == ["level", "mode", "dtype", "threads", "B"]
    assert (first["candidate"], first["ms"], first["high_ms"], first["rounds"]) == (
        "sdpa",
        "0.125",
        "0.13",
        "9",
    )
    assert (first["size"], first["peak_mib"]) == ("", "")
    assert (second["status"], second["ms"], second["ratio"]) == ("not run: out of time", "", "")


@pytest.mark.parametrize(
    ("spreads", "expected"),
    [
        ([0.2] * 10, (False, 0, 10)),
        ([0.3] + [0.1] * 9, (False, 1, 10)),
        ([0.3] * 2 + [0.1] * 8, (True, 2, 10)),
    ],
)
def test_a_machine_is_busy_when_more_than_a_tenth_of_the_rows_vary(
    spreads: list[float], expected: tuple[bool, int, int]
) -> None:
    rows = [bench_row("x", 4, 2.0, low_ms=2.0, high_ms=2.0 + 2.0 * spread) for spread in spreads]
    load = busy([*rows, bench_row("x", 4, None, "not run: out of time")])
    assert (load["busy"], load["disturbed"], load["measured"]) == expected


def test_times_and_ratios_of_known_calls() -> None:
    found = measured([sleeper(SDPA, lambda N: 0.05), sleeper("x", lambda N: 0.005)], [4])
    sdpa, x = found[SDPA, 4], found["x", 4]
    assert sdpa.ms is not None
    assert x.ms is not None
    assert 50 <= sdpa.ms < 1000
    assert 5 <= x.ms < sdpa.ms
    assert x.ratio == sdpa.ms / x.ms
    assert x.low_ms <= x.ms <= x.high_ms
    assert (x.rounds, x.status, x.ratio_status, sdpa.ratio) == (2, MEASURED, MEASURED, 1.0)


def test_calls_that_would_take_too_long_are_predicted_and_only_squares_extrapolated() -> None:
    made: list[tuple[str, int]] = []

    def seconds(name: str, N: int) -> float:
        made.append((name, N))
        return 0.02

    candidates = [
        sleeper(SDPA, lambda N: seconds(SDPA, N), quadratic=True),
        sleeper("x", lambda N: seconds("x", N)),
    ]
    limits = Limits(rounds=2, seconds=0.0, call_seconds=0.5)
    found = measured(candidates, [1024, 2048, 131072], limits)
    assert set(made) == {(SDPA, 1024), (SDPA, 2048), ("x", 1024), ("x", 2048)}
    last, sdpa, x = found[SDPA, 2048], found[SDPA, 131072], found["x", 131072]
    assert (sdpa.status, sdpa.ms) == (EXTRAPOLATED, last.ms * 64**2)
    assert sdpa.low_ms is None
    assert x.status.startswith("not run: a call would take ")
    assert (x.ms, x.ratio) == (None, None)


def test_a_ratio_to_an_extrapolated_time_says_so_and_small_n_are_not_extrapolated() -> None:
    candidates = [sleeper(SDPA, lambda N: 0.02, quadratic=True), sleeper("x", lambda N: 0.001)]
    limits = Limits(rounds=2, seconds=0.0, call_seconds=1.0)
    found = measured(candidates, [1024, 16384], limits)
    assert (found["x", 16384].status, found["x", 16384].ratio_status) == (MEASURED, EXTRAPOLATED)
    found = measured(candidates, [64, 1024], limits)
    assert found[SDPA, 1024].status.startswith("not run: a call would take ")
    assert (found["x", 1024].status, found["x", 1024].ratio) == (MEASURED, None)


@pytest.mark.parametrize("N", [4, 2**20])
def test_a_trial_predicts_the_first_size(N: int) -> None:
    made: list[int] = []
    slow = sleeper("x", lambda N: made.append(N) or 0.15)
    found = measured([slow], [N], Limits(rounds=2, seconds=0.0, call_seconds=0.1))
    assert found["x", N].status.startswith("not run: a call would take ")
    assert made == [min(N, 1024)] * 2


@pytest.mark.parametrize(("slowdown", "start"), [(1, 5.0), (8, 40.0), (30, 60.0)])
def test_quick_ends_within_three_minutes_on_a_busy_machine(
    slowdown: int, start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch)
    monkeypatch.setattr(attention, "can_measure", lambda device: True)
    # The process that measures memory stalls as well, up to the limit it is given.
    monkeypatch.setattr(
        attention,
        "peak_memory",
        lambda *call, limit, **options: clock.advance(min(limit, 0.5 * slowdown)) or 0,
    )

    def build(shape: Shape, *where: object) -> tuple[Callable[..., Tensor], list[Tensor]]:
        # After the first sizes everything becomes slower than predicted from them.
        pace = slowdown if shape.N > 1024 else 1
        return lambda q, *rest: clock.advance(pace * 1e-3 * shape.N) or q * 1, []

    candidates = [Candidate(name, "op", build) for name in (SDPA, "x", "y")]
    clock.advance(start)  # imports
    limits = replace(Limits.quick(spent=start), memory=None)
    sizes = (49, 196, 1024, 2048, 4096, 16384, 65536)
    found = measured(
        candidates, sizes, limits, memory=True, modes=["forward", "train"], dtypes=[torch.float32]
    )
    assert clock.now + start < 180  # the figure takes no longer than the imports
    statuses = {row.status for row in found.values()}
    assert ("not run: out of time" in statuses) == (slowdown > 1)
    if slowdown == 1:
        assert found[SDPA, 49].status == MEASURED


def test_memory_and_time_have_limits() -> None:
    candidates = [sleeper(SDPA, lambda N: 0.0)]
    found = measured(candidates, [2**20], replace(FAST, memory=2**24))  # q, k, v: 2^20 tokens of 2 channels
    assert found[SDPA, 2**20].status == "not run: it would need 0.0 GiB, more than 0.0"
    found = measured(candidates, [4], replace(FAST, memory=2**24, total_seconds=-1.0))
    assert found[SDPA, 4].status == "not run: out of time"


def test_a_candidate_that_fails_says_how_and_the_others_are_measured() -> None:
    def build(*where: object) -> tuple[Callable[..., Tensor], list[Tensor]]:
        raise RuntimeError("expected Float\nbut found BFloat16")

    found = measured([sleeper(SDPA, lambda N: 0.0), Candidate("bad", "op", build)], [4])
    assert found["bad", 4].status == "not run: RuntimeError: expected Float but found BFloat16"
    assert found[SDPA, 4].status == MEASURED


def test_training_differentiates_to_inputs_and_parameters() -> None:
    seen: dict[str, list[bool]] = {}
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: seen.setdefault("weight", []).append(True))

    def build(*where: object) -> tuple[Callable[..., Tensor], list[Tensor]]:
        def attend(*inputs: Tensor) -> Tensor:
            seen["inputs"] = [x.requires_grad for x in inputs]
            assert all(x.is_leaf for x in inputs)
            return inputs[0] * weight

        return attend, [weight]

    candidate = Candidate("x", "op", build)
    measured([candidate], [4], modes=["train"])
    assert all(seen["inputs"])
    assert len(seen["weight"]) == 6  # two trial calls, two before the rounds, two rounds
    seen.clear()
    measured([candidate], [4], modes=["forward"])
    assert "weight" not in seen
    assert not any(seen["inputs"])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_of_the_op_holds_its_output_and_grows_with_n() -> None:
    shapes = [Shape(1, 2, N, 64, 49) for N in (1024, 4096)]
    options = {"modes": ["forward"], "dtypes": [torch.float32], "limits": FAST}
    groups = list(measure_attention(op_candidates(["portable"]), shapes, **options))
    peaks = {(r.candidate, r.N): r.peak_mib for group in groups for r in group}
    for N in (1024, 4096):
        output = 2 * N * 64 * 4 / 2**20
        assert output < peaks[SDPA, N] < output + 4  # tiles, and one number for each query
        # portable: the scores of both streams of one head, float32, too
        assert output < peaks["vca-portable", N] < output + 2 * (2 * 49 * N * 4) / 2**20 + 8
