from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes `classes` x `count` coloured images for every split and returns the root."""

    def write(classes: tuple[str, ...] = ("cat", "dog"), count: int = 2, splits=("train", "val")) -> Path:
        root = tmp_path / "pictures"
        for split in splits:
            for label, name in enumerate(classes):
                (root / split / name).mkdir(parents=True)
                for i in range(count):
                    pixels = np.full((8, 10, 3), (10 * label, 20 * i, 200), np.uint8)
                    Image.fromarray(pixels).save(root / split / name / f"{i}.png")
        return root

    return write
