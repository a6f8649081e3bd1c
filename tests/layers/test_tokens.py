"""Grid pooling against torch's adaptive average pooling; embeddings against timm's resampling."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed

from lineardiff.layers import pool_grid, resize_contrast_embed
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


def test_resizing_is_timms_and_keeps_the_same_grid():
    embed = torch.randn(12, 5)
    expected = resample_abs_pos_embed(embed[None], new_size=[6, 2], old_size=[3, 4], num_prefix_tokens=0)[0]
    assert torch.equal(resize_contrast_embed(embed, new_grid=(6, 2), old_grid=(3, 4)), expected)
    assert resize_contrast_embed(embed, new_grid=(3, 4), old_grid=(3, 4)) is embed
    constant = resize_contrast_embed(torch.full((49, 3), 2.5), new_grid=(5, 6))
    assert torch.allclose(constant, torch.full((30, 3), 2.5), atol=1e-5)


def test_a_grid_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="8 rows does not fit.*give old_grid"):
        resize_contrast_embed(torch.zeros(8, 3), new_grid=(2, 2))
    with pytest.raises(ValueError, match="8 rows does not fit the contrast grid 3 x 3"):
        resize_contrast_embed(torch.zeros(8, 3), new_grid=(2, 2), old_grid=(3, 3))
