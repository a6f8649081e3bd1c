"""Statistics of features in npz files, those of ADM's evaluator and of pytorch-fid included."""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lineardiff.evaluate.frechet import Gaussian


@dataclass(frozen=True)
class FeatureStatistics:
    """The Gaussians of the features of a set of images."""

    features: str
    """The extractor: "inception" or "lite0"."""
    pool: Gaussian
    spatial: Gaussian | None = None
    """For sFID; None where a file has none."""
    floor: float | None = None
    """Frechet distance between two disjoint halves of the images, drawn at random; None: not computed."""


def save_statistics(path: str | Path, statistics: FeatureStatistics) -> None:
    """Write statistics as an npz file: `mu`, `sigma` and, for sFID, `mu_s`, `sigma_s`, as ADM names them.

    Beside these `features`, `images` and `floor` say what they are of.

    Raises:
        ValueError: the path does not end in .npz.
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
    np.savez(npz_path(path), **arrays)


def load_statistics(path: str | Path) -> FeatureStatistics:
    """Read statistics that :func:`save_statistics`, ADM or pytorch-fid wrote.

    A file that does not say whose features they are is taken for Inception's. ADM's files may hold images
    (`arr_0`) too; these are not read.

    Raises:
        ValueError: no npz file, no `mu` and `sigma` in it, or broken ones.
    """
    names = npz_names(path)
    if not {"mu", "sigma"} <= names:
        raise ValueError(
            f"{path} holds {', '.join(sorted(names)) or 'nothing'}; "
            "expected mu and sigma, and mu_s and sigma_s for sFID"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names - {"arr_0"}}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
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
    """The names of the arrays in an npz file.

    Raises:
        ValueError: it is none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as an npz file: {error}") from error


def npz_path(path: str | Path) -> Path:
    """The path, if it ends in .npz: numpy would append that in silence."""
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"{path}: expected a name that ends in .npz")
    return path


def _gaussian(mean: np.ndarray, covariance: np.ndarray, count: int | None) -> Gaussian:
    for array in (mean, covariance):
        if array.dtype.kind != "f":
            raise ValueError(f"statistics of type {array.dtype}, expected floating-point numbers")
    return Gaussian(torch.from_numpy(mean), torch.from_numpy(covariance), count)
