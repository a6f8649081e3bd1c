"""The images of each training step and their random numbers, as functions of (seed, step) only.

`EpochBatches` gives every sample of every step its index and a seed; `Augmented` draws the augmentation of the sample
from that seed. A run can therefore be resumed at any step, with any number of workers, and sees the same pixels.
"""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from lineardiff.data.images import ImageSplit
from lineardiff.data.transforms import Transform

__all__ = ["Augmented", "EpochBatches", "Transformed", "drop_bad", "steps_per_epoch"]

_logger = logging.getLogger("lineardiff")


def steps_per_epoch(length: int, *, batch_size: int) -> int:
    """Return the number of full batches in an epoch of `length` images; the remainder is dropped.

    Raises:
        ValueError: There are fewer images than one batch.
    """
    if not 1 <= batch_size <= length:
        raise ValueError(
            f"batch_size={batch_size} with {length} training images: an epoch has no full batch; "
            f"expected a global batch size between 1 and {length}."
        )
    return length // batch_size


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """The batches of one process for the steps [start_step, total_steps) of an endless sequence of epochs.

    Use it as `batch_sampler` of a DataLoader over `Augmented`. Every epoch is a new permutation of the images, a
    function of (seed, epoch). Global batch k of an epoch is its k-th run of `batch_size` samples, of which rank r takes
    the positions r, r + world_size, ...: the same samples for any number of processes. The samples after the last
    full batch are dropped; the log says how many if they are more than a tenth.

    Args:
        length: Number of images.
        batch_size: Samples of one optimizer step over all processes and accumulated micro-batches.
        total_steps: Step at which training ends (exclusive).
        start_step: First step, counted from 0 at the beginning of training.
        world_size: Number of processes.
        rank: Index of this process.
        repeats: Repeated augmentation (DeiT: 3): every drawn image comes that many times in a row, each time with
            another seed, and so on different ranks. An epoch still has `length` samples, so it shows length / repeats
            images, drawn anew every epoch.
        seed: Non-negative integer.

    Yields:
        For every step the `batch_size / world_size` pairs (index, sample_seed) of this process, with
        0 <= sample_seed < 2^32.

    Raises:
        ValueError: The batch is larger than an epoch or not divisible by world_size, or an argument is out of range.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        total_steps: int,
        start_step: int = 0,
        world_size: int = 1,
        rank: int = 0,
        repeats: int = 1,
        seed: int = 0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} with world_size={world_size}: expected 0 <= rank < world_size.")
        if batch_size % world_size:
            raise ValueError(f"batch_size={batch_size}: expected a multiple of the {world_size} processes.")
        if not 0 <= start_step <= total_steps:
            raise ValueError(
                f"start_step={start_step}, total_steps={total_steps}: expected 0 <= start <= total."
            )
        self.steps_per_epoch = steps_per_epoch(length, batch_size=batch_size)
        if not 1 <= repeats <= batch_size:
            raise ValueError(
                f"repeats={repeats} (repeated augmentation): expected 1 to {batch_size}, the batch size, so that a "
                "batch holds at least one image with all its copies."
            )
        if seed < 0:
            raise ValueError(f"seed={seed}: expected 0 or more.")
        dropped = length % batch_size
        if dropped > length / 10 and rank == 0:
            _logger.warning(
                "batch_size=%d with %d images: each epoch leaves out %d of them (%.0f%%), others every time",
                batch_size, length, dropped, 100 * dropped / length,
            )  # fmt: skip
        self.length = length
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.start_step = start_step
        self.world_size = world_size
        self.rank = rank
        self.repeats = repeats
        self.seed = seed

    def __len__(self) -> int:
        return self.total_steps - self.start_step

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        current_epoch = -1
        for step in range(self.start_step, self.total_steps):
            epoch, batch = divmod(step, self.steps_per_epoch)
            if epoch != current_epoch:
                current_epoch = epoch
                indices, seeds = self._draw_epoch(epoch)
            first = batch * self.batch_size
            mine = slice(first + self.rank, first + self.batch_size, self.world_size)
            yield list(zip(indices[mine].tolist(), seeds[mine].tolist(), strict=True))

    def _draw_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self.seed, epoch))
        indices = rng.permutation(self.length)
        seeds = rng.integers(2**32, size=self.length)
        return np.repeat(indices, self.repeats)[: self.length], seeds


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's CPU generators at the end of the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class Augmented(Dataset[tuple[Tensor, int]]):
    """A split under a random transform whose random numbers are seeded by the key, for training.

    The keys are the pairs (index, sample_seed) of `EpochBatches`; the sample is (transformed image, label). The states
    of the global generators are preserved. Where the split skips an image (bad_images="skip"), the next one replaces
    it, so that every batch is full.
    """

    def __init__(self, split: ImageSplit, transform: Transform) -> None:
        self.split = split
        self.transform = transform

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[tuple[Tensor, int]]:
        # by batch, because saving the states costs 20 times as much as seeding them
        with _random_states_kept():
            return [self._sample(index, seed) for index, seed in keys]

    def _sample(self, index: int, seed: int) -> tuple[Tensor, int]:
        for offset in range(len(self.split)):
            item = self.split[(index + offset) % len(self.split)]
            if item is not None:
                random.seed(seed)
                np.random.seed(seed)
                # torch.manual_seed would also reseed every accelerator, at 50 times the cost
                torch.default_generator.manual_seed(seed)
                return self.transform(item[0]), item[1]
        raise ValueError(f"{self.split.source}: none of the {len(self.split)} images can be decoded.")


class Transformed(Dataset[tuple[Tensor, int] | None]):
    """A split under a deterministic transform, for evaluation: item i is (transformed image, label).

    It is None where the split skips an image (bad_images="skip"); collate with `drop_bad`.
    """

    def __init__(self, split: ImageSplit, transform: Transform) -> None:
        self.split = split
        self.transform = transform

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        item = self.split[index]
        return None if item is None else (self.transform(item[0]), item[1])


def drop_bad(samples: list[tuple[Tensor, int] | None]) -> tuple[Tensor, Tensor] | None:
    """Collate the samples that are not None into images (B, 3, H, W) and labels (B,); return None if all are None."""
    good = [sample for sample in samples if sample is not None]
    if not good:
        return None
    images, labels = default_collate(good)
    return images, labels
