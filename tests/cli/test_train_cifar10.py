"""Training on CIFAR-10's parquet files from the command line, on slices of at most 200 + 100 images for speed."""

import csv
import json
import math
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from lineardiff.cli import main

MODEL = ("img_size=32", "patch_size=4", "embed_dim=32", "depth=2", "num_heads=2", "contrast_grid=(3,3)")


@pytest.fixture
def cifar10_slice(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, images in (("train", 200), ("test", 100)):
        name = f"{split}-00000-of-00001.parquet"
        batch = next(pq.ParquetFile(shared_data / "cifar10" / name).iter_batches(images))
        (tmp_path / "cifar10").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_batches([batch]), tmp_path / "cifar10" / name)
    return tmp_path / "cifar10"


def test_cifar10_slice_trains_and_scores(
    cifar10_slice: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(cifar10_slice), "--output", str(tmp_path / "run"), "--workers", "0"]
    words += ["--epochs", "4", "--batch-size", "20", "--log-every", "10", "--model-args", *MODEL]
    assert main(["train", "demo", *words]) == 0
    rows = list(csv.DictReader((tmp_path / "run/train.csv").read_text().splitlines()))
    losses = [float(row["loss"]) for row in rows]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["classes"][:3] == ["airplane", "automobile", "bird"]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--workers", "0", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["images"] == 100
    last = list(csv.DictReader((tmp_path / "run/validation.csv").read_text().splitlines()))[-1]
    assert scores["top1"] == pytest.approx(float(last["top1"]))


@pytest.mark.parametrize(("precision", "images"), [("no", 64), ("bf16", 32)])  # bf16 is slow on many CPUs
@pytest.mark.parametrize(
    ("model", "grids"),
    [
        ("vca_pvt_tiny", "((3,3),(4,4),(4,4),(2,2))"),
        ("vca_swin_tiny_patch4_224", "((3,3),(4,4),(4,4),None)"),
    ],
)
def test_the_hierarchical_models_train_an_epoch_at_64_pixels_on_few_images(
    cifar10_slice: Path, tmp_path: Path, model: str, grids: str, precision: str, images: int
) -> None:
    words = ["--data", str(cifar10_slice), "--output", str(tmp_path / "run"), "--workers", "0"]
    words += ["--model", model, "--model-args", "img_size=64", f"contrast_grids={grids}"]
    words += ["--image-size", "64", "--epochs", "1", "--batch-size", "16", "--warmup-epochs", "0.5"]
    words += ["--train-limit", str(images), "--validation-limit", "16", "--learning-rate", "5e-4"]
    assert main(["train", "demo", *words, "--log-every", "1", "--precision", precision]) == 0
    rows = list(csv.DictReader((tmp_path / "run/train.csv").read_text().splitlines()))
    assert len(rows) == images // 16
    assert all(math.isfinite(float(row["loss"])) and math.isfinite(float(row["grad_norm"])) for row in rows)
    assert all(float(row["grad_norm"]) > 0 for row in rows)
    weights = load_file(tmp_path / "run/model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())
