"""Tables and files of a measurement: NAME.csv, NAME.json and, over N, NAME.png."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lineardiff.bench.machine import describe_machine, machine_line
from lineardiff.bench.rows import EXTRAPOLATED, MEASURED, SDPA, Row, busy, crossovers, write_rows
from lineardiff.bench.timing import BUSY
from lineardiff.files import write_atomically
from lineardiff.table import format_table

__all__ = ["crossover_table", "record", "speed_table"]


def record(
    groups: Iterable[Sequence[Row]], *, output: Path, name: str, settings: Mapping[str, Any], total: int
) -> list[Row]:
    """Measure with a progress bar, print the tables and write the files.

    Args:
        groups: Rows as they are measured.
        output: Folder of the files.
        name: Name of the files, without suffix.
        settings: JSON-serialisable; part of NAME.json beside the machine, its disturbance and the crossovers.
        total: Expected number of groups.

    Raises:
        KeyboardInterrupt: After the files hold what had been measured.
    """
    from tqdm import tqdm

    output.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    print(machine_line(machine), flush=True)
    rows: list[Row] = []
    interrupted = False
    try:
        with tqdm(total=total, unit="group", desc=name) as bar:
            for group in groups:
                rows += group
                write_rows(output / f"{name}.csv", rows)
                first = rows[-1]
                bar.set_postfix_str(f"{first.size or first.N}, {first.mode}, {first.dtype}", refresh=False)
                bar.update()
    except KeyboardInterrupt:
        interrupted = True
    about = {
        "machine": machine,
        "settings": dict(settings),
        "load": busy(rows),
        "crossovers": crossovers(rows),
    }
    write_atomically(output / f"{name}.json", json.dumps(about, indent=1) + "\n")
    drawn = False
    if rows:
        print("\n" + f"{speed_table(rows)}\n\n{crossover_table(rows)}".rstrip())
        drawn = _plot(rows, output / f"{name}.png")
    if interrupted:
        raise KeyboardInterrupt(f"{len(rows)} rows were measured and saved to {output / name}.csv")
    print(f"\nSaved {output / name}.csv, .json" + (", .png" if drawn else ""))
    return rows


def _plot(rows: Sequence[Row], path: Path) -> bool:
    if rows[0].heads is None:  # networks have no series of N
        return False
    from lineardiff.bench.plot import plot_attention_speed

    try:
        figure = plot_attention_speed(rows)
    except ValueError as reason:  # a single N
        print(f"\nNo figure: {reason}")
        path.unlink(missing_ok=True)
        return False
    figure.savefig(path)
    return True


def speed_table(rows: Sequence[Row]) -> str:
    """Return a table grouped by level, mode and type, with a line per setting and candidate.

    A line holds the median in ms and its quartiles, the speed relative to the baseline, the peak memory in MiB, and
    why a candidate was not run. "!" marks a time disturbed by other work, "~" an extrapolated one; the lines below
    the table explain the marks that occur.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.level, row.mode, row.dtype), []).append(row)
    ordered = [row for part in groups.values() for row in part]
    attention = rows[0].heads is not None
    shape = "B, heads, N, d, n" if attention else "B, size, threads"
    base = SDPA if attention else "first"
    header = ("what", shape, "candidate", "ms", "quartiles", f"x {base}", "MiB")
    title, rule, *printed = format_table(header, [_line(row) for row in ordered], left=3).splitlines()
    notes = ["" if row.status in (MEASURED, EXTRAPOLATED) else row.status for row in ordered]
    lines = [f"{line}  {note}".rstrip() for line, note in zip(printed, notes, strict=True)]
    if any(row.status == EXTRAPOLATED for row in rows):
        lines.append("~ extrapolated with N^2, not measured")
    load = busy(rows)
    if load["disturbed"]:
        count = f"in {load['disturbed']} of {load['measured']} rows the quartiles are"
        lines.append(f"! {count} more than {BUSY:.0%} of the median apart.")
    if load["busy"]:
        lines.append("The machine was busy: do not rely on these times and ratios; rerun when it is idle.")
    return "\n".join([title, rule, *lines])


def crossover_table(rows: Sequence[Row]) -> str:
    """Return the N from which each candidate stays faster than SDPA; empty where nothing was measured at two N."""
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
    disturbed = "!" if (row.spread or 0) > BUSY else ""
    ratio = "-" if row.ratio is None else f"{_mark(row.ratio_status)}{row.ratio:.2f}"
    peak = "-" if row.peak_mib is None else f"{row.peak_mib:.1f}"
    shape = (row.B, row.heads, row.N, row.d, row.n) if row.heads else (row.B, row.size, row.threads)
    what = f"{row.level}, {row.mode}, {row.dtype}"
    return what, ", ".join(map(str, shape)), row.candidate, time, disturbed + quartiles, ratio, peak


def _number(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 100 else f"{ms:.3f}" if ms < 1 else f"{ms:.2f}"


def _mark(status: str | None) -> str:
    return "~" if status == EXTRAPOLATED else ""
