"""A CSV table that grows row by row."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lineardiff.files import explain_disk_errors, write_atomically


class CsvLog:
    """A table on disk with a column `step`; each row is on the disk when `append` returns.

    Args:
        path: the file, made with the first row.
        keep_to_step: rows past this step are cut from a file that exists, a last line cut short included.
    """

    def __init__(self, path: Path, *, keep_to_step: int) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            *whole, _ = path.read_text().split("\n")  # what follows the last line end is empty or cut short
            self.rows = [row for row in csv.DictReader(whole) if int(row["step"]) <= keep_to_step]
            header = whole[:1] if self.rows else []
            write_atomically(path, "".join(line + "\n" for line in (header + whole[1 : len(self.rows) + 1])))

    def append(self, row: Mapping[str, float]) -> None:
        """Adds one row; numbers are written so that they read back exactly.

        Raises:
            OSError: the disk is full; the message names the file.
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
