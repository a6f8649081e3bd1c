"""VCA-DeiT as a timm model: the numbers of the design, timm's baseline, options, sizes, features."""

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch.utils.flop_counter import FlopCounterMode

import lineardiff
from lineardiff.layers import AgentAttention, DifferentialAttention, SelfAttention, VisualContrastAttention

SMALL = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}


def small(name="vca_deit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, "contrast_grid": (3, 4), **options}).eval()


def images(*size, batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "parameters", "giga"),
    [
        ("vca_deit_tiny_patch16_224", 5_973_928, "1.2"),
        ("vca_deit_small_patch16_224", 22_556_008, "4.6"),
        ("vca_deit_base_patch16_224", 87_570_664, None),
        ("vca_deit_tiny_distilled_patch16_224", 5_973_928 + 192 + 192 + 192_000 + 1_000, None),
    ],
)
def test_parameters_and_multiply_adds_of_the_design(name, parameters, giga):
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    if giga:
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 224, 224, device="meta"))
        assert f"{counter.get_total_flops() / 2e9:.1f}" == giga


def test_self_attention_is_timms_deit():
    theirs = timm.create_model("deit_tiny_patch16_224", **SMALL).eval()
    mine = small(attention="mhsa")
    mine.load_state_dict(theirs.state_dict())
    x = images(32, 32)
    assert torch.allclose(mine(x), theirs(x), atol=1e-6)
    ours, wanted = (
        m.forward_intermediates(x, [0, 2], norm=True, return_prefix_tokens=True) for m in (mine, theirs)
    )
    assert torch.allclose(ours[0], wanted[0], atol=1e-6)
    for (feature, prefix), (feature_, prefix_) in zip(ours[1], wanted[1], strict=True):
        assert torch.allclose(feature, feature_, atol=1e-6)
        assert torch.allclose(prefix, prefix_, atol=1e-6)


def test_the_interface_of_timms_vits_for_dino_and_masks():
    theirs = timm.create_model("deit_tiny_patch16_224", **SMALL).eval()
    mine = small(attention="mhsa")
    mine.load_state_dict(theirs.state_dict())
    x = images(32, 32)
    for reshape in (False, True):
        ours, wanted = (
            m.get_intermediate_layers(x, [1, 2], reshape=reshape, norm=True) for m in (mine, theirs)
        )
        assert len(ours) == len(wanted) == 2
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, wanted, strict=True))
    for call in (mine, mine.forward_features, mine.forward_intermediates):
        call(x, attn_mask=None, is_causal=False)
        for refused in ({"attn_mask": torch.ones(65, 65)}, {"is_causal": True}):
            with pytest.raises(ValueError, match="attn_mask and is_causal are not available"):
                call(x, **refused)


