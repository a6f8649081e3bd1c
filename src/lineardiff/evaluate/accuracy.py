"""Accuracy of classifiers, and the comparison of two on the same images."""

import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from lineardiff.data.images import ImageSplit
from lineardiff.data.sampling import Transformed, drop_bad
from lineardiff.data.transforms import Transform
from lineardiff.device import PRECISIONS, autocast, ignore_interrupts, iterate, sum_over_processes

__all__ = ["accuracy", "agreement", "paired_difference", "predict"]

_logger = logging.getLogger("lineardiff")


def predict(
    model: nn.Module,
    split: ImageSplit,
    *,
    transform: Transform,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    workers: int = 0,
    precision: str = "no",
    progress: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a classifier over a split, in order and in eval mode; restore the model's mode at the end.

    Args:
        model: Maps images (b, C, H, W) to logits (b, classes).
        split: Images and labels.
        transform: Maps a PIL image to a tensor (C, H, W), for example `lineardiff.data.eval_transform(...)`.
        batch_size: Images per forward pass.
        device: Device to compute on; the model is moved there. None uses the model's device.
        workers: Processes that load images; 0 loads in this one.
        precision: "no" (the model's), or autocast to "bf16" or "fp16".
        progress: Show a progress bar if stderr is a terminal.
        rank: First image of this process, which takes images rank, rank + world_size, ...
        world_size: Number of processes that share the images.

    Yields:
        For each batch the logits (b, classes) in float32 and the labels (b,), on the device, without the images that
        cannot be decoded (bad_images="skip").

    Raises:
        ValueError: The model has another number of classes than the split, or the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}.")
    device = torch.device(device) if device is not None else next(model.parameters()).device
    loader: DataLoader = DataLoader(
        Subset(Transformed(split, transform), range(rank, len(split), world_size)),
        batch_size,
        num_workers=workers,
        collate_fn=drop_bad,
        worker_init_fn=ignore_interrupts,
    )
    was_training = model.training
    model.to(device).eval()
    batches = iterate(loader)
    try:
        hidden = None if progress else True
        bar = tqdm(batches, total=len(loader), desc=split.split, unit="batch", leave=False, disable=hidden)
        for images, labels in filter(None, bar):
            with torch.inference_mode(), autocast(device, precision):
                logits = model(images.to(device, non_blocking=True)).float()
            if logits.shape[-1] != len(split.classes):
                raise ValueError(
                    f"the model has {logits.shape[-1]} classes, but {split.source} has {len(split.classes)}; "
                    "evaluate it on the data it was trained on."
                )
            yield logits, labels.to(device)
    finally:
        batches.close()
        model.train(was_training)


def accuracy(
    model: nn.Module,
    split: ImageSplit,
    *,
    transform: Transform,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    workers: int = 0,
    precision: str = "no",
    progress: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, float]:
    """Return top-1 and top-5 accuracy in percent, mean cross-entropy in nats, and the number of images.

    Images that cannot be decoded (bad_images="skip") do not count; the log says how many. The arguments are those of
    :func:`predict`. With several processes, each of which calls this with its `rank`, every process gets the result for
    all images.

    Returns:
        {"top1", "top5", "loss", "images"}; without "top5" for five classes or fewer, where it is always 100.

    Raises:
        ValueError: As in :func:`predict`, or no image could be decoded.
    """
    top1 = top5 = images = 0
    loss = 0.0
    for logits, labels in predict(
        model,
        split,
        transform=transform,
        batch_size=batch_size,
        device=device,
        workers=workers,
        precision=precision,
        progress=progress,
        rank=rank,
        world_size=world_size,
    ):
        hits = logits.topk(min(5, logits.shape[-1])).indices == labels[:, None]
        top1 += int(hits[:, 0].sum())
        top5 += int(hits.sum())
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
        images += len(labels)
    if world_size > 1:
        sums = sum_over_processes({"loss": loss, "top1": top1, "top5": top5, "images": images})
        loss, top1, top5, images = sums["loss"], int(sums["top1"]), int(sums["top5"]), int(sums["images"])
    if images == 0:
        raise ValueError(f"none of the {len(split)} {split.split} images of {split.source} can be decoded.")
    if images < len(split) and rank == 0:
        _logger.warning("%d of %d images were skipped and do not count", len(split) - images, len(split))
    scores = {
        "top1": 100 * top1 / images,
        "top5": 100 * top5 / images,
        "loss": loss / images,
        "images": images,
    }
    if len(split.classes) <= 5:
        del scores["top5"]
    return scores


def agreement(first_right: Tensor, second_right: Tensor) -> dict[str, int]:
    """Count the images that both, one or neither of two models classify correctly.

    Args:
        first_right: (M,) bool, whether the first model is right about each image.
        second_right: The same for the second model, in the same order.
    """
    return {
        "both_right": int((first_right & second_right).sum()),
        "only_first_right": int((first_right & ~second_right).sum()),
        "only_second_right": int((~first_right & second_right).sum()),
        "both_wrong": int((~first_right & ~second_right).sum()),
    }


def paired_difference(first_right: Tensor, second_right: Tensor) -> dict[str, float]:
    """Return the difference in accuracy of two models on the same images, with its uncertainty.

    Standard error and p-value describe the choice of images; images on which the models agree carry no information.
    Neither says anything about the choice of the seed.

    Args:
        first_right: (M,) bool, whether the first model is right about each image.
        second_right: The same for the second model, in the same order.

    Returns:
        "top1" (second minus first) and "standard_error", both in percentage points, and "p_value" of the exact
        two-sided McNemar test, in [0, 1].
    """
    gain = second_right.double() - first_right.double()
    wins, losses = int((gain > 0).sum()), int((gain < 0).sum())
    return {
        "top1": 100 * float(gain.mean()),
        "standard_error": 100 * float(gain.std(correction=0)) / math.sqrt(len(gain)),
        "p_value": _sign_test(wins, losses),
    }


def _sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p-value of `wins` successes in `wins + losses` fair coin flips."""
    tail = sum(math.comb(wins + losses, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2 ** (wins + losses))
