"""Rows of a measurement of attention over N: as CSV, and the N from which one is faster than another."""

import csv
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lineardiff.bench.candidates import SDPA, Level, Shape

Mode = Literal["forward", "train"]
MEASURED, EXTRAPOLATED = "measured", "extrapolated"


@dataclass(frozen=True)
class Row:
    """One candidate at one shape; a row of the CSV file, an empty cell where there is no number."""

    level: Level
    mode: Mode
    dtype: str
    B: int
    heads: int
    N: int
    d: int
    n: int
    candidate: str
    status: str
    """Either "measured", "extrapolated" (from the largest N measured, by N^2), or why it was not run."""
    ms: float | None = None
    """Median milliseconds of a call."""
    low_ms: float | None = None
    high_ms: float | None = None
    """Quartiles."""
    rounds: int | None = None
    peak_mib: float | None = None
    """Peak memory beyond the inputs, MiB."""
    ratio: float | None = None
    """Milliseconds of `scaled_dot_product_attention` at this shape over those of the candidate."""
    ratio_status: str | None = None
    """Whether its time, of which `ratio` is made, is "measured" or "extrapolated"."""

    @property
    def shape(self) -> Shape:
        return Shape(self.B, self.heads, self.N, self.d, self.n)


class Crossover(NamedTuple):
    """From which N on a candidate stays faster than another."""

    N: float | None
    """None: it is slower at the largest N; the first N: it is faster from there on, maybe from below."""
    first: int
    last: int
    """Smallest and largest N measured."""

    def __str__(self) -> str:
        if self.N is None:
            return f"none up to N = {self.last}"
        return f"{self.first} or below" if self.N <= self.first else f"{self.N:.0f}"


def crossover(rows: Sequence[Row], candidate: str, *, other: str = SDPA) -> Crossover | None:
    """The N from which `candidate` stays faster than `other`, by log-log interpolation between the two N measured
    where the ratio of their times crosses 1.

    Args:
        rows: Of one level, mode, dtype and series of N; only measured ones count.

    Returns:
        None where the two share no N.
    """
    times: dict[str, dict[int, float]] = {candidate: {}, other: {}}
    for row in rows:
        if row.candidate in times and row.status == MEASURED and row.ms is not None:
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


def series(rows: Sequence[Row]) -> dict[tuple[Level, Mode, str, int, int, int, int], list[Row]]:
    """Rows by (level, mode, dtype, B, heads, d, n): what remains to vary is N."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        key = (row.level, row.mode, row.dtype, row.B, row.heads, row.d, row.n)
        grouped.setdefault(key, []).append(row)
    return grouped


def crossovers(rows: Sequence[Row]) -> list[dict[str, object]]:
    """:func:`crossover` of every candidate with SDPA in every series of two N or more, ready for `json.dump`."""
    found: list[dict[str, object]] = []
    for (level, mode, dtype, B, heads, d, n), part in series(rows).items():
        where = {"level": level, "mode": mode, "dtype": dtype, "B": B, "heads": heads, "d": d, "n": n}
        for name in dict.fromkeys(row.candidate for row in part if row.candidate != SDPA):
            at = crossover(part, name)
            if at is not None and at.first < at.last:
                found.append({**where, "candidate": name, **at._asdict(), "text": str(at)})
    return found


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, a header first."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([column.name for column in fields(Row)])
        for row in rows:
            writer.writerow([f"{x:.5g}" if isinstance(x, float) else x for x in astuple(row)])


def read_rows(path: Path) -> list[Row]:
    """What :func:`write_rows` wrote."""
    with open(path, newline="") as file:
        return [Row(*(_read(name, cell) for name, cell in row.items())) for row in csv.DictReader(file)]


def _read(name: str, cell: str) -> Any:
    if not cell:
        return None
    if name in ("B", "heads", "N", "d", "n", "rounds"):
        return int(cell)
    return float(cell) if name in ("ms", "low_ms", "high_ms", "peak_mib", "ratio") else cell
