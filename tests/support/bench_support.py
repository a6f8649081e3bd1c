"""Rows of results, and a clock that only moves when told to."""

import time

import pytest

from lineardiff.bench.rows import MEASURED, Row


def bench_row(
    candidate: str, N: int | None, ms: float | None, status: str = MEASURED, **other: object
) -> Row:
    """Return a row of the op: float32, forward, B 1, 2 heads, d 64, n 49."""
    where = {"level": "op", "mode": "forward", "dtype": "float32", "threads": 1}
    shape = {"B": 1, "heads": 2, "N": N, "d": 64, "n": 49}
    return Row(**{**where, **shape, "candidate": candidate, "status": status, "ms": ms, **other})


class FakeClock:
    """Replaces `time.perf_counter`; `advance` makes time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds
