import pytest
import timm
import torch
from PIL import Image

from lineardiff.visualize.maps import plot_signed_attention, signed_attention

SIZE = {"img_size": 24, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def model(**kwargs: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vca_deit_tiny_patch16_224", contrast_grid=(2, 3), **SIZE, **kwargs).eval()


def test_the_map_of_the_class_token_is_the_closed_form() -> None:
    """Every weight is set so that A is known: head 0 reads the brightness of a cell, head 1 its negative."""
    vit = model()
    attention, scale = vit.blocks[0].attn, 5.0
    vit.blocks[0].norm1 = torch.nn.Identity()
    brightness = torch.tensor([[0.9, 0.1, 0.5], [0.3, 0.7, 0.0]])
    offset = torch.tensor(
        [[0.0, 0.6, 0.2], [0.4, 0.1, 0.8]]
    )  # what e- adds to the first channel of each head
    with torch.no_grad():
        for parameter in [*vit.parameters()]:
            parameter.zero_()
        vit.patch_embed.proj.weight[0] = 1 / 48
        vit.patch_embed.proj.weight[8] = -1 / 48
        vit.cls_token[..., [0, 8]] = scale
        attention.qkv.weight[:16] = torch.eye(16)
        attention.pos_embed_neg[:, [0, 8]] = offset.reshape(6, 1)
    image = brightness.repeat_interleave(12, 0).repeat_interleave(8, 1).expand(1, 3, 24, 24)
    maps = signed_attention(vit, image, block=0)[0]

    lambda2 = 0.8 - 0.6  # the learned vectors are zero, so lambda is lambda_init of the first block
    for head, sign in enumerate((1, -1)):
        added, subtracted = sign * brightness, sign * brightness + offset
        expected = [(scale / 8**0.5 * logits).flatten().softmax(0) for logits in (added, subtracted)]
        torch.testing.assert_close(maps[head], (expected[0] - lambda2 * expected[1]).reshape(2, 3))


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
