"""Rows of results, one form for the op, layers, models and generators; CSV; crossovers over N."""

import csv
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

from lineardiff.bench.timing import BUSY, Timing
from lineardiff.files import written_whole

__all__ = [
    "EXTRAPOLATED",
    "MEASURED",
    "Crossover",
    "Level",
    "Mode",
    "Row",
    "busy",
    "crossover",
    "crossovers",
    "series",
    "write_rows",
]

Level = Literal["op", "layer", "model", "generator"]
Mode = Literal["forward", "train"]
MEASURED, EXTRAPOLATED = "measured", "extrapolated"
SDPA = "sdpa"
"""Self-attention by `scaled_dot_product_attention`, the baseline of ops and layers."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate in one setting: a line of the CSV file. A cell without a value is empty."""

    level: Level
    mode: Mode
    """forward: no gradients. train: forward and backward, for models and generators with an optimizer step."""
    dtype: str
    threads: int
    B: int
    """Images."""
    size: int | None = None
    """Side of the image (model, pixels) or of the latent (generator)."""
    heads: int | None = None
    N: int | None = None
    d: int | None = None
    n: int | None = None
    candidate: str
    status: str = MEASURED
    """"measured", "extrapolated" (from the largest N measured, by N^2), or the reason it was not run."""
    ms: float | None = None
    """Median milliseconds of a call."""
    low_ms: float | None = None
    high_ms: float | None = None
    """Quartiles."""
    rounds: int | None = None
    peak_mib: float | None = None
    """Peak memory beyond the inputs and weights, MiB."""
    ratio: float | None = None
    """Milliseconds of the baseline in this setting over those of the candidate."""
    ratio_status: str | None = None
    """Status of the baseline's time: "measured" or "extrapolated"."""

    @property
    def spread(self) -> float | None:
        """Interquartile range of the rounds over their median."""
        if self.ms is None or self.low_ms is None or self.high_ms is None:
            return None
        return (self.high_ms - self.low_ms) / self.ms

    def timed(self, timing: Timing, *, peak: int | None = None) -> "Row":
        """Return this row with a timing and a peak in bytes."""
        return replace(
            self,
            ms=1000 * timing.median,
            low_ms=1000 * timing.low,
            high_ms=1000 * timing.high,
            rounds=timing.rounds,
            peak_mib=None if peak is None else peak / 2**20,
        )


def busy(rows: Sequence[Row]) -> dict[str, int | float | bool]:
    """Return how many rows varied by more than :data:`lineardiff.bench.timing.BUSY`, for the JSON file.

    The machine counts as busy when more than a tenth of the rows did.
    """
    spreads = [row.spread for row in rows if row.spread is not None]
    disturbed = sum(spread > BUSY for spread in spreads)
    return {
        "busy": disturbed > 0.1 * len(spreads),
        "disturbed": disturbed,
        "measured": len(spreads),
        "threshold": BUSY,
    }


class Crossover(NamedTuple):
    """The N from which a candidate stays faster than the baseline."""

    N: float | None
    """None if it is slower at the largest N. Equal to `first` if it is faster at every N measured."""
    first: int
    last: int
    """Smallest and largest N measured."""

    def __str__(self) -> str:
        if self.N is None:
            return f"none up to N = {self.last}"
        return f"{self.first} or below" if self.N <= self.first else f"{self.N:.0f}"


def crossover(rows: Sequence[Row], candidate: str, *, other: str = SDPA) -> Crossover | None:
    """Return the N from which `candidate` stays faster than `other`.

    It is interpolated, both axes logarithmic, between the two N measured where the ratio of the times last crosses 1.

    Args:
        rows: Rows of one level, mode, dtype and series of N; only measured ones count.
        candidate: Name of the candidate.
        other: Name of the baseline.

    Returns:
        None where the two share no N.
    """
    times: dict[str, dict[int, float]] = {candidate: {}, other: {}}
    for row in rows:
        if row.candidate in times and row.status == MEASURED and row.ms is not None and row.N is not None:
            times[row.candidate][row.N] = row.ms
    shared = sorted(times[candidate].keys() & times[other].keys())
    if not shared:
        return None
    gains = [math.log(times[other][N] / times[candidate][N]) for N in shared]
    span = shared[0], shared[-1]
    if gains[-1] < 0:
        return Crossover(None, *span)
    slower = [i for i, gain in enumerate(gains) if gain < 0]
    if not slower:
        return Crossover(float(shared[0]), *span)
    i = slower[-1]  # faster from the next N on
    share = gains[i] / (gains[i] - gains[i + 1])
    return Crossover(math.exp(math.log(shared[i]) + share * math.log(shared[i + 1] / shared[i])), *span)


def series(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    """Group rows by (level, mode, dtype, B, heads, d, n), so that only N varies within a group."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        key = (row.level, row.mode, row.dtype, row.B, row.heads, row.d, row.n)
        grouped.setdefault(key, []).append(row)
    return grouped


def crossovers(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the :func:`crossover` of every candidate in every series of two N or more, ready for `json.dump`."""
    found: list[dict[str, object]] = []
    for (level, mode, dtype, B, heads, d, n), part in series(rows).items():
        where = {"level": level, "mode": mode, "dtype": dtype, "B": B, "heads": heads, "d": d, "n": n}
        for name in dict.fromkeys(row.candidate for row in part if row.candidate != SDPA):
            at = crossover(part, name)
            if at is not None and at.first < at.last:
                found.append({**where, "candidate": name, **at._asdict(), "text": str(at)})
    return found


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, preceded by a header."""
    with written_whole(path) as part, open(part, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([column.name for column in fields(Row)])
        for row in rows:
            writer.writerow([f"{x:.5g}" if isinstance(x, float) else x for x in astuple(row)])
