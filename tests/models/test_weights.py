"""Baseline weights in VCA models, and what the report says of them."""

import pytest
import safetensors.torch
import timm
import torch

from lineardiff import load_baseline

SMALL = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3}


def baseline(**options):
    torch.manual_seed(1)
    return timm.create_model("deit_tiny_patch16_224", **{**SMALL, **options})


def vca(**options):
    torch.manual_seed(2)
    return timm.create_model("vca_deit_tiny_patch16_224", **{**SMALL, "contrast_grid": (3, 3), **options})


def test_everything_but_the_vca_terms_is_loaded():
    source, model = baseline(), vca()
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_baseline(model, source.state_dict())
    given, own = source.state_dict(), model.state_dict()
    assert set(report.loaded) == set(given)
    assert all(torch.equal(own[name], given[name]) for name in report.loaded)
    assert all(torch.equal(own[name], initial[name]) for name in report.vca_terms)
    assert len(report.vca_terms) == 2 * 14  # 2 embeddings, 8 lambda vectors, 2 norms, convolution with bias
    assert set(report.loaded) | set(report.vca_terms) == set(own)
    assert report.resized == report.unused == report.classifier == ()
    assert str(report).splitlines() == [
        f"{len(given)} parameters loaded",
        "28 of Visual-Contrast Attention keep their initial values: "
        "blocks.0.attn.pos_embed_pos, blocks.0.attn.pos_embed_neg, blocks.0.attn.lambda1_q1, ...",
    ]


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_files(tmp_path, ending):
    source, model = baseline(), vca()
    path = tmp_path / f"deit.{ending}"
    if ending == "pth":
        torch.save({"model": source.state_dict()}, path)  # the layout of the authors' files
    else:
        safetensors.torch.save_file(source.state_dict(), path)
    assert set(load_baseline(model, path).loaded) == set(source.state_dict())
    assert torch.equal(model.head.weight, source.head.weight)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=f"deit.{ending} cannot be read as weights.*pass a complete"):
        load_baseline(model, path)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "model.pth"
    torch.save(baseline(), path)
    with pytest.raises(ValueError, match="holds only tensors"):
        load_baseline(vca(), path)


def test_other_image_size_and_classes_are_said():
    model = vca(img_size=48, num_classes=5)
    report = load_baseline(model, baseline().state_dict())
    assert report.resized == ("pos_embed",)
    assert report.classifier == ("head.weight", "head.bias")
    assert report.unused == ("head.weight", "head.bias")


def test_vca_weights_of_another_contrast_grid_are_resized():
    source, model = vca(), vca(contrast_grid=(4, 2))
    report = load_baseline(model, source.state_dict())
    assert len(report.resized) == 4
    assert report.vca_terms == ()
    with pytest.raises(ValueError, match="old_grid="):
        load_baseline(vca(), model.state_dict())


def test_another_model_is_refused():
    for options, message in (
        ({"embed_dim": 24}, "has shape"),
        ({"depth": 1}, "blocks.1.norm1.weight is missing"),
    ):
        with pytest.raises(ValueError, match=f"weights are of another model: .*{message}"):
            load_baseline(vca(), baseline(**options).state_dict())


def test_unknown_names_and_no_connection_are_said(monkeypatch):
    with pytest.raises(ValueError, match="'deit_tinny' is neither a file nor a model of timm"):
        load_baseline(vca(), "deit_tinny")

    def offline(*_, **__):
        raise OSError("no route to host")

    model = vca()
    monkeypatch.setattr("lineardiff.models.weights.timm.create_model", offline)
    with pytest.raises(
        ValueError, match="could not be fetched .OSError: no route to host.; check the connection"
    ):
        load_baseline(model, "deit_tiny_patch16_224.fb_in1k")
