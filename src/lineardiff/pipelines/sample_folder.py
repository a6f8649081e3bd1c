"""A folder of generated images, of which image i is a function of (seed, i): the work behind `lineardiff sample`."""

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

GRID_ROWS = 8
PIECES = "[0-9]*[0-9].png"
"""Pattern of the images' names."""

Draw = Callable[[list[int], list[torch.Generator]], list[Image.Image]]
"""``draw(labels, generators)`` makes one image for each pair."""


@dataclass(frozen=True)
class Plan:
    """Which images there are.

    Attributes:
        num: how many.
        classes: the labels that are drawn from.
        in_turn: image i is of class i % len(classes); otherwise its class is drawn at random.
        seed: of the classes and of the noise.
    """

    num: int
    classes: Sequence[int]
    in_turn: bool
    seed: int

    def label(self, index: int) -> int:
        """The class of an image."""
        if self.in_turn:
            return self.classes[index % len(self.classes)]
        return self.classes[int(np.random.default_rng((self.seed, index)).integers(len(self.classes)))]

    def generator(self, index: int) -> torch.Generator:
        """The source of the noise of an image, on the CPU, so that it is the same wherever it is computed.

        torch's generator takes 32 bits of its seed: consecutive seeds from a random start are all different, where
        50,000 random ones would hardly be.
        """
        start = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        return torch.Generator().manual_seed((start + index) % 2**32)


def image_path(folder: Path, index: int) -> Path:
    """Where an image is."""
    return folder / f"{index:06d}.png"


def missing(folder: Path, plan: Plan, *, rank: int = 0, world_size: int = 1) -> list[int]:
    """The images that this process has still to make: of rank, rank + world_size, ..."""
    mine = range(rank, plan.num, world_size)
    return [index for index in mine if not image_path(folder, index).exists()]


def write_images(
    folder: Path,
    plan: Plan,
    indices: Sequence[int],
    draw: Draw,
    *,
    batch_size: int,
    progress: Callable[[int], object] = lambda images: None,
) -> None:
    """Make and write images, each whole or not at all.

    Args:
        folder: exists.
        plan: says what they are.
        indices: which of them.
        draw: makes the images of a batch.
        batch_size: images of a batch, of which they are independent.
        progress: called with the number of images after each batch.
    """
    for start in range(0, len(indices), batch_size):
        batch = indices[start : start + batch_size]
        images = draw([plan.label(i) for i in batch], [plan.generator(i) for i in batch])
        for index, image in zip(batch, images, strict=True):
            with written_whole(image_path(folder, index)) as file:
                image.save(file)
        progress(len(batch))


def write_npz(path: Path, folder: Path, plan: Plan) -> None:
    """All images as ADM's evaluator reads them: `arr_0` (N, H, W, 3), uint8, and the labels as `arr_1` (N,).

    One image is in memory at a time.

    Raises:
        ValueError: an image is damaged, or of another size than the first one.
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
                    raise ValueError(f"{image_path(folder, index)} has another size than the first image")
                file.write(image.tobytes())
        with archive.open("arr_1.npy", "w") as file:
            np.lib.format.write_array(file, np.array([plan.label(index) for index in range(plan.num)]))


def write_grid(path: Path, folder: Path, plan: Plan) -> None:
    """The first images as one picture of at most 8 rows; classes in turn are its columns, up to 16 of them."""
    columns = len(plan.classes) if plan.in_turn and 1 < len(plan.classes) <= 16 else 8
    shown = range(min(plan.num, columns * GRID_ROWS))
    images = torch.stack([pil_to_tensor(_read(folder, index)) for index in shown])
    with written_whole(path) as file:
        to_pil_image(make_grid(images, nrow=columns, pad_value=255)).save(file)


def fingerprint_of(folder: Path) -> str:
    """Return a fingerprint of the settings and weights of a saved pipeline."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors"))
    return fingerprint(
        block
        for path in files
        for block in chain([path.relative_to(folder).as_posix().encode()], read_blocks(path))
    )


def _read(folder: Path, index: int) -> Image.Image:
    path = image_path(folder, index)
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and repeat the command") from error
