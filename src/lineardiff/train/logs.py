"""Progress and speed of a run."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from tqdm import tqdm

LINE_EVERY = 30.0  # seconds between two lines of progress where there is no terminal


class Throughput:
    """Training images per second, without the time of validating and saving.

    Args:
        laps: Speeds measured earlier in the same run.
    """

    def __init__(self, laps: Sequence[float] = ()) -> None:
        self.laps = list(laps)
        self._start = time.perf_counter()
        self._paused = 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside the block."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def lap(self, images: int) -> None:
        """End a lap of `images` training images; call it when the device has finished its work."""
        now = time.perf_counter()
        self.laps.append(images / max(now - self._start - self._paused, 1e-9))
        self._start, self._paused = now, 0.0

    def median(self) -> float | None:
        """Return the median images per second, without the first lap (compilation) if there are others."""
        return median(self.laps[1:] or self.laps) if self.laps else None


class Progress:
    """A progress bar of the run with loss, images/s and remaining time, or occasional lines without a terminal."""

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
        """Count one update."""
        self._step += 1
        self._bar.update()

    def report(self, *, loss: float, images_per_second: float) -> None:
        """Show the newest numbers."""
        numbers = f"loss {loss:.4f}, {images_per_second:,.0f} images/s"
        self._bar.set_postfix_str(numbers, refresh=False)
        now = time.monotonic()
        if self._lines and (now - self._last_line > LINE_EVERY or self._step == self._total):
            self._last_line = now
            left = (now - self._start) / (self._step - self._first) * (self._total - self._step)
            done = f"{self._name}: step {self._step}/{self._total}"
            print(f"{done}, {numbers}, {tqdm.format_interval(left)} left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._lines or not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
