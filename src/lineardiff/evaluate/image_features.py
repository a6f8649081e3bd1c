"""From images to what their scores are computed from: statistics of the features, and some of the features."""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from lineardiff.evaluate.feature_statistics import FeatureStatistics, load_statistics, npz_names
from lineardiff.evaluate.features import FeatureExtractor
from lineardiff.evaluate.frechet import GaussianFit, frechet_distance
from lineardiff.evaluate.image_batches import ImageBatches, open_batches

# as many as the reference batches of ADM hold for precision and recall
REFERENCE_FEATURES = 10_000

_logger = logging.getLogger("lineardiff")


@dataclass(frozen=True)
class ImageFeatures:
    """What the scores need to know about a set of images."""

    statistics: FeatureStatistics
    pool: Tensor | None = None
    """(M, D) float32, for precision and recall; None where only statistics are known."""
    logits: Tensor | None = None
    """(M, classes) float32, for the Inception score; None with Lite0."""


def extract(
    images: ImageBatches,
    extractor: FeatureExtractor,
    *,
    keep: int | None = None,
    floor: bool = False,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> ImageFeatures:
    """Run an extractor over images; the statistics are of all of them, and fitted as the batches come.

    Args:
        keep: How many pool features and logits to keep, at even distances in the order of the images; None
            keeps all. ADM's reference batches of ImageNet have 10,000 images for precision and recall.
        floor: Compute the Frechet distance between two halves of the images too, drawn at random (the same
            ones every time): what two sets of real images have between them.
        device: Where to compute; the extractor is moved there.
        progress: Show a bar with the rate, if stderr is a terminal.

    Raises:
        ValueError: fewer than two images (four with `floor`), broken ones, or features with NaN.
    """
    total = images.images
    count = total if keep is None else min(keep, total)
    kept = torch.zeros(total, dtype=torch.bool)
    kept[torch.arange(count) * total // count] = True
    in_second = torch.zeros(total, dtype=torch.bool)
    if floor:
        in_second[torch.randperm(total, generator=torch.Generator().manual_seed(0))[: total // 2]] = True
    # Without a floor everything is in the first half.
    fit, second_half = GaussianFit(extractor.dim), GaussianFit(extractor.dim)
    spatial_fit: GaussianFit | None = None
    pools: list[Tensor] = []
    logits: list[Tensor] = []
    done = 0
    extractor = extractor.to(device)
    with tqdm(
        total=total, desc=images.source, unit="img", leave=False, disable=None if progress else True
    ) as bar:
        for batch in images:
            with torch.inference_mode():
                features = extractor(batch.to(device, non_blocking=True))
            here = slice(done, done := done + len(batch))
            pool = features.pool.cpu()
            fit.update(pool[~in_second[here]])
            second_half.update(pool[in_second[here]])
            pools.append(pool[kept[here]])
            if features.logits is not None:
                logits.append(features.logits.cpu()[kept[here]])
            if features.spatial is not None:
                spatial_fit = spatial_fit or GaussianFit(features.spatial.shape[1])
                spatial_fit.update(features.spatial)
            bar.update(len(batch))
    distance = frechet_distance(fit.gaussian(), second_half.gaussian()) if floor else None
    fit.add(second_half)
    spatial = spatial_fit.gaussian() if spatial_fit else None
    return ImageFeatures(
        FeatureStatistics(extractor.name, fit.gaussian(), spatial, distance),
        torch.cat(pools),
        torch.cat(logits) if logits else None,
    )


def read_reference(
    source: str | Path,
    extractor: FeatureExtractor,
    *,
    size: tuple[int, int] | None = None,
    batch_size: int = 64,
    image_size: int | None = None,
    workers: int = 0,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> ImageFeatures:
    """Describe real images, or read what is known of them.

    Precision and recall compare with at most 10,000 of them, as many as ADM's reference batches hold. With
    Lite0 the floor is computed too.

    Args:
        source: What :func:`~lineardiff.evaluate.open_batches` opens, or an npz file of statistics. Where such
            a file holds images too (ADM's do), these serve for precision and recall only.
        size: (H, W) that the images must have, that of the generated ones; None: any.
        batch_size, image_size, workers: As in :func:`~lineardiff.evaluate.open_batches`.
        device, progress: As in :func:`extract`.

    Raises:
        ValueError: The images have another size, the statistics are another extractor's, or as in
            :func:`~lineardiff.evaluate.open_batches`, `load_statistics` and :func:`extract`.
    """
    path = Path(source).expanduser()
    names = npz_names(path) if path.is_file() else set()
    statistics = load_statistics(path) if "mu" in names else None
    if statistics is not None and statistics.features != extractor.name:
        if "arr_0" not in names:
            raise ValueError(
                f"{path} holds statistics of the features of {statistics.features}, "
                f"expected those of {extractor.name}; give the images instead"
            )
        _logger.info("%s: the statistics are %s's; its images are used", path, statistics.features)
        statistics = None
    if statistics is not None and "arr_0" not in names:
        return ImageFeatures(statistics)
    images = open_batches(source, batch_size=batch_size, image_size=image_size, workers=workers)
    if size not in (None, images.size):
        raise ValueError(
            f"the reference images have {images.size[0]} x {images.size[1]} pixels, the generated ones "
            f"{size[0]} x {size[1]}; bring images of a folder to that size with image_size (--image-size)"
        )
    found = extract(
        images,
        extractor,
        keep=REFERENCE_FEATURES,
        floor=statistics is None and extractor.name == "lite0",
        device=device,
        progress=progress,
    )
    return found if statistics is None else dataclasses.replace(found, statistics=statistics)
