"""Images and labels of a data source: the embedded images, an image folder, or a Hugging Face dataset."""

import copy
import logging
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from lineardiff.data.readers import EmbeddedImages, FlatImages, FolderImages, open_rgb
from lineardiff.data.tables import TableImages, holds_parquet
from lineardiff.files import HUB_NAME

__all__ = [
    "BadImages",
    "ImageReader",
    "ImageSplit",
    "Split",
    "check_same_classes",
    "open_folder",
    "open_images",
    "subset",
]

Split = Literal["train", "validation"]
BadImages = Literal["refuse", "skip"]

_logger = logging.getLogger("lineardiff")


class ImageReader(Protocol):
    """Storage of the images of one split."""

    classes: tuple[str, ...]
    labels: np.ndarray

    def read(self, index: int) -> Image.Image | bytes:
        """Return image `index` as stored: an image of any mode, or the content of its file."""

    def locate(self, index: int) -> str:
        """Return where image `index` is stored, for messages."""


class ImageSplit(Dataset[tuple[Image.Image, int] | None]):
    """One split of a data source; item i is (upright RGB image, label).

    Attributes:
        source: The data source, as given.
        split: "train" or "validation".
        classes: Class names; a label is an index into them.

    Raises:
        ValueError: Item i cannot be decoded and bad_images is "refuse". With "skip" the item is None, and a warning
            names the image once in every process.
    """

    def __init__(
        self, reader: ImageReader, *, source: str, split: Split, bad_images: BadImages = "refuse"
    ) -> None:
        if bad_images not in ("refuse", "skip"):
            raise ValueError(f"bad_images={bad_images!r}: expected 'refuse' or 'skip'.")
        self.source = source
        self.split: Split = split
        self.classes = reader.classes
        self._reader = reader
        self._bad_images = bad_images
        self._indices = np.arange(len(reader.labels))
        self._skipped: set[int] = set()

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def labels(self) -> np.ndarray:
        """The label of each item, (images,)."""
        return self._reader.labels[self._indices]

    def __getitem__(self, index: int) -> tuple[Image.Image, int] | None:
        row = int(self._indices[index])
        try:
            image = open_rgb(self._reader.read(row))
        # Pillow's decoders raise nearly anything on damaged bytes: OSError, SyntaxError, struct.error, ...
        except Exception as error:
            reason = f"{self._reader.locate(row)} cannot be decoded: {error}"
            if self._bad_images == "refuse":
                raise ValueError(
                    f'{reason}. Replace the image, or skip images that cannot be decoded with bad_images="skip" '
                    "(--bad-images skip)."
                ) from error
            if row not in self._skipped:
                self._skipped.add(row)
                _logger.warning("skipped an image: %s", reason)
            return None
        return image, int(self._reader.labels[row])

    def locate(self, index: int) -> str:
        """Return the file or the row that holds item `index`, for messages."""
        return self._reader.locate(int(self._indices[index]))


def open_images(source: str | Path, split: Split, *, bad_images: BadImages = "refuse") -> ImageSplit:
    """Open the training or the validation images of a data source.

    Hidden files and folders are ignored, and images are turned upright as their EXIF orientation says. Files of
    formats that cannot be read are counted in a warning.

    Args:
        source: One of
            "fashion", the embedded subset of Fashion-MNIST (10,000 + 2,000 grey images of 28 x 28 pixels; pass
            "./fashion" for a folder of that name);
            an image folder, `train/<class>/*.jpg` and `val/<class>/*.jpg`, as torchvision's ImageFolder reads it;
            a folder of parquet files in the Hugging Face layout, `train-*.parquet` and `test-*.parquet`;
            a name on the Hugging Face hub, "uoft-cs/cifar10".
            The last two need the extra `train` and go through the cache of `datasets`, a copy on disk in the
            folder that HF_DATASETS_CACHE names.
        split: "train", or "validation": the first of "validation", "valid", "val" and "test" that exists.
        bad_images: "refuse" raises for an image that cannot be decoded, "skip" yields None.

    Raises:
        ValueError: The source is missing, empty, unreadable or of another layout; the message names what was found
            and what was expected.
        ImportError: The source needs the package datasets, which is not installed.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r}: expected 'train' or 'validation'.")
    return ImageSplit(_open_reader(source, split), source=str(source), split=split, bad_images=bad_images)


def open_folder(folder: str | Path) -> ImageSplit:
    """Open all images below a folder, without labels, in the order of their paths.

    Raises:
        ValueError: The folder holds no images.
    """
    return ImageSplit(FlatImages(Path(folder).expanduser()), source=str(folder), split="train")


def _open_reader(source: str | Path, split: Split) -> ImageReader:
    if source == "fashion":
        return EmbeddedImages(split)
    root = Path(source).expanduser()
    if root.is_dir():
        return TableImages(source, split, folder=root) if holds_parquet(root) else FolderImages(root, split)
    if root.exists():
        raise ValueError(f"The data source {source} is a file; expected the folder that holds the data.")
    if isinstance(source, str) and HUB_NAME.fullmatch(source):
        return TableImages(source, split)
    raise ValueError(
        f"The data source {source} does not exist; expected 'fashion' (the embedded images), an existing "
        "folder of images or of parquet files, or a name on the Hugging Face hub such as 'uoft-cs/cifar10'."
    )


def subset(split: ImageSplit, *, limit: int | None, seed: int = 0) -> ImageSplit:
    """Return the first `limit` images of a seeded shuffle of `split`, in their original order; None returns all.

    Raises:
        ValueError: `limit` is below 1 or above the number of images.
    """
    if limit is None:
        return split
    if not 1 <= limit <= len(split):
        raise ValueError(
            f"limit={limit}: expected 1 to {len(split)}, the number of {split.split} images of {split.source}."
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
        "expected the same classes in both."
    )
