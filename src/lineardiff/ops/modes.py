"""What PyTorch is doing while an op is called: making a graph, transforming the function, or recomputing it."""

import sys
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad


def exporting() -> bool:
    """Return whether a graph is being made that is to run elsewhere, perhaps without this library."""
    return torch.compiler.is_exporting() or (not torch.compiler.is_compiling() and torch.jit.is_tracing())


def transformed() -> bool:
    """Return whether torch.func (vmap, grad, jvp, ...) or forward-mode differentiation is active.

    Compiled ops support neither. Dynamo evaluates both conditions for the code that it traces.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def recomputing() -> bool:
    """Return whether a backward pass is in progress, in which torch.utils.checkpoint repeats forward passes."""
    return torch._C._current_graph_task_id() != -1


def checkpointed_calls() -> list[tuple[Any, bool]]:
    """Return the calls of torch.utils.checkpoint in progress, innermost first, and whether each is a recomputation.

    A call is represented by an object that is the same in the forward pass and in the recomputation, and takes
    attributes. PyTorch has no public way to find it; calls of other versions may be missing.
    """
    calls: list[tuple[Any, bool]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            names = frame.f_locals
            if "ctx" in names:  # use_reentrant=True
                calls.append((names["ctx"], frame.f_code.co_name == "backward"))
            elif "frame" in names:  # use_reentrant=False, recomputation
                calls.append((names["frame"], True))
            elif "gen" in names:  # its forward pass
                generator = getattr(names["gen"], "gi_frame", None)
                call = generator.f_locals.get("new_frame") if generator else None
                calls += [] if call is None else [(call, False)]
        frame = frame.f_back
    return calls
