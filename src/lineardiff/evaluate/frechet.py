"""Frechet distance between Gaussians, which are fitted in batches and stored as ADM and pytorch-fid store them."""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "FeatureStatistics",
    "Gaussian",
    "GaussianFit",
    "check_npz_path",
    "frechet_distance",
    "load_statistics",
    "npz_names",
    "save_statistics",
]


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of features; converted to float64 on the CPU.

    Raises:
        ValueError: The shapes of mean and covariance do not match, they hold NaN or infinity, or the covariance is not
            symmetric.
    """

    mean: Tensor
    """(D,)"""
    covariance: Tensor
    """(D, D), the unbiased estimate (divided by count - 1)."""
    count: int | None = None
    """Number of samples it was fitted to; None if a file does not say."""

    def __post_init__(self) -> None:
        mean, covariance = (
            torch.as_tensor(array, dtype=torch.float64, device="cpu")
            for array in (self.mean, self.covariance)
        )
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(
                f"a mean of shape {tuple(mean.shape)} with a covariance of shape {tuple(covariance.shape)}: "
                "expected (D,) and (D, D)."
            )
        if not (mean.isfinite().all() and covariance.isfinite().all()):
            raise ValueError("the mean or the covariance holds NaN or infinity; recompute the statistics.")
        # float32 statistics of other programs are symmetric to 1e-7 only.
        if not torch.allclose(covariance, covariance.T, rtol=0, atol=1e-5 * float(covariance.abs().max())):
            raise ValueError("the covariance is not symmetric; recompute the statistics.")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "covariance", covariance)


class GaussianFit:
    """Mean and covariance of features in one pass, independent of their order and of the batches.

    Batches are merged by the update of Chan, Golub and LeVeque (1979), which does not cancel as the difference of
    E[x x^T] and E[x] E[x]^T does.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._mean = torch.zeros(dim, dtype=torch.float64)
        self._scatter = torch.zeros(dim, dim, dtype=torch.float64)

    def update(self, features: Tensor) -> None:
        """Add the features (B, D) of a batch, of any floating-point type.

        Raises:
            ValueError: The features have another shape or type, or hold NaN or infinity.
        """
        dim = len(self._mean)
        if features.ndim != 2 or features.shape[1] != dim or not features.is_floating_point():
            raise ValueError(
                f"features of shape {tuple(features.shape)} and type {features.dtype}: "
                f"expected (B, {dim}) of a floating-point type."
            )
        if not features.isfinite().all():
            raise ValueError("features hold NaN or infinity: check the images and the extractor's weights.")
        features = features.detach().cpu().double()
        if len(features):
            mean = features.mean(0)
            self._merge(len(features), mean, (features - mean).T @ (features - mean))

    def add(self, other: "GaussianFit") -> None:
        """Add the features of another fit."""
        if other.count:
            self._merge(other.count, other._mean, other._scatter)

    def gaussian(self) -> Gaussian:
        """Return the fit so far.

        Raises:
            ValueError: It has seen fewer than two samples.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {self.count}.")
        return Gaussian(self._mean, self._scatter / (self.count - 1), self.count)

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        total = self.count + count
        step = mean - self._mean
        self._scatter = self._scatter + scatter + torch.outer(step, step) * (self.count * count / total)
        self._mean = self._mean + step * (count / total)
        self.count = total


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Return the squared Frechet (2-Wasserstein) distance |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), as in FID.

    Reference: Heusel et al. 2017, https://arxiv.org/abs/1706.08500, equation 6.

    Raises:
        ValueError: The Gaussians have different dimensions, or a covariance has a negative eigenvalue.
    """
    if first.mean.shape != second.mean.shape:
        raise ValueError(
            f"Gaussians of {len(first.mean)} and of {len(second.mean)} features cannot be compared; "
            "take both from the same extractor."
        )
    # With S = R R^T the trace of (S1 S2)^(1/2) is the sum of the singular values of R1^T R2. Unlike the root
    # of the product S1 S2, this is accurate for singular covariances.
    overlap = torch.linalg.svdvals(_root(first.covariance).T @ _root(second.covariance)).sum()
    gap = (first.mean - second.mean).square().sum()
    distance = gap + first.covariance.trace() + second.covariance.trace() - 2 * overlap
    return max(float(distance), 0.0)


