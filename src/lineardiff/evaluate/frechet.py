"""Frechet distance between Gaussians, and fitting them to features that arrive in batches, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of features; converted to float64 on the CPU.

    Raises:
        ValueError: mean and covariance do not fit together, hold NaN or infinity, or the covariance is not
            symmetric.
    """

    mean: Tensor
    """(D,)"""
    covariance: Tensor
    """(D, D), the unbiased estimate (divided by count - 1)."""
    count: int | None = None
    """Samples it was fitted to; None where a file does not say."""

    def __post_init__(self) -> None:
        mean, covariance = (
            torch.as_tensor(array, dtype=torch.float64, device="cpu")
            for array in (self.mean, self.covariance)
        )
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(
                f"a mean of shape {tuple(mean.shape)} with a covariance of shape {tuple(covariance.shape)}: "
                "expected (D,) and (D, D)"
            )
        if not (mean.isfinite().all() and covariance.isfinite().all()):
            raise ValueError("the mean or the covariance holds NaN or infinity; compute the statistics anew")
        # float32 statistics of other programs are symmetric to 1e-7 only
        if not torch.allclose(covariance, covariance.T, rtol=0, atol=1e-5 * float(covariance.abs().max())):
            raise ValueError("the covariance is not symmetric; compute the statistics anew")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "covariance", covariance)


class GaussianFit:
    """Mean and covariance of features in one pass: neither their order nor the batches matter.

    Batches are merged by the update of Chan, Golub and LeVeque (1979), which does not cancel as the
    difference of E[x x^T] and E[x] E[x]^T does.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._mean = torch.zeros(dim, dtype=torch.float64)
        self._scatter = torch.zeros(dim, dim, dtype=torch.float64)

    def update(self, features: Tensor) -> None:
        """Add the features (B, D) of a batch, of any floating-point type.

        Raises:
            ValueError: another shape or type, or NaN or infinity among them.
        """
        dim = len(self._mean)
        if features.ndim != 2 or features.shape[1] != dim or not features.is_floating_point():
            raise ValueError(
                f"features of shape {tuple(features.shape)} and type {features.dtype}: "
                f"expected (B, {dim}) of a floating-point type"
            )
        if not features.isfinite().all():
            raise ValueError("features hold NaN or infinity: check the images and the extractor's weights")
        features = features.detach().cpu().double()
        if len(features):
            mean = features.mean(0)
            self._merge(len(features), mean, (features - mean).T @ (features - mean))

    def add(self, other: "GaussianFit") -> None:
        """Add all that another fit has seen."""
        if other.count:
            self._merge(other.count, other._mean, other._scatter)

    def gaussian(self) -> Gaussian:
        """Return the fit so far.

        Raises:
            ValueError: it has seen fewer than two samples.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {self.count}")
        return Gaussian(self._mean, self._scatter / (self.count - 1), self.count)

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        total = self.count + count
        step = mean - self._mean
        self._scatter = self._scatter + scatter + torch.outer(step, step) * (self.count * count / total)
        self._mean = self._mean + step * (count / total)
        self.count = total


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Squared Frechet (2-Wasserstein) distance |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), as in FID.

    Reference: Heusel et al. 2017, https://arxiv.org/abs/1706.08500, equation 6.

    Raises:
        ValueError: the Gaussians have different dimensions, or a covariance has a negative eigenvalue.
    """
    if first.mean.shape != second.mean.shape:
        raise ValueError(
            f"Gaussians of {len(first.mean)} and of {len(second.mean)} features cannot be compared; "
            "take both from the same extractor"
        )
    # With S = R R^T the trace of (S1 S2)^(1/2) is the sum of the singular values of R1^T R2. Other than the root
    # of the product S1 S2, this does not suffer from singular covariances.
    overlap = torch.linalg.svdvals(_root(first.covariance).T @ _root(second.covariance)).sum()
    gap = (first.mean - second.mean).square().sum()
    distance = gap + first.covariance.trace() + second.covariance.trace() - 2 * overlap
    return max(float(distance), 0.0)


def _root(covariance: Tensor) -> Tensor:
    """Some R (D, rank) with R R^T = covariance, without the directions in which there is rounding only."""
    values, vectors = torch.linalg.eigh(covariance)
    largest = values.abs().max()
    if values.min() < -1e-4 * largest:
        raise ValueError(f"the covariance has the eigenvalue {values.min():.3g}; compute the statistics anew")
    kept = values > largest * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()
