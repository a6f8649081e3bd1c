"""Images as an autoencoder's latents, written once: the moments of each image and of its mirror image.

A folder of latents holds `shard-00000.safetensors`, ... with `moments` (images, 2, 2C, h, w), of which [:, 1] are
those of the mirror images, and `labels` (images,); and `index.json`, which is written last.
"""

import json
import math
from collections.abc import Callable, Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lineardiff.data.images import ImageSplit
from lineardiff.data.sampling import Transformed, drop_bad
from lineardiff.data.transforms import Transform
from lineardiff.files import fingerprint, written_whole

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

INDEX = "index.json"


@torch.no_grad()
def encode_moments(vae: "AutoencoderKL", images: Tensor) -> Tensor:
    """Mean and log-variance of the latents of images and of their mirror images.

    Args:
        vae: of diffusers, such as Stable Diffusion's, with C = 4 and h = H / 8.
        images: (B, 3, H, W), uint8.

    Returns:
        (B, 2, 2C, h, w), of the autoencoder's type; [:, 0] of the images, [:, 1] of their mirror images, each the
        mean in the first C channels and the log-variance in the others, neither scaled nor clamped.
    """
    pixels = images.to(vae.device, vae.dtype) / 127.5 - 1
    both = torch.stack([pixels, pixels.flip(3)], dim=1).flatten(0, 1)
    return vae.encode(both).latent_dist.parameters.unflatten(0, (-1, 2))


def sample_moments(moments: Tensor, noise: Tensor) -> Tensor:
    """Latents (..., C, h, w) of moments (..., 2C, h, w) and standard normal noise (..., C, h, w).

    The networks take them times 0.18215. The log-variance is clamped to [-30, 20], as diffusers does.
    """
    mean, log_variance = moments.chunk(2, dim=-3)
    return mean + (0.5 * log_variance.clamp(-30, 20)).exp() * noise


def fingerprint_of(split: ImageSplit) -> str:
    """Of the classes and of the place and label of each image: other labels or other images give another."""
    places = (f"{split.locate(index)}\n".encode() for index in range(len(split)))
    return fingerprint(chain([json.dumps(list(split.classes)).encode()], places))


def write_latents(
    split: ImageSplit,
    folder: Path,
    *,
    encode: Callable[[Tensor], Tensor],
    transform: Transform,
    shard_size: int = 4096,
    batch_size: int = 32,
    workers: int = 0,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[[int, bool], None] | None = None,
) -> None:
    """Write those shards of a folder that are this process's and are not there yet.

    Shard s holds the images from s * shard_size and is written by process s % world_size, so that its content
    is the same for any number of processes.

    Args:
        split: the images; those that cannot be decoded are left out if it skips them.
        folder: must exist; filled before with the same settings, or empty.
        encode: from a batch of transformed images to (B, 2, 2C, h, w), as :func:`encode_moments`.
        transform: from an RGB image to what `encode` takes.
        shard_size: images of a shard; one shard is held in memory.
        batch_size: images of one call of `encode`.
        workers: processes that load images; 0 loads in this one.
        dtype: of the moments on disk.
        rank, world_size: which process this is, of how many.
        progress: called with (images, whether they were there already) after each batch or shard.

    Raises:
        ValueError: an image cannot be decoded and the split refuses such, or a shard has no image left.
    """
    samples = Transformed(split, transform)
    for shard in range(rank, shard_count(len(split), shard_size=shard_size), world_size):
        path = folder / f"shard-{shard:05d}.safetensors"
        indices = range(shard * shard_size, min((shard + 1) * shard_size, len(split)))
        if path.exists():
            if progress is not None:
                progress(len(indices), True)
            continue
        loader = DataLoader(
            Subset(samples, indices), batch_size=batch_size, num_workers=workers, collate_fn=drop_bad
        )
        moments, labels, done = [], [], 0
        for batch in loader:
            if batch is not None:
                moments.append(encode(batch[0]).to("cpu", dtype))
                labels.append(batch[1])
            if progress is not None:
                progress(min(batch_size, len(indices) - done), False)
            done += batch_size
        if not moments:
            raise ValueError(
                f"{split.source}: not one of the images {indices[0]} to {indices[-1]} can be decoded"
            )
        with written_whole(path) as unfinished:
            save_file(
                {"moments": torch.cat(moments).contiguous(), "labels": torch.cat(labels).long()}, unfinished
            )


def shard_count(images: int, *, shard_size: int) -> int:
    """How many shards hold so many images.

    Raises:
        ValueError: `shard_size` is below 1.
    """
    if shard_size < 1:
        raise ValueError(f"shard_size={shard_size}: expected at least 1 image")
    return math.ceil(images / shard_size)


def write_index(split: ImageSplit, folder: Path, *, shards: int, settings: Mapping[str, Any]) -> None:
    """Complete a folder whose shards are all written; one process does it.

    Args:
        split: whose images these are.
        folder: of the shards.
        shards: how many there must be.
        settings: JSON-able, for readers of the index.

    Raises:
        ValueError: a shard is missing or damaged.
    """
    names = [f"shard-{shard:05d}.safetensors" for shard in range(shards)]
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
    """Moments of images or of their mirror images, for training.

    The keys are the pairs (index, sample_seed) of `EpochBatches`: the seed chooses between the image and its mirror
    image, each with probability 1/2. A sample is (moments (2C, h, w) float32, label).

    Attributes:
        source, split: the data source that was encoded, and which split of it.
        classes: the class names; a label is an index into them.
        labels: (images,) int64.
        settings: what `lineardiff latents` was told.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / INDEX
        if not file.exists():
            raise ValueError(
                f"{folder} holds no {INDEX}: no folder of latents, or one that is not finished; "
                "write it with lineardiff latents, or repeat the command that began it"
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
                f"{file} is damaged ({error!r}): delete it and repeat lineardiff latents"
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
        """(2C, h, w) float32 of one image, or of its mirror image."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index}: expected 0 to {len(self) - 1}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        if shard not in self._open:
            self._open[shard] = safe_open(self._files[shard], framework="pt").get_slice("moments")
        row = index - int(self._starts[shard])
        return self._open[shard][row, int(mirrored)].float()

    def __getstate__(self) -> dict[str, Any]:
        # open files do not pickle; each process opens its own
        return {**self.__dict__, "_open": {}}


def open_latents(folder: str | Path) -> Latents:
    """Open what `lineardiff latents` wrote.

    Raises:
        ValueError: the folder is missing, not finished or damaged.
    """
    return Latents(Path(folder).expanduser())


def _read_labels(path: Path, count: int | None = None) -> np.ndarray:
    """The labels of a shard, whose moments must be as many (and `count`)."""
    try:
        with safe_open(path, framework="pt") as file:
            labels, images = file.get_tensor("labels").numpy(), file.get_slice("moments").get_shape()[0]
    except (OSError, SafetensorError) as error:
        state = "damaged" if path.exists() else "missing"
        raise ValueError(
            f"{path} is {state} ({str(error).splitlines()[0]}): delete it if it is there, and repeat the command that "
            "wrote it"
        ) from error
    if len(labels) != images or count not in (None, images):
        raise ValueError(f"{path} holds {images} images and {len(labels)} labels, the index says {count}")
    return labels
