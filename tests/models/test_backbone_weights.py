"""Weights of timm's Swin, and of PVT and CSwin in both layouts, in the VCA forms; saved and rebuilt models."""

import re

import pytest
import timm
import torch
from backbones import OWN, SMALL, images, skip_where_timms_swin_cannot, small
from timm.models import save_for_hf

import lineardiff
from lineardiff.models import vca_cswin, vca_pvt

NAMES = list(SMALL)


def authors_names(state_dict, own_key):
    """The state dict as the authors' code would save it: the inverse of the key map, found by trying names."""
    tried = [
        *(
            f"patch_embed{i}.{p}"
            for i in range(1, 5)
            for p in ("proj.weight", "proj.bias", "norm.weight", "norm.bias")
        ),
        *(f"pos_embed{i}" for i in range(1, 5)),
        "cls_token",
        *(f"stage1_conv_embed.{p}" for p in ("0.weight", "0.bias", "2.weight", "2.bias")),
        *(
            f"merge{i}.{p}"
            for i in range(1, 4)
            for p in ("conv.weight", "conv.bias", "norm.weight", "norm.bias")
        ),
        "head.weight",
        "head.bias",
    ]
    names = {own_key(name): name for name in tried if own_key(name) in state_dict}
    for key in state_dict.keys() - names.keys():
        match = re.fullmatch(r"stages\.(\d)\.blocks\.(\d+)\.(.*)", key)
        if match is None:
            names[key] = key
            continue
        stage, block, rest = int(match[1]) + 1, match[2], match[3]
        if own_key is vca_pvt.authors_key:
            names[key] = f"block{stage}.{block}.{rest}"
        else:
            rest = re.sub(r"^attn\.(?:lepe\.(\d))", r"attns.\1.get_v", rest).removeprefix("attn.")
            names[key] = f"stage{stage}.{block}.{rest}"
    return {names[key]: value for key, value in state_dict.items()}


@pytest.mark.parametrize(
    ("name", "own_key"),
    [("vca_pvt_tiny", vca_pvt.authors_key), ("vca_cswin_tiny_224", vca_cswin.authors_key)],
)
def test_authors_checkpoints_load_into_the_baseline_and_its_vca_form(name, own_key, tmp_path):
    baseline = small(name, attention=OWN[name])
    published = authors_names(baseline.state_dict(), own_key)
    assert len(published) == len(baseline.state_dict())
    assert not [key for key in published if key.startswith("stages")]
    path = tmp_path / "published.pth"
    torch.save({"state_dict_ema": published}, path)
    again = small(name, attention=OWN[name])
    torch.nn.init.zeros_(again.norm.weight)
    report = lineardiff.load_baseline(again, path)
    assert (report.unused, report.vca_terms, report.resized) == ((), (), ())
    assert torch.equal(again(images(64, 64)), baseline(images(64, 64)))

    model = small(name)
    report = lineardiff.load_baseline(model, path)
    assert set(report.loaded) | set(report.vca_terms) == set(model.state_dict())
    assert not set(report.loaded) & set(report.vca_terms)
    assert all(re.search(r"\.attn\.(sr|norm|lepe)\.", key) for key in report.unused), report.unused
    own = model.state_dict()
    for stage in (0, 1):
        qkv = own[f"stages.{stage}.blocks.0.attn.qkv.weight"]
        attn = baseline.stages[stage].blocks[0].attn
        wanted = attn.qkv.weight if hasattr(attn, "qkv") else torch.cat([attn.q.weight, attn.kv.weight])
        assert torch.equal(qkv, wanted)
    assert torch.equal(own["stages.1.embed.weight"], baseline.stages[1].embed.weight)


