"""CSV tables that grow row by row: the writer, and the reader of what it wrote."""

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from lineardiff.files import explain_disk_errors, write_atomically

__all__ = ["CsvLog", "read_table"]


def read_table(path: Path) -> list[dict[str, float]]:
    """Return the rows of a table; an empty cell is nan, and a last line without a line end is left out.

    Raises:
        ValueError: The file is not a table of numbers with a column `step`; the message names the line.
        FileNotFoundError: The file does not exist.
    """
    try:
        *lines, _ = path.read_text().split("\n")
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error
    return _rows(path, lines)


class CsvLog:
    """A table on disk with a column `step`; each row is on the disk when `append` returns.

    Args:
        path: The file, created with the first row.
        keep_to_step: Rows past this step are removed from an existing file, as is an incomplete last line.

    Raises:
        ValueError: The file exists and is damaged.
    """

    def __init__(self, path: Path, *, keep_to_step: int) -> None:
        self.path = path
        self.rows: list[dict[str, float]] = []
        if path.exists():
            self.rows = [row for row in read_table(path) if row["step"] <= keep_to_step]
            lines = path.read_text().split("\n")[: len(self.rows) + 1] if self.rows else []
            write_atomically(path, "".join(line + "\n" for line in lines))

    def append(self, row: Mapping[str, float]) -> None:
        """Add one row, with numbers written so that they read back exactly.

        Raises:
            OSError: The disk is full; the message names the file.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, list(row), lineterminator="\n")
        if not self.rows:
            writer.writeheader()
        writer.writerow(row)
        with explain_disk_errors(self.path), self.path.open("ab", buffering=0) as file:
            file.write(text.getvalue().encode())
            os.fsync(file.fileno())
        self.rows.append(dict(row))


def _rows(path: Path, lines: Iterable[str]) -> list[dict[str, float]]:
    reader = csv.DictReader(lines)
    rows = []
    try:
        if reader.fieldnames is not None and "step" not in reader.fieldnames:
            raise ValueError("it has no column step")
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"expected {len(reader.fieldnames or ())} cells")
            rows.append({name: float(cell or "nan") for name, cell in row.items()})
            if not math.isfinite(rows[-1]["step"]):
                raise ValueError(f"step is {row['step']!r}")
    except (TypeError, ValueError, csv.Error) as error:
        raise _damaged(path, f"line {reader.line_num}: {error}") from error
    return rows


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is damaged ({reason}). Restore it from a copy, or delete this file to resume without its earlier rows."
    )
