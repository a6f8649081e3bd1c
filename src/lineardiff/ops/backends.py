"""The implementations of the op, why one cannot run, and how one is chosen."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from lineardiff.ops import portable, reference
from lineardiff.ops.inputs import Inputs


class Backend(NamedTuple):
    """One implementation: `run` computes the op; `why_not` answers None, or in words why it cannot run.

    `why_not` is asked with the inputs of a call, or with None whether this machine can run it at all.
    """

    name: str
    run: Callable[[Inputs], Tensor]
    why_not: Callable[[Inputs | None], str | None]
    summary: str


def _always(inputs: Inputs | None) -> str | None:
    return None


# "auto" takes the first that can run.
BACKENDS: tuple[Backend, ...] = (
    Backend("portable", portable.run, _always, "fast plain PyTorch, any device"),
    Backend("reference", reference.run, _always, "the paper's equations one by one, any device, slow"),
)

VARIABLE = "LINEARDIFF_BACKEND"
_chosen = os.environ.get(VARIABLE) or "auto"


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
        return next(b for b in BACKENDS if b.why_not(inputs) is None)
    reason = found.why_not(inputs)
    if reason is not None:
        raise ValueError(
            f"backend {found.name!r} cannot run here: {reason}. Use backend='auto' to let one be chosen."
        )
    return found


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
