"""Folders of generated images; image i is a function of (seed, i)."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

from lineardiff.files import fingerprint, read_blocks, written_whole

__all__ = ["NAME", "Plan", "fingerprint_of", "write_grid", "write_images", "write_npz"]

GRID_ROWS = 8
NAME = "%06d.png"
"""File name of image i."""

Draw = Callable[[list[int], list[torch.Generator]], list[Image.Image]]
"""``draw(labels, generators)`` generates one image per pair."""


@dataclass(frozen=True)
class Plan:
    """Class and noise of every image.

    Attributes:
        num: Number of images.
        classes: Labels to choose from.
        cycle: Whether image i has class ``classes[i % len(classes)]`` instead of a random one.
        seed: Seed of random classes and of the noise.
    """

    num: int
    classes: Sequence[int]
    cycle: bool
    seed: int

    def label(self, index: int) -> int:
        """Return the class of an image."""
        if self.cycle:
            return self.classes[index % len(self.classes)]
        return self.classes[int(np.random.default_rng((self.seed, index)).integers(len(self.classes)))]

    def generator(self, index: int) -> torch.Generator:
        """Return the generator of an image's noise, on the CPU so that the noise is the same on every device.

        torch's generator uses 32 bits of its seed. Consecutive seeds from a random start are all different, whereas
        50,000 random seeds would collide.
        """
        start = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        return torch.Generator().manual_seed((start + index) % 2**32)


def write_images(
    folder: Path,
    plan: Plan,
    indices: Sequence[int],
    draw: Draw,
    *,
    batch_size: int,
    progress: Callable[[int], object] = lambda images: None,
) -> None:
    """Generate and write images, each file atomically.

    Args:
        folder: An existing folder.
        plan: Class and noise of every image.
        indices: Images to write.
        draw: Generates the images of a batch.
        batch_size: Number of images per batch; does not change them.
        progress: Called after each batch with its number of images.
    """
    for start in range(0, len(indices), batch_size):
        batch = indices[start : start + batch_size]
        images = draw([plan.label(i) for i in batch], [plan.generator(i) for i in batch])
        for index, image in zip(batch, images, strict=True):
            with written_whole(folder / (NAME % index)) as file:
                image.save(file)
        progress(len(batch))


def write_npz(path: Path, folder: Path, plan: Plan) -> None:
    """Write all images in the format of ADM's evaluator: `arr_0` (N, H, W, 3) uint8, and the labels `arr_1` (N,).

    Holds one image in memory at a time.

    Raises:
        ValueError: An image is damaged, or differs in size from the first.
    """
    size = _read(folder, 0).size
    shape = (plan.num, size[1], size[0], 3)
    with written_whole(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(
                file, {"shape": shape, "fortran_order": False, "descr": "|u1"}
            )
            for index in range(plan.num):
                image = _read(folder, index)
                if image.size != size:
                    raise ValueError(
                        f"{folder / (NAME % index)} has size {image.size}, but the first image {size}; expected equal."
                    )
                file.write(image.tobytes())
        with archive.open("arr_1.npy", "w") as file:
            np.lib.format.write_array(file, np.array([plan.label(index) for index in range(plan.num)]))


def write_grid(path: Path, folder: Path, plan: Plan) -> None:
    """Write the first images as a grid of at most 8 rows, with a column per class for up to 16 cycled classes."""
    columns = len(plan.classes) if plan.cycle and 1 < len(plan.classes) <= 16 else 8
    shown = range(min(plan.num, columns * GRID_ROWS))
    images = torch.stack([pil_to_tensor(_read(folder, index)) for index in shown])
    with written_whole(path) as file:
        to_pil_image(make_grid(images, nrow=columns, pad_value=255)).save(file)


def fingerprint_of(folder: Path) -> str:
    """Return a fingerprint of the settings and weights of a saved pipeline, or of a file of weights."""
    if folder.is_file():
        return fingerprint(read_blocks(folder))
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors"))
    return fingerprint(
        block
        for path in files
        for block in chain([path.relative_to(folder).as_posix().encode()], read_blocks(path))
    )


def _read(folder: Path, index: int) -> Image.Image:
    path = folder / (NAME % index)
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete that file and rerun the command.") from error
