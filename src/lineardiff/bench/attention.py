"""Time and peak memory of attention over N, with the candidates interleaved."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lineardiff.bench.candidates import AttentionLevel, Candidate, Shape, tensors
from lineardiff.bench.machine import memory_bytes
from lineardiff.bench.memory import CallFailed, can_measure, in_one_line, peak_memory
from lineardiff.bench.rows import EXTRAPOLATED, MEASURED, SDPA, Mode, Row
from lineardiff.bench.timing import Timing, call_seconds, interleaved

__all__ = ["Limits", "measure_attention"]

QUADRATIC_FROM = 1024
"""N from which N^2 dominates the time of quadratic attention. Times at smaller N are not extrapolated."""

log = logging.getLogger("lineardiff")


@dataclass(frozen=True)
class Limits:
    """Limits of time and memory. A candidate over a limit is not run, and its row gives the reason."""

    rounds: int = 9
    seconds: float = 0.1
    """Approximate duration of one measurement; a longer call is made once."""
    shape_seconds: float = 20.0
    """Seconds for the rounds of all candidates at one shape; three rounds are always made."""
    call_seconds: float = 10.0
    """Longest call, as predicted from a smaller N."""
    memory: int | None = field(default_factory=lambda: _quarter(memory_bytes()))
    """Bytes of inputs and intermediate results together. None sets no limit."""
    total_seconds: float = math.inf
    """Seconds after which no further call is made."""

    @classmethod
    def quick(cls, *, rounds: int = 5, seconds: float = 0.02, spent: float = 0.0) -> "Limits":
        """Return limits that keep a run of `lineardiff bench` below 3 minutes on a busy machine too.

        Past `total_seconds` only a call in progress, predicted to take at most 2.5 seconds, has to end. A slow start
        predicts a slow end (the figure), so the `spent` seconds since the process began count twice.
        """
        total = max(20.0, 140.0 - 2 * spent)
        return cls(rounds, seconds, shape_seconds=2.0, call_seconds=2.5, total_seconds=total)


def measure_attention(
    candidates: Sequence[Candidate],
    shapes: Sequence[Shape],
    *,
    modes: Sequence[Mode] = ("forward", "train"),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    device: torch.device | None = None,
    limits: Limits | None = None,
    memory: bool = True,
) -> Iterator[list[Row]]:
    """Measure all candidates at each shape, interleaved, in order of N.

    "forward" is a call without gradients; "train" is forward and backward to the inputs and the parameters.

    Args:
        candidates: From :func:`op_candidates` or :func:`layer_candidates`; levels may be mixed.
        shapes: The shapes to measure.
        modes: Modes to measure at each shape.
        dtypes: Types to measure at each shape.
        device: None selects the CPU.
        limits: None selects the defaults.
        memory: Also measure peak memory where the system supports it.

    Yields:
        The rows of one level, shape, dtype and mode as soon as they are measured.
    """
    device = device or torch.device("cpu")
    limits = limits or Limits()
    if memory and not can_measure(device):
        log.info("Peak memory is measured on Linux and CUDA only; its column stays empty.")
        memory = False
    deadline = time.perf_counter() + limits.total_seconds
    before: dict[tuple, _Last] = {}
    levels = list(dict.fromkeys(candidate.level for candidate in candidates))
    for shape in sorted(shapes, key=lambda shape: shape.N):
        for level in levels:
            chosen = [candidate for candidate in candidates if candidate.level == level]
            for dtype in dtypes:
                for mode in modes:
                    group = _Group(level, mode, dtype, shape, device, limits, memory, deadline)
                    yield group.rows(chosen, before)


class _Last(NamedTuple):
    """The last measurement of a candidate, mode, dtype and series of N, from which the next N is predicted."""

    N: int
    seconds: float
    peak: int = 0

    def growth(self, N: int, *, quadratic: bool) -> float:
        return (N / self.N) ** (2 if quadratic else 1)


class _Group(NamedTuple):
    """The interleaved measurements of all candidates of one level at one shape, type and mode."""

    level: AttentionLevel
    mode: Mode
    dtype: torch.dtype
    shape: Shape
    device: torch.device
    limits: Limits
    memory: bool
    deadline: float

    def rows(self, candidates: Sequence[Candidate], before: dict[tuple, _Last]) -> list[Row]:
        """Measure all candidates. `before` holds the last measurement of each and is updated."""
        status: dict[str, str] = {}
        peaks: dict[str, int] = {}
        for candidate in candidates:
            name, reason = candidate.name, None
            try:
                if time.perf_counter() < self.deadline:
                    reason = self._too_much(candidate, before.get(self._key(name)))
                if self.memory and reason is None and time.perf_counter() < self.deadline:
                    peaks[name] = self._peak(candidate)
            except CallFailed as error:
                reason = str(error)
            except Exception as error:  # a peer may refuse a type or a shape in any way
                reason = in_one_line(error)
            if time.perf_counter() >= self.deadline:
                reason = "out of time"
            status[name] = MEASURED if reason is None else f"not run: {reason}"
        timings = self._timings(candidates, status)
        rows = []
        N = self.shape.N
        for candidate in candidates:
            name = candidate.name
            row, last = self._row(name, status[name], timings.get(name), peaks), before.get(self._key(name))
            if row.ms is not None:
                before[self._key(name)] = _Last(N, row.ms / 1000, peaks.get(name, 0))
            elif candidate.quadratic and last is not None and last.N >= QUADRATIC_FROM:
                row = replace(
                    row, status=EXTRAPOLATED, ms=1000 * last.seconds * last.growth(N, quadratic=True)
                )
            rows.append(row)
        base = next((row for row in rows if row.candidate == SDPA and row.ms is not None), None)
        if base is None or base.ms is None:
            return rows
        compare = partial(replace, ratio_status=base.status)
        return [compare(row, ratio=base.ms / row.ms) if row.ms else row for row in rows]

    def _key(self, name: str) -> tuple:
        return (name, self.level, self.mode, self.dtype, self.shape._replace(N=0))

    def _too_much(self, candidate: Candidate, last: _Last | None) -> str | None:
        """Return why a candidate is not run, as far as a smaller N or a trial tells; None if it is."""
        B, heads, N, d, _ = self.shape
        size = B * heads * N * d * self.dtype.itemsize * (3 if self.level == "op" else 1)
        if last is not None:
            growth = last.growth(N, quadratic=candidate.quadratic)
            seconds, size = growth * last.seconds, size + int(growth * last.peak)
        if self._too_large(size):
            return f"it would need {size / 2**30:.1f} GiB, more than {(self.limits.memory or 0) / 2**30:.1f}"
        if last is None:
            small = self.shape._replace(B=min(B, 8), N=min(N, max(1024, self.shape.n)))
            call = _prepare(candidate, self.level, self.mode, self.dtype, small, device=self.device)
            call_seconds(call, [self.device])  # warm-up
            trial = _Last(small.N, call_seconds(call, [self.device]) * B / small.B)
            seconds = trial.seconds * trial.growth(N, quadratic=candidate.quadratic)
        if seconds > self.limits.call_seconds:
            return f"a call would take {seconds:.1f} s, more than {self.limits.call_seconds:g}"
        return None

    def _too_large(self, size: int) -> bool:
        return self.limits.memory is not None and size > self.limits.memory

    def _peak(self, candidate: Candidate) -> int:
        prepare = partial(_prepare, candidate, self.level, self.mode, self.dtype, device=self.device)
        left = self.deadline - time.perf_counter()
        return peak_memory(
            partial(prepare, self.shape),
            device=self.device,
            warm_up=partial(prepare, self.shape._replace(B=1, N=self.shape.n)),
            limit=max(0.1, min(60 + 2 * self.limits.call_seconds, left)),
        )

    def _timings(self, candidates: Sequence[Candidate], status: dict[str, str]) -> dict[str, Timing]:
        """Return the timings of the candidates that can run; update `status` of the others."""
        inputs: tuple[Tensor, ...] | None = None
        calls: dict[str, Callable[[], object]] = {}
        for candidate in (candidate for candidate in candidates if status[candidate.name] == MEASURED):
            if time.perf_counter() >= self.deadline:
                break
            try:
                if inputs is None:
                    inputs = tensors(self.level, self.shape, self.dtype, self.device)
                call = _call(candidate, inputs, self.mode, self.shape, self.dtype)
                call()  # the warm-up, which raises if the candidate cannot run
                calls[candidate.name] = call
            except Exception as error:
                status[candidate.name] = f"not run: {in_one_line(error)}"
        timings = interleaved(
            calls,
            rounds=self.limits.rounds,
            seconds=self.limits.seconds,
            limit=self.limits.shape_seconds,
            deadline=self.deadline,
            devices=[self.device],
            warm_up=False,
        )
        late = [name for name, state in status.items() if state == MEASURED and name not in timings]
        status.update(dict.fromkeys(late, "not run: out of time"))
        return timings

    def _row(self, name: str, status: str, timing: Timing | None, peaks: dict[str, int]) -> Row:
        row = Row(
            level=self.level,
            mode=self.mode,
            dtype=str(self.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            **self.shape._asdict(),
            candidate=name,
            status=status,
        )
        return row if timing is None else row.timed(timing, peak=peaks.get(name))


def _prepare(
    candidate: Candidate,
    level: AttentionLevel,
    mode: Mode,
    dtype: torch.dtype,
    shape: Shape,
    *,
    device: torch.device,
) -> Callable[[], object]:
    return _call(candidate, tensors(level, shape, dtype, device), mode, shape, dtype)


def _call(
    candidate: Candidate, inputs: tuple[Tensor, ...], mode: Mode, shape: Shape, dtype: torch.dtype
) -> Callable[[], object]:
    """Return one forward pass without gradients, or one forward and backward pass."""
    function, parameters = candidate.build(shape, dtype, inputs[0].device)
    if mode == "forward":
        return torch.inference_mode()(lambda: function(*inputs))
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    # strided as in a model, where the heads of the output are joined: (B, N, heads, d)
    shape_out = inputs[0].shape if inputs[0].ndim == 3 else inputs[0].transpose(1, 2).shape
    gradient = torch.randn(shape_out, dtype=dtype, device=inputs[0].device)
    if inputs[0].ndim == 4:
        gradient = gradient.transpose(1, 2)

    def forward_and_backward() -> object:
        return torch.autograd.grad(function(*inputs), [*inputs, *parameters], gradient, allow_unused=True)

    return forward_and_backward


def _quarter(size: int | None) -> int | None:
    return None if size is None else size // 4
