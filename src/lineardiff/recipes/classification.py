"""Recipes of image classification. Standard library only."""

from dataclasses import dataclass
from typing import Literal

from .training import TrainingRecipe

BadImages = Literal["refuse", "skip"]
TrainCrop = Literal["random-resized", "pad"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(TrainingRecipe):
    """Everything one classification run needs; two runs of one recipe on one machine give the same numbers.

    Raises:
        ValueError: a field has a value that cannot be trained with; the message names the field and the mend.
    """

    data: str = "fashion"
    """Images: "fashion" (embedded), a folder of images or parquet files, or a Hugging Face data set."""
    bad_images: BadImages = "refuse"
    """A file that is no image: "refuse" stops with its name, "skip" leaves it out with a warning."""
    image_size: int = 224
    """Side of the square images the model sees, in pixels."""
    train_limit: int | None = None
    """Train on this many images only, drawn by the seed; None uses all."""
    validation_limit: int | None = None
    """Validate on this many images only, drawn by the seed; None uses all."""

    drop_path: float = 0.1
    """Stochastic depth: how often the last block is skipped, falling linearly to 0 at the first."""
    label_smoothing: float = 0.1
    """Share of the target given to all classes alike."""
    mixup: float = 0.8
    """Alpha of Mixup's Beta distribution; 0 turns Mixup off."""
    cutmix: float = 1.0
    """Alpha of CutMix's Beta distribution; 0 turns CutMix off."""
    mixup_prob: float = 1.0
    """How often a batch is mixed at all."""
    mixup_switch_prob: float = 0.5
    """How often a mixed batch gets CutMix rather than Mixup, when both are on."""

    train_crop: TrainCrop = "random-resized"
    """"random-resized" (ImageNet), or "pad": shift by up to an eighth, as usual for small images."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of the image area in a random resized crop."""
    hflip: float = 0.5
    """How often an image is mirrored."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """RandAugment or another policy in timm's notation; None for none."""
    color_jitter: float = 0.3
    """Strength of the colour jitter; timm leaves it out when auto_augment is on."""
    random_erasing: float = 0.25
    """How often a rectangle of the image is replaced by noise."""
    repeated_augmentation: int = 1
    """Each image drawn appears this often, differently augmented, in the same epoch (DeiT: 3)."""
    interpolation: Interpolation = "bicubic"
    """How images are resized."""
    crop_pct: float = 0.875
    """Share of the resized image that the central crop of validation keeps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("drop_path", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise self.error(name, "expected a share from 0 to below 1")
        for name in ("mixup_prob", "mixup_switch_prob", "hflip", "random_erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise self.error(name, "expected a probability, from 0 to 1")
        for name in ("mixup", "cutmix", "color_jitter"):
            if getattr(self, name) < 0:
                raise self.error(name, "expected zero (off) or more")
        for name in ("image_size", "repeated_augmentation"):
            if getattr(self, name) < 1:
                raise self.error(name, "expected a whole number of at least 1")
        for name in ("train_limit", "validation_limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise self.error(name, "expected a number of images of at least 1, or None for all")
        if (self.mixup or self.cutmix) and (self.batch_size // self.accumulate) % 2:
            raise self.error(
                "batch_size", "Mixup and CutMix mix images in pairs: give an even batch, or set both to 0"
            )
        if len(self.crop_scale) != 2 or not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise self.error("crop_scale", "expected two shares of the area with 0 < low <= high <= 1")
        if not 0 < self.crop_pct <= 1:
            raise self.error("crop_pct", "expected a share above 0 and up to 1")
        self._expect_one_of("train_crop", TrainCrop)
        self._expect_one_of("bad_images", BadImages)
        self._expect_one_of("interpolation", Interpolation)
        taken = self.model_kwargs().keys() & {"num_classes", "in_chans", "drop_path_rate", "pretrained"}
        if taken:
            raise self.error(
                "model_args", f"{', '.join(sorted(taken))} follows from the data and the other fields"
            )


def demo() -> ClassificationRecipe:
    """Minutes on two CPU cores: a small ViT on the 28 x 28 grey images inside the package, enlarged to 32.

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
