"""The benchmarks of whole models and of training, on models of seconds."""

import csv
import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import timm
import torch

ROOT = Path(__file__).resolve().parents[1]
MODELS = ["vit_tiny_patch16_224", "vca_deit_tiny_patch16_224"]
SHORT = ["--image-size", "112", "--rounds", "2", "--seconds", "0.001"]


def run(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", [name, *map(str, words), "--threads", str(torch.get_num_threads())])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert not end.value.code


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_inference_of_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "model", *MODELS, *SHORT, "--csv", tmp_path / "m.csv")
    first, second = rows(tmp_path / "m.csv")
    assert [first["model"], second["model"]] == MODELS
    assert (first["mode"], first["image"], first["ratio"]) == ("inference", "112", "1.00")
    assert float(second["ratio"]) == pytest.approx(float(first["ms"]) / float(second["ms"]), rel=0.05)
    assert float(first["low_ms"]) <= float(first["ms"]) <= float(first["high_ms"])
    assert 0 < float(first["peak_mib"]) < 60  # without the weights, 22 MiB
    assert (
        json.loads((tmp_path / "m.json").read_text())["environment"]["versions"]["timm"] == timm.__version__
    )


def test_training_of_models_and_of_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    common = importlib.import_module("benchmarks.common")
    monkeypatch.setattr(common, "SHAPES", [(1, 1, 16, 8, 4)])
    words = [MODELS[0], *SHORT, "--batch-size", "1", "--backends", "portable"]
    run(monkeypatch, "train", *words, "--csv", tmp_path / "train.csv")
    (model,) = rows(tmp_path / "train.csv")
    assert (model["model"], model["mode"]) == (MODELS[0], "training")
    assert float(model["peak_mib"]) > 22  # the gradients of 5.7 M weights
    op = rows(tmp_path / "train_op.csv")
    assert {row["candidate"] for row in op} == {"sdpa", "vca-portable", "vca-portable+pool"}
    assert {(row["mode"], row["N"], row["status"]) for row in op} == {("train", "16", "measured")}
    assert {row["dtype"] for row in op} == {"float32", "bfloat16"}
