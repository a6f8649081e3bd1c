"""Readers of the embedded images and of image folders, and the decoding of images."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, features
from torchvision.datasets.folder import IMG_EXTENSIONS

__all__ = ["SPLIT_NAMES", "EmbeddedImages", "FlatImages", "FolderImages", "is_hidden", "open_rgb"]

SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "test")}
"""Names of each split by preference: where a dataset has both, the labels of "test" are often secret."""

_FASHION_CLASSES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_HEIF = (".heic", ".heif")

_logger = logging.getLogger("lineardiff")


class EmbeddedImages:
    """The subset of Fashion-MNIST inside the package: grey, 28 x 28 pixels."""

    classes = tuple(_FASHION_CLASSES.split(", "))

    def __init__(self, split: str) -> None:
        self._split = split
        with (files("lineardiff.data") / "fashion" / "fashion.npz").open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            self.labels: np.ndarray = arrays[f"{split}_labels"]
            self._images: np.ndarray = arrays[f"{split}_images"]

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self._images[index])

    def locate(self, index: int) -> str:
        return f"image {index} of the embedded {self._split} images"


class FlatImages:
    """All images below a folder, as a single class.

    Raises:
        ValueError: The folder holds no images.
    """

    classes: tuple[str, ...] = ("image",)

    def __init__(self, root: Path) -> None:
        self._paths = _image_files([root], where=root)
        if not self._paths:
            raise ValueError(
                f"{root} holds no images; expected files such as *.png or *.jpg, in any subfolder."
            )
        self.labels = np.zeros(len(self._paths), dtype=np.int64)

    def read(self, index: int) -> bytes:
        return Path(self._paths[index]).read_bytes()

    def locate(self, index: int) -> str:
        return self._paths[index]


class FolderImages(FlatImages):
    """The images `root/<split>/<class>/*`, where split is the first name of SPLIT_NAMES that exists.

    Raises:
        ValueError: The split has no folder or no class folders, or a class folder holds no images.
    """

    def __init__(self, root: Path, split: str) -> None:
        names = SPLIT_NAMES[split]
        folder = next((root / name for name in names if (root / name).is_dir()), None)
        if folder is None:
            entries = sorted(entry.name for entry in root.iterdir() if not is_hidden(entry.name))
            held = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "") if entries else "nothing"
            raise ValueError(
                f"The data folder {root} has no {split} images: it holds {held}; "
                f"expected {root}/{'|'.join(names)}/<class>/*.jpg (or train-*.parquet and test-*.parquet)."
            )
        self.classes = tuple(
            sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name))
        )
        self._paths = _image_files([folder / name for name in self.classes], where=folder)
        index = {name: label for label, name in enumerate(self.classes)}
        depth = len(folder.parts)
        self.labels = np.array([index[Path(path).parts[depth]] for path in self._paths], dtype=np.int64)
        empty = [name for name, count in zip(self.classes, self._counts(), strict=True) if not count]
        if empty or not self.classes:
            found = f"the classes {', '.join(empty)} have no images" if empty else "it has no class folders"
            raise ValueError(
                f"The image folder {folder} cannot be used: {found}. "
                f"Expected {folder}/<class>/*.jpg with at least one image in every class folder."
            )

    def _counts(self) -> list[int]:
        return np.bincount(self.labels, minlength=len(self.classes)).tolist()


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden or a system's: `.ipynb_checkpoints`, macOS's `._*`, a NAS's thumbnails."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir")


def open_rgb(image: Image.Image | bytes) -> Image.Image:
    """Decode an image to 8-bit RGB, turned upright as its EXIF orientation says.

    Transparency is dropped, as in timm and torchvision. HEIC needs the package pillow-heif.

    Args:
        image: Content of an image file, or an image of any mode, decoded or not.

    Raises:
        ValueError: Integer pixels beyond 16 bits, or floating-point pixels, whose range is undefined.
        Exception: Whatever Pillow's decoders raise on damaged content.
    """
    if isinstance(image, bytes):
        _can_read_heif()  # registers the format, in every process that loads
        image = Image.open(BytesIO(image))
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255 instead of scaling it.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(
                f"32-bit integer pixels from {values.min()} to {values.max()}; expected 0 to 65535"
            )
        return Image.fromarray((values / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range; expected 8 or 16 bits a channel")
    if image.mode == "P":
        image = image.convert("RGBA")  # straight to RGB, Pillow warns about palettes with transparency
    return image.convert("RGB")


@cache
def _can_read_heif() -> bool:
    """Register HEIC with Pillow and return whether that succeeded."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _image_files(folders: list[Path], *, where: Path) -> list[str]:
    """Return the images below the folders, in torchvision's order; log how many files are not read, and why."""
    readable = (*IMG_EXTENSIONS, *((".avif",) if features.check("avif") else ()), *_HEIF * _can_read_heif())
    found: list[str] = []
    skipped: Counter[str] = Counter()
    for path in (path for folder in folders for path in _visible_files(folder)):
        extension = os.path.splitext(path)[1].lower()
        if extension in readable:
            found.append(path)
        else:
            skipped[extension or "no extension"] += 1
    if skipped:
        counts = ", ".join(f"{count} {extension}" for extension, count in skipped.most_common(5))
        hint = "; pip install pillow-heif to read HEIC" if skipped.keys() & set(_HEIF) else ""
        hint += "; AVIF needs Pillow 11.3 or newer" if ".avif" in skipped else ""
        _logger.warning(
            "%s: skipped %d files that are not in a format that can be read (%s)%s",
            where, skipped.total(), counts, hint,
        )  # fmt: skip
    return found


def _visible_files(folder: Path) -> Iterator[str]:
    for parent, children, names in os.walk(folder, followlinks=True):
        children[:] = sorted(name for name in children if not is_hidden(name))
        yield from (os.path.join(parent, name) for name in sorted(names) if not is_hidden(name))