def test_window_stages_are_timms_and_its_weights_load():
    options = {"num_classes": 7, "embed_dim": 24, "depths": (1, 2, 1, 2), "img_size": 64}
    torch.manual_seed(1)
    theirs = timm.create_model("swin_tiny_patch4_window7_224", **options).eval()
    mine = small("vca_swin_tiny_patch4_224", attention="window")
    mine.load_state_dict(theirs.state_dict())
    assert torch.equal(mine(images(64, 64)), theirs(images(64, 64)))

    model = small("vca_swin_tiny_patch4_224")
    report = lineardiff.load_baseline(model, theirs.state_dict())
    assert set(report.loaded) | set(report.vca_terms) == set(model.state_dict())
    assert sorted(report.unused) == sorted(
        key for key in theirs.state_dict() if re.match(r"layers\.[012]\..*relative_position_bias_table", key)
    )
    assert len(report.vca_terms) == 4 * 14
    mine, wanted = model.layers[3], theirs.layers[3]
    assert all(
        torch.equal(a, b)
        for a, b in zip(mine.state_dict().values(), wanted.state_dict().values(), strict=True)
    )
    bigger = small("vca_swin_tiny_patch4_224", img_size=256, window_size=8)
    report = lineardiff.load_baseline(bigger, theirs.state_dict())
    assert {key.rsplit(".", 1)[1] for key in report.resized} == {"relative_position_bias_table"}


def test_pvt_positions_of_another_size_are_interpolated_as_its_authors_do():
    source = small("vca_pvt_tiny", attention="spatial_reduction")
    model = small("vca_pvt_tiny", attention="spatial_reduction", img_size=(96, 128))
    report = lineardiff.load_baseline(model, source.state_dict())
    assert len(report.resized) == 4
    x = images(96, 128)
    assert torch.allclose(model(x), source(x), atol=1e-5)
    with pytest.raises(
        ValueError, match=r"positions of 768 tokens, which is not a square grid; build the model with the "
    ):
        lineardiff.load_baseline(source, model.state_dict())
    positions = source.stages[0].pos_embed.detach()
    wanted = torch.nn.functional.interpolate(
        positions.reshape(1, 16, 16, 16).permute(0, 3, 1, 2), size=(24, 32), mode="bilinear"
    )
    assert torch.allclose(
        model.stages[0].pos_embed, wanted.permute(0, 2, 3, 1).reshape(1, 24 * 32, 16), atol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_numbers_fits_and_another_is_refused(name):
    source = small(name, attention=OWN[name])
    model = small(name, num_classes=3)
    report = lineardiff.load_baseline(model, source.state_dict())
    head = model.default_cfg["classifier"]
    assert report.classifier == (f"{head}.weight", f"{head}.bias")
    with pytest.raises(ValueError, match="weights are of another model"):
        lineardiff.load_baseline(small(name, depths=(2, 2, 2, 2)), source.state_dict())
    depths = SMALL[name]["depths"]
    deeper = small(name, attention=OWN[name], depths=(*depths[:3], depths[3] + 1))
    with pytest.raises(
        ValueError, match=rf"weights are of another model: it has .*\.blocks\.{depths[3]}\..*this one has"
    ):
        lineardiff.load_baseline(small(name), deeper.state_dict())
    features = small(name, features_only=True, out_indices=(0, 1))
    report = lineardiff.load_baseline(features, source.state_dict())
    first = (
        "layers.0.blocks.0.mlp.fc1.weight"
        if "swin_tiny_patch4" in name
        else "stages.0.blocks.0.mlp.fc1.weight"
    )
    assert first in report.loaded
    assert torch.equal(features.model.state_dict()[first], source.state_dict()[first])
    with pytest.raises(ValueError, match="is not a model of lineardiff"):
        lineardiff.load_baseline(timm.create_model("resnet10t"), source.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_rebuilt_at_its_size(name, tmp_path):
    skip_where_timms_swin_cannot(name)
    options = {**SMALL[name], "num_classes": 7, "contrast_grids": ((2, 2), (2, 2), (2, 2), (2, 2))}
    model = small(name, contrast_grids=options["contrast_grids"])
    model.set_input_size((96, 64))
    save_for_hf(model, tmp_path, model_args=options | {"img_size": (96, 64)})
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images(96, 64)), model(images(96, 64)))


@pytest.mark.parametrize("name", NAMES)
def test_weights_drawn_anew_after_to_empty_are_finite(name):
    with torch.device("meta"):
        model = timm.create_model(name, **SMALL[name], contrast_grids=((2, 2),) * 4)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.init_weights()
    if hasattr(model, "layers"):
        for block in model.layers[3].blocks:
            block.attn.init_non_persistent_buffers()
            block.init_non_persistent_buffers()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model.eval()(images(64, 64)).isfinite().all()
