"""Images to score as uint8 batches: a folder, an npz file in ADM's format, or the embedded images."""

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import pil_to_tensor

from lineardiff.data import ImageSplit, center_crop, open_folder, open_images
from lineardiff.device import ignore_interrupts, iterate
from lineardiff.evaluate.features import check_images
from lineardiff.evaluate.frechet import check_npz_path, npz_names

__all__ = ["ImageBatches", "TensorBatches", "open_batches", "save_samples"]


class ImageBatches(Protocol):
    """All images of a source, in a fixed order; iterating yields batches (B, 3, H, W), uint8."""

    source: str
    images: int
    size: tuple[int, int]
    """(H, W)"""

    def __iter__(self) -> Iterator[Tensor]: ...


class TensorBatches:
    """Images (N, 3, H, W), uint8, in memory."""

    def __init__(self, images: Tensor, *, batch_size: int = 64, source: str = "tensor") -> None:
        check_images(images)
        self._batches = images.split(batch_size)
        self.source, self.images, self.size = source, len(images), (images.shape[2], images.shape[3])

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


def open_batches(
    source: str | Path, *, batch_size: int = 64, image_size: int | None = None, workers: int = 0
) -> ImageBatches:
    """Open images to score.

    Args:
        source: "fashion", the embedded training images (10,000; pass "./fashion" for a folder of that name); a folder
            with all images below it, in the order of their paths, upright; or an npz file with an array `arr_0`
            (N, H, W, 3), or (N, H, W) for grey images, uint8.
        batch_size: Images per batch.
        image_size: Crop and resize images to this square as ADM does (:func:`center_crop`); None does not. Images of an
            npz file are never resized.
        workers: Processes that load the images of a folder; 0 loads in this one.

    Raises:
        ValueError: The source is missing, empty, damaged or of another layout or type. During iteration: an image
            cannot be decoded, or its size differs from that of the first one.
    """
    if batch_size < 1 or (image_size is not None and image_size < 2):
        raise ValueError(
            f"batch_size={batch_size}, image_size={image_size}: expected at least 1 image and 2 pixels."
        )
    path = Path(source).expanduser()
    if source == "fashion":
        return _SplitBatches(open_images("fashion", "train"), batch_size, image_size, workers)
    if path.is_dir():
        return _SplitBatches(open_folder(path), batch_size, image_size, workers)
    if not path.exists():
        raise ValueError(
            f"{source} does not exist; expected a folder of images, an npz file, or 'fashion' (the embedded images)."
        )
    batches = _NpzBatches(path, batch_size)
    if image_size is not None and batches.size != (image_size, image_size):
        raise ValueError(
            f"{path} holds images of {_size(batches.size)} and image_size is {image_size}; images of an npz file are "
            "not resized: pass a folder, or omit image_size."
        )
    return batches


def save_samples(path: str | Path, images: Tensor) -> None:
    """Write images (N, 3, H, W), uint8, as an npz file that ADM's evaluator reads: `arr_0` (N, H, W, 3).

    Raises:
        ValueError: The images have another type or shape, or the path does not end in .npz.
    """
    check_npz_path(path)
    check_images(images)
    np.savez(path, images.cpu().permute(0, 2, 3, 1).contiguous().numpy())


class _SplitPixels(Dataset[Tensor]):
    """The images of a split as tensors (3, H, W), uint8, all of one size."""

    def __init__(self, split: ImageSplit, image_size: int | None) -> None:
        self._split = split
        self._image_size = image_size
        self.size: tuple[int, int] | None = None
        _, height, width = self[0].shape
        self.size = (height, width)

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> Tensor:
        item = self._split[index]
        assert item is not None  # the split refuses bad images
        image = item[0] if self._image_size is None else center_crop(item[0], self._image_size)
        pixels = pil_to_tensor(image)
        if self.size is not None and pixels.shape[-2:] != self.size:
            raise ValueError(
                f"{self._split.locate(index)} has {_size(pixels.shape[-2:])} pixels, the first image "
                f"{_size(self.size)}; bring all to one size with image_size (--image-size)."
            )
        return pixels


class _SplitBatches:
    def __init__(self, split: ImageSplit, batch_size: int, image_size: int | None, workers: int) -> None:
        pixels = _SplitPixels(split, image_size)
        assert pixels.size is not None
        self.source, self.images, self.size = split.source, len(split), pixels.size
        self._loader = DataLoader(pixels, batch_size, num_workers=workers, worker_init_fn=ignore_interrupts)

    def __iter__(self) -> Iterator[Tensor]:
        return iterate(self._loader)


class _NpzBatches:
    """Images of an npz file, read batch by batch: 50,000 images of 256 x 256 are 10 GB."""

    def __init__(self, path: Path, batch_size: int) -> None:
        if "arr_0" not in npz_names(path):
            raise ValueError(
                f"{path} holds {', '.join(sorted(npz_names(path))) or 'nothing'}; "
                "expected images, an array arr_0 (N, H, W, 3)."
            )
        self.source = str(path)
        self._path, self._batch_size = path, batch_size
        with zipfile.ZipFile(path) as archive, archive.open("arr_0.npy") as file:
            shape, fortran, dtype = _npy_header(file)
        if dtype != np.uint8 or fortran or len(shape) not in (3, 4) or (*shape, 1)[3] not in (1, 3):
            raise ValueError(
                f"arr_0 of {path} is {dtype}{', in Fortran order,' if fortran else ''} of shape {shape}; "
                "expected uint8 images, 0 to 255, of shape (N, H, W, 3) or grey (N, H, W), in C order."
            )
        if shape[0] == 0:
            raise ValueError(f"{path} holds no images.")
        self._shape = (*shape, 1)[:4]
        self.images, self.size = shape[0], (shape[1], shape[2])

    def __iter__(self) -> Iterator[Tensor]:
        with zipfile.ZipFile(self._path) as archive, archive.open("arr_0.npy") as file:
            _npy_header(file)
            for start in range(0, self.images, self._batch_size):
                shape = (min(self._batch_size, self.images - start), *self._shape[1:])
                try:
                    data = file.read(math.prod(shape))
                except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                    raise ValueError(f"{self._path} is damaged: {error}.") from error
                if len(data) < math.prod(shape):
                    raise ValueError(f"{self._path} is truncated: it ends after image {start}.")
                images = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape)
                yield images.permute(0, 3, 1, 2).expand(-1, 3, -1, -1).contiguous()


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, Fortran order and type of an array, and position the file at its data."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _size(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
