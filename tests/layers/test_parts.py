"""Contrast embeddings resized, against timm's resampling."""

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from lineardiff.layers import resize_contrast_embed


def test_resizing_is_timms_and_keeps_the_same_grid():
    embed = torch.randn(12, 5)
    expected = resample_abs_pos_embed(embed[None], new_size=[6, 2], old_size=[3, 4], num_prefix_tokens=0)[0]
    assert torch.equal(resize_contrast_embed(embed, new_grid=(6, 2), old_grid=(3, 4)), expected)
    assert resize_contrast_embed(embed, new_grid=(3, 4), old_grid=(3, 4)) is embed
    constant = resize_contrast_embed(torch.full((49, 3), 2.5), new_grid=(5, 6))
    assert torch.allclose(constant, torch.full((30, 3), 2.5), atol=1e-5)


def test_a_grid_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="8 rows does not fit.*old_grid="):
        resize_contrast_embed(torch.zeros(8, 3), new_grid=(2, 2))
    with pytest.raises(ValueError, match="8 rows does not fit the contrast grid 3 x 3"):
        resize_contrast_embed(torch.zeros(8, 3), new_grid=(2, 2), old_grid=(3, 3))
