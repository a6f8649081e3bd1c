"""The tables that ``lineardiff bench`` prints."""

from collections.abc import Sequence

from lineardiff.bench.candidates import SDPA
from lineardiff.bench.rows import EXTRAPOLATED, MEASURED, Row, crossovers
from lineardiff.table import format_table


def speed_table(rows: Sequence[Row]) -> str:
    """Level by level, mode by mode, type by type; within these a line for each shape and candidate.

    A line tells the median in ms and its quartiles, how many times as fast as SDPA that is, the peak memory in MiB,
    and why a candidate was not run.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.level, row.mode, row.dtype), []).append(row)
    ordered = [row for part in groups.values() for row in part]
    lines = [_line(row) for row in ordered]
    header = ("what", "B, heads, N, d, n", "candidate", "ms", "quartiles", "x sdpa", "MiB")
    title, rule, *printed = format_table(header, lines, left=3).splitlines()
    noted = [f"{line}  {_note(row)}".rstrip() for line, row in zip(printed, ordered, strict=True)]
    if any(row.status == EXTRAPOLATED for row in rows):
        noted.append("~ from a time that is extrapolated with N^2, not measured")
    return "\n".join([title, rule, *noted])


def crossover_table(rows: Sequence[Row]) -> str:
    """From which N on each candidate stays faster than SDPA; empty where nothing was measured at two N."""
    found = [
        (
            f"{at['level']}, {at['mode']}, {at['dtype']}",
            f"{at['B']}, {at['heads']}, {at['d']}, {at['n']}",
            str(at["candidate"]),
            str(at["text"]),
        )
        for at in crossovers(rows)
    ]
    header = ("what", "B, heads, d, n", "candidate", f"faster than {SDPA} from N")
    return format_table(header, found, left=4) if found else ""


def _line(row: Row) -> tuple[str, ...]:
    time = "-" if row.ms is None else f"{_mark(row.status)}{_number(row.ms)}"
    quartiles = (
        "-" if row.low_ms is None or row.high_ms is None else f"{_number(row.low_ms)}-{_number(row.high_ms)}"
    )
    ratio = "-" if row.ratio is None else f"{_mark(row.ratio_status)}{row.ratio:.2f}"
    peak = "-" if row.peak_mib is None else f"{row.peak_mib:.1f}"
    what = f"{row.level}, {row.mode}, {row.dtype}"
    return what, ", ".join(map(str, row.shape)), row.candidate, time, quartiles, ratio, peak


def _note(row: Row) -> str:
    return "" if row.status in (MEASURED, EXTRAPOLATED) else row.status


def _number(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 100 else f"{ms:.3f}" if ms < 1 else f"{ms:.2f}"


def _mark(status: str | None) -> str:
    return "~" if status == EXTRAPOLATED else ""
