"""What PyTorch is doing while the op is called: making a graph, or transforming the function."""

import torch
from torch.autograd import forward_ad


def exporting() -> bool:
    """Whether a graph is being made that shall run elsewhere, perhaps without this library."""
    return torch.compiler.is_exporting() or (not torch.compiler.is_compiling() and torch.jit.is_tracing())


def transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp, ...) or forward-mode differentiation is at work, unknown to compiled ops."""
    at_work = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not torch.compiler.is_compiling() and at_work
