"""FID, sFID, Inception score, precision and recall as ADM's evaluator computes them, and FD-Lite0.

extractor = InceptionFeatures(weights)                      # or Lite0Features()
reference = read_reference("imagenet/train", extractor, image_size=256)
samples = extract(open_batches("samples.npz"), extractor)
print(generation_scores(samples, reference))
"""

import logging

import torch
from torch import Tensor

from lineardiff.evaluate.feature_statistics import FeatureStatistics
from lineardiff.evaluate.frechet import frechet_distance
from lineardiff.evaluate.image_features import ImageFeatures

_logger = logging.getLogger("lineardiff")


def generation_scores(samples: ImageFeatures, reference: ImageFeatures) -> dict[str, float | int | None]:
    """Score generated images against reference images.

    A score whose ingredients the reference lacks (sFID without spatial statistics, precision and recall
    without images) is None. Frechet distances fall as the number of images grows: compare equal numbers.

    Returns:
        With Inception: {"fid", "sfid", "inception_score", "precision", "recall"}, precision and recall
        from 0 to 1; with Lite0: {"fd_lite0", "fd_lite0_floor"}. Both: {"sample_images", "reference_images"}.

    Raises:
        ValueError: the features are not from the same extractor, or there are too few images.
    """
    ours, real = samples.statistics, reference.statistics
    if ours.features != real.features:
        raise ValueError(
            f"the samples' features are {ours.features}'s and the reference's {real.features}'s; "
            "take both from the same extractor"
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
    """exp of the mean KL divergence between p(class | image) and p(class), averaged over splits of the images.

    Reference: Salimans et al. 2016, https://arxiv.org/abs/1606.03498. ADM takes splits of 5000 images in
    their order, and logits without the bias of the last layer.

    Args:
        logits: (N, classes).
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
    """Improved precision and recall: the share of samples among the real images, and of real among samples.

    A feature vector is among a set if it lies within the ball around one of the set's vectors that reaches to
    its `neighbors`-th nearest one in the set. Reference: Kynkaanniemi et al. 2019, https://arxiv.org/abs/1904.06991.
    ADM computes the distances in float16 where they fit, this in float32.

    Args:
        samples: (N, D), reference: (M, D), pool features.
        rows: Distances are computed for that many samples at a time.

    Returns:
        (precision, recall), from 0 to 1.

    Raises:
        ValueError: a set has no `neighbors`-th neighbor, or the dimensions differ.
    """
    for name, vectors in (("samples", samples), ("reference images", reference)):
        if len(vectors) <= neighbors:
            raise ValueError(f"{len(vectors)} {name}: precision and recall need at least {neighbors + 1}")
    if samples.shape[1] != reference.shape[1]:
        raise ValueError(
            f"samples have {samples.shape[1]} features, the reference {reference.shape[1]}; "
            "take both from the same extractor"
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
    """Distance (N,) of each vector to its `neighbors`-th nearest other one; it is itself the nearest."""
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
            "fewer images than the %d features (%s): the Frechet distances are too large, "
            "and comparable only between equal numbers of images",
            dim,
            ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in few.items()),
        )
