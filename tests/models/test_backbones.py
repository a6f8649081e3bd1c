"""What PVT, Swin and CSwin share: stages, sizes, features, groups, weights, errors."""

import itertools
import logging

import pytest
import timm
import torch
from backbones import OWN, SMALL, images, skip_where_timms_swin_cannot, small
from timm.models.swin_transformer import WindowAttention
from timm.optim import param_groups_weight_decay

from lineardiff.layers import (
    AgentAttention,
    DifferentialAttention,
    SelfAttention,
    VisualContrastAttention,
    factory,
)
from lineardiff.models import stages
from lineardiff.models.vca_cswin import CrossWindowAttention
from lineardiff.models.vca_pvt import SpatialReductionAttention

NAMES = list(SMALL)
HOST = {
    "vca_pvt_tiny": SpatialReductionAttention,
    "vca_swin_tiny_patch4_224": WindowAttention,
    "vca_cswin_tiny_224": CrossWindowAttention,
}


def attentions(model):
    parts = model.layers if hasattr(model, "layers") else model.stages
    return [[block.attn for block in part.blocks] for part in parts]


@pytest.mark.parametrize("name", NAMES)
def test_any_attention_in_any_stage(name):
    types = {
        "vca": VisualContrastAttention,
        "mhsa": SelfAttention,
        "mhsa_conv": SelfAttention,
        "diff": DifferentialAttention,
        "agent": AgentAttention,
    }
    for names in (("vca", "mhsa", "agent", OWN[name]), (OWN[name], "mhsa_conv", "vca", "mhsa")):
        model = small(name, attention=names)
        for chosen, attns in zip(names, attentions(model), strict=True):
            assert {type(a) for a in attns} == {types.get(chosen, HOST[name])}
        assert model(images(64, 64)).shape == (2, 7)
    heads = {
        "vca_pvt_tiny": (1, 2, 4, 4),
        "vca_swin_tiny_patch4_224": (1, 2, 4, 8),
        "vca_cswin_tiny_224": (2, 4, 8, 16),
    }
    assert small(name, attention="diff", num_heads=heads[name])(images(64, 64)).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_options_reach_the_layers_and_depth_counts_through_the_network(name):
    model = small(name, softmax="joint", patchwise="plain", conv=False)
    layers = [a for a in itertools.chain(*attentions(model)) if isinstance(a, VisualContrastAttention)]
    assert len(layers) >= 3
    for index, layer in enumerate(layers):
        assert (layer.softmax, layer.patchwise, layer.conv) == ("joint", "plain", None)
        assert layer.lambda_init == pytest.approx(0.8 - 0.6 * 2.718281828459045 ** (-0.3 * index))
    with pytest.raises(TypeError, match="sofmax"):
        small(name, sofmax="joint")


