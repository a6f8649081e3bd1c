"""Grid pooling against torch's adaptive average pooling."""

import pytest
import torch
import torch.nn.functional as F

from lineardiff.ops import pool_grid
from lineardiff.ops.pooling import pool_matrix


@pytest.mark.parametrize(
    ("feat_size", "grid"),
    [
        ((14, 14), (7, 7)),
        ((7, 7), (7, 7)),
        ((9, 13), (4, 5)),
        ((5, 3), (1, 2)),
        ((10, 7), (7, 3)),
        ((1, 8), (1, 3)),
    ],
)
def test_pooling_is_adaptive_average_pooling(feat_size, grid):
    (H, W), C = feat_size, 6
    packed = torch.randn(2, H * W, 3, C, dtype=torch.float64, requires_grad=True)
    x = packed.unbind(2)[1]  # of the strides of a packed projection
    pooled = pool_grid(x, feat_size, grid)
    expected = F.adaptive_avg_pool2d(x.transpose(1, 2).reshape(2, C, H, W), grid).flatten(2).transpose(1, 2)
    assert pooled.shape == (2, grid[0] * grid[1], C)
    assert torch.allclose(pooled, expected, atol=1e-14, rtol=0)
    weight = torch.randn_like(pooled)
    mine, theirs = (torch.autograd.grad(y, packed, weight)[0] for y in (pooled, expected))
    assert torch.allclose(mine, theirs, atol=1e-14, rtol=0)


def test_rows_of_the_matrix_are_averages():
    matrix = pool_matrix(11, 4, device=torch.device("cpu"), dtype=torch.float64)
    assert torch.equal(matrix.sum(1), torch.ones(4, dtype=torch.float64))
    assert (matrix > 0).sum(1).tolist() == [3, 4, 4, 3]  # 0..2, 2..5, 5..8, 8..10
