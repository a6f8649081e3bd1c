from pathlib import Path

import numpy as np
import pytest
import torch

from lineardiff.evaluate.feature_statistics import FeatureStatistics, load_statistics, save_statistics
from lineardiff.evaluate.frechet import Gaussian, GaussianFit, frechet_distance


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
