from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import linalg
from torch import Tensor

from lineardiff.evaluate import (
    FeatureStatistics,
    Gaussian,
    GaussianFit,
    frechet_distance,
    load_statistics,
    save_statistics,
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spd(dim: int, *, seed: int) -> Tensor:
    root = normal(dim, dim, seed=seed)
    return root @ root.T / dim + 0.1 * torch.eye(dim, dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 7, 64])
def test_independent_features_have_a_closed_form(dim: int) -> None:
    means, variances = normal(2, dim, seed=0), normal(2, dim, seed=1).exp()
    gaussians = [
        Gaussian(mean, torch.diag(variance)) for mean, variance in zip(means, variances, strict=True)
    ]
    expected = (means[0] - means[1]).square().sum() + (
        variances[0].sqrt() - variances[1].sqrt()
    ).square().sum()
    assert frechet_distance(*gaussians) == pytest.approx(float(expected), abs=1e-6)
    assert frechet_distance(*reversed(gaussians)) == pytest.approx(float(expected), abs=1e-6)


def test_covariances_that_do_not_commute_have_the_cost_of_the_optimal_map() -> None:
    # x -> A x with A symmetric and positive is the optimal map, so the distance is E|x - A x|^2.
    covariance, optimal = spd(32, seed=0), spd(32, seed=1)
    moved = optimal @ covariance @ optimal
    assert (covariance @ moved - moved @ covariance).abs().max() > 0.1
    step = torch.eye(32, dtype=torch.float64) - optimal
    zero = torch.zeros(32, dtype=torch.float64)
    found = frechet_distance(Gaussian(zero, covariance), Gaussian(zero, (moved + moved.T) / 2))
    assert found == pytest.approx(float((step @ covariance @ step).trace()), abs=1e-6)


def test_it_is_the_formula_of_the_evaluators_with_a_matrix_root() -> None:
    first, second = (
        np.cov(normal(300, 24, seed=seed).numpy() @ spd(24, seed=seed).numpy(), rowvar=False)
        for seed in (0, 1)
    )
    expected = np.trace(first) + np.trace(second) - 2 * np.trace(linalg.sqrtm(first @ second).real)
    zero = torch.zeros(24)
    found = frechet_distance(
        Gaussian(zero, torch.from_numpy(first)), Gaussian(zero, torch.from_numpy(second))
    )
    assert found == pytest.approx(float(expected), abs=1e-6)


def test_singular_covariances_are_exact() -> None:
    u, v = normal(2, 100, seed=0)
    zero = torch.zeros(100)
    found = frechet_distance(Gaussian(zero, torch.outer(u, u)), Gaussian(zero, torch.outer(v, v)))
    assert found == pytest.approx(float(u @ u + v @ v - 2 * (u @ v).abs()), abs=1e-6)
    few = GaussianFit(100)
    few.update(normal(10, 100, seed=1))
    assert 0 <= frechet_distance(few.gaussian(), few.gaussian()) < 1e-9
    point = Gaussian(u, torch.zeros(100, 100))
    assert frechet_distance(point, Gaussian(v, torch.zeros(100, 100))) == pytest.approx(
        float((u - v).square().sum())
    )


@pytest.mark.parametrize("batch_size", [1, 7, 64, 500])
def test_statistics_depend_neither_on_the_batches_nor_on_the_order(batch_size: int) -> None:
    # a mean of 10,000 standard deviations, where E[x^2] - E[x]^2 in float64 is right to 1e-8 only
    features = normal(500, 12, seed=0) @ spd(12, seed=1) + 1e4
    order = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    fit, halves = GaussianFit(12), [GaussianFit(12), GaussianFit(12)]
    for batch in features[order].split(batch_size):
        fit.update(batch)
        halves[0].update(batch[::2])
        halves[1].update(batch[1::2])
    halves[0].add(halves[1])
    for found in (fit.gaussian(), halves[0].gaussian()):
        assert found.count == 500
        np.testing.assert_allclose(found.mean, features.numpy().mean(0), rtol=1e-14)
        np.testing.assert_allclose(
            found.covariance, np.cov(features.numpy(), rowvar=False), rtol=0, atol=1e-11
        )


