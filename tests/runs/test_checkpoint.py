"""Checkpoints: complete or absent, damaged or of another model, and a disk that is full."""

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from toy import TOY, ToyTask, fingerprint, flat

from lineardiff.files import is_unfinished, unfinished, write_atomically
from lineardiff.runs.checkpoint import (
    check_checkpoint,
    list_checkpoints,
    load_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from lineardiff.runs.weights import load_weights
from lineardiff.train import train


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded_exactly(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model(torch.randn(8, 3))
    state = {"step": 5, "tensors": [torch.tensor([1e-30, 2.5])], "nothing": None, "pair": (0.9, 0.999)}
    path = save_checkpoint(tmp_path, 5, weights={"model": model}, state=state)
    again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    loaded = load_checkpoint(path, weights={"model": again})
    assert names(path) == ["manifest.json", "model.safetensors", "state.pt"]
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    assert torch.equal(loaded.pop("tensors")[0], state.pop("tensors")[0])
    assert loaded == state


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        save_checkpoint(tmp_path, step, weights={"model": nn.Linear(1, 1)}, state={})
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert [path.name for path in list_checkpoints(tmp_path)] == names(tmp_path)


def test_leftovers_are_ignored_and_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, weights={"model": nn.Linear(1, 1)}, state={})
    leftover = unfinished(tmp_path / "step-00000002")
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def damage(file: Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
    elif kind == "bit":
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    else:
        file.write_bytes(data[: int(float(kind) * len(data))])


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("kind", ["missing", "0", "0.5", "0.99", "bit"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = partial(ToyTask, replace(TOY, ema_decay=0.9))
    train(task(), output=tmp_path)
    before = fingerprint(tmp_path)
    damage(tmp_path / "checkpoints/step-00000015" / name, kind)
    train(task(), output=tmp_path)
    assert f"step-00000015/{name}" in caplog.text or name == "manifest.json"
    assert "Using step-00000012 instead" in caplog.text
    assert fingerprint(tmp_path) == before
    check_checkpoint(tmp_path / "checkpoints/step-00000015")  # written again


def test_every_bit_flip_is_found(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, weights={"model": nn.Linear(2, 1)}, state={"step": 1})
    for file in path.iterdir():
        data = file.read_bytes()
        for position in range(0, len(data), max(1, len(data) // 50)):
            file.write_bytes(
                data[:position] + bytes([data[position] ^ 1 << position % 7]) + data[position + 1 :]
            )
            with pytest.raises(ValueError, match="step-00000001"):
                check_checkpoint(path)
        file.write_bytes(data)
    check_checkpoint(path)


def test_a_bit_flip_in_exported_weights_is_found(tmp_path: Path) -> None:
    train(ToyTask(), output=tmp_path)
    damage(tmp_path / "model.safetensors", "bit")
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_weights(nn.Linear(5, 1), file)


@pytest.mark.parametrize("kind", ["missing", "bit"])
def test_two_damaged_checkpoints_are_refused_and_kept(tmp_path: Path, kind: str) -> None:
    train(ToyTask(), output=tmp_path)
    for step in (12, 15):
        damage(tmp_path / f"checkpoints/step-{step:08d}/manifest.json", kind)
    with pytest.raises(ValueError, match=r"step-00000015.*Restore"):
        train(ToyTask(), output=tmp_path)
    assert names(tmp_path / "checkpoints") == ["step-00000012", "step-00000015"]


@pytest.mark.parametrize("content", [{"step": 3}, [1, 2], {"step": "15", "optimizer": None}, "text"])
def test_a_state_with_other_content_is_refused(tmp_path: Path, content: object) -> None:
    train(ToyTask(), output=tmp_path)
    folder = tmp_path / "checkpoints/step-00000015"
    torch.save(content, folder / "state.pt")
    manifest = json.loads((folder / "manifest.json").read_text())
    data = (folder / "state.pt").read_bytes()
    manifest["state.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()[:16]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"step-00000015/state\.pt"):
        train(ToyTask(), output=tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    train(ToyTask(), output=tmp_path)
    wider = nn.Linear(5, 2)
    before = flat(wider)
    with pytest.raises(
        ValueError,
        match=r"model.safetensors holds .* another model: other shapes: bias is \(1,\), the model's \(2,\)",
    ):
        load_weights(wider, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: 0.bias, 0.weight; not in the model: bias, weight"):
        load_weights(nn.Sequential(nn.Linear(5, 1)), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"nowhere.safetensors does not exist"):
        load_weights(wider, tmp_path / "nowhere.safetensors")
    assert torch.equal(flat(wider), before)
    with pytest.raises(ValueError, match=r"step-00000015/model.safetensors holds .* another model"):
        train(ToyTask(model=nn.Linear(5, 1, bias=False)), output=tmp_path)


def test_a_changed_recipe_is_refused_by_field(tmp_path: Path) -> None:
    train(ToyTask(), output=tmp_path)
    before = fingerprint(tmp_path)
    changed = replace(TOY, epochs=4, learning_rate=0.2, log_every=7)
    with pytest.raises(
        ValueError,
        match=r"recipe.json is of another recipe: epochs was 3 and is now 4; "
        r"learning_rate was 0.1 and is now 0.2\. .*only checkpoint_every, log_every, workers",
    ):
        train(ToyTask(changed), output=tmp_path)
    with pytest.raises(ValueError, match=r"already holds a run"):
        train(ToyTask(), output=tmp_path, resume=False)
    assert fingerprint(tmp_path) == before


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    train(ToyTask(replace(TOY, seed=3)), output=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    train(ToyTask(), output=tmp_path)
    train(ToyTask(), output=tmp_path / "new")
    assert fingerprint(tmp_path) == fingerprint(tmp_path / "new")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing past `size` bytes fails with EFBIG, as on a disk with a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_a_checkpoint(tmp_path: Path) -> None:
    big, small = nn.Linear(1000, 10), nn.Linear(1, 1)
    save_checkpoint(tmp_path, 1, weights={"small": small, "big": big}, state={})
    with (
        largest_file(20_000),
        pytest.raises(OSError, match=r"cannot write .*step-00000002: .*free some space") as raised,
    ):
        save_checkpoint(tmp_path, 2, weights={"small": small, "big": big}, state={})
    assert raised.value.errno == errno.EFBIG
    assert names(tmp_path) == ["step-00000001"]
    load_checkpoint(tmp_path / "step-00000001", weights={"small": small, "big": big})


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    write_atomically(file, "old")
    with largest_file(10), pytest.raises(OSError, match=r"config\.json"):
        write_atomically(file, "new" * 10)
    assert (file.read_text(), names(tmp_path)) == ("old", ["config.json"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 kB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root and the right to mount")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_stops_the_run_and_space_lets_it_go_on(tmp_path: Path, small_disk: Path) -> None:
    recipe = replace(TOY, epochs=40, validate_every=40, checkpoint_every=20)
    train(ToyTask(recipe), output=tmp_path / "reference")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(110_000))
    with pytest.raises(OSError, match=r"cannot write .*; free some space, then rerun") as raised:
        train(ToyTask(recipe), output=small_disk / "run")
    assert raised.value.errno == errno.ENOSPC
    saved = list_checkpoints(small_disk / "run/checkpoints")
    assert saved
    assert not [name for name in names(small_disk / "run/checkpoints") if is_unfinished(Path(name))]
    ballast.unlink()
    train(ToyTask(recipe), output=small_disk / "run")
    assert fingerprint(small_disk / "run") == fingerprint(tmp_path / "reference")
