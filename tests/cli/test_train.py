import csv
import json
from dataclasses import fields
from pathlib import Path

import pytest
from tiny import TINY

from lineardiff.cli import main
from lineardiff.recipes import get_recipe

TINY = [*TINY, "--validation-limit", "12"]


def test_training_writes_a_run_folder_and_a_second_call_continues_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    output = str(tmp_path / "run")
    assert main(["train", *TINY, "--output", output]) == 0
    assert output in capsys.readouterr().out
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert (recipe["epochs"], recipe["train_limit"], recipe["seed"]) == (2, 40, get_recipe("demo").seed)
    rows = (tmp_path / "run" / "train.csv").read_text()
    assert [row["step"] for row in csv.DictReader(rows.splitlines())] == ["5", "10"]
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()

    assert main(["train", *TINY, "--output", output]) == 0
    assert "resuming the run" in caplog.text
    assert (tmp_path / "run" / "train.csv").read_text() == rows
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights

    capsys.readouterr()
    assert main(["train", *TINY, "--output", output, "--epochs", "3"]) == 2
    assert "epochs was 2 and is now 3" in capsys.readouterr().err
    assert main(["train", *TINY, "--output", output, "--no-resume"]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_dry_run_shows_everything_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "--epochs", "11", "--dry-run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: line[1:] for line in lines if line}
    assert table["epochs"] == ["11", str(get_recipe("demo").epochs)]  # value, instead of
    assert table["seed"] == ["0"]
    assert {field.name for field in fields(get_recipe("demo"))} <= table.keys()
    # By hand: 4 patches of 8 x 8 x 3 and a class token, one block of width 16, 10 classes.
    n, dim = 5, 16
    block = 12 * n * dim * dim + 2 * n * n * dim
    assert table["multiply-adds"][-1] == f"{4 * 192 * dim + block + dim * 10:,}"
    patch_embed, positions = 192 * dim + dim, dim + 5 * dim
    weights = (3 * dim * dim + 3 * dim) + (dim * dim + dim) + (8 * dim * dim + 5 * dim) + 3 * 2 * dim
    assert table["parameters"] == [f"{patch_embed + positions + weights + dim * 10 + 10:,}"]
    assert table["updates"] == ["55"]
    assert table["training"] == ["images", "40"]
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_of_the_paper_resolves_with_its_own_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "imagenet_swin_tiny", "--data", "fashion", "--dry-run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: line[1:] for line in lines if line}
    assert table["model"] == ["vca_swin_tiny_patch4_224"]
    assert table["clip_grad"] == ["5.0"]
    assert table["data"] == ["fashion", "ILSVRC/imagenet-1k"]
    assert table["updates"] == [f"{300 * (10_000 // 1024):,}"]
    # Swin's stem, three downsamplings, 96 to 768 channels: more than 27 M weights without the 1000 classes.
    assert int(table["parameters"][0].replace(",", "")) > 27_000_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dem"], "no recipe 'dem'; did you mean demo?"),
        (["--epochs", "3"], "The recipe comes first"),
        (["demo", "--epochs", "0"], "epochs=0"),
        (["demo", "--optimizer", "adamm"], "adamw"),
        (["demo", "--model", "vca_diet_tiny_patch16_224"], "did you mean vca_deit_tiny_patch16_224"),
        (["demo", "--model-args", "attention=mhas", "img_size=32"], "ttention 'mhas'"),
        (["demo", "--model-args", "contrast=3"], "contrast"),
        (["demo", "--data", "cifra"], "cifra"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, *(["--output", str(tmp_path / "run")] if words[0] == "demo" else [])]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_empty_folder_of_images_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    assert main(["train", "demo", "--data", str(tmp_path / "images"), "--output", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path / "images") in err
    assert err.count("\n") == 1
