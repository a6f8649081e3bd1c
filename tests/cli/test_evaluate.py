import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from tiny import TINY

from lineardiff.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that was validated on all of the validation images."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    assert main(["train", *TINY, "--output", str(folder)]) == 0
    return folder


def scores(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(["evaluate", *words, "--workers", "0", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_scores_as_it_did_at_the_end_of_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((run / "summary.json").read_text())
    found = scores(capsys, str(run))
    assert (found["top1"], found["top5"]) == (summary["top1"], summary["top5"])
    assert found["loss"] == pytest.approx(summary["loss"], rel=1e-5)
    assert (found["images"], found["data"], found["split"]) == (2000, "fashion", "validation")
    checkpoint = next((run / "checkpoints").glob("step-*"))
    assert scores(capsys, str(checkpoint)) == found
    assert scores(capsys, str(checkpoint / "model.safetensors")) == found


def test_the_table_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = scores(capsys, str(run))
    assert main(["evaluate", str(run), "--workers", "0"]) == 0
    rows = dict(line.split() for line in capsys.readouterr().out.splitlines()[2:])
    assert rows == {
        "top1": f"{found['top1']:.2f}",
        "top5": f"{found['top5']:.2f}",
        "loss": f"{found['loss']:.4f}",
        "images": "2,000",
    }


def test_weights_alone_need_their_config_but_not_their_recipe(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(run / "model.safetensors", tmp_path)
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "neither recipe.json nor config.json" in capsys.readouterr().err
    shutil.copy(run / "config.json", tmp_path)
    assert main(["evaluate", str(tmp_path)]) == 2
    assert "--data" in capsys.readouterr().err
    assert scores(capsys, str(tmp_path), "--data", "fashion") == scores(capsys, str(run))


@pytest.mark.parametrize("nesting", ["", "model", "state_dict"])
def test_weights_of_a_named_model_may_be_a_pth_file(
    tmp_path: Path, nesting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        for number in range(3):
            (tmp_path / split / str(number)).mkdir(parents=True)
            Image.new("RGB", (40, 40), (80 * number, 0, 0)).save(tmp_path / split / str(number) / "a.png")
    model = timm.create_model("lcnet_035", num_classes=3)
    weights = model.state_dict()
    torch.save({nesting: weights, "epoch": 3} if nesting else weights, tmp_path / "weights.pth")
    safetensors.torch.save_file(weights, tmp_path / "weights.safetensors")
    words = ["--model", "lcnet_035", "--data", str(tmp_path), "--checkpoint"]
    expected = scores(capsys, *words, str(tmp_path / "weights.safetensors"))
    assert scores(capsys, *words, str(tmp_path / "weights.pth")) == expected


def test_bad_checkpoints_are_one_line_and_exit_code_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    short.mkdir()
    for name in ("recipe.json", "config.json", "model.safetensors"):
        data = (run / name).read_bytes()
        (short / name).write_bytes(data[: len(data) // 2] if name == "model.safetensors" else data)
    other = ["--model", "vit_tiny_patch16_224", "--data", "fashion", "--checkpoint"]
    junk, pickled = tmp_path / "junk.pth", tmp_path / "pickled.pth"
    junk.write_bytes(b"junk")
    torch.save({"state_dict": {}, "path": tmp_path}, pickled)
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    for words, message in [
        ([str(tmp_path / "none")], "does not exist"),
        ([str(run.parent)], "is not a run"),
        ([str(short)], f"{short}/model.safetensors is damaged"),
        ([str(broken)], "does not say"),
        ([*other, str(run / "model.safetensors")], "weights of another model"),
        ([*other, str(run / "none.safetensors")], "none.safetensors does not exist"),
        (["--model", "vit_tny_patch16_224", *other[2:], str(run)], "did you mean vit_tiny_patch16_224"),
        (["--model", "vit_tiny_patch16_224"], "--checkpoint"),
        ([], "run folder"),
        ([str(run), "--data", "nowhere"], "nowhere"),
        ([str(run), "--split", "test"], "'test'"),
        ([str(run), "--model", "vit_tiny_patch16_224"], "--model cannot be combined with a run"),
        ([str(run), "--checkpoint", str(pickled)], "--checkpoint cannot be combined with a run"),
        ([*other, str(junk)], "junk.pth cannot be read as weights"),
        ([*other, str(pickled)], "pickled.pth cannot be read as weights"),
        ([*other, str(tmp_path)], f"{tmp_path} is a folder; expected a .safetensors or .pth file"),
        ([str(run), "--device", "gpu7"], "device 'gpu7'"),
    ]:
        capsys.readouterr()
        assert main(["evaluate", *words]) == 2, words
        err = capsys.readouterr().err
        assert message in err
        assert "remove" not in err
        assert "delete" not in err
        assert err.count("\n") == 1, err


def test_data_with_other_classes_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(tmp_path / split / name / "a.png")
    assert main(["evaluate", str(run), "--data", str(tmp_path), "--workers", "0"]) == 2
    err = capsys.readouterr().err
    assert "10: T-shirt/top, Trouser, Pullover, ..." in err
    assert "2: cat, dog" in err


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_damaged_image_is_named_or_skipped(
    run: Path,
    tmp_path: Path,
    workers: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    classes = json.loads((run / "config.json").read_text())["classes"]
    names = [name.replace("/", "-") for name in classes]
    for split in ("train", "val"):
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(tmp_path / split / name / "a.png")
    (tmp_path / "val" / "Bag" / "a.png").write_bytes(b"no image")
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text()) | {"classes": sorted(names)}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    words = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path), "--workers", workers, "--json"]
    capsys.readouterr()
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("lineardiff: error: ")
    assert str(tmp_path / "val" / "Bag" / "a.png") in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert main([*words, "--bad-images", "skip"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 9
    assert "1 of 10 images were skipped" in caplog.text
