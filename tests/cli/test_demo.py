"""The demo at the scale of a test: 40 + 30 images of 16 pixels, one epoch, measurements of a moment."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from lineardiff.cli.demo import compare, summary_table
from lineardiff.data import Transformed, eval_transform, open_images, subset
from lineardiff.recipes import get_recipe
from lineardiff.visualize import read_curve

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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The folder of a tiny demo and its results."""
    output = tmp_path_factory.mktemp("demo")
    return output, compare(RECIPE, output=output, scaling_sizes=(32,), seconds=0.0)


def test_tiny_demo_writes_its_report_and_two_runs(demo: tuple[Path, dict]) -> None:
    output, results = demo
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    with Image.open(output / "curves.png") as curves:
        assert curves.format == "PNG"
        assert min(curves.size) > 300
    assert "<title>MHSA and VCA, side by side</title>" in (output / "report.html").read_text("utf-8")
    for arm in ("mhsa", "vca"):
        assert {"model.safetensors", "config.json", "recipe.json", "summary.json"} <= {
            path.name for path in (output / arm).iterdir()
        }
    assert str(output.parent) not in (output / "report.html").read_text("utf-8")


def test_tiny_demo_arms_differ_in_attention_only(demo: tuple[Path, dict]) -> None:
    output, _ = demo
    recipes = [json.loads((output / arm / "recipe.json").read_text()) for arm in ("mhsa", "vca")]
    assert [recipe.pop("model_args")[-1] for recipe in recipes] == ["attention=mhsa", "attention=vca"]
    assert recipes[0] == recipes[1]
    steps = [read_curve(output / arm / "train.csv")["step"] for arm in ("mhsa", "vca")]
    assert steps == [[1, 2, 3, 4, 5]] * 2


def test_tiny_demo_numbers_are_those_of_the_weights(demo: tuple[Path, dict]) -> None:
    output, results = demo
    split = subset(open_images("fashion", "validation"), limit=30, seed=RECIPE.seed)
    samples = Transformed(split, eval_transform(image_size=16, crop_pct=RECIPE.crop_pct))
    images = torch.stack([samples[i][0] for i in range(30)])
    labels = torch.tensor([samples[i][1] for i in range(30)])
    right = {}
    for arm in ("mhsa", "vca"):
        model = timm.create_model(RECIPE.model, img_size=16, num_classes=10, attention=arm, **SIZE).eval()
        model.load_state_dict(load_file(output / arm / "model.safetensors"))
        with torch.no_grad():
            right[arm] = model(images).argmax(-1) == labels
        assert results["arms"][arm]["top1"] == pytest.approx(100 * right[arm].float().mean().item())
        assert results["arms"][arm]["parameters"] == sum(p.numel() for p in model.parameters())
        assert results["arms"][arm]["training"]["median"] > 0
    assert results["agreement"]["only_second_right"] == int((right["vca"] & ~right["mhsa"]).sum())
    assert sum(results["agreement"].values()) == sum(row["images"] for row in results["classes"]) == 30
    for row in results["classes"]:
        mine = labels == split.classes.index(row["name"])
        if mine.any():
            assert row["top1"]["vca"] == pytest.approx(100 * right["vca"][mine].float().mean().item())
    # 16 patches and a class token of width 16 against 64: the MHSA arm by the closed form of a ViT.
    n, dim = 65, 16
    larger = results["scaling"][0]
    assert (larger["image_size"], larger["patches"]) == (32, 64)
    cost = 64 * 48 * dim + 12 * n * dim * dim + 2 * n * n * dim + dim * 10
    assert larger["arms"]["mhsa"]["multiply_adds"] == cost


def test_tiny_demo_does_not_train_again_what_is_finished(
    demo: tuple[Path, dict], caplog: pytest.LogCaptureFixture
) -> None:
    output, results = demo
    before = {arm: (output / arm / "model.safetensors").stat().st_mtime_ns for arm in ("mhsa", "vca")}
    with caplog.at_level(logging.INFO, "lineardiff"):
        again = compare(RECIPE, output=output, scaling_sizes=(), seconds=0.0)
    assert caplog.text.count("is finished and is not trained again") == 2
    assert before == {arm: (output / arm / "model.safetensors").stat().st_mtime_ns for arm in ("mhsa", "vca")}
    assert again["arms"]["vca"]["top1"] == results["arms"]["vca"]["top1"]
    with pytest.raises(ValueError, match="epochs was 1 and is now 2"):
        compare(replace(RECIPE, epochs=2), output=output, scaling_sizes=(), seconds=0.0)


def test_tiny_demo_table_shows_the_measured_numbers(demo: tuple[Path, dict]) -> None:
    _, results = demo
    rows = {line.split("  ")[0]: line for line in summary_table(results).splitlines()}
    for arm in results["arms"].values():
        assert f"{arm['top1']:.2f}" in rows["top-1 (%)"]
        assert f"{arm['parameters']:,}" in rows["parameters"]
        assert f"{arm['multiply_adds']:,}" in rows["multiply-adds"]
        assert f"{arm['training']['median']:,.0f} (" in rows["training, images/s"]
        assert f"{arm['inference']['median']:,.0f} (" in rows["inference, images/s"]
