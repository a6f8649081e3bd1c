"""The attentions by name, each against timm's module or a formula written out."""

import logging

import pytest
import timm.layers
import torch
import torch.nn.functional as F

from lineardiff.layers import (
    AgentAttention,
    AttentionOptions,
    SelfAttention,
    VisualContrastAttention,
    create_attention,
    factory,
    list_attentions,
)


def tokens(P=1, H=4, W=6, C=24):
    return torch.randn(2, P + H * W, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64), (
        H,
        W,
    )


def test_mhsa_is_timms_attention():
    x, size = tokens()
    theirs = timm.layers.Attention(24, 3, qkv_bias=True, dtype=torch.float64)
    mine = create_attention("mhsa", 24, 3, qkv_bias=True, dtype=torch.float64)
    mine.load_state_dict(theirs.state_dict())
    assert torch.allclose(mine(x, size), theirs(x), atol=1e-12)


def test_mhsa_conv_adds_the_convolution_of_the_values_on_the_grid():
    x, (H, W) = tokens(P=2)
    plain, conv = (SelfAttention(24, 3, conv=c, dtype=torch.float64) for c in (False, True))
    missing, unexpected = plain.load_state_dict(conv.state_dict(), strict=False)
    assert (missing, sorted(unexpected)) == ([], ["conv.bias", "conv.weight"])
    v = F.linear(x, conv.qkv.weight, conv.qkv.bias)[:, 2:, 48:]
    local = F.conv2d(
        v.transpose(1, 2).reshape(2, 24, H, W), conv.conv.weight, conv.conv.bias, padding=1, groups=24
    )
    extra = F.linear(local.flatten(2).transpose(1, 2), conv.proj.weight)
    expected = plain(x, (H, W)) + F.pad(extra, (0, 0, 2, 0))
    assert torch.allclose(conv(x, (H, W)), expected, atol=1e-12)
    with pytest.raises(ValueError, match="needs the grid"):
        conv(x)


def test_diff_is_timms_differential_attention():
    x, size = tokens()
    theirs = timm.layers.DiffAttention(24, 3, qkv_bias=True, depth=4, dtype=torch.float64)
    mine = create_attention("diff", 24, 3, depth=4, qkv_bias=True, dtype=torch.float64)
    mine.load_state_dict(theirs.state_dict())
    assert torch.equal(mine(x, size), theirs(x))


def test_agent_attention_is_its_two_softmaxes():
    x, (H, W) = tokens(P=1)
    layer = AgentAttention(24, 3, contrast_grid=(2, 3), dtype=torch.float64)
    assert {name.split(".")[0] for name, _ in layer.named_parameters()} == {"qkv", "proj", "conv"}
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)

    def on_grid(t):
        return t[:, :, 1:].transpose(1, 2).flatten(2).transpose(1, 2).reshape(2, 24, H, W)

    agents = (
        F.adaptive_avg_pool2d(on_grid(q), (2, 3))
        .flatten(2)
        .transpose(1, 2)
        .unflatten(-1, (3, 8))
        .transpose(1, 2)
    )
    o = F.scaled_dot_product_attention(q, agents, F.scaled_dot_product_attention(agents, k, v))
    local = (
        F.conv2d(on_grid(v), layer.conv.weight, layer.conv.bias, padding=1, groups=24)
        .flatten(2)
        .transpose(1, 2)
    )
    expected = layer.proj(o.transpose(1, 2).flatten(2) + F.pad(local, (0, 0, 1, 0)))
    assert torch.allclose(layer(x, (H, W)), expected, atol=1e-12)


@pytest.mark.parametrize("name", list_attentions())
def test_every_attention_has_the_same_call_and_gradients_for_all_parameters(name):
    x, size = tokens(C=48)
    layer = create_attention(name, 48, 3, options=AttentionOptions(contrast_grid=(2, 3)), dtype=torch.float64)
    out = layer(x, size)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


def test_options_reach_vca_and_are_named_where_they_are_ignored(caplog):
    layer = create_attention(
        "vca", 24, 3, depth=2, options=AttentionOptions(contrast_grid=(2, 3), softmax="joint")
    )
    assert isinstance(layer, VisualContrastAttention)
    assert (layer.contrast_grid, layer.softmax) == ((2, 3), "joint")
    assert layer.lambda_init == VisualContrastAttention(24, 3, depth=2).lambda_init
    factory.log_ignored.cache_clear()
    with caplog.at_level(logging.INFO, logger="lineardiff"):
        for _ in range(3):
            create_attention("mhsa", 24, 3, options=AttentionOptions(contrast_grid=(2, 3)))
    assert [r.getMessage() for r in caplog.records] == [
        "Attention 'mhsa' has no option contrast_grid; it is ignored."
    ]


def test_bad_names_and_options_are_refused():
    with pytest.raises(
        ValueError, match="Unknown attention 'linear'; choose one of vca, mhsa, mhsa_conv, diff, agent"
    ):
        create_attention("linear", 24, 3)
    with pytest.raises(ValueError, match="2 names for 3 blocks"):
        factory.per_block(("vca", "mhsa"), 3)
    with pytest.raises(ValueError, match="no dropout of the attention map; set attn_drop=0.1 to 0"):
        create_attention("vca", 24, 3, attn_drop=0.1)
    with pytest.raises(ValueError, match=r"multiple of 2 \* num_heads=3"):
        create_attention("diff", 27, 3)
    with pytest.raises(ValueError, match="multiple of num_heads=5"):
        create_attention("mhsa", 24, 5)
