"""The implementations of the op, why one cannot run, and how one is chosen."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lineardiff.ops import cpu, portable, reference
from lineardiff.ops.inputs import Inputs
from lineardiff.ops.modes import exporting


class Backend(NamedTuple):
    """One implementation: `run` computes the op; `why_not` answers None, or in words why it cannot run.

    `why_not` is asked with the inputs of a call, or with None whether this machine can run it at all.
    `device` is the type of device it is written for, None for any.
    """

    name: str
    run: Callable[[Inputs], Tensor]
    why_not: Callable[[Inputs | None], str | None]
    summary: str
    device: str | None = None


def _always(inputs: Inputs | None) -> str | None:
    return None


# "auto" takes the first that can run.
BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", cpu.run, cpu.why_not, cpu.SUMMARY, "cpu"),
    Backend("portable", portable.run, _always, "fast plain PyTorch, any device"),
    Backend("reference", reference.run, _always, "the paper's equations one by one, any device, slow"),
)

VARIABLE = "LINEARDIFF_BACKEND"
_chosen = os.environ.get(VARIABLE) or "auto"


def list_backends() -> tuple[str, ...]:
    """Return the names of the backends that can run on this machine, preferred ones first."""
    return tuple(candidate.name for candidate in BACKENDS if candidate.why_not(None) is None)


def set_backend(name: str) -> None:
    """Choose the backend of this process: "auto" or a name that `lineardiff info` lists.

    Raises:
        ValueError: no backend has this name.
    """
    global _chosen
    _find(name)
    _chosen = name


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """`with lineardiff.backend("reference"):` chooses the backend of this process for a while."""
    previous = _chosen
    set_backend(name)
    try:
        yield
    finally:
        set_backend(previous)


def select(name: str, inputs: Inputs) -> Backend:
    """The backend to run for these inputs.

    Args:
        name: of a call; "auto" defers to :func:`set_backend`, then to the environment variable
            LINEARDIFF_BACKEND, then to the first backend that can run.
        inputs: of the call.

    Raises:
        ValueError: no backend has the name, or the named one cannot run (its reason is given).
    """
    found = _find(_chosen if name == "auto" else name)
    if found is None:
        return _first_that_can_run(inputs)
    reason = found.why_not(inputs)
    if reason is not None:
        raise ValueError(
            f"backend {found.name!r} cannot run here: {reason}. Use backend='auto' to let one be chosen."
        )
    return found


def may_choose(name: str) -> bool:
    """Whether parts beside the attention may run on that backend too: it is chosen, or free to be."""
    return _chosen == name or (_chosen == "auto" and not exporting())


def _first_that_can_run(inputs: Inputs) -> Backend:
    """A backend for this kind of device that is passed over is said once in the log."""
    device = inputs.q.device.type
    for candidate in BACKENDS:
        if candidate.device not in (None, device):
            continue
        reason = candidate.why_not(inputs)
        if reason is None and candidate.device is not None and exporting():
            reason = (
                "an exported graph must run without lineardiff (name the backend to export it all the same)"
            )
        if reason is None:
            return candidate
        _say_once(f"backend {candidate.name!r} is passed over for a slower one: {reason}.")
    raise AssertionError("the last backend runs anything")


@torch.compiler.assume_constant_result  # said while a graph is made, never part of it
def _say_once(message: str) -> None:
    _log(message)


@functools.cache
def _log(message: str) -> None:
    logging.getLogger("lineardiff").warning(message)


def _find(name: str) -> Backend | None:
    """The backend of that name, None for "auto"."""
    if name == "auto":
        return None
    for candidate in BACKENDS:
        if candidate.name == name:
            return candidate
    raise ValueError(
        f"unknown backend {name!r}; choose 'auto', {', '.join(repr(b.name) for b in BACKENDS)} "
        f"(by argument, lineardiff.set_backend or the environment variable {VARIABLE})."
    )
