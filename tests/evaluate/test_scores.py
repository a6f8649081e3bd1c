import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_fidelity
from random_inception import random_images, save_random_inception
from torch import Tensor
from torch.utils.data import Dataset
from toy_extractor import ChannelMeans

from lineardiff.evaluate import (
    Gaussian,
    ImageFeatures,
    InceptionFeatures,
    TensorBatches,
    extract,
    frechet_distance,
    generation_scores,
    inception_score,
    precision_recall,
    read_reference,
    save_samples,
    save_statistics,
)


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
    # all images of the first half of the order are dark: halves by order, or by parity, would differ
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
    assert "using its images" in caplog.text
    assert_fits(found.statistics.pool, means(few))


class Images(Dataset[Tensor]):
    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


def test_fid_inception_score_precision_and_recall_are_torch_fidelitys(tmp_path: Path) -> None:
    weights = save_random_inception(tmp_path / "weights.pth")
    samples, real = random_images(10, seed=1), random_images(8, seed=2)
    extractor = InceptionFeatures(weights)
    found = generation_scores(
        extract(TensorBatches(samples, batch_size=4), extractor), extract(TensorBatches(real), extractor)
    )
    expected = torch_fidelity.calculate_metrics(
        input1=Images(samples),
        input2=Images(real),
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights),
        fid=True,
        isc=True,
        prc=True,
        isc_splits=1,
        samples_shuffle=False,
        batch_size=10,
        cuda=False,
        cache=False,
        save_cpu_ram=True,
        verbose=False,
    )
    assert found["fid"] == pytest.approx(expected["frechet_inception_distance"], rel=1e-4)
    assert found["inception_score"] == pytest.approx(expected["inception_score_mean"], rel=1e-7)
    assert found["precision"] == pytest.approx(expected["precision"])
    assert found["recall"] == pytest.approx(expected["recall"])
    assert 0 < found["precision"] < 1 or 0 < found["recall"] < 1
    assert found["sfid"] > 0
    assert (found["sample_images"], found["reference_images"]) == (10, 8)


def test_inception_score_of_known_predictions() -> None:
    certain = 1e4 * torch.eye(10)
    # every image sure of its class, all classes as often: as many as there are classes
    assert inception_score(certain.repeat(7, 1)) == pytest.approx(10)
    assert inception_score(certain[:1].repeat(20, 1)) == pytest.approx(1)
    assert inception_score(torch.zeros(20, 10)) == pytest.approx(1)
    # p(y|x) = (3/4, 1/4) and (1/4, 3/4): KL to (1/2, 1/2) is 3/4 ln 3/2 + 1/4 ln 1/2 for both
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log()
    assert inception_score(logits) == pytest.approx(math.exp(0.75 * math.log(1.5) + 0.25 * math.log(0.5)))
    # the mean over splits in order: 10 classes in the first, one in the second
    logits = torch.cat([certain, certain[:1].repeat(10, 1)])
    assert inception_score(logits, split_size=10) == pytest.approx((10 + 1) / 2)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_precision_and_recall_of_points_on_a_line(rows: int) -> None:
    reference = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None]  # radii (3rd neighbor): 3, 2, 2, 3
    samples = torch.tensor([-2.5, 0.5, 7.0, 20.0, 21.0])[:, None]  # radii: 22.5, 19.5, 13, 19.5, 20.5
    # -2.5 is within 3 of 0, 0.5 within everything; 7 is 4 from 3, the others further
    precision, recall = precision_recall(samples, reference, rows=rows)
    assert precision == pytest.approx(2 / 5)
    assert recall == 1
    recall, precision = precision_recall(reference, samples, rows=rows)
    assert (precision, recall) == (pytest.approx(2 / 5), 1)
    far = precision_recall(samples + 1000, reference, rows=rows)
    assert far == (0, 0)
    assert precision_recall(reference, reference.flip(0), rows=rows) == (1, 1)


def test_precision_and_recall_count_the_neighbors() -> None:
    reference = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None]
    samples = torch.tensor([-0.9, -1.1])[:, None]
    assert precision_recall(samples, reference, neighbors=1)[0] == 0.5
    with pytest.raises(ValueError, match="3 samples: precision and recall need at least 4"):
        precision_recall(torch.zeros(3, 2), torch.zeros(9, 2))
    with pytest.raises(ValueError, match="3 reference images"):
        precision_recall(torch.zeros(9, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="2 features, the reference 3"):
        precision_recall(torch.zeros(9, 2), torch.zeros(9, 3))


def described(count: int, name: str, *, seed: int, floor: bool = False) -> ImageFeatures:
    return extract(TensorBatches(random_images(count, seed=seed, size=4)), ChannelMeans(name), floor=floor)


def test_lite0_is_reported_beside_its_floor_and_never_as_fid() -> None:
    found = generation_scores(
        described(30, "lite0", seed=0), real := described(40, "lite0", seed=1, floor=True)
    )
    assert set(found) == {"fd_lite0", "fd_lite0_floor", "sample_images", "reference_images"}
    assert found["fd_lite0_floor"] == real.statistics.floor > 0
    with pytest.raises(ValueError, match="samples are from lite0, those of the reference from inception"):
        generation_scores(described(30, "lite0", seed=0), described(40, "inception", seed=1))


def test_what_statistics_alone_cannot_tell_is_none() -> None:
    samples, real = described(30, "inception", seed=0), described(40, "inception", seed=1)
    whole = generation_scores(samples, real)
    assert None not in whole.values()
    found = generation_scores(samples, ImageFeatures(real.statistics))
    assert found == whole | {"precision": None, "recall": None}


def test_fewer_images_than_features_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lineardiff"):
        generation_scores(described(30, "lite0", seed=0), described(40, "lite0", seed=1, floor=True))
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "lineardiff"):
        found = generation_scores(described(3, "lite0", seed=0), described(5, "lite0", seed=1, floor=True))
    assert math.isfinite(found["fd_lite0"])
    (record,) = caplog.records
    assert (
        "fewer images than the 3 features (sample images: 3, half of the reference images: 2)"
        in record.getMessage()
    )
