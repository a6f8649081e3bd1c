"""What a run tells while it goes: CSV tables, TensorBoard, a progress bar, its speed."""

import csv
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from .checkpoint import explain_disk_errors, write_atomically

LINE_EVERY = 30.0  # seconds between two lines of progress where there is no terminal


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


class Throughput:
    """Images per second of training, the time of validating and saving left out.

    Args:
        laps: speeds measured before, by an earlier process of the same run.
    """

    def __init__(self, laps: Sequence[float] = ()) -> None:
        self.laps = list(laps)
        self._start = time.perf_counter()
        self._paused = 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside the block does not count."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def lap(self, images: int) -> None:
        """Ends a lap of `images` training images; call it when the device has finished its work."""
        now = time.perf_counter()
        self.laps.append(images / max(now - self._start - self._paused, 1e-9))
        self._start, self._paused = now, 0.0

    def median(self) -> float | None:
        """Median images per second; without the first lap, which holds compilation, once there are others."""
        return median(self.laps[1:] or self.laps) if self.laps else None


class Progress:
    """The whole run as a bar with loss, images/s and remaining time; as a line now and then without a
    terminal.
    """

    def __init__(self, *, step: int, total_steps: int, shown: bool, name: str) -> None:
        self._lines = shown and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total_steps,
            initial=step,
            desc=name,
            unit="step",
            dynamic_ncols=True,
            disable=not shown or self._lines,
        )
        self._name, self._first, self._step, self._total = name, step, step, total_steps
        self._start = self._last_line = time.monotonic()

    def update(self) -> None:
        """Counts one update."""
        self._step += 1
        self._bar.update()

    def report(self, *, loss: float, images_per_second: float) -> None:
        """Shows the newest numbers."""
        numbers = f"loss {loss:.4f}, {images_per_second:,.0f} images/s"
        self._bar.set_postfix_str(numbers, refresh=False)
        now = time.monotonic()
        if self._lines and (now - self._last_line > LINE_EVERY or self._step == self._total):
            self._last_line = now
            left = (now - self._start) / (self._step - self._first) * (self._total - self._step)
            done = f"{self._name}: step {self._step}/{self._total}"
            print(f"{done}, {numbers}, {tqdm.format_interval(left)} left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        if self._lines or not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()
