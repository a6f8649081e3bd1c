"""What a model costs on paper: its parameters and the multiply-adds of one image."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def parameters(model: nn.Module) -> int:
    """Number of learned values of the model, each shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(
    model: nn.Module,
    image_size: int | tuple[int, int],
    *,
    in_chans: int = 3,
    conditions: Sequence[Tensor] = (),
) -> int:
    """Multiply-adds of one forward pass with one image, as the papers count them (their "FLOPs").

    Convolutions and every matrix product count, those of attention included; softmax, norms and activations
    do not.

    Args:
        model: Takes images (1, in_chans, height, width). It is left as it is: the count runs on a copy.
        image_size: Pixels of a side, or (height, width).
        in_chans: Channels of the image.
        conditions: What the model takes beside the image, such as the time (1,) and the label (1,) of a DiT.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    # On the meta device nothing is computed, and fused attention, which the counter does not see on a CPU, is
    # taken apart into the matrix products it stands for.
    twin = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        image = torch.empty(1, in_chans, height, width, device="meta")
        twin(image, *(condition.to("meta") for condition in conditions))
    return counter.get_total_flops() // 2
