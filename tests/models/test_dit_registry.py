"""DiT and SiT by name, and how many parameters they have."""

import subprocess
import sys

import pytest
import torch

from lineardiff.models import DIT_CONFIGS, create_dit


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def meta(name, **options):
    with torch.device("meta"):
        return create_dit(name, **options)


def test_every_size_patch_family_and_attention_has_a_name():
    assert len(DIT_CONFIGS) == len(set(DIT_CONFIGS)) == 2 * 2 * 4 * 3
    assert {"dit_s_2", "sit_b_4", "vca_dit_xl_2", "vca_sit_s_8"} < set(DIT_CONFIGS)


@pytest.mark.parametrize(
    ("size", "trained", "with_positions"),
    [
        ("s", 32_865_056, 32_963_360),
        ("b", 130_315_808, 130_512_416),
        ("l", 457_840_672, 458_102_816),
        ("xl", 674_834_720, 675_129_632),
    ],
)
def test_parameters_of_patch_2(size, trained, with_positions):
    """The sizes that are quoted (33.0, 130.5, 458.1, 675.1 M) count the fixed position table, which the authors
    keep as a parameter without gradient."""
    for family in ("dit", "sit"):
        model = meta(f"{family}_{size}_2")
        assert count(model) == trained
        assert count(model) + model.pos_embed.numel() == with_positions


@pytest.mark.parametrize("patch_size", [8, 4, 2])
@pytest.mark.parametrize("size", ["s", "b", "l", "xl"])
def test_what_visual_contrast_attention_adds(size, patch_size):
    model = meta(f"vca_dit_{size}_{patch_size}")
    n = {8: 4, 4: 16, 2: 64}[patch_size]
    dim, depth, num_heads = model.config.dim, model.config.depth, model.config.num_heads
    assert model.contrast_grid[0] * model.contrast_grid[1] == n
    # a block: e+ and e-, eight lambda vectors and two gains, a 3 x 3 convolution with bias
    added = depth * (2 * n * dim + 10 * (dim // num_heads) + 10 * dim)
    assert count(model) - count(meta(f"dit_{size}_{patch_size}")) == added
    assert count(meta(f"vca_sit_{size}_{patch_size}")) == count(model)


@pytest.mark.parametrize(
    ("sample_size", "patch_size", "contrast_grid"),
    [(32, 8, (2, 2)), (64, 2, (8, 8)), (128, 2, (8, 8)), ((16, 48), 4, (2, 6)), ((8, 40), 8, (1, 2))],
)
def test_the_contrast_grid_is_half_the_patches_and_at_most_8_x_8(sample_size, patch_size, contrast_grid):
    model = meta(f"vca_sit_s_{patch_size}", sample_size=sample_size, depth=1)
    assert model.contrast_grid == model.blocks[0].attn.contrast_grid == contrast_grid


def test_arguments_are_handed_on():
    model = meta("vca_sit_s_4", sample_size=(16, 24), num_classes=7, in_channels=3, depth=2, tokens="embed")
    assert model.y_embedder.embedding_table.num_embeddings == 8
    assert (model.head_channels, model.out_channels) == (6, 3)
    assert model.blocks[0].attn.tokens == "embed"
    assert [type(block.attn).__name__ for block in model.blocks] == ["VisualContrastAttention"] * 2
    other = meta("dit_s_4", attention=["diff", "mhsa_conv"], depth=2)
    assert [type(block.attn).__name__ for block in other.blocks] == ["DifferentialAttention", "SelfAttention"]


def test_unknown_names():
    with pytest.raises(ValueError, match="no DiT or SiT 'vca_dit_xxl_2'; did you mean vca_dit_xl_2"):
        create_dit("vca_dit_xxl_2")
    with pytest.raises(ValueError, match="no DiT or SiT '7'; choose one of dit_s_8, "):
        create_dit("7")


def test_diffusers_is_imported_with_the_first_network_only():
    code = "import lineardiff.models, sys; assert 'diffusers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    monkeypatch.delitem(sys.modules, "lineardiff.models.dit", raising=False)
    with pytest.raises(ImportError, match=r"^diffusers is not installed.*pip install"):
        create_dit("dit_s_8")
