"""Average pooling over the image grid as matrix products."""

import torch
from torch import Tensor


def pool_matrix(size: int, bins: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix (bins, size) of average pooling along one axis.

    Row i averages the bin from floor(i size / bins) to ceil((i + 1) size / bins), as in adaptive average pooling; bins
    overlap if `bins` does not divide `size`. `size` may be symbolic, so that one compiled or exported graph serves
    every image size.
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
        x: Grid tokens (B, H*W, C), row by row, with any strides.
        feat_size: (H, W).
        contrast_grid: (h, w).

    Returns:
        (B, h*w, C) in the type of x, equal to adaptive average pooling.
    """
    (H, W), (h, w) = feat_size, contrast_grid
    B, _, C = x.shape
    rows = pool_matrix(H, h, device=x.device, dtype=x.dtype)
    columns = pool_matrix(W, w, device=x.device, dtype=x.dtype)
    # (h, H) (H, W C) first: one batched product shrinks the large operand
    pooled = torch.matmul(rows, x.reshape(B, H, W * C)).view(B, h, W, C)
    return torch.matmul(columns, pooled).view(B, h * w, C)


def pool_queries(q: Tensor, pool: tuple[int, int, int, int]) -> Tensor:
    """Average the last H*W queries of each head into h x w cells: t~.

    Args:
        q: Queries (B, heads, N, d).
        pool: (H, W, h, w).

    Returns:
        (B, heads, h*w, d) in the type of q.
    """
    H, W, h, w = pool
    heads, N = q.shape[1], q.shape[2]
    grid = q.transpose(1, 2)[:, N - H * W :].flatten(2)
    return pool_grid(grid, (H, W), (h, w)).unflatten(2, (heads, -1)).transpose(1, 2)
