import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipeline import save_vae
from torchvision.transforms.functional import pil_to_tensor

from lineardiff.cli import main
from lineardiff.data import center_crop
from lineardiff.data.latents import open_latents

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    save_vae(folder / "vae")
    for i in range(5):
        path = folder / "images" / "train" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (20, 41, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def words(work: Path, output: Path, *more: object) -> list[str]:
    given = [work / "images", "--vae", work / "vae", "--output", output, "--size", 16, "--shard-size", 2]
    return ["latents", *map(str, [*given, "--workers", "0", "--device", "cpu", *more])]


def test_moments_of_adms_crop_and_its_mirror_image(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(work, tmp_path)) == 0
    captured = capsys.readouterr()
    assert "5/5" in captured.err
    assert captured.out == f"wrote {tmp_path}; train on it with --data {tmp_path}\n"
    latents = open_latents(tmp_path)
    assert (len(latents), latents.classes, latents.labels.tolist()) == (5, ("cat", "dog"), [0, 0, 0, 1, 1])
    vae = diffusers.AutoencoderKL.from_pretrained(work / "vae").eval()
    space = {"channels": 4, "downsampling": 2, "scaling_factor": 0.18215, "shift_factor": 0.0}
    assert latents.settings["latent_space"] == space
    image = Image.open(work / "images" / "train" / "dog" / "3.png")
    pixels = pil_to_tensor(center_crop(image, 16))[None] / 127.5 - 1
    for mirrored in (False, True):
        with torch.no_grad():
            expected = vae.encode(pixels.flip(3) if mirrored else pixels).latent_dist.parameters[0]
        torch.testing.assert_close(latents.moments(4, mirrored=mirrored), expected, rtol=1e-4, atol=1e-4)
        assert expected.shape == (8, 8, 8)
    # once more does nothing, half written or missing shards are made again
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")}
    (tmp_path / "shard-00001.safetensors").rename(tmp_path / "shard-00001.unfinished.safetensors")
    assert main(words(work, tmp_path)) == 0
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")}
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == ["shard-00001.safetensors"]


def test_other_images_or_another_autoencoder_of_the_same_name_are_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(work / "images", tmp_path / "images")
    shutil.copytree(work / "vae", tmp_path / "vae")
    assert main(words(tmp_path, tmp_path / "out")) == 0
    (tmp_path / "images" / "train" / "ant").mkdir()
    added = tmp_path / "images" / "train" / "ant" / "0.png"
    shutil.copy(work / "images" / "train" / "cat" / "0.png", added)
    capsys.readouterr()
    assert main(words(tmp_path, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert "number_of_images was 5 and is now 6" in error
    assert "fingerprint_of_images" in error
    shutil.rmtree(added.parent)
    assert main(words(tmp_path, tmp_path / "out")) == 0
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae")
    torch.nn.init.normal_(vae.encoder.conv_in.weight)
    vae.save_pretrained(tmp_path / "vae")
    capsys.readouterr()
    assert main(words(tmp_path, tmp_path / "out")) == 2
    assert "fingerprint_of_vae" in capsys.readouterr().err


def test_two_processes_write_what_one_writes(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(work, tmp_path / "one", "--dtype", "float16")) == 0
    for rank in (1, 0):  # one after the other, so nobody waits
        state = SimpleNamespace(
            process_index=rank, num_processes=2, is_main_process=rank == 0, wait_for_everyone=lambda: None
        )
        (tmp_path / "two").mkdir(exist_ok=True)
        monkeypatch.setattr(
            "lineardiff.jobs.join_processes", lambda device, s=state: (s, torch.device("cpu"))
        )
        capsys.readouterr()
        if rank == 0:  # the main process writes the settings first
            shutil.copy(tmp_path / "one" / "settings.json", tmp_path / "two")
        assert main(words(work, tmp_path / "two", "--dtype", "float16")) == 0
        captured = capsys.readouterr()
        assert captured.out.count("wrote") == (rank == 0)
        assert captured.err.count("encoding (1 of 2 processes)") == 0 if rank else 1
    one, two = sorted((tmp_path / "one").iterdir()), sorted((tmp_path / "two").iterdir())
    assert [(p.name, p.read_bytes()) for p in one] == [(p.name, p.read_bytes()) for p in two]


def test_mistakes_are_one_line_and_exit_code_2(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(work, tmp_path / "done")) == 0
    bad = tmp_path / "bad" / "train" / "cat"
    bad.mkdir(parents=True)
    (bad / "1.png").write_bytes(b"no image")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    for output, more, message in [
        ("done", ["--size", "32"], "size was 16 and is now 32"),
        ("new", ["--vae", "someone/vae"], "the autoencoder someone/vae cannot be loaded"),
        ("new", ["--vae", str(tmp_path / "none")], "none does not exist"),
        ("new", ["--vae", str(tmp_path / "damaged")], "cannot be loaded"),
        ("new", ["--size", "15"], "--size 15; expected a multiple of 2"),
        ("new", ["--size", "0"], "--size 0"),
        ("new", ["--size", "nan"], "nan"),
        ("new", ["--workers", "-1"], "--workers -1"),
        ("new", ["--batch-size", "-1"], "--batch-size -1"),
        ("new", ["--shard-size", "0"], "--shard-size 0"),
        ("new", ["--split", "validation"], "has no validation images"),
        ("new", ["--dtype", "int8"], "int8"),
        ("new", ["--device", "gpu7"], "device 'gpu7' is not available"),
    ]:
        capsys.readouterr()
        assert main(words(work, tmp_path / output, *more)) == 2, more
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.startswith("lineardiff: error: ")
        assert err.count("\n") == 1, err
    assert not (tmp_path / "new").exists()
    assert main(["latents", str(tmp_path / "bad"), *words(work, tmp_path / "b")[2:]]) == 2
    assert "1.png cannot be decoded" in capsys.readouterr().err
