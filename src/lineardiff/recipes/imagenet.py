"""ImageNet-1k recipes: the training settings of each baseline's authors, for its VCA variant. Standard library only.

The paper trains every VCA model as its baseline was trained. The settings come from the baselines' repositories; each
recipe names the files. Two things differ throughout: the authors trained in float16, the recipes in bfloat16, and the
learning rate follows the cosine at every update where some of the authors changed it once per epoch.

Each recipe also trains its baseline if the model is replaced, as in `--model swin_tiny_patch4_window7_224`. We have
trained none of them. 300 epochs are 384 million images: divide by your images/s.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from .classification import ClassificationRecipe

__all__ = ["CSWIN", "PVT", "SWIN", "imagenet_cswin", "imagenet_deit", "imagenet_pvt", "imagenet_swin"]

Setting = TypeVar("Setting")

IMAGENET = ClassificationRecipe(
    name="imagenet", data="ILSVRC/imagenet-1k", color_jitter=0.4, precision="bf16", workers=8
)
"""Settings shared by the recipes, beyond the defaults: 300 epochs, RandAugment, Mixup, CutMix, random erasing."""

# Stochastic depth and maximum gradient norm.
PVT: Mapping[str, tuple[float, float | None]] = {
    "tiny": (0.1, None),
    "small": (0.1, None),
    "medium": (0.3, 1.0),
    "large": (0.3, 1.0),
}
# Stochastic depth.
SWIN: Mapping[str, float] = {"tiny": 0.2, "small": 0.3, "base": 0.5}
# Stochastic depth, batch size, weight decay and decay of the moving average.
CSWIN: Mapping[str, tuple[float, int, float, float]] = {
    "tiny": (0.2, 2048, 0.05, 0.99984),
    "small": (0.4, 2048, 0.05, 0.99984),
    "base": (0.5, 1024, 0.1, 0.99992),
}


def imagenet_deit() -> ClassificationRecipe:
    """Train VCA-DeiT with DeiT's settings, as the paper does: 300 epochs at 224 pixels, batches of 1024.

    Pass the images (a folder with train/ and val/, or a dataset on the hub) and start one process per GPU:

        torchrun --nproc-per-node 8 -m lineardiff train imagenet_deit --data /data/imagenet --output runs/tiny

    Expected (the paper, not measured here): top-1 75.6 for vca_deit_tiny_patch16_224 (DeiT 72.2), 80.7 for
    vca_deit_small_patch16_224 (DeiT 79.8). The learning rate is DeiT's, 5e-4 per 512 images of a batch:
    scale it with `batch_size`.
    """
    return replace(
        IMAGENET,
        name="imagenet_deit",
        color_jitter=0.3,
        learning_rate=5e-4 * 1024 / 512,
        ema_decay=0.99996,
        repeated_augmentation=3,
    )


def imagenet_pvt(size: str) -> ClassificationRecipe:
    """Train VCA-PVT with PVT's settings: 300 epochs, batches of 1024, repeated augmentation, no moving average.

        torchrun --nproc-per-node 8 -m lineardiff train imagenet_pvt_tiny --data /data/imagenet --output runs/pvt

    From github.com/whai362/PVT: classification/main.py, datasets.py for the crop of validation, and
    classification/configs/pvt/pvt_{tiny,small,medium,large}.py for stochastic depth and gradient clipping, which
    differ by size. Its repeated augmentation is DeiT's, three copies of each image (samplers.py of
    github.com/facebookresearch/deit). The learning rate is 5e-4 per 512 images of a batch.
    Baseline: `--model pvt_v1_tiny`.

    Expected (the paper, not measured here): top-1 78.2 for vca_pvt_tiny (PVT 75.1).

    Args:
        size: "tiny", "small", "medium" or "large".

    Raises:
        ValueError: The size does not exist.
    """
    drop_path, clip_grad = _of(size, PVT)
    return replace(
        IMAGENET,
        name=f"imagenet_pvt_{size}",
        model=f"vca_pvt_{size}",
        learning_rate=5e-4 * 1024 / 512,
        repeated_augmentation=3,
        drop_path=drop_path,
        clip_grad=clip_grad,
    )


def imagenet_swin(size: str) -> ClassificationRecipe:
    """Train VCA-Swin with Swin's settings: 300 epochs, batches of 1024, 20 epochs of warm-up, clipping at 5.

        torchrun --nproc-per-node 8 -m lineardiff train imagenet_swin_tiny --data /data/imagenet --output runs/swin

    From github.com/microsoft/Swin-Transformer: config.py, main.py (which scales all three learning rates by
    the batch over 512), get_started.md (the batch) and configs/swin_{tiny,small,base}_patch4_window7_224.yaml
    for the stochastic depth of each size. Baseline: `--model swin_tiny_patch4_window7_224`.

    Expected (the paper, not measured here): top-1 82.3 for vca_swin_tiny_patch4_224 (Swin 81.3).

    Args:
        size: "tiny", "small" or "base".

    Raises:
        ValueError: The size does not exist.
    """
    return replace(
        IMAGENET,
        name=f"imagenet_swin_{size}",
        model=f"vca_swin_{size}_patch4_224",
        learning_rate=5e-4 * 1024 / 512,
        warmup_learning_rate=5e-7 * 1024 / 512,
        min_learning_rate=5e-6 * 1024 / 512,
        warmup_epochs=20.0,
        clip_grad=5.0,
        drop_path=_of(size, SWIN),
    )


def imagenet_cswin(size: str) -> ClassificationRecipe:
    """Train VCA-CSwin with CSwin's settings: 300 epochs, batches of 2048 or 1024, 20 epochs of warm-up.

        torchrun --nproc-per-node 8 -m lineardiff train imagenet_cswin_tiny --data /data/imagenet --output runs/cswin

    From github.com/microsoft/CSWin-Transformer: the commands of README.md for each size, main.py for the rest,
    models/cswin.py for the crop of validation. Two differences: training images are resized bicubically, while the
    authors choose bilinear or bicubic at random, and the authors' ten epochs at the lowest learning rate after the
    300 are omitted. Baseline: `--model cswin_tiny_24181_224`.

    Expected (the paper, not measured here): top-1 83.3 for vca_cswin_tiny_224 (CSwin 82.7).

    Args:
        size: "tiny", "small" or "base".

    Raises:
        ValueError: The size does not exist.
    """
    drop_path, batch_size, weight_decay, ema_decay = _of(size, CSWIN)
    return replace(
        IMAGENET,
        name=f"imagenet_cswin_{size}",
        model=f"vca_cswin_{size}_224",
        batch_size=batch_size,
        learning_rate=1e-3 * batch_size / 1024,
        warmup_epochs=20.0,
        weight_decay=weight_decay,
        ema_decay=ema_decay,
        drop_path=drop_path,
        crop_pct=0.9,
    )


def _of(size: str, sizes: Mapping[str, Setting]) -> Setting:
    if size not in sizes:
        raise ValueError(f"size={size!r}: expected one of {', '.join(sizes)}.")
    return sizes[size]
