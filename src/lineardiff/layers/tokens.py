"""Contrast tokens: embeddings resized to another contrast grid."""

from timm.layers import resample_abs_pos_embed
from torch import Tensor


def resize_contrast_embed(
    embed: Tensor, *, new_grid: tuple[int, int], old_grid: tuple[int, int] | None = None
) -> Tensor:
    """Resize a contrast embedding to another contrast grid, bicubic as timm resizes position embeddings.

    Args:
        embed: (h*w, C).
        new_grid: the contrast grid wanted.
        old_grid: the contrast grid of `embed`; None takes a square one.

    Returns:
        (h_new * w_new, C) in the type of embed.

    Raises:
        ValueError: `old_grid` does not fit the rows, or is None and the rows are no square number.
    """
    n = embed.shape[0]
    if old_grid is None:
        side = round(n**0.5)
        old_grid = (side, side)
    if old_grid[0] * old_grid[1] != n:
        raise ValueError(
            f"a contrast embedding with {n} rows does not fit the contrast grid {old_grid[0]} x {old_grid[1]}; "
            "give old_grid=(h, w), the contrast grid it was made for."
        )
    if tuple(old_grid) == tuple(new_grid):
        return embed
    resized = resample_abs_pos_embed(
        embed.unsqueeze(0), new_size=list(new_grid), old_size=list(old_grid), num_prefix_tokens=0
    )
    return resized.squeeze(0)
