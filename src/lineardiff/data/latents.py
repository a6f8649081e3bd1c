"""Folders of latents: the moments that an autoencoder gives for each image and for its mirror image.

A folder holds `shard-00000.safetensors`, ... with `moments` (images, 2, 2C, h, w), of which [:, 1] belong to the
mirror images, and `labels` (images,); and `index.json`, which is written last.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lineardiff.data.images import ImageSplit
from lineardiff.data.sampling import Transformed, drop_bad
from lineardiff.data.transforms import Transform
from lineardiff.device import ignore_interrupts, iterate
from lineardiff.files import fingerprint, written_whole

__all__ = [
    "NAME",
    "Latents",
    "fingerprint_of",
    "open_latents",
    "sample_moments",
    "shard_count",
    "write_index",
    "write_latents",
]

INDEX = "index.json"
NAME = "shard-%05d.safetensors"
"""File name of shard i."""


def sample_moments(moments: Tensor, noise: Tensor) -> Tensor:
    """Return latents (..., C, h, w) drawn from moments (..., 2C, h, w) with standard normal noise (..., C, h, w).

    The log-variance is clamped to [-30, 20], as in diffusers. The result is not scaled.
    """
    mean, log_variance = moments.chunk(2, dim=-3)
    return mean + (0.5 * log_variance.clamp(-30, 20)).exp() * noise


def fingerprint_of(split: ImageSplit) -> str:
    """Return a fingerprint of the classes and of the location and label of each image."""
    places = (f"{split.locate(index)}\n".encode() for index in range(len(split)))
    return fingerprint(chain([json.dumps(list(split.classes)).encode()], places))


def write_latents(
    split: ImageSplit,
    folder: Path,
    shards: Iterable[int],
    *,
    encode: Callable[[Tensor], Tensor],
    transform: Transform,
    shard_size: int = 4096,
    batch_size: int = 32,
    workers: int = 0,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[int], object] = lambda images: None,
) -> None:
    """Encode images and write shards, each file atomically.

    Args:
        split: The images. With bad_images="skip", images that cannot be decoded are omitted.
        folder: An existing folder.
        shards: Indices of the shards to write. Shard s starts at image s * shard_size.
        encode: Function from a batch of transformed images to moments (B, 2, 2C, h, w).
        transform: Function from an RGB image to what `encode` takes.
        shard_size: Number of images per shard; one shard is held in memory.
        batch_size: Number of images per call of `encode`.
        workers: Number of loader processes; 0 loads images in this process.
        dtype: Type of the moments on disk.
        progress: Called after each batch with its number of images.

    Raises:
        ValueError: An image cannot be decoded and the split does not skip it, or no image of a shard can be decoded.
    """
    samples = Transformed(split, transform)
    for shard in shards:
        indices = range(shard * shard_size, min((shard + 1) * shard_size, len(split)))
        loader = DataLoader(
            Subset(samples, indices),
            batch_size=batch_size,
            num_workers=workers,
            collate_fn=drop_bad,
            worker_init_fn=ignore_interrupts,
        )
        moments, labels, done = [], [], 0
        with closing(iterate(loader)) as batches:
            for batch in batches:
                if batch is not None:
                    moments.append(encode(batch[0]).to("cpu", dtype))
                    labels.append(batch[1])
                progress(min(batch_size, len(indices) - done))
                done += batch_size
        if not moments:
            raise ValueError(
                f"{split.source}: none of the images {indices[0]} to {indices[-1]} can be decoded."
            )
        with written_whole(folder / (NAME % shard)) as unfinished:
            save_file(
                {"moments": torch.cat(moments).contiguous(), "labels": torch.cat(labels).long()}, unfinished
            )


def shard_count(images: int, *, shard_size: int) -> int:
    """Return the number of shards that hold a number of images.

    Raises:
        ValueError: `shard_size` is below 1.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size={shard_size}; expected at least 1 image.")
    return math.ceil(images / shard_size)


