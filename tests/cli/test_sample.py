import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipeline import NAMES, SETTINGS, save_pipeline, save_vae

from lineardiff.cli import main
from lineardiff.evaluate import open_batches

pytest.importorskip("diffusers")

from lineardiff.pipelines.pipeline import LinearDiffPipeline
from lineardiff.pipelines.sample_folder import Plan


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_pipeline(folder / "pipeline")
    return folder / "pipeline"


def sample(model: Path, output: Path, *words: object) -> dict[str, np.ndarray]:
    assert main(["sample", str(model), "--output", str(output), *SETTINGS, *map(str, words)]) == 0
    return pictures(output)


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))}


def check_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    # a batch of another size may round a pixel the other way
    assert all(np.abs(found[name].astype(int) - expected[name]).max() <= 1 for name in expected)


def test_an_image_is_what_the_pipeline_makes_of_its_class_and_noise(
    pipeline_folder: Path, tmp_path: Path
) -> None:
    found = sample(pipeline_folder, tmp_path / "a", "--labels", "coat", "0", "--num", "5", "--seed", "3")
    assert list(found) == [f"{i:06d}.png" for i in range(5)]
    pipeline = LinearDiffPipeline.from_pretrained(pipeline_folder)
    plan = Plan(5, [2, 0], cycle=True, seed=3)
    for index, label in enumerate([2, 0, 2, 0, 2]):
        assert plan.label(index) == label
        (image,) = pipeline([label], generator=plan.generator(index), num_inference_steps=2).images
        assert np.abs(found[f"{index:06d}.png"].astype(int) - np.asarray(image)).max() <= 1
    assert not np.array_equal(found["000000.png"], found["000002.png"])
    # one image of each label, where nothing says how many; numbers and names are the same
    named = sample(pipeline_folder, tmp_path / "b", "--labels", "2", "boot", "--seed", "3")
    check_equal(named, {name: found[name] for name in list(found)[:2]})
    assert not np.array_equal(
        sample(pipeline_folder, tmp_path / "c", "--num", 1)["000000.png"], found["000000.png"]
    )


def test_classes_and_noise_follow_from_seed_and_index() -> None:
    plan = Plan(3000, range(3), cycle=False, seed=0)
    labels = [plan.label(i) for i in range(3000)]
    assert labels == [Plan(9, range(3), cycle=False, seed=0).label(i) for i in range(3000)]
    assert [900 < labels.count(k) < 1100 for k in range(3)] == [True] * 3  # 4 standard deviations
    assert labels != [Plan(3000, range(3), cycle=False, seed=1).label(i) for i in range(3000)]
    firsts = {float(torch.randn((), generator=plan.generator(i))) for i in range(3000)}
    firsts |= {float(torch.randn((), generator=Plan(1, [0], True, 1).generator(i))) for i in range(3000)}
    assert len(firsts) > 5990  # float32 numbers may coincide, seeds do not


def test_neither_the_batch_size_nor_the_processes_matter(pipeline_folder: Path, tmp_path: Path) -> None:
    words = ["--num-images", "7", "--method", "sde-euler", "--guidance", "2"]
    one = sample(pipeline_folder, tmp_path / "one", *words, "--batch-size", 7)
    check_equal(sample(pipeline_folder, tmp_path / "small", *words, "--batch-size", 3), one)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lineardiff"]
    command = ["sample", str(pipeline_folder), "--output", str(tmp_path / "two"), *SETTINGS, *words]
    done = subprocess.run(
        [sys.executable, *torchrun, *command, "--npz", str(tmp_path / "two.npz")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 2 processes" in done.stderr
    assert done.stdout.count("wrote 7 images") == 1
    check_equal(pictures(tmp_path / "two"), one)
    with np.load(tmp_path / "two.npz") as file:
        assert np.array_equal(file["arr_0"][..., 1], np.stack(list(pictures(tmp_path / "two").values())))


def test_what_sigkill_left_is_gone_on_with(pipeline_folder: Path, tmp_path: Path) -> None:
    command = [
        "sample",
        str(pipeline_folder),
        "--output",
        str(tmp_path / "killed"),
        *SETTINGS,
        "--num",
        "200",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "lineardiff", *command, "--batch-size", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "000003.png").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("0*[0-9].png")}
    assert 4 <= len(made) < 200
    (tmp_path / "killed" / "000199.unfinished.png").write_bytes(b"killed here")
    whole = sample(pipeline_folder, tmp_path / "killed", "--num", 200, "--batch-size", 100)
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())
    check_equal(whole, sample(pipeline_folder, tmp_path / "whole", "--num", 200, "--batch-size", 100))


