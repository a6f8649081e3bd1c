"""The image transforms of training and of evaluation, built by timm."""

import math
from collections.abc import Callable, Sequence
from itertools import chain

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from timm.data.auto_augment import AugmentOp, AugMixAugment, AutoAugment, RandAugment, posterize
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import InterpolationMode

__all__ = ["Transform", "center_crop", "eval_transform", "train_transform"]

Transform = Callable[[Image.Image], Tensor]

_INTERPOLATIONS = tuple(
    mode.value for mode in InterpolationMode if mode is not InterpolationMode.NEAREST_EXACT
)


def train_transform(
    *,
    image_size: int,
    train_crop: str = "random-resized",
    crop_scale: tuple[float, float] = (0.08, 1.0),
    auto_augment: str | None = "rand-m9-mstd0.5-inc1",
    color_jitter: float = 0.3,
    random_erasing: float = 0.25,
    hflip: float = 0.5,
    interpolation: str = "bicubic",
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
) -> Transform:
    """Build DeiT's training augmentation; the defaults are its settings for ImageNet.

    Args:
        image_size: Side of the square output in pixels.
        train_crop: "random-resized" cuts a random area and aspect ratio and resizes it; "pad", for images of about 32
            pixels, resizes the shorter side to image_size, pads image_size / 8 black pixels on every side (the 4 of
            CIFAR at 32) and cuts a random image_size square.
        crop_scale: Smallest and largest share of the area for "random-resized"; unused by "pad".
        auto_augment: Policy of timm ("rand-m9-mstd0.5-inc1", "augmix-m3-w3", "original", ...) or None.
        color_jitter: Strength of brightness, contrast and saturation jitter. timm ignores it if auto_augment is given
            (3-Augment excepted).
        random_erasing: Probability of replacing a rectangle by normal noise, pixel by pixel.
        hflip: Probability of a horizontal flip.
        interpolation: Interpolation of resizing and of RandAugment's geometric operations: "nearest", "bilinear",
            "bicubic", "box", "hamming", "lanczos", or "random" (bilinear or bicubic).
        mean: Mean of the three channels, in the range 0 to 1.
        std: Standard deviation of the three channels, in the range 0 to 1.

    Returns:
        A function from an RGB image of any size to a normalized float32 tensor (3, image_size, image_size). It draws
        from the global generators of Python, NumPy and torch.

    Raises:
        ValueError: A size, probability, range or name that the transforms cannot use.
    """
    _check_images(image_size, mean, std)
    if train_crop not in ("random-resized", "pad"):
        raise ValueError(f"train_crop={train_crop!r}: expected 'random-resized' or 'pad'.")
    if len(crop_scale) != 2 or not 0 < crop_scale[0] <= crop_scale[1] <= 1:
        raise ValueError(
            f"crop_scale={crop_scale}: expected two shares of the area, 0 < smallest <= largest <= 1."
        )
    for name, probability in (("random_erasing", random_erasing), ("hflip", hflip)):
        if not 0 <= probability <= 1:
            raise ValueError(f"{name}={probability}: expected a probability between 0 and 1.")
    if not 0 <= color_jitter < math.inf:
        raise ValueError(f"color_jitter={color_jitter}: expected a strength of 0 or more.")
    _check_interpolation(interpolation, allowed=(*_INTERPOLATIONS, "random"))
    try:
        transform = create_transform(
            image_size,
            is_training=True,
            scale=crop_scale,
            auto_augment=auto_augment,
            color_jitter=color_jitter or None,
            re_prob=random_erasing,
            re_mode="pixel",
            hflip=hflip,
            interpolation=interpolation,
            mean=tuple(mean),
            std=tuple(std),
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(
            f"auto_augment={auto_augment!r} is not a policy timm knows ({error or type(error).__name__}); "
            "expected None or e.g. 'rand-m9-mstd0.5-inc1', 'augmix-m3-w3', 'original', '3a'."
        ) from error
    if train_crop == "pad":
        resize = InterpolationMode.BICUBIC if interpolation == "random" else InterpolationMode(interpolation)
        transform.transforms[:1] = [
            transforms.Resize(image_size, interpolation=resize),
            transforms.RandomCrop(image_size, padding=image_size // 8),
        ]
    for operation in _operations(transform):
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterize
    return transform


def eval_transform(
    *,
    image_size: int,
    crop_pct: float = 0.875,
    interpolation: str = "bicubic",
    mean: Sequence[float] = IMAGENET_DEFAULT_MEAN,
    std: Sequence[float] = IMAGENET_DEFAULT_STD,
) -> Transform:
    """Build the deterministic transform of evaluation: resize the shorter side, crop the center, normalize.

    Args:
        image_size: Side of the square output in pixels.
        crop_pct: Share of the shorter side that is kept; it is resized to image_size / crop_pct pixels.
        interpolation: "nearest", "bilinear", "bicubic", "box", "hamming" or "lanczos".
        mean: Mean of the three channels, in the range 0 to 1.
        std: Standard deviation of the three channels, in the range 0 to 1.

    Returns:
        A function from an RGB image of any size to a normalized float32 tensor (3, image_size, image_size).

    Raises:
        ValueError: A size, share or name that the transform cannot use.
    """
    _check_images(image_size, mean, std)
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct={crop_pct}: expected a share of the image, 0 < crop_pct <= 1.")
    _check_interpolation(interpolation, allowed=_INTERPOLATIONS)
    return create_transform(
        image_size, crop_pct=crop_pct, interpolation=interpolation, mean=tuple(mean), std=tuple(std)
    )


def _operations(transform: transforms.Compose) -> list[AugmentOp]:
    """Return every operation of the augmentation policy in `transform`."""
    operations: list[AugmentOp] = []
    for step in transform.transforms:
        if isinstance(step, RandAugment | AugMixAugment):
            operations.extend(step.ops)
        elif isinstance(step, AutoAugment):
            operations.extend(chain.from_iterable(step.policy))
    return operations


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Posterize as timm does, but return a black image for 0 bits, which Pillow 13 rejects."""
    return posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def _check_images(image_size: int, mean: Sequence[float], std: Sequence[float]) -> None:
    if not isinstance(image_size, int) or image_size < 1:
        raise ValueError(f"image_size={image_size}: expected the side of the image in pixels, at least 1.")
    for name, values, lowest in (("mean", mean, 0), ("std", std, math.ulp(0))):
        if len(values) != 3 or not all(lowest <= value < math.inf for value in values):
            raise ValueError(
                f"{name}={values}: expected a number for each of the three channels, from 0 to 1."
            )


def _check_interpolation(interpolation: str, *, allowed: tuple[str, ...]) -> None:
    if interpolation not in allowed:
        raise ValueError(f"interpolation={interpolation!r}: expected one of {', '.join(allowed)}.")


def center_crop(image: Image.Image, image_size: int) -> Image.Image:
    """Return the central square of an image at `image_size` pixels a side, as ADM prepares ImageNet.

    The image is halved by box filtering while its shorter side is at least twice image_size, then resized by bicubic
    interpolation so that the shorter side fits, then cropped.
    """
    while min(image.size) >= 2 * image_size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = image_size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - image_size) // 2, (image.height - image_size) // 2
    return image.crop((left, top, left + image_size, top + image_size))