def write_index(split: ImageSplit, folder: Path, *, shards: int, settings: Mapping[str, Any]) -> None:
    """Write the index, which completes a folder of shards. Call it from one process.

    Args:
        split: The encoded images.
        folder: Folder of the shards.
        shards: Number of shards.
        settings: JSON-serialisable values stored in the index.

    Raises:
        ValueError: A shard is missing or damaged.
    """
    names = [NAME % shard for shard in range(shards)]
    counts = [len(_read_labels(folder / name)) for name in names]
    index = {
        "source": split.source,
        "split": split.split,
        "classes": split.classes,
        "shards": [{"file": name, "images": count} for name, count in zip(names, counts, strict=True)],
        "settings": dict(settings),
    }
    with written_whole(folder / INDEX) as file:
        file.write_text(json.dumps(index, indent=1) + "\n")


class Latents(Dataset[tuple[Tensor, int]]):
    """Training dataset of the moments of images and of their mirror images.

    Keys are the pairs (index, sample_seed) of `EpochBatches`; the seed chooses the image or its mirror image with
    probability 1/2 each. A sample is (moments (2C, h, w) float32, label).

    Attributes:
        source, split: The encoded data source and its split.
        classes: Class names; a label is an index into them.
        labels: Labels (images,) int64.
        settings: Settings of `lineardiff latents`.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / INDEX
        if not file.exists():
            raise ValueError(
                f"{folder} holds no {INDEX}: it is not a folder of latents, or is not finished. Write it with "
                "lineardiff latents, or rerun the command that started it."
            )
        try:
            index = json.loads(file.read_text())
            self.source: str = index["source"]
            self.split: str = index["split"]
            self.classes = tuple(index["classes"])
            self.settings: dict[str, Any] = index["settings"]
            counts = [shard["images"] for shard in index["shards"]]
            self._files = [folder / shard["file"] for shard in index["shards"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{file} is damaged ({error!r}); delete that file and rerun lineardiff latents."
            ) from error
        self.labels = np.concatenate(
            [_read_labels(path, count) for path, count in zip(self._files, counts, strict=True)]
        )
        self._starts = np.array([0, *accumulate(counts)])
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        index, seed = key
        return self.moments(index, mirrored=bool(np.random.default_rng(seed).random() < 0.5)), int(
            self.labels[index]
        )

    def moments(self, index: int, *, mirrored: bool = False) -> Tensor:
        """Return the moments (2C, h, w) float32 of an image, or of its mirror image."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is out of range; expected 0 to {len(self) - 1}.")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        if shard not in self._open:
            self._open[shard] = safe_open(self._files[shard], framework="pt").get_slice("moments")
        row = index - int(self._starts[shard])
        return self._open[shard][row, int(mirrored)].float()

    def __getstate__(self) -> dict[str, Any]:
        # open files cannot be pickled; each process opens its own
        return {**self.__dict__, "_open": {}}


def open_latents(folder: str | Path) -> Latents:
    """Open a folder written by `lineardiff latents`.

    Raises:
        ValueError: The folder is missing, unfinished or damaged.
    """
    return Latents(Path(folder).expanduser())


def _read_labels(path: Path, count: int | None = None) -> np.ndarray:
    """Return the labels of a shard, after checking that it has as many moments (and `count` of both)."""
    try:
        with safe_open(path, framework="pt") as file:
            labels, images = file.get_tensor("labels").numpy(), file.get_slice("moments").get_shape()[0]
    except (OSError, SafetensorError) as error:
        fix = "is damaged ({}); delete that file and rerun" if path.exists() else "is missing ({}); rerun"
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} {fix.format(reason)} the command that wrote it.") from error
    if len(labels) != images or count not in (None, images):
        raise ValueError(
            f"{path} holds {images} images and {len(labels)} labels; expected {count or images}."
        )
    return labels