def test_npz_and_grid(pipeline_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--per-class", "2", "--npz", tmp_path / "new" / "a.npz", "--grid", tmp_path / "grid.png"]
    found = list(sample(pipeline_folder, tmp_path / "a", *words).values())
    captured = capsys.readouterr()
    assert "6/6" in captured.err
    assert "image/s" in captured.err
    assert captured.out == f"wrote 6 images in {tmp_path / 'a'}, {words[3]}, {words[5]}\n"
    with np.load(tmp_path / "new" / "a.npz") as file:
        assert (file["arr_0"].shape, file["arr_0"].dtype) == ((6, 8, 8, 3), np.uint8)
        assert np.array_equal(file["arr_0"], np.stack([np.stack([image] * 3, -1) for image in found]))
        assert file["arr_1"].tolist() == [0, 1, 2, 0, 1, 2]
    (batch,) = open_batches(tmp_path / "new" / "a.npz")
    assert np.array_equal(batch[:, 0].numpy(), np.stack(found))
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    assert grid.shape == (2 * 10 + 2, 3 * 10 + 2, 3)  # classes are columns
    assert np.array_equal(grid[12:20, 22:30, 0], found[5])
    # the images are scored, settings.json is not one
    assert open_batches(tmp_path / "a").images == 6


def test_latents_need_an_autoencoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_pipeline(tmp_path / "model", in_channels=4)
    save_vae(tmp_path / "vae")
    words = ["sample", str(tmp_path / "model"), "--output", str(tmp_path / "a"), "--num", "2", *SETTINGS]
    assert main(words) == 2
    assert "need a VAE" in capsys.readouterr().err
    found = sample(tmp_path / "model", tmp_path / "b", "--num", 2, "--vae", tmp_path / "vae")
    assert [image.shape for image in found.values()] == [(16, 16, 3)] * 2


def test_other_settings_are_refused(
    pipeline_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample(pipeline_folder, tmp_path / "a", "--num", 2)
    sample(pipeline_folder, tmp_path / "a", "--num", 2, "--batch-size", 1)
    save_pipeline(tmp_path / "other", prediction="noise")
    base = ["--output", str(tmp_path / "a"), *SETTINGS]
    for model, words, told in [
        (pipeline_folder, ["--num", "3"], "num was 2 and is now 3"),
        (pipeline_folder, ["--num", "2", "--seed", "1"], "seed was 0 and is now 1"),
        (pipeline_folder, ["--num", "2", "--guidance", "2"], "guidance was 1.0 and is now 2.0"),
        (pipeline_folder, ["--per-class", "1"], "classes was 'random' and is now [0, 1, 2]"),
        (tmp_path / "other", ["--num", "2"], "weights was "),
    ]:
        capsys.readouterr()
        assert main(["sample", str(model), *base, *words]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert err.count("\n") == 1
    (tmp_path / "a" / "settings.json").write_text("{")
    assert main(["sample", str(pipeline_folder), *base, "--num", "2"]) == 2
    assert "settings.json is damaged" in capsys.readouterr().err


def test_mistakes_are_one_line_and_exit_code_2(
    pipeline_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    save_pipeline(tmp_path / "damaged")
    (weights,) = (tmp_path / "damaged").rglob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-10])
    run = str(pipeline_folder)
    for words, message in [
        ([str(tmp_path / "none")], "does not exist"),
        ([str(tmp_path / "empty")], "holds no pipeline"),
        ([str(tmp_path / "damaged")], "cannot be loaded"),
        (["someone/garments"], "the pipeline someone/garments cannot be loaded"),
        ([run, "--vae", "someone/vae"], "the autoencoder someone/vae cannot be loaded"),
        ([run, "--vae", str(tmp_path / "none")], "none does not exist"),
        ([run, "--labels", "3"], "a number from 0 to 2, or a name"),
        ([run, "--labels", "cot"], "did you mean coat"),
        ([run, "--method", "ddim"], "unknown method of flow 'ddim'"),
        ([run, "--num", "2", "--per-class", "2"], "pass one of them"),
        ([run, "--num", "0"], "--num-images 0; expected at least 1"),
        ([run, "--seed", "-1"], "--seed -1"),
        ([run, "--batch-size", "0"], "--batch-size 0"),
        ([run, "--guidance", "nan"], "--guidance nan"),
        ([run, "--guidance-channels", "0"], "channels=0"),
        ([run, "--guidance-interval", "0.5", "nan"], "--guidance-interval"),
        ([run, "--steps", "0"], "num_inference_steps=0"),
        ([run, "--steps", "nan"], "nan"),
        ([run, "--npz", "a.npy"], "ends in .npz"),
        ([run, "--grid", "a.jpg"], "ends in .png"),
        ([run, "--grid", str(tmp_path / "out" / "grid.png")], "count as one of them"),
        ([run, "--output", str(tmp_path / "file")], "is a file"),
        ([run, "--device", "gpu7"], "device 'gpu7' is not available"),
    ]:
        capsys.readouterr()
        assert main(["sample", "--output", str(tmp_path / "out"), *words]) == 2, words
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        lines = [line for line in err.splitlines() if not line.startswith("sampling:") and line.strip()]
        assert [line.split(": ")[:2] for line in lines] == [["lineardiff", "error"]], err
    (tmp_path / "b").mkdir()
    assert main(["sample", run, "--output", str(tmp_path / "b"), *SETTINGS, "--num", "2"]) == 0
    (tmp_path / "b" / "000001.png").write_bytes(b"\x89PNG")
    words = ["--num", "2", "--npz", str(tmp_path / "b.npz")]
    assert main(["sample", run, "--output", str(tmp_path / "b"), *SETTINGS, *words]) == 2
    assert "000001.png is damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("b*.npz"))


def test_settings_say_what_was_sampled(pipeline_folder: Path, tmp_path: Path) -> None:
    sample(pipeline_folder, tmp_path / "a", "--labels", "bag", "--guidance-interval", "0.1", "0.9")
    settings = json.loads((tmp_path / "a" / "settings.json").read_text())
    assert settings.pop("weights")
    assert settings == {
        "num": 1,
        "classes": [NAMES.index("bag")],
        "steps": 2,
        "guidance": 1.0,
        "guidance_channels": None,
        "guidance_interval": [0.1, 0.9],
        "method": None,
        "vae": None,
        "seed": 0,
        "precision": "no",
    }


def test_a_missing_package_names_the_extra(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lineardiff.pipelines.pipeline", None)
    monkeypatch.delitem(sys.modules, "lineardiff.pipelines.pipeline")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert main(["sample", str(pipeline_folder), "--output", str(tmp_path / "a")]) == 2
    assert "diffusers is not installed; run: " in capsys.readouterr().err


def test_neither_import_nor_help_needs_diffusers() -> None:
    code = (
        "import sys, lineardiff; from lineardiff.cli import main; main(['--help']); main(['sample', '--help']);"
        "main(['latents', '--help']); print([m for m in ('diffusers', 'torchdiffeq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--per-class" in done.stdout
