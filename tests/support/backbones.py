"""Small PVT, Swin and CSwin for the tests of what they share."""

import pytest
import timm
import torch
from packaging.version import Version

GRIDS = ((2, 3), (3, 2), (2, 2), (2, 2))
SMALL = {
    "vca_pvt_tiny": {
        "img_size": 64,
        "embed_dims": (16, 24, 40, 48),
        "num_heads": (1, 2, 5, 6),
        "mlp_ratios": (2, 2, 2, 2),
        "depths": (1, 2, 1, 1),
    },
    "vca_swin_tiny_patch4_224": {"img_size": 64, "embed_dim": 24, "depths": (1, 2, 1, 2)},
    "vca_cswin_tiny_224": {"img_size": 64, "embed_dim": 16, "depths": (1, 2, 2, 1)},
}
DEFAULTS = {
    "vca_pvt_tiny": ("vca", "vca", "vca", "vca"),
    "vca_swin_tiny_patch4_224": ("vca", "vca", "vca", "window"),
    "vca_cswin_tiny_224": ("vca", "vca", "cross_window", "cross_window"),
}
OWN = {
    "vca_pvt_tiny": "spatial_reduction",
    "vca_swin_tiny_patch4_224": "window",
    "vca_cswin_tiny_224": "cross_window",
}


def small(name, **options):
    """A few seconds' worth of a backbone, its contrast grids small enough for 64 pixels."""
    torch.manual_seed(0)
    names = options.get("attention", DEFAULTS[name])
    names = (names,) * 4 if isinstance(names, str) else names
    if isinstance(names, tuple) and len(names) == 4:
        grids = (g if chosen in ("vca", "agent") else None for chosen, g in zip(names, GRIDS, strict=True))
        options.setdefault("contrast_grids", tuple(grids))
    return timm.create_model(name, **{**SMALL[name], "num_classes": 7, **options}).eval()


def images(height, width, *, batch=2):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def skip_where_timms_swin_cannot(name):
    if name.startswith("vca_swin") and Version(timm.__version__) < Version("1.0.31"):
        pytest.skip(
            f"the Swin of timm {timm.__version__} cannot be pruned, nor resized to other than square windows"
        )
