"""Accuracy of a classifier on one split of a data source."""

import logging
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
    """Run a classifier over a split, in order and in eval mode; the model gets its old mode back at the end.

    Args:
        model: (b, C, H, W) images to (b, classes) logits.
        transform: PIL image to tensor (C, H, W), such as `lineardiff.data.eval_transform(...)`.
        device: Where to compute; the model is moved there. None: where the model is.
        workers: Processes that load images; 0 loads in this one.
        precision: "no" (that of the model), or autocast to "bf16" or "fp16".
        progress: Show a bar, if stderr is a terminal.
        rank, world_size: Take images rank, rank + world_size, ... only.

    Yields:
        For each batch the logits (b, classes) in float32 and the labels (b,), on the device. Images that
        cannot be read (bad_images="skip") are left out.

    Raises:
        ValueError: The model has another number of classes than the split, or the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}")
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
                    f"the model tells {logits.shape[-1]} classes apart, but {split.source} has "
                    f"{len(split.classes)}; evaluate it on the data it was trained for"
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
    """Return top-1 and top-5 accuracy in per cent, mean cross-entropy in nats, and the number of images.

    Top-5 is top-k with k = the number of classes if there are fewer than five. Images that cannot be read
    (bad_images="skip") do not count; the log says how many. The arguments are those of :func:`predict`. With several
    processes, each of which calls this with its `rank`, the result is that of all images, in every process.

    Returns:
        {"top1", "top5", "loss", "images"}.

    Raises:
        ValueError: As :func:`predict`, or not one image could be read.
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
        loss, *counts = sum_over_processes((loss, top1, top5, images))
        top1, top5, images = map(int, counts)
    if images == 0:
        raise ValueError(f"not one of the {len(split)} {split.split} images of {split.source} can be read")
    if images < len(split) and rank == 0:
        _logger.warning("%d of %d images were skipped and do not count", len(split) - images, len(split))
    return {"top1": 100 * top1 / images, "top5": 100 * top5 / images, "loss": loss / images, "images": images}
