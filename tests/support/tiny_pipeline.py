"""A tiny generator on disk, shared by the tests of this folder."""

from pathlib import Path

import torch
from torch import nn

NAMES = ["boot", "bag", "coat"]
SETTINGS = ["--steps", "2", "--device", "cpu"]


def save_pipeline(folder: Path, *, in_channels: int = 1, **options: object) -> None:
    from lineardiff.models.dit import DiT
    from lineardiff.pipelines.pipeline import LinearDiffPipeline

    torch.manual_seed(0)
    model = DiT(
        sample_size=8,
        patch_size=4,
        in_channels=in_channels,
        dim=16,
        depth=1,
        num_heads=2,
        num_classes=len(NAMES),
        learn_sigma=False,
    )
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    LinearDiffPipeline(model.eval(), class_names=NAMES, **options).save_pretrained(folder)


def save_vae(folder: Path) -> None:
    from diffusers import AutoencoderKL

    torch.manual_seed(1)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, **blocks).save_pretrained(folder)