@pytest.mark.parametrize("name", NAMES)
def test_other_and_non_square_sizes_give_maps_of_strides_4_8_16_32(name):
    model = small(name, features_only=True)
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    for height, width in ((64, 64), (96, 160), (64, 128)):
        maps = model(images(height, width))
        shapes = [tuple(m.shape) for m in maps]
        channels = model.feature_info.channels()
        assert shapes == [
            (2, c, height // s, width // s) for c, s in zip(channels, (4, 8, 16, 32), strict=True)
        ]
        assert all(m.isfinite().all() for m in maps)
    assert len(small(name, features_only=True, out_indices=(1, 3))(images(64, 64))) == 2


@pytest.mark.parametrize("name", NAMES)
def test_set_input_size_changes_nothing_where_the_size_was_free(name):
    model = small(name)
    x = images(96, 64)
    before = model(x)
    model.set_input_size((96, 64))
    if "swin_tiny_patch4" in name:  # its windows scale with the map
        assert model(x).shape == before.shape
    else:
        assert torch.allclose(model(x), before, atol=1e-5)
    too_small = (
        r"Stage 4 pools into a 2 x 2 .* 1 x 1 tokens" if "pvt" in name else "Stage 1 pools into a 2 x 3"
    )
    with pytest.raises(ValueError, match=too_small):
        model.set_input_size((32, 32) if "pvt" in name else (4, 4))
    assert model(x).shape == before.shape


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_and_pruning(name):
    skip_where_timms_swin_cannot(name)
    model = small(name)
    x = images(64, 96)
    features, maps = model.forward_intermediates(x)
    assert torch.equal(features, model.forward_features(x))
    assert len(maps) == 4
    normed = model.forward_intermediates(x, indices=[3], norm=True, intermediates_only=True)[0]
    grid = features[:, 1:].unflatten(1, (2, 3)) if "pvt" in name else features
    assert torch.allclose(normed, grid.permute(0, 3, 1, 2), atol=1e-6)
    early = model.forward_intermediates(x, indices=[1], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], maps[1])
    tiny = images(32, 32)  # too small for stage 4 of PVT and stage 3 of Swin, which are not needed
    assert model.forward_intermediates(tiny, indices=[0], stop_early=True, intermediates_only=True)[0].shape[
        2:
    ] == (8, 8)
    assert model.prune_intermediate_layers([1]) == [1]
    assert model(tiny).isfinite().all()
    assert torch.equal(model.forward_intermediates(x, indices=[1], intermediates_only=True)[0], maps[1])
    model.reset_classifier(5, "avg")
    assert torch.allclose(
        model.forward_head(model.forward_features(x), pre_logits=True), maps[1].mean((2, 3)), atol=1e-5
    )
    assert model(x).shape == (2, 5)
    with pytest.raises((ValueError, AssertionError), match="NHWC|NCHW"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_has_empty_logits(name):
    assert small(name, attention="mhsa")(images(64, 64, batch=0)).shape == (0, 7)
    if "pvt" in name:
        assert small(name, attention=OWN[name])(images(64, 64, batch=0)).shape == (0, 7)


@pytest.mark.parametrize("name", NAMES)
def test_reset_classifier_keeps_or_changes_the_pooling(name):
    model = small(name)
    x = images(64, 64)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(3, "avg")
    features = model.forward_features(x)
    mean = (features[:, 1:] if "pvt" in name else features.flatten(1, 2)).mean(1)
    assert torch.allclose(model.forward_head(features, pre_logits=True), mean, atol=1e-6)
    assert model.get_classifier().out_features == 3
    if "pvt" in name:
        with pytest.raises(ValueError, match="global_pool='max' is unknown.*'token', 'avg'"):
            model.reset_classifier(3, "max")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_with_checkpointing_are_the_same(name):
    gradients = []
    for checkpointing in (False, True):
        model = small(name).train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(0)
        model(images(64, 64)).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(g is not None and g.isfinite().all() for g in gradients[0].values())
    for n in gradients[0]:
        assert torch.allclose(gradients[0][n], gradients[1][n], atol=1e-5), n


@pytest.mark.parametrize("name", NAMES)
def test_groups_for_weight_decay_and_layer_decay(name):
    model = small(name)
    decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())[1]
    kept = {id(p) for p in decayed["params"]}
    names = [n for n, p in model.named_parameters() if id(p) in kept]
    assert decayed["weight_decay"] == 0.05
    assert len(names) > 15
    assert not [
        n
        for n in names
        if "norm" in n or "lambda" in n or "pos_embed" in n or "cls_token" in n or "table" in n
    ]
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1.0, layer_decay=0.5)
    scale = {id(p): g["lr_scale"] for g in optimizer.param_groups for p in g["params"]}
    scales = [scale[id(attns[0].qkv.weight)] for attns in attentions(model)]
    assert scales == sorted(scales)
    assert len(set(scales)) == 4
    assert min(scale.values()) == scale[id(model.get_submodule(model.default_cfg["first_conv"]).weight)]
    assert scale[id(model.get_classifier().weight)] == 1


@pytest.mark.parametrize("name", NAMES)
def test_bad_images_name_the_stage_and_the_mend(name):
    model = small(name)
    with pytest.raises(
        ValueError, match=r"of 66 x 64 pixels give stage 1.*patches of 4 x 4.*multiples of (4|32)"
    ):
        model(images(66, 64))
    with pytest.raises(ValueError, match="multiples of"):
        model.forward_intermediates(images(64, 66))
    grids = ((9, 9), None, None, None)
    message = r"Stage 1 .* 9 x 9 contrast grid.* 16 x 8 tokens.* 64 x 32 pixels"
    names = ("vca", OWN[name], OWN[name], OWN[name])
    model = small(name, attention=names, contrast_grids=grids)
    with pytest.raises(ValueError, match=message + r".*contrast_grids=\(\(9, 8\), None, None, None\)"):
        model(images(64, 32))
    with pytest.raises(ValueError, match=message.replace("64 x 32", "32 x 32").replace("16 x 8", "8 x 8")):
        small(name, attention=names, contrast_grids=grids, img_size=32)


