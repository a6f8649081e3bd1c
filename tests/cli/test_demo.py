"""The demo on 40 + 30 images of 16 pixels: one epoch, and measurements of a moment."""

import json
import logging
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy.stats import binomtest

from lineardiff.cli import main
from lineardiff.cli.demo import compare
from lineardiff.data import Transformed, eval_transform, open_images, subset
from lineardiff.recipes import get_recipe
from lineardiff.runs import load_run
from lineardiff.train import ClassificationTask
from lineardiff.visualize import compare_models

SIZE = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "contrast_grid": (2, 2)}
RECIPE = replace(
    get_recipe("demo"),
    model_args=tuple(f"{name}={value}" for name, value in {"img_size": 16, **SIZE}.items()),
    image_size=16,
    epochs=1,
    warmup_epochs=0,
    batch_size=8,
    log_every=1,
    train_limit=40,
    validation_limit=30,
    workers=0,
)


ARMS = ("mhsa", "mhsa_conv", "vca")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The folder of a tiny demo and its results."""
    output = tmp_path_factory.mktemp("demo")
    return output, compare(RECIPE, output=output, scaling_sizes=(32,), seconds=0.0)[0]


def weights_of(output: Path) -> dict[str, bytes]:
    return {arm: (output / arm / "model.safetensors").read_bytes() for arm in ARMS}


def test_tiny_demo_writes_its_report_and_three_runs(demo: tuple[Path, dict]) -> None:
    output, results = demo
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    with Image.open(output / "curves.png") as curves:
        assert curves.format == "PNG"
        assert min(curves.size) > 300
    page = (output / "report.html").read_text("utf-8")
    assert "<title>MHSA, MHSA + conv, VCA: a comparison</title>" in page
    assert str(output.parent) not in page
    for arm in ARMS:
        assert {"model.safetensors", "config.json", "recipe.json", "summary.json"} <= {
            path.name for path in (output / arm).iterdir()
        }


def test_tiny_demo_arms_differ_in_attention_only(demo: tuple[Path, dict]) -> None:
    output, _ = demo
    recipes = [json.loads((output / arm / "recipe.json").read_text()) for arm in ARMS]
    common = {f"{name}={value}" for name, value in SIZE.items() if name != "contrast_grid"} | {"img_size=16"}
    expected = [{f"attention={arm}"} | common for arm in ARMS]
    expected[2].add("contrast_grid=(2, 2)")
    assert [set(recipe.pop("model_args")) for recipe in recipes] == expected
    assert recipes[0] == recipes[1] == recipes[2]
    steps = [[row["step"] for row in load_run(output / arm).curves().train] for arm in ARMS]
    assert steps == [[1, 2, 3, 4, 5]] * 3


def test_tiny_demo_numbers_are_those_of_the_weights(demo: tuple[Path, dict]) -> None:
    output, results = demo
    split = subset(open_images("fashion", "validation"), limit=30, seed=RECIPE.seed)
    samples = Transformed(split, eval_transform(image_size=16, crop_pct=RECIPE.crop_pct))
    images = torch.stack([samples[i][0] for i in range(30)])
    labels = torch.tensor([samples[i][1] for i in range(30)])
    right = {}
    for arm in ARMS:
        model = timm.create_model(RECIPE.model, img_size=16, num_classes=10, attention=arm, **SIZE).eval()
        model.load_state_dict(load_file(output / arm / "model.safetensors"))
        with torch.no_grad():
            guesses = model(images).argmax(-1)
        right[arm] = guesses == labels
        assert results["arms"][arm]["top1"] == pytest.approx(100 * right[arm].float().mean().item())
        assert results["arms"][arm]["parameters"] == sum(p.numel() for p in model.parameters())
        assert results["arms"][arm]["train"]["median"] > 0
        counted = torch.zeros(10, 10, dtype=torch.long)
        for label, guess in zip(labels, guesses, strict=True):
            counted[label, guess] += 1
        assert results["confusion"][arm] == counted.tolist()
    for comparison in results["comparisons"]:
        wins = int((right[comparison["second"]] & ~right[comparison["first"]]).sum())
        losses = int((right[comparison["first"]] & ~right[comparison["second"]]).sum())
        assert comparison["agreement"]["only_second_right"] == wins
        assert comparison["top1"] == pytest.approx(100 * (wins - losses) / 30)
        p_value = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        assert comparison["p_value"] == pytest.approx(p_value)
        assert comparison["within_noise"] == (p_value >= 0.05)
    pairs = [(comparison["first"], comparison["second"]) for comparison in results["comparisons"]]
    assert pairs == [("mhsa_conv", "vca"), ("mhsa", "vca"), ("mhsa", "mhsa_conv")]
    assert sum(row["images"] for row in results["class_scores"]) == 30
    for row in results["class_scores"]:
        mine = labels == split.classes.index(row["name"])
        assert row["top1"]["vca"] == pytest.approx(100 * right["vca"][mine].float().mean().item())
    # 64 patches and a class token of width 16: the MHSA arm by the closed form of a ViT.
    n, dim = 65, 16
    larger = results["scaling"][0]
    assert (larger["image_size"], larger["patches"]) == (32, 64)
    cost = 64 * 48 * dim + 12 * n * dim * dim + 2 * n * n * dim + dim * 10
    assert larger["arms"]["mhsa"]["multiply_adds"] == cost


def test_tiny_demo_does_not_train_again_what_is_finished(
    demo: tuple[Path, dict], caplog: pytest.LogCaptureFixture
) -> None:
    output, results = demo
    before = {arm: (output / arm / "model.safetensors").stat().st_mtime_ns for arm in ARMS}
    with caplog.at_level(logging.INFO, "lineardiff"):
        again, _ = compare(RECIPE, output=output, scaling_sizes=(), seconds=0.0)
    assert caplog.text.count("is finished and is not trained again") == 3
    assert before == {arm: (output / arm / "model.safetensors").stat().st_mtime_ns for arm in ARMS}
    assert again["arms"]["vca"]["top1"] == results["arms"]["vca"]["top1"]
    with pytest.raises(ValueError, match="epochs was 1 and is now 2"):
        compare(replace(RECIPE, epochs=2), output=output, scaling_sizes=(), seconds=0.0)


def interrupt(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("moment", ["training of the second model", "measuring", "report"])
def test_ctrl_c_ends_in_one_line_and_a_rerun_gives_the_same_numbers(
    moment: str,
    demo: tuple[Path, dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "demo"
    tiny = partial(compare_models, scaling_sizes=(), seconds=0.0)
    monkeypatch.setattr("lineardiff.cli.demo.demo", lambda: RECIPE)
    monkeypatch.setattr("lineardiff.visualize.compare_models", tiny)
    with monkeypatch.context() as broken:
        if moment == "measuring":
            broken.setattr("lineardiff.visualize.compare_models", interrupt)
        elif moment == "report":
            broken.setattr("lineardiff.visualize.comparison.report_html", interrupt)
        else:
            loss, calls = ClassificationTask.loss, []

            def third_update(task: ClassificationTask, *arguments: object) -> torch.Tensor:
                if "attention=mhsa_conv" in task.recipe.model_args:
                    calls.append(1)
                    if len(calls) == 3:
                        interrupt()
                return loss(task, *arguments)

            broken.setattr(ClassificationTask, "loss", third_update)
        assert main(["demo", "--output", str(output)]) == 130
        line = capfd.readouterr().err.splitlines()[-1]
        assert line.startswith("lineardiff: interrupted")
        assert "rerun the command to resume" in line
        assert str(output) in line
    assert (output / "mhsa" / "model.safetensors").exists()
    assert not (output / "results.json").exists()

    assert main(["demo", "--output", str(output), "--markdown"]) == 0
    printed = capfd.readouterr().out
    assert "| top-1 (%) | " in printed
    assert f"evaluate {output / 'vca'}" in printed
    complete, results = demo
    assert weights_of(output) == weights_of(complete)
    again = json.loads((output / "results.json").read_text())
    assert again["confusion"] == results["confusion"]
    assert not [path for path in output.rglob("*") if "unfinished" in path.name]


def test_the_seed_is_a_flag_and_belongs_to_its_folder(
    demo: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = demo
    monkeypatch.setattr("lineardiff.cli.demo.demo", lambda: RECIPE)
    assert main(["demo", "--output", str(output), "--seed", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lineardiff: error: ")
    assert "seed was 0 and is now 1" in error
