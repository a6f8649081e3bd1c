"""Contrast tokens: average pooling over the image grid, and embeddings resized to another contrast grid."""

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor


def pool_matrix(size: int, bins: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Average pooling of one axis as a matrix, (bins, size): row i averages bin i.

    The bins are those of adaptive average pooling, floor(i size / bins) to ceil((i + 1) size / bins); they
    overlap where `bins` does not divide `size`. `size` may be symbolic, so that one compiled or exported
    graph serves every image size.
    """
    bin_index = torch.arange(bins, device=device).unsqueeze(1)
    start = bin_index * size // bins
    end = ((bin_index + 1) * size + bins - 1) // bins
    place = torch.arange(size, device=device)
    inside = (place >= start) & (place < end)
    return inside.to(dtype) / (end - start).to(dtype)


def pool_grid(x: Tensor, feat_size: tuple[int, int], contrast_grid: tuple[int, int]) -> Tensor:
    """Average the grid tokens into the cells of the contrast grid.

    Args:
        x: grid tokens (B, H*W, C), row by row, of any strides.
        feat_size: (H, W).
        contrast_grid: (h, w).

    Returns:
        (B, h*w, C), equal to adaptive average pooling, in the type of x.
    """
    (H, W), (h, w) = feat_size, contrast_grid
    B, _, C = x.shape
    rows = pool_matrix(H, h, device=x.device, dtype=x.dtype)
    columns = pool_matrix(W, w, device=x.device, dtype=x.dtype)
    # (h H) (H, W C) first: it shrinks the large operand in one batched product
    pooled = torch.matmul(rows, x.reshape(B, H, W * C)).view(B, h, W, C)
    return torch.matmul(columns, pooled).view(B, h * w, C)


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
