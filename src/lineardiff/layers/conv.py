"""The depth-wise convolution of V that the paper adds to the attention's output."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ValueConv(nn.Conv2d):
    """Depth-wise 3x3 convolution, with bias, of the values on their grid.

    Args:
        dim: channels C.
    """

    def __init__(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim, device=device, dtype=dtype)

    def forward(self, v: Tensor, feat_size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Convolve.

        Args:
            v: values (B, heads, P + H*W, head_dim): prefix tokens, then the grid row by row.
            feat_size: (H, W).

        Returns:
            (B, P + H*W, C); zero at the prefix tokens, which have no place on the grid.
        """
        H, W = feat_size
        prefix = v.shape[2] - H * W
        grid = v.transpose(1, 2).flatten(2)[:, prefix:].transpose(1, 2).unflatten(2, (H, W))
        local = self._conv_forward(grid, self.weight, self.bias)
        return F.pad(local.flatten(2).transpose(1, 2), (0, 0, prefix, 0))
