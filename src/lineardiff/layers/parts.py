"""Parts shared by the attention layers: the convolution of the values and the resizing of contrast embeddings."""

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from lineardiff.ops import add_value_conv

__all__ = ["ValueConv", "resize_contrast_embed"]


class ValueConv(nn.Conv2d):
    """Depth-wise 3x3 convolution of the values on their grid, with bias, added to the attention's output.

    Args:
        dim: Number of channels C.
    """

    def __init__(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim, device=device, dtype=dtype)

    def forward(self, o: Tensor, v: Tensor, feat_size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Add the convolution of `v` to `o`.

        Args:
            o: Output of the attention (B, heads, P + H*W, head_dim). It is overwritten when gradients are off.
            v: Values of the same shape: prefix tokens, then the grid row by row.
            feat_size: Grid (H, W) of the tokens.

        Returns:
            (B, heads, P + H*W, head_dim), equal to `o` at the prefix tokens, which are not on the grid.
        """
        bias = self.bias
        assert bias is not None
        return add_value_conv(o, v, self.weight, bias, feat_size=feat_size, overwrite=True)


def resize_contrast_embed(
    embed: Tensor, *, new_grid: tuple[int, int], old_grid: tuple[int, int] | None = None
) -> Tensor:
    """Resize a contrast embedding to another contrast grid, bicubically as timm resizes position embeddings.

    Args:
        embed: Embedding (h*w, C).
        new_grid: New contrast grid.
        old_grid: Contrast grid of `embed`. Default: a square grid.

    Returns:
        (h_new * w_new, C) in the type of `embed`.

    Raises:
        ValueError: `old_grid` does not match the number of rows, or is None and that number is not a square.
    """
    n = embed.shape[0]
    if old_grid is None:
        side = round(n**0.5)
        old_grid = (side, side)
    if old_grid[0] * old_grid[1] != n:
        raise ValueError(
            f"A contrast embedding with {n} rows does not fit the contrast grid {old_grid[0]} x {old_grid[1]}; "
            "pass the grid it was trained with as old_grid=(h, w)."
        )
    if tuple(old_grid) == tuple(new_grid):
        return embed
    resized = resample_abs_pos_embed(
        embed.unsqueeze(0), new_size=list(new_grid), old_size=list(old_grid), num_prefix_tokens=0
    )
    return resized.squeeze(0)
