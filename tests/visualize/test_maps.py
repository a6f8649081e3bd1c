import pytest
import timm
import torch
from PIL import Image

from lineardiff.visualize.maps import plot_signed_attention, signed_attention

SIZE = {"img_size": 24, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def model(**kwargs: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vca_deit_tiny_patch16_224", contrast_grid=(2, 3), **SIZE, **kwargs).eval()


def test_signed_attention_is_the_difference_of_two_softmaxes() -> None:
    vit = model()
    maps = signed_attention(vit, torch.randn(4, 3, 24, 24))
    assert maps.shape == (4, 2, 2, 3)
    # Each softmax sums to one over the contrast tokens, so a row of A sums to 1 - lambda2.
    attention = vit.blocks[-1].attn
    lambda2 = attention._lambda(
        attention.lambda2_q1, attention.lambda2_k1, attention.lambda2_q2, attention.lambda2_k2
    ).detach()
    torch.testing.assert_close(maps.sum((2, 3)), (1 - lambda2).expand(4, 2))


def test_looking_changes_nothing() -> None:
    vit, images = model(), torch.randn(2, 3, 24, 24)
    before = vit(images)
    signed_attention(vit, images, block=0)
    assert torch.equal(vit(images), before)
    assert not vit.blocks[0].attn._forward_pre_hooks


def test_another_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no signed attention"):
        signed_attention(model(attention="mhsa"), torch.randn(1, 3, 24, 24))


def test_the_figure_shows_each_head_below_its_picture() -> None:
    maps = torch.linspace(-1, 2, 2 * 3 * 4).reshape(2, 3, 2, 2)
    figure = plot_signed_attention([Image.new("RGB", (8, 8))] * 2, maps)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 2 * (1 + 3)
    shown = panels[2].images[0]  # row by row: the second row starts with head 1 of the first picture
    assert shown.get_array().tolist() == maps[0, 0].tolist()
    assert shown.get_clim() == (-2, 2)  # zero is white
