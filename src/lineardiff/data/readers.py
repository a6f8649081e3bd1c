"""Readers of images that lie inside the package or in a folder for every class."""

from importlib.resources import files
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder

# In order of preference: where a data set has both, the labels of "test" are often secret.
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "test")}

_FASHION_CLASSES = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"


class EmbeddedImages:
    """The subset of Fashion-MNIST inside the package: grey, 28 x 28."""

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


class FolderImages:
    """The images `root/<split>/<class>/*`, where split is the first name of SPLIT_NAMES that exists.

    Raises:
        ValueError: no folder of the split, no class folders, or class folders without images.
    """

    def __init__(self, root: Path, split: str) -> None:
        names = SPLIT_NAMES[split]
        folder = next((root / name for name in names if (root / name).is_dir()), None)
        if folder is None:
            entries = sorted(entry.name for entry in root.iterdir())
            held = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "") if entries else "nothing"
            raise ValueError(
                f"the data folder {root} has no {split} images: it holds {held}, "
                f"expected {root}/{'|'.join(names)}/<class>/*.jpg (or train-*.parquet and test-*.parquet)"
            )
        try:
            images = ImageFolder(folder)
        except OSError as error:
            raise ValueError(
                f"the image folder {folder} cannot be used: {error}. "
                f"Expected {folder}/<class>/*.jpg with at least one image in every class folder"
            ) from error
        self.classes = tuple(images.classes)
        self.labels = np.array(images.targets)
        self._paths = [path for path, _ in images.samples]

    def read(self, index: int) -> Image.Image:
        return Image.open(BytesIO(Path(self._paths[index]).read_bytes()))

    def locate(self, index: int) -> str:
        return self._paths[index]