def test_bad_stages_name_the_stage_and_the_mend():
    for options, message in (
        ({"attention": "linear"}, r"Unknown attention 'linear'; choose one of vca, .*window"),
        ({"attention": ("vca", "vcaa", "vca", "window")}, r"Unknown attention 'vcaa' of stage 2"),
        ({"attention": ("vca", "window")}, "2 names for 4 stages"),
        ({"attention": "vca,vca,vca,window"}, "Unknown attention 'vca,vca,vca,window'"),
        ({"contrast_grids": ((2, 2),) * 3}, r"one \(h, w\), or None, for each of the 4 stages"),
        (
            {"contrast_grids": (None, (2, 2), (2, 2), None)},
            r"contrast_grids\[0\] of attention 'vca' must be two .*got None",
        ),
        ({"contrast_grids": (4, (2, 2), (2, 2), None)}, r"contrast_grids\[0\].*got 4"),
        ({"contrast_grids": ((2, 0), (2, 2), (2, 2), None)}, r"got \(2, 0\)"),
        ({"contrast_grids": ((2, 2.5), (2, 2), (2, 2), None)}, r"got \(2, 2.5\)"),
        ({"contrast_grids": (("a", "b"), (2, 2), (2, 2), None)}, r"got \('a', 'b'\)"),
        ({"contrast_grids": ((True, True), (2, 2), (2, 2), None)}, r"got \(True, True\)"),
        (
            {"attention": 3, "contrast_grids": None},
            "attention=3 must be one name, or one for each of the 4 stages",
        ),
        ({"depths": (1, 1, 1)}, r"\{'depths': 3, 'num_heads': 4\}"),
        ({"img_size": (64,)}, r"img_size=\(64,\) must be one side or"),
        ({"img_size": 0}, "img_size=0 must be one side"),
        ({"attn_drop_rate": 0.1}, "attn_drop=0.1"),
        ({"contrast_grid": (2, 2)}, r"contrast_grid=\(2, 2\) is an option of models without stages"),
        ({"depths": (1, 0, 1, 1)}, r"depths\[1\]=0 must be an integer of at least 1"),
        ({"patch_size": 0}, "patch_size=0 must be"),
        ({"embed_dim": 0}, "embed_dim=0 must be"),
        ({"num_heads": (1, 2, 4, True)}, "num_heads=True must be"),
        ({"weight_init": "xavier"}, "weight_init='xavier' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            small("vca_swin_tiny_patch4_224", **{"img_size": 64, **options})


def test_an_ignored_contrast_grid_is_said_once(caplog):
    factory.log_ignored.cache_clear()
    with caplog.at_level(logging.INFO, logger="lineardiff"):
        for _ in range(2):
            small("vca_swin_tiny_patch4_224", contrast_grids=((2, 2), (2, 2), (2, 2), (2, 2)))
    assert [r.message for r in caplog.records] == [
        "Attention 'window' has no option contrast_grid; it is ignored."
    ]


def test_grids_round_up_and_find_the_first_stage_that_does_not_divide():
    swin = stages.Geometry((4, 2, 2, 2), True, (None,) * 4)
    assert swin.grids((100, 36)) == [(25, 9), (13, 5), (7, 3), (4, 2)]
    stages.check_image(100, 36, swin)
    pvt = stages.Geometry((4, 2, 2, 2), False, (None,) * 4)
    stages.check_image(96, 32, pvt)
    for size, found in (
        ((96, 34), "stage 1 a map of 96 x 34"),
        ((36, 32), "stage 2 a map of 9 x 8"),
        ((96, 80), "stage 4 a map of 6 x 5"),
    ):
        with pytest.raises(ValueError, match=f"{found}.*multiples of 32, such as"):
            stages.check_image(*size, pvt)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_whole(name):
    torch._dynamo.reset()
    model = small(name, depths=(1, 1, 1, 1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    x = images(64, 96)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_drop_path_rises_through_the_network(name):
    model = small(name, drop_path_rate=0.3)
    rates = [
        m.drop_prob for n, m in model.named_modules() if n.endswith("drop_path2") and hasattr(m, "drop_prob")
    ]
    total = sum(SMALL[name]["depths"])
    assert rates == pytest.approx([0.3 * i / (total - 1) for i in range(1, total)])


@pytest.mark.parametrize("name", NAMES)
def test_memory_format_device_and_dtype_arguments(name):
    model = small(name, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(images(64, 64).bfloat16()).dtype == torch.bfloat16
    model = small(name)
    x = images(64, 96)
    assert torch.allclose(model(x.to(memory_format=torch.channels_last)), model(x), atol=1e-5)
