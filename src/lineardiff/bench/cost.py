"""Parameters and multiply-adds of a model."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lineardiff import ops

__all__ = ["multiply_adds", "parameters"]


def parameters(model: nn.Module) -> int:
    """Return the number of learned values of a model; a shared parameter counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(
    model: nn.Module,
    image_size: int | tuple[int, int],
    *,
    in_chans: int = 3,
    conditions: Sequence[Tensor] = (),
) -> int:
    """Return the multiply-adds of one forward pass on one image, which papers report as "FLOPs".

    Convolutions and matrix products count, those of attention included; softmax, norms and activations do not.

    Args:
        model: Takes images (1, in_chans, height, width). The count runs on a copy.
        image_size: Pixels per side, or (height, width).
        in_chans: Channels of the image.
        conditions: Further inputs of the model, such as the time (1,) and the label (1,) of a DiT.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    # Nothing is computed on the meta device, and attention is decomposed into its matrix products: on a CPU the
    # counter does not see scaled_dot_product_attention.
    twin = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    # A backend chosen for real tensors may not run there.
    with torch.no_grad(), ops.backend("auto"), FlopCounterMode(display=False) as counter:
        image = torch.empty(1, in_chans, height, width, device="meta")
        twin(image, *(condition.to("meta") for condition in conditions))
    return counter.get_total_flops() // 2
