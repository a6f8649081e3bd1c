"""Training on CIFAR-10's parquet files from the command line, on a slice of 200 + 100 images for speed."""

import csv
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineardiff.cli import main

MODEL = ("img_size=32", "patch_size=4", "embed_dim=32", "depth=2", "num_heads=2", "contrast_grid=(3,3)")


def test_cifar10_slice_trains_and_scores(
    shared_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for split, images in (("train", 200), ("test", 100)):
        name = f"{split}-00000-of-00001.parquet"
        batch = next(pq.ParquetFile(shared_data / "cifar10" / name).iter_batches(images))
        (tmp_path / "cifar10").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_batches([batch]), tmp_path / "cifar10" / name)
    words = ["--data", str(tmp_path / "cifar10"), "--output", str(tmp_path / "run"), "--workers", "0"]
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
