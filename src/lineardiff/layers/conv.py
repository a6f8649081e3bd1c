"""The depth-wise convolution of V that the paper adds to the attention's output."""

import torch
from torch import Tensor, nn

from lineardiff.ops import add_value_conv


class ValueConv(nn.Conv2d):
    """Depth-wise 3x3 convolution, with bias, of the values on their grid, added to the attention's output.

    Args:
        dim: channels C.
    """

    def __init__(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim, device=device, dtype=dtype)

    def forward(self, o: Tensor, v: Tensor, feat_size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Add the convolution.

        Args:
            o: what the attention gives (B, heads, P + H*W, head_dim); overwritten when gradients are off.
            v: values, shape of o: prefix tokens, then the grid row by row.
            feat_size: (H, W).

        Returns:
            (B, heads, P + H*W, head_dim); o itself at the prefix tokens, which have no place on the grid.
        """
        bias = self.bias
        assert bias is not None
        return add_value_conv(o, v, self.weight, bias, feat_size=feat_size, overwrite=True)
