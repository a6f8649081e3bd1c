"""Images and labels of a data source: the embedded images, an image folder, or a Hugging Face dataset."""

import copy
import logging
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from lineardiff.data.readers import EmbeddedImages, FolderImages
from lineardiff.data.tables import TableImages, holds_parquet
from lineardiff.files import HUB_NAME

Split = Literal["train", "validation"]
BadImages = Literal["refuse", "skip"]

_logger = logging.getLogger("lineardiff")


class ImageReader(Protocol):
    """Where the images of one split lie."""

    classes: tuple[str, ...]
    labels: np.ndarray

    def read(self, index: int) -> Image.Image:
        """Return image `index` as it is stored, in any mode, decoded or not."""

    def locate(self, index: int) -> str:
        """Say in words where image `index` is stored."""


class ImageSplit(Dataset[tuple[Image.Image, int] | None]):
    """One split of a data source; item i is (RGB image, label).

    Attributes:
        source: the data source, as it was given.
        split: "train" or "validation".
        classes: the class names; a label is an index into them.

    Raises:
        ValueError: item i cannot be decoded and bad_images is "refuse". With "skip" the item is None, and a
            warning names the image, once in every process.
    """

    def __init__(
        self, reader: ImageReader, *, source: str, split: Split, bad_images: BadImages = "refuse"
    ) -> None:
        self.source = source
        self.split: Split = split
        self.classes = reader.classes
        self._reader = reader
        self._bad_images = bad_images
        self._indices = np.arange(len(reader.labels))
        self._skipped: set[int] = set()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Image.Image, int] | None:
        row = int(self._indices[index])
        try:
            image = _to_rgb(self._reader.read(row))
        # Pillow's decoders raise nearly anything on damaged bytes: OSError, SyntaxError, struct.error, ...
        except Exception as error:
            reason = f"{self._reader.locate(row)} cannot be decoded: {error}"
            if self._bad_images == "refuse":
                raise ValueError(
                    f'{reason}. Mend or delete the image, or leave out such images with bad_images="skip".'
                ) from error
            if row not in self._skipped:
                self._skipped.add(row)
                _logger.warning("image skipped: %s", reason)
            return None
        return image, int(self._reader.labels[row])

    def locate(self, index: int) -> str:
        """Return the file or the row that item `index` is stored in, for messages."""
        return self._reader.locate(int(self._indices[index]))


def open_images(source: str | Path, split: Split, *, bad_images: BadImages = "refuse") -> ImageSplit:
    """Open the training or the validation images of a data source.

    Args:
        source: one of
            "fashion", the embedded subset of Fashion-MNIST (10,000 + 2,000 grey images of 28 x 28; write
            "./fashion" for a folder of that name);
            an image folder, `train/<class>/*.jpg` and `val/<class>/*.jpg`, read by torchvision's ImageFolder;
            a folder of parquet files in the Hugging Face layout, `train-*.parquet` and `test-*.parquet`;
            a name on the Hugging Face hub, "uoft-cs/cifar10".
            The last two need `pip install "lineardiff[train]"` and go through the cache of `datasets`, a copy
            on disk in the folder that HF_DATASETS_CACHE names.
        split: "train", or "validation": the first of "validation", "valid", "val" and "test" that exists.
        bad_images: what to do about an image that cannot be decoded: "refuse" raises, "skip" yields None.

    Raises:
        ValueError: a source that is missing, empty, unreadable or of another layout; the message names what
            was found and what was expected.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r}: expected 'train' or 'validation'")
    if bad_images not in ("refuse", "skip"):
        raise ValueError(f"bad_images={bad_images!r}: expected 'refuse' or 'skip'")
    return ImageSplit(_open_reader(source, split), source=str(source), split=split, bad_images=bad_images)


def _open_reader(source: str | Path, split: Split) -> ImageReader:
    if source == "fashion":
        return EmbeddedImages(split)
    root = Path(source).expanduser()
    if root.is_dir():
        return TableImages(source, split, folder=root) if holds_parquet(root) else FolderImages(root, split)
    if root.exists():
        raise ValueError(f"the data source {source} is a file; expected the folder that holds the data")
    if isinstance(source, str) and HUB_NAME.fullmatch(source):
        return TableImages(source, split)
    raise ValueError(
        f"the data source {source} does not exist; expected 'fashion' (the embedded images), an existing "
        "folder of images or of parquet files, or a name on the Hugging Face hub such as 'uoft-cs/cifar10'"
    )


def subset(split: ImageSplit, *, limit: int | None, seed: int = 0) -> ImageSplit:
    """Return the first `limit` images of a seeded shuffle of `split`, in their old order; None takes all.

    Raises:
        ValueError: `limit` is below 1 or above the number of images.
    """
    if limit is None:
        return split
    if not 1 <= limit <= len(split):
        raise ValueError(
            f"limit={limit}: expected 1 to {len(split)}, the number of {split.split} images of {split.source}"
        )
    part = copy.copy(split)
    part._indices = split._indices[np.sort(np.random.default_rng(seed).permutation(len(split))[:limit])]
    part._skipped = set()
    return part


def check_same_classes(train: ImageSplit, validation: ImageSplit) -> None:
    """Raise ValueError, naming the difference, unless both splits give every label the same class name."""
    if train.classes == validation.classes:
        return
    names = set(train.classes), set(validation.classes)
    differences = [
        f"only in {split}: {', '.join(sorted(only)[:5])}{', ...' if len(only) > 5 else ''}"
        for split, only in (("train", names[0] - names[1]), ("validation", names[1] - names[0]))
        if only
    ]
    raise ValueError(
        f"{train.source} has {len(train.classes)} classes in train and {len(validation.classes)} in "
        f"validation ({'; '.join(differences) or 'the same names in another order'}); "
        "expected the same classes in both"
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    """Decode an image of any mode to 8-bit RGB; transparency is dropped, as timm and torchvision drop it."""
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255 instead of scaling it.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(
                f"32-bit integer pixels from {values.min()} to {values.max()}, expected 0 to 65535"
            )
        return Image.fromarray((values / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range; expected 8 or 16 bits a channel")
    if image.mode == "P":
        image = image.convert("RGBA")  # straight to RGB, Pillow warns about palettes with transparency
    return image.convert("RGB")
