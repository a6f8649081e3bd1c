"""Recipes for image classification. Standard library only."""

from dataclasses import dataclass
from typing import Literal

from .training import TrainingRecipe

__all__ = ["ClassificationRecipe", "demo"]

BadImages = Literal["refuse", "skip"]
TrainCrop = Literal["random-resized", "pad"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(TrainingRecipe):
    """The settings of a classification run; two runs of a recipe on one machine give the same numbers.

    Raises:
        ValueError: A field has a value that cannot be used; the message names the field and what was expected.
    """

    data: str = "fashion"
    """Images: "fashion" (embedded), a folder of images or parquet files, or a Hugging Face data set."""
    bad_images: BadImages = "refuse"
    """For an image that cannot be decoded: "refuse" stops with its name, "skip" skips it with a warning."""
    image_size: int = 224
    """Side of the model's square input images, in pixels."""
    train_limit: int | None = None
    """Number of training images, drawn by the seed; None uses all."""
    validation_limit: int | None = None
    """Number of validation images, drawn by the seed; None uses all."""

    drop_path: float = 0.1
    """Stochastic depth: probability of skipping the last block, decreasing linearly to 0 at the first."""
    label_smoothing: float = 0.1
    """Share of the target that is spread evenly over all classes."""
    mixup: float = 0.8
    """Alpha of Mixup's Beta distribution; 0 turns Mixup off."""
    cutmix: float = 1.0
    """Alpha of CutMix's Beta distribution; 0 turns CutMix off."""
    mixup_prob: float = 1.0
    """Probability of mixing a batch."""
    mixup_switch_prob: float = 0.5
    """Probability of CutMix rather than Mixup for a mixed batch, if both are on."""

    train_crop: TrainCrop = "random-resized"
    """"random-resized" (ImageNet), or "pad": shift by up to an eighth, as is common for small images."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image area in a random resized crop."""
    hflip: float = 0.5
    """Probability of a horizontal flip."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """RandAugment or another policy, in timm's notation; None disables it."""
    color_jitter: float = 0.3
    """Strength of the color jitter; timm ignores it if auto_augment is on."""
    random_erasing: float = 0.25
    """Probability of replacing a rectangle of the image by noise."""
    repeated_augmentation: int = 1
    """Number of differently augmented copies of each drawn image in an epoch (DeiT: 3)."""
    interpolation: Interpolation = "bicubic"
    """Interpolation used to resize images."""
    crop_pct: float = 0.875
    """Share of the resized image that the center crop of validation keeps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("drop_path", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise self.error(name, "expected a share from 0 to below 1.")
        for name in ("mixup_prob", "mixup_switch_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise self.error(name, "expected a probability, from 0 to 1.")
        for name in ("mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise self.error(name, "expected zero (off) or more.")
        if (self.mixup or self.cutmix) and (self.batch_size // self.accumulate) % 2:
            raise self.error(
                "batch_size", "Mixup and CutMix mix images in pairs: give an even batch, or set both to 0."
            )
        taken = self.model_kwargs().keys() & {"num_classes", "in_chans", "drop_path_rate", "pretrained"}
        if taken:
            raise self.error(
                "model_args", f"{', '.join(sorted(taken))} follows from the data and the other fields."
            )


def demo() -> ClassificationRecipe:
    """Train a small ViT in minutes on two CPU cores, on the embedded 28 x 28 grey images enlarged to 32.

    lineardiff train demo --output runs/demo
    """
    return ClassificationRecipe(
        name="demo",
        model_args=(
            "img_size=32",
            "patch_size=4",
            "embed_dim=64",
            "depth=4",
            "num_heads=2",
            "contrast_grid=(4,4)",
            "weight_init=jax",
        ),
        image_size=32,
        epochs=2,
        batch_size=50,
        learning_rate=3e-3,
        warmup_epochs=0.5,
        drop_path=0.0,
        label_smoothing=0.0,
        mixup=0.0,
        cutmix=0.0,
        train_crop="pad",
        auto_augment=None,
        color_jitter=0.0,
        random_erasing=0.0,
        crop_pct=1.0,
        workers=1,
        log_every=10,
        checkpoint_every=100,
    )