def _root(covariance: Tensor) -> Tensor:
    """Return some R (D, rank) with R R^T = covariance, without the directions that hold only rounding errors."""
    values, vectors = torch.linalg.eigh(covariance)
    largest = values.abs().max()
    if values.min() < -1e-4 * largest:
        raise ValueError(f"the covariance has the eigenvalue {values.min():.3g}; recompute the statistics.")
    kept = values > largest * len(values) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()


@dataclass(frozen=True)
class FeatureStatistics:
    """Gaussians of the features of a set of images."""

    features: str
    """Name of the extractor: "inception" or "lite0"."""
    pool: Gaussian
    spatial: Gaussian | None = None
    """For sFID; None if a file does not have it."""
    floor: float | None = None
    """Frechet distance between two disjoint random halves of the images; None if not computed."""


def save_statistics(path: str | Path, statistics: FeatureStatistics) -> None:
    """Write statistics as an npz file: `mu`, `sigma` and, for sFID, `mu_s`, `sigma_s`, as ADM names them.

    `features`, `images` and `floor` hold the other fields.

    Raises:
        ValueError: The path does not end in .npz.
    """
    arrays: dict[str, Any] = {"features": np.array(statistics.features)}
    arrays |= {"mu": statistics.pool.mean.numpy(), "sigma": statistics.pool.covariance.numpy()}
    if statistics.spatial is not None:
        arrays |= {
            "mu_s": statistics.spatial.mean.numpy(),
            "sigma_s": statistics.spatial.covariance.numpy(),
        }
    if statistics.pool.count is not None:
        arrays["images"] = np.array(statistics.pool.count)
    if statistics.floor is not None:
        arrays["floor"] = np.array(statistics.floor)
    check_npz_path(path)
    np.savez(path, **arrays)


def load_statistics(path: str | Path) -> FeatureStatistics:
    """Read statistics written by :func:`save_statistics`, ADM or pytorch-fid.

    Without `features` in the file they are taken to be Inception's. Images in the file (`arr_0`, as in ADM's) are not
    read.

    Raises:
        ValueError: The file is not an npz file, or its `mu` and `sigma` are missing or damaged.
    """
    names = npz_names(path)
    if not {"mu", "sigma"} <= names:
        raise ValueError(
            f"{path} holds {', '.join(sorted(names)) or 'nothing'}; "
            "expected mu and sigma, and mu_s and sigma_s for sFID."
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names - {"arr_0"}}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    count = int(arrays["images"]) if "images" in arrays else None
    spatial = {"mu_s", "sigma_s"} <= names
    try:
        return FeatureStatistics(
            features=str(arrays.get("features", "inception")),
            pool=_gaussian(arrays["mu"], arrays["sigma"], count),
            spatial=_gaussian(arrays["mu_s"], arrays["sigma_s"], count) if spatial else None,
            floor=float(arrays["floor"]) if "floor" in arrays else None,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def npz_names(path: str | Path) -> set[str]:
    """Return the names of the arrays in an npz file.

    Raises:
        ValueError: The file is not an npz file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as an npz file: {error}.") from error


def check_npz_path(path: str | Path) -> None:
    """Raise ValueError unless a path ends in .npz, which NumPy would append silently."""
    if Path(path).suffix != ".npz":
        raise ValueError(f"{path}: expected a name that ends in .npz.")


def _gaussian(mean: np.ndarray, covariance: np.ndarray, count: int | None) -> Gaussian:
    for array in (mean, covariance):
        if array.dtype.kind != "f":
            raise ValueError(f"statistics of type {array.dtype}, expected floating-point numbers.")
    return Gaussian(torch.from_numpy(mean), torch.from_numpy(covariance), count)