def test_half_precision_features_are_accumulated_in_float64() -> None:
    features = normal(300, 4, seed=0).half()
    fit = GaussianFit(4)
    fit.update(features)
    np.testing.assert_allclose(fit.gaussian().covariance, np.cov(features.double(), rowvar=False), atol=1e-14)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.zeros(5, 4), r"expected \(B, 3\)"),
        (torch.zeros(3), r"expected \(B, 3\)"),
        (torch.zeros(5, 3, dtype=torch.uint8), "torch.uint8.*floating-point"),
        (torch.tensor([[0.0, float("nan"), 0.0]]), "NaN"),
        (torch.tensor([[0.0, float("inf"), 0.0]]), "infinity"),
    ],
)
def test_bad_features_are_refused(features: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussianFit(3).update(features)


def test_one_image_has_no_covariance() -> None:
    fit = GaussianFit(3)
    fit.update(torch.zeros(1, 3))
    fit.update(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        fit.gaussian()


def test_bad_gaussians_are_refused() -> None:
    eye = torch.eye(3)
    for mean, covariance, message in [
        (torch.zeros(2), eye, r"\(2,\).*\(3, 3\)"),
        (torch.full((3,), float("nan")), eye, "NaN"),
        (torch.zeros(3), eye / 0, "infinity"),
        (torch.zeros(3), eye + torch.triu(torch.ones(3, 3), 1), "not symmetric"),
    ]:
        with pytest.raises(ValueError, match=message):
            Gaussian(mean, covariance)
    with pytest.raises(ValueError, match="of 3 and of 4 features"):
        frechet_distance(Gaussian(torch.zeros(3), eye), Gaussian(torch.zeros(4), torch.eye(4)))
    with pytest.raises(ValueError, match="eigenvalue -1"):
        frechet_distance(Gaussian(torch.zeros(3), eye), Gaussian(torch.zeros(3), -eye))


def gaussian(dim: int, *, seed: int) -> Gaussian:
    fit = GaussianFit(dim)
    fit.update(torch.randn(50, dim, generator=torch.Generator().manual_seed(seed)))
    return fit.gaussian()


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    written = FeatureStatistics("inception", gaussian(8, seed=0), gaussian(5, seed=1))
    save_statistics(tmp_path / "s.npz", written)
    read = load_statistics(tmp_path / "s.npz")
    assert (read.features, read.pool.count, read.floor) == ("inception", 50, None)
    for one, other in ((read.pool, written.pool), (read.spatial, written.spatial)):
        assert torch.equal(one.mean, other.mean)
        assert torch.equal(one.covariance, other.covariance)
        assert frechet_distance(one, other) < 1e-12
    lite = FeatureStatistics("lite0", gaussian(8, seed=0), floor=1.25)
    save_statistics(tmp_path / "l.npz", lite)
    read = load_statistics(tmp_path / "l.npz")
    assert (read.features, read.spatial, read.floor) == ("lite0", None, 1.25)


def test_adms_keys_are_written_and_nothing_pickled(tmp_path: Path) -> None:
    save_statistics(
        tmp_path / "s.npz", FeatureStatistics("inception", gaussian(8, seed=0), gaussian(5, seed=1))
    )
    with np.load(tmp_path / "s.npz", allow_pickle=False) as file:
        shapes = {name: file[name].shape for name in file.files}
    assert shapes == {
        "features": (),
        "images": (),
        "mu": (8,),
        "sigma": (8, 8),
        "mu_s": (5,),
        "sigma_s": (5, 5),
    }


@pytest.mark.parametrize("spatial", [True, False])
def test_files_of_adm_and_of_pytorch_fid_are_read(tmp_path: Path, spatial: bool) -> None:
    pool, places = gaussian(8, seed=0), gaussian(5, seed=1)
    arrays = {"mu": pool.mean.float().numpy(), "sigma": pool.covariance.numpy()}
    if spatial:
        arrays |= {"mu_s": places.mean.float().numpy(), "sigma_s": places.covariance.numpy()}
        arrays["arr_0"] = np.zeros((4, 8, 8, 3), dtype=np.uint8)
    np.savez_compressed(tmp_path / "ref.npz", **arrays)
    read = load_statistics(tmp_path / "ref.npz")
    assert (read.features, read.pool.count, read.floor) == ("inception", None, None)
    torch.testing.assert_close(read.pool.mean, pool.mean, rtol=0, atol=1e-7)
    assert torch.equal(read.pool.covariance, pool.covariance)
    assert (read.spatial is not None) == spatial


def test_broken_files_are_refused(tmp_path: Path) -> None:
    good = {"mu": np.zeros(3), "sigma": np.eye(3)}

    def saved(name: str, **arrays: np.ndarray) -> Path:
        np.savez(tmp_path / name, **arrays)
        return tmp_path / name

    whole = saved("whole.npz", **good).read_bytes()
    (tmp_path / "short.npz").write_bytes(whole[: len(whole) // 2])
    damaged = bytearray(whole)
    damaged[len(damaged) // 3] ^= 255
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for path, message in [
        (saved("images.npz", arr_0=np.zeros(3)), "holds arr_0; expected mu and sigma"),
        (saved("nan.npz", mu=good["mu"] * np.nan, sigma=good["sigma"]), "NaN"),
        (saved("shape.npz", mu=good["mu"], sigma=np.eye(4)), r"\(3,\).*\(4, 4\)"),
        (saved("type.npz", mu=np.zeros(3, dtype=np.int64), sigma=good["sigma"]), "int64"),
        (saved("object.npz", mu=np.array([{}, {}, {}]), sigma=good["sigma"]), "allow_pickle"),
        (tmp_path / "short.npz", "cannot be read as an npz file"),
        (tmp_path / "damaged.npz", "damaged"),
        (tmp_path / "none.npz", "cannot be read as an npz file"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_statistics(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="ends in .npz"):
        save_statistics(tmp_path / "s.bin", FeatureStatistics("lite0", gaussian(3, seed=0)))
