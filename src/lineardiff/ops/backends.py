"""The implementations of the two ops, why one cannot run, and how one is chosen."""

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lineardiff.ops import cpu, portable, reference
from lineardiff.ops.inputs import ConvInputs, Inputs
from lineardiff.ops.modes import checkpointed_calls, exporting, recomputing

VARIABLE = "LINEARDIFF_BACKEND"


class Backend(NamedTuple):
    """One implementation of the attention and of the convolution of V.

    Attributes:
        name: What users write.
        run: Compute the attention.
        add_value_conv: Add the convolution of the values to the attention's output.
        why_not: Return why these inputs cannot be computed, or None if they can; given None, why nothing can be
            computed on this machine.
        summary: What it is, for `lineardiff info`.
        device: The device type that it is written for, None for any.
    """

    name: str
    run: Callable[[Inputs], Tensor]
    add_value_conv: Callable[[ConvInputs], Tensor]
    why_not: Callable[[Inputs | ConvInputs | None], str | None]
    summary: str
    device: str | None = None


class BackendInfo(NamedTuple):
    """A backend as `lineardiff info` lists it.

    Attributes:
        name: For :func:`set_backend`, :func:`backend`, `backend=` and LINEARDIFF_BACKEND.
        summary: What it is.
        reason: Why it cannot run on this machine; None if it can.
    """

    name: str
    summary: str
    reason: str | None


def _always(inputs: Inputs | ConvInputs | None) -> str | None:
    return None


# "auto" takes the first that can run.
BACKENDS: tuple[Backend, ...] = (
    Backend("cpu", cpu.run, cpu.add_value_conv, cpu.why_not, cpu.SUMMARY, "cpu"),
    Backend("portable", portable.run, portable.add_value_conv, _always, "fast plain PyTorch, any device"),
    Backend(
        "reference",
        reference.run,
        portable.add_value_conv,
        _always,
        "the paper's equations one by one, any device, slow",
    ),
)

_environment = os.environ.get(VARIABLE) or "auto"
_process: str | None = None  # set_backend


class _Choice(NamedTuple):
    name: str
    calls: tuple[Any, ...]  # the checkpointed calls in which `with lineardiff.backend(...)` was entered


_context: contextvars.ContextVar[_Choice | None] = contextvars.ContextVar("lineardiff.backend", default=None)


def list_backends() -> tuple[BackendInfo, ...]:
    """Return every backend, in the order in which "auto" prefers them, and why it cannot run if it cannot."""
    return tuple(BackendInfo(b.name, b.summary, b.why_not(None)) for b in BACKENDS)


def set_backend(name: str) -> None:
    """Choose the backend of this process.

    Args:
        name: "auto", or the name of a backend (:func:`list_backends`).

    Raises:
        ValueError: No backend has this name.
    """
    global _process
    _find(name)
    _process = name


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the backend of the code inside `with lineardiff.backend("reference"):`.

    The choice belongs to the current thread or asyncio task. A forward pass that torch.utils.checkpoint repeats in the
    backward pass runs on the backend that it was made with.

    Args:
        name: "auto", which undoes an outer choice, or the name of a backend (:func:`list_backends`).

    Raises:
        ValueError: No backend has this name.
    """
    _find(name)
    token = _context.set(_Choice(name, tuple(call for call, _ in checkpointed_calls())))
    try:
        yield
    finally:
        _context.reset(token)


def check_environment() -> None:
    """Check LINEARDIFF_BACKEND.

    Raises:
        ValueError: It names no backend.
    """
    if _environment != "auto" and all(b.name != _environment for b in BACKENDS):
        raise ValueError(f"{VARIABLE}={_environment!r} is unknown; set it to {_choices()}, or unset it.")


def select(name: str, inputs: Inputs | ConvInputs) -> Backend:
    """Return the backend to run for these inputs.

    Args:
        name: The argument of the call. "auto" defers to :func:`backend`, then to :func:`set_backend`, then to the
            environment variable LINEARDIFF_BACKEND, then to the first backend that can run.
        inputs: The inputs of the call.

    Raises:
        ValueError: No backend has the name, or the named one cannot run (its reason is given).
    """
    check_environment()
    found = _find(_chosen() if name == "auto" else name)
    if found is None:
        return _first_that_can_run(inputs)
    reason = found.why_not(inputs)
    if reason is not None:
        raise ValueError(
            f"backend {found.name!r} cannot run here: {reason}. Use backend='auto' to choose one that can."
        )
    return found


def _chosen() -> str:
    """Return the choice outside of the call's arguments; in a recomputation, that of the original forward pass."""
    choice = _context.get()
    name = None if choice is None else choice.name
    if not torch.compiler.is_compiling() and (choice is not None or recomputing()):
        # A context inside the checkpointed function is entered again; one around it may be gone, so it is remembered.
        entered = () if choice is None else choice.calls
        calls = [(call, again) for call, again in checkpointed_calls() if all(call is not x for x in entered)]
        repeated = next((call for call, again in calls if again), None)
        if repeated is not None:
            name = getattr(repeated, "lineardiff_backend", None)
        if name is not None:
            for call, _ in calls:
                call.lineardiff_backend = name
    return name or _process or _environment


def _first_that_can_run(inputs: Inputs | ConvInputs) -> Backend:
    """Return it, and log a backend for this type of device that is passed over."""
    device = (inputs.v if isinstance(inputs, ConvInputs) else inputs.q).device.type
    for candidate in BACKENDS:
        if candidate.device not in (None, device):
            continue
        reason = candidate.why_not(inputs)
        if reason is None and candidate.device is not None and exporting():
            reason = "an exported graph must run without lineardiff (name the backend to export it anyway)"
        if reason is None:
            return candidate
        _log_once(f"backend {candidate.name!r} is passed over for a slower one: {reason}.")
    raise AssertionError("the last backend runs anything")


@torch.compiler.assume_constant_result  # logged while a graph is made, never part of it
def _log_once(message: str) -> None:
    _log(message)


@functools.cache
def _log(message: str) -> None:
    logging.getLogger("lineardiff").warning(message)


def _find(name: str) -> Backend | None:
    """Return the backend of that name, None for "auto"."""
    if name == "auto":
        return None
    for candidate in BACKENDS:
        if candidate.name == name:
            return candidate
    raise ValueError(
        f"unknown backend {name!r}; choose {_choices()} "
        f"(by argument, lineardiff.set_backend, lineardiff.backend or the environment variable {VARIABLE})."
    )


def _choices() -> str:
    return ", ".join(repr(name) for name in ("auto", *(b.name for b in BACKENDS)))
