"""Time and peak memory of attention, its candidates interleaved, what is too slow or too large left out."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lineardiff.bench.candidates import SDPA, Candidate, Level, Shape, tensors
from lineardiff.bench.machine import memory_bytes
from lineardiff.bench.memory import CallFailed, can_measure, in_one_line, peak_memory
from lineardiff.bench.rows import EXTRAPOLATED, MEASURED, Mode, Row
from lineardiff.bench.timing import Timing, call_seconds, interleaved

QUADRATIC_FROM = 1024  # N from which N^2 dominates a quadratic attention; from less nothing is extrapolated

log = logging.getLogger("lineardiff")


@dataclass(frozen=True)
class Limits:
    """How long and how large a measurement may be."""

    rounds: int = 9
    seconds: float = 0.1
    """Of one measurement; a call that takes longer is made once."""
    shape_seconds: float = 20.0
    """Of the rounds at one shape, all candidates together; three rounds are always made."""
    call_seconds: float = 10.0
    """A candidate whose call would take longer than this, predicted from the N before, is not run."""
    memory: int | None = field(default_factory=lambda: _quarter(memory_bytes()))
    """Bytes; a candidate that would need more, inputs included, is not run. None: no limit."""
    total_seconds: float | None = None
    """Nothing is begun after this; None: everything is."""


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
    """Measure all candidates at each shape, interleaved, the smallest N first.

    "forward" is a call without gradients; "train" is forward and backward to the inputs and the parameters.

    Args:
        candidates: Of :func:`op_candidates` or :func:`layer_candidates`; levels may be mixed.
        shapes: What they are measured at.
        modes, dtypes: Each is measured at each shape.
        device: None takes the CPU.
        limits: What is too slow or too large is not run, and its row says so.
        memory: Also measure peak memory, where the system tells it.

    Yields:
        The rows of one level, shape, dtype and mode, as soon as they are measured.
    """
    device = device or torch.device("cpu")
    limits = limits or Limits()
    if memory and not can_measure(device):
        log.info("peak memory is measured on Linux and CUDA only; its column stays empty")
        memory = False
    end = math.inf if limits.total_seconds is None else time.monotonic() + limits.total_seconds
    before: dict[tuple, Row] = {}  # the last row measured of each candidate, mode, dtype and series of N
    levels = list(dict.fromkeys(candidate.level for candidate in candidates))
    for shape in sorted(shapes, key=lambda shape: shape.N):
        for level in levels:
            chosen = [candidate for candidate in candidates if candidate.level == level]
            for dtype in dtypes:
                for mode in modes:
                    group = _Group(level, mode, dtype, shape, device, limits, memory)
                    yield group.rows(chosen, before, late=time.monotonic() > end)


class _Group(NamedTuple):
    """What is interleaved: all candidates of one level at one shape, type and mode."""

    level: Level
    mode: Mode
    dtype: torch.dtype
    shape: Shape
    device: torch.device
    limits: Limits
    memory: bool

    def rows(self, candidates: Sequence[Candidate], before: dict[tuple, Row], *, late: bool) -> list[Row]:
        """Measure; `before` holds the last row measured of each candidate and is brought up to date."""
        status: dict[str, str] = {}
        peaks: dict[str, int] = {}
        for candidate in candidates:
            name = candidate.name
            reason = (
                "not run: out of time" if late else self._too_much(candidate, before.get(self._key(name)))
            )
            if reason is None and self.memory:
                try:
                    peaks[name] = self._peak(candidate)
                except CallFailed as error:
                    reason = f"not run: {error}"
            status[name] = reason or MEASURED
        timings = self._timings(candidates, status, before)
        rows = []
        for candidate in candidates:
            name = candidate.name
            row, last = self._row(name, status[name], timings, peaks), before.get(self._key(name))
            if row.status == MEASURED:
                before[self._key(name)] = row
            elif candidate.quadratic and last is not None and last.ms and last.N >= QUADRATIC_FROM:
                row = replace(row, status=EXTRAPOLATED, ms=last.ms * (row.N / last.N) ** 2)
            rows.append(row)
        base = next((row for row in rows if row.candidate == SDPA and row.ms is not None), None)
        if base is None or base.ms is None:
            return rows
        compare = partial(replace, ratio_status=base.status)
        return [compare(row, ratio=base.ms / row.ms) if row.ms else row for row in rows]

    def _key(self, name: str) -> tuple:
        return (name, self.level, self.mode, self.dtype, self.shape._replace(N=0))

    def _too_much(self, candidate: Candidate, last: Row | None) -> str | None:
        """Why a candidate is not run, as far as the N before tells."""
        B, heads, N, d, _ = self.shape
        size = B * heads * N * d * self.dtype.itemsize * (3 if self.level == "op" else 1)
        if last is not None:
            growth = (N / last.N) ** (2 if candidate.quadratic else 1)
            seconds = growth * (last.ms or 0.0) / 1000
            if seconds > self.limits.call_seconds:
                return f"not run: a call would take {seconds:.1f} s, more than {self.limits.call_seconds:g}"
            size += int(growth * (last.peak_mib or 0.0) * 2**20)
        if self.limits.memory is not None and size > self.limits.memory:
            return (
                f"not run: it would need {size / 2**30:.1f} GiB, more than {self.limits.memory / 2**30:.1f}"
            )
        return None

    def _peak(self, candidate: Candidate) -> int:
        prepare = partial(_prepare, candidate, self.level, self.mode, self.dtype, device=self.device)
        return peak_memory(
            partial(prepare, self.shape),
            device=self.device,
            warm_up=partial(prepare, self.shape._replace(B=1, N=self.shape.n)),
            limit=60 + 2 * self.limits.call_seconds,
        )

    def _timings(
        self, candidates: Sequence[Candidate], status: dict[str, str], before: dict[tuple, Row]
    ) -> dict[str, Timing]:
        """Times of those that can run; `status` is told of the others."""
        inputs: tuple[Tensor, ...] | None = None
        calls: dict[str, Callable[[], object]] = {}
        for candidate in candidates:
            name = candidate.name
            if status[name] != MEASURED:
                continue
            try:
                if inputs is None:
                    inputs = tensors(self.level, self.shape, self.dtype, self.device)
                call = _call(candidate, inputs, self.mode, self.shape, self.dtype)
                # the first N of all has no other to be predicted from
                seconds = 0.0 if self._key(name) in before else call_seconds(call, [self.device])
            except Exception as error:  # a peer may refuse a type or a shape in any way
                status[name] = f"not run: {in_one_line(error)}"
                continue
            if seconds > self.limits.call_seconds:
                status[name] = (
                    f"not run: a call takes {seconds:.1f} s, more than {self.limits.call_seconds:g}"
                )
            else:
                calls[name] = call
        return interleaved(
            calls,
            rounds=self.limits.rounds,
            seconds=self.limits.seconds,
            limit=self.limits.shape_seconds,
            devices=[self.device],
        )

    def _row(self, name: str, status: str, timings: dict[str, Timing], peaks: dict[str, int]) -> Row:
        row = Row(self.level, self.mode, str(self.dtype).removeprefix("torch."), *self.shape, name, status)
        if name not in timings:
            return row
        timing = timings[name]
        return replace(
            row,
            ms=1000 * timing.median,
            low_ms=1000 * timing.low,
            high_ms=1000 * timing.high,
            rounds=timing.rounds,
            peak_mib=peaks[name] / 2**20 if name in peaks else None,
        )


def _prepare(
    candidate: Candidate, level: Level, mode: Mode, dtype: torch.dtype, shape: Shape, *, device: torch.device
) -> Callable[[], object]:
    return _call(candidate, tensors(level, shape, dtype, device), mode, shape, dtype)


def _call(
    candidate: Candidate, inputs: tuple[Tensor, ...], mode: Mode, shape: Shape, dtype: torch.dtype
) -> Callable[[], object]:
    """One forward pass without gradients, or one forward and backward pass."""
    function, parameters = candidate.build(shape, dtype, inputs[0].device)
    if mode == "forward":
        return torch.inference_mode()(lambda: function(*inputs))
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    # laid out as the gradient of the output of an attention is, (B, N, heads, d), heads joined
    shape_out = inputs[0].shape if inputs[0].ndim == 3 else inputs[0].transpose(1, 2).shape
    gradient = torch.randn(shape_out, dtype=dtype, device=inputs[0].device)
    if inputs[0].ndim == 4:
        gradient = gradient.transpose(1, 2)

    def forward_and_backward() -> object:
        return torch.autograd.grad(function(*inputs), [*inputs, *parameters], gradient, allow_unused=True)

    return forward_and_backward


def _quarter(size: int | None) -> int | None:
    return None if size is None else size // 4
