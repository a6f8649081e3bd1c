import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from random_inception import random_images

from lineardiff.cli import main
from lineardiff.evaluate import FeatureExtractor, Features, save_samples


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fid")
    save_samples(folder / "samples.npz", random_images(6, seed=0, size=16))
    (folder / "real").mkdir()
    for i, image in enumerate(random_images(9, seed=1, size=16)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "real" / f"{i}.png")
    return folder


def scores(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    capsys.readouterr()
    assert main(["evaluate", "fid", *map(str, words), "--workers", "0", "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "error" not in err
    return json.loads(out)


def test_lite0_scores_an_npz_against_a_folder_and_its_saved_statistics(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = [files / "samples.npz", "--features", "lite0", "--reference"]
    found = scores(capsys, *words, files / "real", "--save-statistics", tmp_path / "real.npz")
    again = scores(capsys, *words, tmp_path / "real.npz")
    assert (again.pop("reference"), found.pop("reference")) == (
        str(tmp_path / "real.npz"),
        str(files / "real"),
    )
    assert again.pop("fd_lite0_floor") == found.pop("fd_lite0_floor") > 0
    assert again.pop("fd_lite0") == pytest.approx(fd_lite0 := found.pop("fd_lite0"), rel=1e-3)
    assert fd_lite0 > 0
    assert again == found
    assert found == {
        "samples": str(files / "samples.npz"),
        "features": "lite0",
        "sample_images": 6,
        "reference_images": 9,
    }
    # once a run
    assert sum("fewer images than" in record.getMessage() for record in caplog.records) == 2


class Colours(FeatureExtractor):
    """Stands in for Inception, whose distances take long: the mean of every channel."""

    name, dim = "inception", 3
    weights: Path | None = None

    def __init__(self, weights: Path | None) -> None:
        super().__init__()
        Colours.weights = weights

    def forward(self, images: torch.Tensor) -> Features:
        pool = images.float().mean((2, 3))
        return Features(pool, images.float().flatten(1)[:, :3], pool)


def test_inception_is_the_default_and_gets_its_weights(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lineardiff.evaluate.InceptionFeatures", Colours)
    words = [files / "samples.npz", "--inception-weights", tmp_path / "w.pth", "--reference"]
    found = scores(capsys, *words, files / "real", "--save-statistics", tmp_path / "real.npz")
    assert Colours.weights == tmp_path / "w.pth"
    names = ("fid", "sfid", "inception_score", "precision", "recall")
    assert all(isinstance(found[name], float) for name in names)
    assert found["features"] == "inception"
    again = scores(capsys, *words, tmp_path / "real.npz")
    assert again["fid"] == pytest.approx(found["fid"])
    assert (again["precision"], again["recall"]) == (None, None)
    with np.load(tmp_path / "real.npz") as file:
        assert {"mu", "sigma", "mu_s", "sigma_s"} <= set(file.files)
    # the table says the same
    assert main(["evaluate", "fid", *map(str, words), str(tmp_path / "real.npz"), "--device", "cpu"]) == 0
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:])
    assert rows == {
        "FID": f"{again['fid']:.3f}",
        "sFID": f"{again['sfid']:.3f}",
        "Inception score": f"{again['inception_score']:.3f}",
        "precision": "unknown",
        "recall": "unknown",
        "samples": "6",
        "reference images": "9",
    }


def test_mistakes_are_one_line_and_exit_code_2(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    samples, real = str(files / "samples.npz"), str(files / "real")
    np.savez(tmp_path / "nan.npz", np.full((4, 16, 16, 3), np.nan))
    lite0 = ["--features", "lite0"]
    for words, message in [
        ([samples, "--reference", real], "--inception-weights"),
        ([samples, "--reference", real, "--inception-weights", str(tmp_path / "w.pth")], "do not exist"),
        ([samples], "--reference"),
        (["--reference", real], "SAMPLES"),
        ([str(tmp_path / "none"), "--reference", real], "does not exist"),
        ([str(tmp_path / "nan.npz"), "--reference", real], "float64"),
        ([samples, "--reference", str(tmp_path / "none"), *lite0], "does not exist"),
        ([samples, "--reference", "fashion", *lite0], "28 x 28 pixels, the generated ones 16 x 16"),
        ([samples, "--reference", real, "--save-statistics", "a.pt"], "ends in .npz"),
        ([samples, "--reference", real, "--features", "vgg"], "vgg"),
        ([samples, "--reference", real, "--nonsense"], "--nonsense"),
        ([samples, "--reference", real, *lite0, "--device", "gpu7"], "'gpu7' is not available"),
    ]:
        capsys.readouterr()
        assert main(["evaluate", "fid", *words]) == 2, words
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        lines = [line for line in err.splitlines() if not line.startswith("Downloading: ")]
        assert [line.split(": ")[:2] for line in lines] == [["lineardiff", "error"]], err


def test_a_missing_package_names_the_extra(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    assert main(["evaluate", "fid", str(files / "samples.npz"), "--reference", "fashion"]) == 2
    assert "torch-fidelity is not installed; run: " in capsys.readouterr().err


def test_it_has_help_and_the_other_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "fid", "--help"]) == 0
    text = capsys.readouterr().out
    assert "lineardiff evaluate fid" in text
    assert "--inception-weights" in text
    assert main(["evaluate", "--help"]) == 0
    assert "evaluate fid" in capsys.readouterr().out
