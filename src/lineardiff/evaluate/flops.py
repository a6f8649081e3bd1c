"""What a model costs on paper: its parameters and the multiply-adds of one image."""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def parameters(model: nn.Module) -> int:
    """Number of learned values of the model, each shared one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(model: nn.Module, image_size: int | tuple[int, int], *, in_chans: int = 3) -> int:
    """Multiply-adds of one forward pass with one image, as the papers count them (their "FLOPs").

    Convolutions and every matrix product count, those of attention included; softmax, norms and activations
    do not.

    Args:
        model: Takes images (1, in_chans, height, width). It is left as it is: the count runs on a copy.
        image_size: Pixels of a side, or (height, width).
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    # On the meta device nothing is computed, and fused attention, which the counter does not see on a CPU, is
    # taken apart into the matrix products it stands for.
    twin = copy.deepcopy(model).to("meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        twin(torch.empty(1, in_chans, height, width, device="meta"))
    return counter.get_total_flops() // 2
