"""DiT / SiT: the network itself. What diffusers asks of a model is in test_dit_diffusers.py."""

import logging
import math

import numpy as np
import pytest
import torch
from awake_dit import TINY, AwakeDiT, batch
from torch import nn

from lineardiff.layers import list_attentions
from lineardiff.models.dit import DiT


def test_a_new_network_returns_zeros():
    model = DiT(**TINY, attention="vca").eval()
    output = model(*batch()).sample
    assert output.shape == (3, 8, 8, 12)
    assert output.abs().max() == 0


@pytest.mark.parametrize("attention", ["mhsa", "vca"])
def test_initial_values(attention):
    torch.manual_seed(0)
    model = DiT(**{**TINY, "dim": 64, "depth": 6}, attention=attention)
    initial = dict(model.named_parameters())
    zero = [n for n in initial if "adaLN_modulation" in n or n.startswith("final_layer.linear")]
    zero += [n for n in initial if n.endswith(".bias") and ".conv." not in n]
    assert all(initial[name].abs().max() == 0 for name in zero)
    for name, (rows, columns) in {
        "attn.qkv": (192, 64),
        "attn.proj": (64, 64),
        "mlp.fc1": (256, 64),
        "mlp.fc2": (64, 256),
    }.items():
        bound = math.sqrt(6 / (rows + columns))
        for index in range(6):
            weight = initial[f"blocks.{index}.{name}.weight"]
            assert 0.98 * bound < weight.abs().max() <= bound
    bound = math.sqrt(6 / (64 + 4 * 2 * 2))
    assert 0.95 * bound < initial["x_embedder.proj.weight"].abs().max() <= bound
    for name in ("t_embedder.mlp.0", "t_embedder.mlp.2", "y_embedder.embedding_table"):
        assert initial[f"{name}.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    if attention == "vca":

        def std(*names):
            return torch.cat([v.flatten() for n, v in initial.items() if n.endswith(names)]).std().item()

        assert std("pos_embed_pos", "pos_embed_neg") == pytest.approx(1.0, rel=0.05)
        assert std("q1", "k1", "q2", "k2") == pytest.approx(0.1, rel=0.1)
        assert all((initial[f"blocks.{i}.attn.norm1.weight"] == 1).all() for i in range(6))


@pytest.mark.parametrize("attention", list_attentions())
def test_gradients_reach_every_parameter(attention):
    torch.manual_seed(0)
    model = AwakeDiT(**TINY, attention=attention).train()
    model(*batch()).sample.square().mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert missing == []


def test_blocks_get_the_grid_and_their_depth():
    model = AwakeDiT(**TINY, attention="vca").eval()
    seen = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    model(*batch())
    assert seen == [(4, 6), (4, 6)]
    assert [block.attn.lambda_init for block in model.blocks] == [
        pytest.approx(0.8 - 0.6 * math.exp(-0.3 * depth)) for depth in range(2)
    ]
    assert model.contrast_grid == (2, 3)


def test_positions_of_a_non_square_grid():
    table = DiT(**TINY).pos_embed[0].numpy()
    for row in range(4):
        for column in range(6):
            angles = [[place / 10000 ** (k / 8) for k in range(8)] for place in (column, row)]
            expected = [f(a) for axis in angles for f in (math.sin, math.cos) for a in axis]
            np.testing.assert_allclose(table[6 * row + column], expected, atol=1e-7)


def test_tokens_become_the_pixels_of_their_patches():
    class Numbers(nn.Module):
        def forward(self, x, c):
            return torch.arange(x.shape[0] * 24 * 32, dtype=torch.float32).view(-1, 24, 32)

    model = DiT(**TINY).eval()
    model.final_layer = Numbers()
    output = model(*batch()).sample
    for b, c, y, x in [(0, 0, 0, 0), (0, 5, 1, 0), (1, 2, 3, 10), (2, 7, 7, 11), (0, 1, 4, 7)]:
        token, inside = (y // 2) * 6 + x // 2, ((y % 2) * 2 + x % 2) * 8 + c
        assert output[b, c, y, x] == (b * 24 + token) * 32 + inside


def test_sigma_learned_returned_or_absent():
    torch.manual_seed(0)
    both = AwakeDiT(**TINY).eval()
    first = AwakeDiT(**TINY, return_sigma=False).eval()
    first.load_state_dict(both.state_dict())
    output = both(*batch()).sample
    assert torch.equal(first(*batch()).sample, output[:, :4])
    assert AwakeDiT(**TINY, learn_sigma=False).eval()(*batch()).sample.shape == (3, 4, 8, 12)
    assert both.out_channels == 8
    assert first.out_channels == 4


@torch.no_grad()
def test_labels_are_dropped_once_a_call_in_training():
    torch.manual_seed(0)
    model = AwakeDiT(**{**TINY, "class_dropout_prob": 0.5})
    x, t, y = batch(16)
    torch.manual_seed(5)
    trained = model.train()(x, t, y).sample
    torch.manual_seed(5)
    drop = torch.rand(16) < 0.5
    assert 0 < drop.sum() < 16
    model.eval()
    assert torch.equal(trained, model(x, t, torch.where(drop, 5, y)).sample)
    assert torch.equal(trained, model(x, t, y, force_drop_ids=drop.int()).sample)
    whole = model(x, t, y).sample
    assert torch.equal(whole[~drop], trained[~drop])
    assert (whole[drop] - trained[drop]).abs().amax(dim=(1, 2, 3)).min() > 0
    model.train()
    keep = model(x, t, y, force_drop_ids=torch.zeros(16)).sample
    assert torch.equal(keep, whole)


def test_without_a_null_label():
    model = AwakeDiT(**{**TINY, "class_dropout_prob": 0.0})
    assert model.y_embedder.embedding_table.num_embeddings == 5
    assert torch.equal(model.train()(*batch()).sample, model.eval()(*batch()).sample)
    with pytest.raises(ValueError, match="no null label.*class_dropout_prob > 0"):
        model(*batch(), force_drop_ids=torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_of_any_integer_type(dtype):
    model = AwakeDiT(**TINY).eval()
    x, t, y = batch()
    assert torch.equal(model(x, t, y.to(dtype)).sample, model(x, t, y).sample)


def test_time_may_be_whole_or_a_fraction():
    model = AwakeDiT(**TINY).eval()
    x, _, y = batch()
    whole, halves = torch.tensor([0, 500, 999]), torch.tensor([0.0, 0.5, 0.25])
    assert torch.equal(model(x, whole, y).sample, model(x, whole.double(), y).sample)
    assert not torch.equal(model(x, halves, y).sample, model(x, halves.long(), y).sample)


@pytest.mark.parametrize("attention", ["mhsa", "vca"])
@torch.no_grad()
def test_bfloat16_is_close(attention):
    torch.manual_seed(0)
    model = AwakeDiT(**TINY, attention=attention).eval()
    x, t, y = batch()
    exact = model(x, t, y).sample
    low = model.bfloat16()(x.bfloat16(), t, y).sample
    assert low.dtype == torch.bfloat16
    assert 0 < (low.float() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_autocast_to_any_type_is_as_exact_as_with_self_attention(weights, autocast):
    x, t, y = batch()
    errors = {}
    for attention in ("mhsa", "vca"):
        torch.manual_seed(0)
        model = AwakeDiT(**TINY, attention=attention).eval().to(weights)
        with torch.autocast("cpu", autocast):
            out = model(x.to(weights), t, y).sample
        exact = model.double()(x.to(weights).double(), t, y).sample
        errors[attention] = float((out - exact).norm() / exact.norm())
    assert errors["vca"] <= 2 * errors["mhsa"] + 1e-14, errors


def test_options_reach_the_layers_and_are_said_where_they_mean_nothing(caplog):
    options = {
        "tokens": "embed",
        "global_contrast": "plain",
        "patchwise": "halves",
        "softmax": "joint",
        "conv": False,
        "contrast_grid": (3, 2),
    }
    attn = DiT(**TINY, attention=["vca", "agent"], **options).blocks[0].attn
    assert (attn.tokens, attn.global_contrast, attn.patchwise, attn.softmax) == (
        "embed",
        "plain",
        "halves",
        "joint",
    )
    assert attn.conv is None
    assert attn.contrast_grid == (3, 2)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="lineardiff"):
        DiT(**TINY)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_size": 9}, "sample_size=9 must be a multiple of patch_size=2"),
        ({"sample_size": (8, 12, 4)}, "sample_size=.*one side or .height, width."),
        ({"dim": 30}, "dim=30 must be a multiple of 4"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"patch_size": 0}, "patch_size=0 must be an integer of at least 1"),
        ({"patch_size": "2"}, "patch_size='2' must be"),
        ({"depth": 0}, "depth=0 must be"),
        ({"depth": None}, "depth=None must be"),
        ({"dim": [32]}, r"dim=\[32\] must be"),
        ({"in_channels": 2.5}, "in_channels=2.5 must be"),
        ({"sample_size": "32"}, "sample_size='32' must be one side or"),
        ({"sample_size": None}, "sample_size=None must be one side or"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio=nan must be a number above 0"),
        ({"mlp_ratio": "4"}, "mlp_ratio='4' must be"),
        ({"class_dropout_prob": None}, "class_dropout_prob=None must be"),
        ({"mlp_norm_eps": -1}, "mlp_norm_eps=-1 must be"),
        ({"learn_sigma": "no"}, "learn_sigma='no' must be True or False"),
        ({"attention": None}, "attention=None must be one name"),
        ({"num_heads": 3}, "num_heads=3"),
        ({"num_classes": 0}, "num_classes=0 must be an integer of at least 1"),
        ({"class_dropout_prob": 1.0}, "class_dropout_prob=1.0 must be a number .*below 1"),
        ({"attention": "linear"}, "Unknown attention 'linear'; choose one of"),
        ({"attention": ["vca"]}, "1 names for 2 blocks"),
        ({"attention": "vca", "contrast_grid": (5, 7)}, r"5 x 7 is larger than the 4 x 6.*=\(4, 6\)"),
        ({"attention": "vca", "contrast_grid": 4}, "contrast_grid must be two positive integers"),
        ({"attention": "vca", "tokens": "mean"}, "tokens='mean' is unknown"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DiT(**{**TINY, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": torch.zeros(3, 4, 12, 8)}, r"sample has shape \(3, 4, 12, 8\), expected \(B, 4, 8, 12\)"),
        ({"sample": torch.zeros(4, 8, 12)}, "sample has shape"),
        ({"timestep": torch.tensor(3.0)}, r"timestep has shape \(\), expected \(3,\)"),
        ({"class_labels": torch.zeros(2, dtype=torch.long)}, r"class_labels has shape \(2,\)"),
        ({"class_labels": torch.zeros(3)}, "class_labels are torch.float32; pass integers"),
        ({"class_labels": torch.tensor([0, 6, 2])}, r"class_labels must be from 0 to 5; got \[0, 6, 2\]"),
        ({"class_labels": torch.tensor([0, -1, 2])}, "class_labels must be from 0 to 5"),
        ({"force_drop_ids": torch.ones(3, 1)}, r"force_drop_ids has shape \(3, 1\)"),
    ],
)
def test_bad_inputs(change, message):
    x, t, y = batch()
    with pytest.raises(ValueError, match=message):
        DiT(**TINY)(**{"sample": x, "timestep": t, "class_labels": y, **change})
