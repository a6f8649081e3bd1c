"""FID, sFID, Inception score, precision and recall as ADM's evaluator computes them, and FD-Lite0.

extractor = InceptionFeatures(weights)                      # or Lite0Features()
reference = read_reference("imagenet/train", extractor, image_size=256)
samples = extract(open_batches("samples.npz"), extractor)
print(generation_scores(samples, reference))
"""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from lineardiff.evaluate.features import FeatureExtractor
from lineardiff.evaluate.frechet import (
    FeatureStatistics,
    GaussianFit,
    frechet_distance,
    load_statistics,
    npz_names,
)
from lineardiff.evaluate.image_batches import ImageBatches, open_batches

__all__ = [
    "ImageFeatures",
    "extract",
    "generation_scores",
    "inception_score",
    "precision_recall",
    "read_reference",
]

# Number of images in ADM's reference batches for precision and recall.
REFERENCE_FEATURES = 10_000

_logger = logging.getLogger("lineardiff")


@dataclass(frozen=True)
class ImageFeatures:
    """The features of a set of images that the scores are computed from."""

    statistics: FeatureStatistics
    pool: Tensor | None = None
    """(M, D) float32, for precision and recall; None if only statistics are known."""
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
    """Extract the features of images batch by batch and fit their statistics.

    Args:
        images: Batches to run over.
        extractor: Network whose features are computed.
        keep: Number of pool features and logits to keep, evenly spaced in the order of the images; None keeps all.
            ADM's reference batches of ImageNet have 10,000 images for precision and recall.
        floor: Also compute the Frechet distance between two random halves of the images (the same halves every time),
            which is the distance between two sets of real images.
        device: Device to compute on; the extractor is moved there.
        progress: Show a progress bar with the rate if stderr is a terminal.

    Raises:
        ValueError: There are fewer than two images (four with `floor`), damaged ones, or features with NaN.
    """
    total = images.images
    count = total if keep is None else min(keep, total)
    kept = torch.zeros(total, dtype=torch.bool)
    kept[torch.arange(count) * total // count] = True
    in_second = torch.zeros(total, dtype=torch.bool)
    if floor:
        in_second[torch.randperm(total, generator=torch.Generator().manual_seed(0))[: total // 2]] = True
    # without a floor the first half holds all images
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
    """Compute the features of real images, or read their statistics.

    Precision and recall compare with at most 10,000 of them, the size of ADM's reference batches. With Lite0 the floor
    is computed too.

    Args:
        source: Whatever :func:`~lineardiff.evaluate.open_batches` opens, or an npz file of statistics. If such a file
            also holds images, as ADM's do, they are used for precision and recall only.
        extractor: Network whose features are computed.
        size: (H, W) that the images must have, that of the generated ones; None accepts any.
        batch_size: As in :func:`~lineardiff.evaluate.open_batches`.
        image_size: As in :func:`~lineardiff.evaluate.open_batches`.
        workers: As in :func:`~lineardiff.evaluate.open_batches`.
        device: As in :func:`extract`.
        progress: As in :func:`extract`.

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
                f"expected those of {extractor.name}; pass the images instead."
            )
        _logger.info(
            "%s: using its images, as the statistics are those of %s",
            path,
            statistics.features,
        )
        statistics = None
    if statistics is not None and "arr_0" not in names:
        return ImageFeatures(statistics)
    images = open_batches(source, batch_size=batch_size, image_size=image_size, workers=workers)
    if size not in (None, images.size):
        raise ValueError(
            f"the reference images have {images.size[0]} x {images.size[1]} pixels, the generated ones "
            f"{size[0]} x {size[1]}; bring images of a folder to that size with image_size (--image-size)."
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


def generation_scores(samples: ImageFeatures, reference: ImageFeatures) -> dict[str, float | int | None]:
    """Score generated images against reference images.

    A score that the reference does not allow (sFID without spatial statistics, precision and recall without images) is
    None. Frechet distances decrease with the number of images: compare equal numbers.

    Returns:
        With Inception {"fid", "sfid", "inception_score", "precision", "recall"}, precision and recall from 0 to 1; with
        Lite0 {"fd_lite0", "fd_lite0_floor"}. Both add {"sample_images", "reference_images"}.

    Raises:
        ValueError: The features are not from the same extractor, or there are too few images.
    """
    ours, real = samples.statistics, reference.statistics
    if ours.features != real.features:
        raise ValueError(
            f"the features of the samples are from {ours.features}, those of the reference from {real.features}; "
            "take both from the same extractor."
        )
    counts = {"sample_images": ours.pool.count, "reference_images": real.pool.count}
    _warn_few(counts, real)
    distance = frechet_distance(ours.pool, real.pool)
    if ours.features == "lite0":
        return {"fd_lite0": distance, "fd_lite0_floor": real.floor, **counts}
    sfid = precision = recall = None
    if ours.spatial is not None and real.spatial is not None:
        sfid = frechet_distance(ours.spatial, real.spatial)
    if samples.pool is not None and reference.pool is not None:
        precision, recall = precision_recall(samples.pool, reference.pool)
    return {
        "fid": distance,
        "sfid": sfid,
        "inception_score": None if samples.logits is None else inception_score(samples.logits),
        "precision": precision,
        "recall": recall,
        **counts,
    }


def inception_score(logits: Tensor, *, split_size: int = 5000) -> float:
    """Return exp of the mean KL divergence between p(class | image) and p(class), averaged over splits of the images.

    Reference: Salimans et al. 2016, https://arxiv.org/abs/1606.03498. ADM uses splits of 5000 images in
    order, and logits without the bias of the last layer.

    Args:
        logits: (N, classes).
        split_size: Images per split.
    """
    scores = []
    for split in logits.split(split_size):
        log_p = split.double().log_softmax(1)
        p = log_p.exp()
        scores.append((p * (log_p - p.mean(0).log())).nansum(1).mean().exp())
    return float(torch.stack(scores).mean())


def precision_recall(
    samples: Tensor, reference: Tensor, *, neighbors: int = 3, rows: int = 2048
) -> tuple[float, float]:
    """Return improved precision and recall: the share of samples among the real images, and of real among samples.

    A feature vector is among a set if it lies within the ball around one of the set's vectors whose radius is the
    distance to its `neighbors`-th nearest one in the set. Reference: Kynkaanniemi et al. 2019, https://arxiv.org/abs/1904.06991.
    ADM computes distances in float16 where they fit; this function uses float32.

    Args:
        samples: Pool features (N, D).
        reference: Pool features (M, D).
        neighbors: Rank of the neighbor that defines the radius.
        rows: Number of samples whose distances are computed at a time.

    Returns:
        (precision, recall), from 0 to 1.

    Raises:
        ValueError: A set has no `neighbors`-th neighbor, or the dimensions differ.
    """
    for name, vectors in (("samples", samples), ("reference images", reference)):
        if len(vectors) <= neighbors:
            raise ValueError(f"{len(vectors)} {name}: precision and recall need at least {neighbors + 1}.")
    if samples.shape[1] != reference.shape[1]:
        raise ValueError(
            f"samples have {samples.shape[1]} features, the reference {reference.shape[1]}; "
            "take both from the same extractor."
        )
    sample_radii, radii = (_radii(vectors, neighbors, rows) for vectors in (samples, reference))
    precise = 0
    recalled = torch.zeros(len(reference), dtype=torch.bool, device=reference.device)
    for block, block_radii in zip(samples.split(rows), sample_radii.split(rows), strict=True):
        distances = torch.cdist(block, reference)
        precise += int((distances <= radii).any(1).sum())
        recalled |= (distances <= block_radii[:, None]).any(0)
    return precise / len(samples), float(recalled.double().mean())


def _radii(vectors: Tensor, neighbors: int, rows: int) -> Tensor:
    """Return the distance (N,) of each vector to its `neighbors`-th nearest other vector."""
    return torch.cat(
        [torch.cdist(block, vectors).kthvalue(neighbors + 1).values for block in vectors.split(rows)]
    )


def _warn_few(counts: dict[str, int | None], reference: FeatureStatistics) -> None:
    dim = len(reference.pool.mean)
    few = {name: count for name, count in counts.items() if count is not None and count <= dim}
    half = (reference.pool.count or 0) // 2
    if reference.floor is not None and half <= dim:
        few["half of the reference_images"] = half
    if few:
        _logger.warning(
            "fewer images than the %d features (%s): the Frechet distances are too large, and comparable only between "
            "equal numbers of images",
            dim,
            ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in few.items()),
        )