def test_distilled_self_attention_is_timms_distilled_deit():
    theirs = timm.create_model("deit_tiny_distilled_patch16_224", **SMALL).eval()
    mine = small("vca_deit_tiny_distilled_patch16_224", attention="mhsa")
    mine.load_state_dict(theirs.state_dict())
    x = images(32, 32)
    assert torch.allclose(mine(x), theirs(x), atol=1e-6)
    for model in (mine, theirs):
        model.train()
        model.set_distilled_training(True)
    for a, b in zip(mine(x), theirs(x), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_attentions_can_differ_by_block():
    names = {
        "vca": VisualContrastAttention,
        "mhsa": SelfAttention,
        "mhsa_conv": SelfAttention,
        "diff": DifferentialAttention,
        "agent": AgentAttention,
    }
    model = small(attention=tuple(names), depth=5)
    assert [type(block.attn) for block in model.blocks] == list(names.values())
    assert model.blocks[2].attn.conv is not None
    assert model(images(32, 32)).shape == (2, 7)
    assert [small(depth=2).blocks[i].attn.lambda_init for i in (0, 1)] == pytest.approx(
        [0.2, 0.8 - 0.6 * 2.718281828**-0.3]
    )


def test_options_of_the_layer_are_handed_on():
    model = small(tokens="pool", global_contrast="plain", patchwise="halves", softmax="joint", conv=False)
    for block in model.blocks:
        a = block.attn
        assert (a.tokens, a.global_contrast, a.patchwise, a.softmax, a.conv) == (
            "pool",
            "plain",
            "halves",
            "joint",
            None,
        )
        assert a.contrast_grid == (3, 4)


def test_dynamic_image_size_equals_a_model_built_for_that_size():
    dynamic = small(dynamic_img_size=True)
    for H, W in ((32, 32), (48, 20), (24, 64)):
        fixed = small(img_size=(H, W))
        fixed.load_state_dict(lineardiff.models.weights.checkpoint_filter_fn(dynamic.state_dict(), fixed))
        x = images(H, W)
        assert torch.allclose(dynamic(x), fixed(x), atol=1e-5)


def test_set_input_size_keeps_working_and_checks_the_grid():
    model = small()
    model.set_input_size((40, 24))
    assert model(images(40, 24)).shape == (2, 7)
    with pytest.raises(
        ValueError,
        match=r"blocks.0 pools into a 3 x 4 contrast grid.*only 2 x 8 patches.*contrast_grid=\(2, 4\)",
    ):
        model.set_input_size((8, 32))
    with pytest.raises(ValueError, match="contrast_grid="):
        small(img_size=8)


def test_checkpointing_with_two_sizes_before_one_backward_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = small(dynamic_img_size=True).train()
        model.set_grad_checkpointing(checkpointing)
        (model(images(32, 32)).square().sum() + model(images(16, 48)).square().sum()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_features_only_gives_maps_of_the_grid():
    model = small(features_only=True, out_indices=(0, 2), dynamic_img_size=True)
    maps = model(images(32, 48))
    assert [tuple(m.shape) for m in maps] == [(2, 48, 8, 12)] * 2
    assert model.feature_info.reduction() == [4, 4]


def test_no_weight_decay_for_lambdas_and_embeddings_and_layer_decay_groups():
    model = small()
    decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())[1]
    kept = {id(p) for p in decayed["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in kept]
    assert decayed["weight_decay"] == 0.05
    assert len(names) > 10
    assert all(name.endswith("weight") and "norm" not in name for name in names)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    scales = {id(p): g["lr_scale"] for g in optimizer.param_groups for p in g["params"]}
    own = dict(model.named_parameters())
    assert scales[id(own["head.weight"])] == 1
    assert [scales[id(own[f"blocks.{i}.attn.pos_embed_neg"])] for i in range(3)] == [0.125, 0.25, 0.5]
    assert scales[id(own["patch_embed.proj.weight"])] == 0.0625


def test_bad_options_say_what_to_do():
    for options, message in (
        ({"attention": "linear"}, "Unknown attention 'linear'"),
        ({"attention": ("vca", "mhsa")}, "2 names for 3 blocks"),
        ({"attn_layer": "diff"}, "choose the attention with attention="),
        ({"patch_drop_rate": 0.5}, "patch_drop_rate=0.5 removes tokens"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"attn_drop_rate": 0.1}, "attn_drop=0.1"),
        ({"depth": 0}, "depth=0 must be an integer of at least 1"),
        ({"depth": float("nan")}, "depth=nan must be"),
        ({"patch_size": 0}, "patch_size=0 must be"),
        ({"img_size": "32"}, "img_size='32' must be"),
        ({"embed_dim": 48.0}, "dim=48.0 must be"),
        ({"num_heads": 5}, "multiple of num_heads=5"),
        ({"weight_init": "xavier"}, "weight_init='xavier' is unknown"),
        ({"contrast_grid": (9, 2)}, r"9 x 2 contrast grid.*contrast_grid=\(8, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            small(**options)
    with pytest.raises(TypeError, match="not_an_option"):
        small(not_an_option=1)
    with pytest.raises(ValueError, match="output_fmt='NHWC'"):
        small().forward_intermediates(images(32, 32), output_fmt="NHWC")


def test_compiles_whole():
    torch._dynamo.reset()
    model = small(depth=2)
    x = images(32, 32)
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x), atol=1e-5)
