"""Reading a run: its model, curves and records, and what is refused with a sentence."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from toy import TINY, TOY, ToyTask, rows

import lineardiff
from lineardiff.runs import Run, build_model, load_run
from lineardiff.runs.lock import locked
from lineardiff.train import ClassificationTask, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ClassificationTask]:
    task = ClassificationTask(replace(TINY, ema_decay=0.9, validation_limit=8))
    train(task, output=tmp_path_factory.mktemp("runs") / "tiny")
    return tmp_path_factory.getbasetemp() / "runs0/tiny", task


def test_a_run_gives_its_model_curves_and_records(trained: tuple[Path, ClassificationTask]) -> None:
    folder, task = trained
    run = lineardiff.load_run(folder)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    task.model.load_state_dict(saved)
    model = run.model()
    assert not model.training
    assert torch.equal(model(images), task.model.eval()(images))
    assert run.recipe() == task.recipe
    assert run.classes == task.classes
    assert run.summary() == json.loads((folder / "summary.json").read_text())
    assert run.curves().train == rows(folder / "train.csv")
    assert run.curves().validation == rows(folder / "validation.csv")
    assert [path.name for path in run.checkpoints()] == ["step-00000008", "step-00000012"]
    assert run.transform()(task.validation[0][0]).shape == (3, 16, 16)


def test_a_checkpoint_gives_the_averaged_weights_and_a_file_its_own(
    trained: tuple[Path, ClassificationTask],
) -> None:
    folder = trained[0]
    checkpoint = folder / "checkpoints/step-00000012"
    for path, expected in (
        (checkpoint, "ema"),
        (checkpoint / "model.safetensors", "model"),
        (checkpoint / "ema.safetensors", "ema"),
    ):
        run = load_run(path)
        assert run.path == folder
        weights = safetensors.torch.load_file(checkpoint / f"{expected}.safetensors")
        assert all(torch.equal(weights[name], value) for name, value in run.model().state_dict().items())


def test_a_run_that_is_not_there_or_not_finished(
    trained: tuple[Path, ClassificationTask], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        Run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not a run.*neither recipe\.json nor config\.json"):
        Run(tmp_path)
    part = tmp_path / "part"
    shutil.copytree(trained[0], part)
    (part / "model.safetensors").unlink()
    (part / "summary.json").unlink()
    for read in (Run(part).model, Run(part).summary):
        with pytest.raises(ValueError, match=r"has not finished.*checkpoints/step-"):
            read()
    assert Run(part / "checkpoints/step-00000008").model() is not None
    with pytest.raises(ValueError, match="classifier"):
        Run(part).pipeline()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", None),
        ("model_args", ["depth=2"]),
        ("classes", "cat"),
        ("classes", [1, 2]),
        ("image_size", "32"),
        ("image_size", None),
        ("mean", [0.5]),
        ("mean", [0.5, 0.5, float("nan")]),
        ("std", [0.5, 0.5, 0.0]),
        ("crop_pct", float("inf")),
        ("interpolation", "best"),
        ("weights", 3),
    ],
)
def test_a_wrong_value_in_config_is_named(
    trained: tuple[Path, ClassificationTask], tmp_path: Path, name: str, value: Any
) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(trained[0] / file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ValueError, match=rf"config\.json: {name}=.*expected"):
        Run(tmp_path).model()
    del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"config\.json does not say {name}"):
        Run(tmp_path).model()


@pytest.mark.parametrize("text", ["", "null", "[]", '"32"', "{", "3"])
@pytest.mark.parametrize("name", ["config.json", "recipe.json", "summary.json"])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / name).write_text(text)
    run = Run(tmp_path)
    with pytest.raises(ValueError, match=rf"{name.replace('.', '[.]')} (is damaged|holds)"):
        {"config.json": run.config, "recipe.json": run.recipe, "summary.json": run.summary}[name]()


@pytest.mark.parametrize(
    "model_args",
    [
        {"depth": 0},
        {"patch_size": 0},
        {"patch_size": -4},
        {"num_heads": 0},
        {"embed_dim": "64"},
        {"weight_init": "best"},
        {"unknown": 3},
        {"depth": None, "img_size": 2.5},
    ],
)
@pytest.mark.parametrize("name", ["vca_deit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_impossible_models_are_one_sentence(name: str, model_args: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as raised:
        build_model(name, model_args, num_classes=2, image_size=32)
    assert str(raised.value).count("\n") == 0
    assert any(key in str(raised.value) for key in model_args)


def test_no_stochastic_depth_means_none_even_where_the_model_has_it_by_default() -> None:
    from timm.layers import DropPath

    model = build_model("vca_swin_tiny_patch4_224", {}, num_classes=3, image_size=224)
    assert not [module for module in model.modules() if isinstance(module, DropPath)]
    assert (
        build_model("lcnet_035", {}, num_classes=3, image_size=224).num_classes == 3
    )  # it takes no drop_path_rate


class Changed(ToyTask):
    """The toy task with another record of its data."""

    def __init__(self, **entry: Any) -> None:
        super().__init__()
        self.entry = entry

    def data_record(self) -> dict[str, Any]:
        return {"train": {**super().data_record()["train"], **self.entry}}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"points": {"label": 0, "images": 41, "checksum": ""}}, "points had 40 images and has 41"),
        ({"points": {"label": 1, "images": 40, "checksum": ""}}, "points was class 0 and is class 1"),
        ({"points": {"label": 0, "images": 40, "checksum": "x"}}, "points has other images"),
        ({"more": {"label": 1, "images": 1, "checksum": ""}}, "more is new"),
    ],
)
def test_changed_data_are_named_and_may_be_accepted(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    train(ToyTask(), output=tmp_path)
    with pytest.raises(ValueError, match=f"train: {message}.*accept_changed_data"):
        train(Changed(**entry), output=tmp_path)
    train(Changed(**entry), output=tmp_path, accept_changed_data=True)
    train(Changed(**entry), output=tmp_path)  # the new record replaced the old one


HOLD = """
import sys, time
from pathlib import Path
from lineardiff.runs.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_use_is_refused_with_process_and_host_and_free_after_a_kill(tmp_path: Path) -> None:
    import socket

    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "train.lock"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=f"process {holder.pid} on {socket.gethostname()}"):
            train(ToyTask(), output=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["train.lock"]
    finally:
        holder.kill()
        holder.wait()
    train(ToyTask(), output=tmp_path)


def test_two_runs_of_one_process_cannot_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "train.lock"), pytest.raises(ValueError, match="this process"):
        train(ToyTask(TOY), output=tmp_path)
    train(ToyTask(TOY), output=tmp_path)
