"""What a run tells while it goes: CSV tables, TensorBoard, a progress bar, its speed."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from tqdm import tqdm

LINE_EVERY = 30.0  # seconds between two lines of progress where there is no terminal


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
