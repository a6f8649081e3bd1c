import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_extractor import ChannelMeans

from lineardiff.evaluate.feature_statistics import save_statistics
from lineardiff.evaluate.frechet import Gaussian, frechet_distance
from lineardiff.evaluate.image_batches import TensorBatches, save_samples
from lineardiff.evaluate.image_features import ImageFeatures, extract, read_reference


def images(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 3, 4, 5), dtype=np.uint8))


def means(pixels: torch.Tensor) -> np.ndarray:
    return pixels.numpy().astype(np.float64).mean((2, 3))


def assert_fits(found: Gaussian, features: np.ndarray) -> None:
    assert found.count == len(features)
    np.testing.assert_allclose(found.mean, features.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.covariance, np.cov(features, rowvar=False), rtol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_features_of_all_images_are_fitted_and_kept(batch_size: int) -> None:
    pixels = images(50)
    found = extract(TensorBatches(pixels, batch_size=batch_size), ChannelMeans("inception"))
    assert_fits(found.statistics.pool, means(pixels))
    assert_fits(found.statistics.spatial, pixels.numpy().reshape(50, -1)[:, :4].astype(np.float64))
    np.testing.assert_allclose(found.pool, means(pixels), rtol=1e-6)
    assert torch.equal(found.logits, found.pool)
    assert (found.statistics.features, found.statistics.floor) == ("inception", None)


@pytest.mark.parametrize("keep", [1, 4, 7, 100])
def test_kept_features_are_spread_over_the_images(keep: int) -> None:
    pixels = images(20)
    found = extract(TensorBatches(pixels, batch_size=6), ChannelMeans("inception"), keep=keep)
    chosen = [i * 20 // min(keep, 20) for i in range(min(keep, 20))]
    np.testing.assert_allclose(found.pool, means(pixels)[chosen], rtol=1e-6)
    assert found.statistics.pool.count == 20


def test_the_floor_is_the_distance_of_two_halves() -> None:
    # all images of the first half of the order are dark: halves by order, or by parity, would be told apart
    pixels = torch.cat([images(200) // 4, images(201, seed=1)])
    found = extract(TensorBatches(pixels, batch_size=32), ChannelMeans("lite0"), floor=True)
    assert_fits(found.statistics.pool, means(pixels))
    by_order = [extract(TensorBatches(part), ChannelMeans("lite0")) for part in (pixels[:200], pixels[200:])]
    apart = frechet_distance(*(part.statistics.pool for part in by_order))
    assert 0 < found.statistics.floor < apart / 20
    again = extract(TensorBatches(pixels, batch_size=7), ChannelMeans("lite0"), floor=True)
    assert again.statistics.floor == pytest.approx(found.statistics.floor, rel=1e-4)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        extract(TensorBatches(images(1)), ChannelMeans("lite0"))
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        extract(TensorBatches(images(3)), ChannelMeans("lite0"), floor=True)


def same(one: ImageFeatures, other: ImageFeatures) -> bool:
    return torch.equal(one.statistics.pool.covariance, other.statistics.pool.covariance)


def test_a_reference_of_images(tmp_path: Path) -> None:
    save_samples(tmp_path / "real.npz", images(50))
    expected = extract(TensorBatches(images(50)), ChannelMeans("inception"))
    found = read_reference(tmp_path / "real.npz", ChannelMeans("inception"), size=(4, 5))
    assert same(found, expected)
    assert torch.equal(found.pool, expected.pool)
    assert found.statistics.floor is None
    assert read_reference(tmp_path / "real.npz", ChannelMeans("lite0")).statistics.floor > 0
    with pytest.raises(ValueError, match=r"4 x 5 pixels, the generated ones 8 x 8; .*--image-size"):
        read_reference(tmp_path / "real.npz", ChannelMeans("inception"), size=(8, 8))


def test_a_reference_of_statistics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    real = extract(TensorBatches(images(50)), ChannelMeans("inception"))
    save_statistics(tmp_path / "stats.npz", real.statistics)
    found = read_reference(tmp_path / "stats.npz", ChannelMeans("inception"), size=(8, 8))
    assert same(found, real)
    assert found.pool is None
    with pytest.raises(ValueError, match="statistics of the features of inception, expected those of lite0"):
        read_reference(tmp_path / "stats.npz", ChannelMeans("lite0"))
    # ADM's reference batches: statistics of all images beside some of them
    few = images(10, seed=1)
    with np.load(tmp_path / "stats.npz") as file:
        arrays = {name: file[name] for name in ("mu", "sigma", "mu_s", "sigma_s")}
    np.savez(tmp_path / "adm.npz", arr_0=few.permute(0, 2, 3, 1).numpy(), **arrays)
    found = read_reference(tmp_path / "adm.npz", ChannelMeans("inception"))
    assert same(found, real)
    np.testing.assert_allclose(found.pool, means(few), rtol=1e-6)
    with caplog.at_level(logging.INFO, "lineardiff"):
        found = read_reference(tmp_path / "adm.npz", ChannelMeans("lite0"))
    assert "its images are used" in caplog.text
    assert_fits(found.statistics.pool, means(few))
