"""Weights of DiT and SiT from other places: files of the authors, diffusers, other sizes, baselines."""

import argparse
import logging

import pytest
import torch
from awake_dit import TINY, AwakeDiT
from diffusers import DiTTransformer2DModel
from safetensors.torch import save_file

from lineardiff.models.dit import DiT, sincos_table
from lineardiff.models.dit_weights import (
    from_diffusers,
    load_dit,
    read_checkpoint,
    resize_dit,
    to_diffusers,
)

SQUARE = {**TINY, "sample_size": 8}
TIMES = torch.tensor([0, 37, 812, 999])
LABELS = torch.tensor([0, 3, 4, 5])


def awake(seed=1, **options):
    torch.manual_seed(seed)
    return AwakeDiT(**{**TINY, **options}).eval()


def random_diffusers(**options):
    """Return a diffusers DiT with nonzero output whose blocks share their conditioning, as the published ones do."""
    torch.manual_seed(3)
    model = DiTTransformer2DModel(
        **{
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "num_embeds_ada_norm": 5,
            **options,
        }
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    emb = model.transformer_blocks[0].norm1.emb.state_dict()
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(emb)
    return model


@torch.no_grad()
def outputs(model):
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sample = model(x, timestep=TIMES, class_labels=LABELS).sample
    assert sample.abs().mean() > 0.05
    return sample


@pytest.mark.parametrize("layout", ["bare", "training", "model", "safetensors"])
def test_files_of_the_authors(tmp_path, layout):
    source, other = awake(), awake(seed=9)
    path = tmp_path / ("weights.safetensors" if layout == "safetensors" else "weights.pt")
    if layout == "safetensors":
        save_file(source.state_dict(), path)
    else:
        arguments = argparse.Namespace(model="DiT-XL/2", lr=1e-4)
        optimizer = torch.optim.AdamW(other.parameters()).state_dict()
        contents = {
            "bare": source.state_dict(),
            "model": {"model": source.state_dict()},
            "training": {
                "model": other.state_dict(),
                "ema": source.state_dict(),
                "opt": optimizer,
                "args": arguments,
            },
        }
        torch.save(contents[layout], path)
    model = awake(seed=5)
    report = load_dit(model, path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    assert set(report.loaded) == set(source.state_dict())
    assert report.resized == report.vca_terms == report.classifier == report.unused == ()


def test_files_that_are_no_weights(tmp_path):
    with pytest.raises(ValueError, match="none.pt is not a file; pass a .pt"):
        read_checkpoint(tmp_path / "none.pt")
    path = tmp_path / "code.pt"
    torch.save(awake(), path)
    with pytest.raises(ValueError, match=r"code.pt cannot be read as weights .*holds only tensors"):
        read_checkpoint(path)
    torch.save({"model": awake().state_dict()}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="code.pt cannot be read as weights"):
        read_checkpoint(path)
    torch.save({"step": 3}, path)
    with pytest.raises(ValueError, match="does not hold a state dict; expected one"):
        read_checkpoint(path)


def test_a_baseline_in_a_vca_model():
    source, model = awake(), awake(seed=2, attention="vca")
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_dit(model, source.state_dict())
    own = model.state_dict()
    assert set(report.loaded) == set(source.state_dict())
    assert all(torch.equal(own[name], value) for name, value in source.state_dict().items())
    assert len(report.vca_terms) == 2 * 14
    assert all(torch.equal(own[name], initial[name]) for name in report.vca_terms)
    assert set(report.loaded) | set(report.vca_terms) == set(own)
    with pytest.raises(ValueError, match="weights are of another model: .*blocks.1.attn.* is missing"):
        load_dit(model, awake(depth=1).state_dict())


def test_another_resolution_and_other_classes():
    source = awake(attention="vca", contrast_grid=(2, 2))
    model = awake(seed=2, attention="vca", sample_size=(16, 16), num_classes=3, contrast_grid=(3, 3))
    report = load_dit(model, source.state_dict())
    assert torch.equal(model.pos_embed, sincos_table((8, 8), 32))
    assert report.resized[0] == "pos_embed"
    assert len(report.resized) == 1 + 2 * 2
    assert report.classifier == ("y_embedder.embedding_table.weight",)
    assert torch.equal(model.x_embedder.proj.weight, source.x_embedder.proj.weight)


def test_resize_keeps_the_weights_and_makes_the_positions_anew():
    model = awake(attention="vca").bfloat16()
    larger = resize_dit(model, (16, 24), contrast_grid=(2, 3))
    assert larger.sample_size == (16, 24)
    assert larger.contrast_grid == (2, 3)
    assert larger.dtype == torch.bfloat16
    assert not larger.training
    own = dict(larger.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in model.named_parameters())
    assert all(own[name].data_ptr() != value.data_ptr() for name, value in model.named_parameters())
    assert torch.equal(larger.pos_embed, sincos_table((8, 12), 32).bfloat16())
    assert resize_dit(model, (16, 24)).contrast_grid == (4, 6)
    same = resize_dit(model, (8, 12))
    assert all(
        torch.equal(a, b)
        for a, b in zip(same.state_dict().values(), model.state_dict().values(), strict=True)
    )
    with pytest.raises(ValueError, match="multiple of patch_size=2"):
        resize_dit(model, 17)


def test_resize_to_as_many_patches_in_another_shape():
    """As many positions and contrast tokens, yet other ones: 4 x 6 patches pooled to 2 x 3, 6 x 4 to 3 x 2."""
    model = awake(attention="vca")
    turned = resize_dit(model, (12, 8))
    assert torch.equal(turned.pos_embed, sincos_table((6, 4), 32))
    assert turned.contrast_grid == (3, 2)
    before, after = (m.blocks[0].attn.pos_embed_pos.detach() for m in (model, turned))
    assert before.shape == after.shape
    assert not torch.equal(before, after)


def test_contrast_embeddings_of_a_smooth_pattern_stay_smooth():
    """A pattern that grows along the columns of a 2 x 3 contrast grid does so on 4 x 6."""
    model = awake(attention="vca")
    assert model.contrast_grid == (2, 3)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.pos_embed_pos.copy_(torch.tensor([0.0, 1.0, 2.0]).repeat(2)[:, None].expand(6, 32))
    larger = resize_dit(model, (16, 24))
    grid = larger.blocks[1].attn.pos_embed_pos.detach().view(4, 6, 32)
    assert torch.allclose(grid[0], grid[3], atol=1e-6)
    assert (grid[0].diff(dim=0) > 0).all()
    assert grid.mean().item() == pytest.approx(1.0, abs=1e-5)


def test_from_diffusers_keeps_the_output():
    theirs = random_diffusers()
    ours = from_diffusers(theirs)
    assert (ours.config.frequency_shift, ours.config.mlp_norm_eps) == (1, 1e-5)
    assert_close(outputs(ours), outputs(theirs))
    plain = DiT.from_config({**ours.config, "frequency_shift": 0}).eval()
    plain.load_state_dict(ours.state_dict())
    assert (outputs(plain) - outputs(theirs)).abs().max() > 0.01  # so the frequencies do matter
    assert_close(outputs(to_diffusers(ours)), outputs(theirs))


@pytest.mark.parametrize("out_channels", [4, 8])
def test_to_diffusers_keeps_the_output_and_converts_back(out_channels, caplog):
    ours = awake(**{**SQUARE, "learn_sigma": out_channels == 8})
    with caplog.at_level(logging.WARNING, logger="lineardiff"):
        theirs = to_diffusers(ours)
    assert "does not save the authors' timestep frequencies" in caplog.text
    assert_close(outputs(theirs), outputs(ours))
    back = from_diffusers(theirs)
    assert back.config.frequency_shift == 0
    assert back.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in back.state_dict().items())


def test_what_diffusers_saves_of_a_converted_model(tmp_path, caplog):
    ours = awake(**SQUARE, frequency_shift=1)
    with caplog.at_level(logging.WARNING, logger="lineardiff"):
        to_diffusers(ours).save_pretrained(tmp_path)
    assert caplog.text == ""
    loaded = DiTTransformer2DModel.from_pretrained(tmp_path)
    assert loaded.config.norm_eps == 1e-6
    assert_close(outputs(loaded), outputs(ours))


def test_what_has_no_counterpart_in_diffusers():
    for options, message in (
        ({"attention": "vca"}, "attention='mhsa'"),
        ({"sample_size": (8, 12)}, "square latents"),
        ({"mlp_ratio": 2.0}, "mlp_ratio=4"),
        ({"class_dropout_prob": 0.0}, "class_dropout_prob > 0"),
        ({"return_sigma": False}, "return_sigma=True"),
    ):
        with pytest.raises(ValueError, match=f"diffusers' DiT needs {message}"):
            to_diffusers(awake(**{**SQUARE, **options}))
    with pytest.raises(ValueError, match="attention_bias=False has no counterpart"):
        from_diffusers(random_diffusers(attention_bias=False))
    with pytest.raises(ValueError, match="out_channels=3 must be in_channels=4"):
        from_diffusers(random_diffusers(out_channels=3))
    apart = random_diffusers()
    torch.nn.init.ones_(apart.transformer_blocks[1].norm1.emb.timestep_embedder.linear_2.bias)
    with pytest.raises(ValueError, match="blocks differ in norm1.emb.timestep_embedder.linear_2.bias"):
        from_diffusers(apart)
    with pytest.raises(ValueError, match="diffusers' layout; convert the model with from_diffusers"):
        load_dit(awake(), random_diffusers().state_dict())


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
