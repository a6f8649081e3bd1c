"""The depth-wise 3x3 convolution of V that the paper adds to the attention's output: choose a backend, call it."""

import torch
from torch import Tensor

from lineardiff.ops import portable
from lineardiff.ops.backends import select
from lineardiff.ops.inputs import ConvInputs


def add_value_conv(
    o: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    feat_size: tuple[int, int],
    overwrite: bool,
) -> Tensor:
    """Add the zero-padded convolution of the values on their grid to the attention's output.

    Args:
        o: The attention's output (B, heads, P + H*W, d).
        v: Values, shape of o: prefix tokens, then the grid row by row.
        weight: (heads*d, 1, 3, 3).
        bias: (heads*d,).
        feat_size: (H, W).
        overwrite: Allow the result to be written into o when gradients are off, because allocating memory takes longer
            than the convolution.

    Returns:
        (B, heads, P + H*W, d). Prefix tokens, which are not on the grid, are those of o.

    Raises:
        ValueError: The chosen backend cannot run.
    """
    inputs = ConvInputs(o, v, weight, bias, feat_size, overwrite)
    if torch.jit.is_scripting():
        return portable.add_value_conv(inputs)
    return select("auto", inputs).add_value_conv(inputs)
