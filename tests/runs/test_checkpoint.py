"""Checkpoints: whole or absent, damaged or of another model, and a disk that is full."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toy import TOY, ToyTask, fingerprint, flat

from lineardiff.files import write_atomically
from lineardiff.runs import checkpoint as module
from lineardiff.runs.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_weights,
    remove_unfinished,
    save_checkpoint,
)
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
    assert names(path) == ["model.safetensors", "state.pt"]
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
    leftover = tmp_path / f"step-00000002{module._UNFINISHED}"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "state.pt"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_cut_short_is_named(tmp_path: Path, name: str, share: float) -> None:
    recipe = replace(TOY, ema_decay=0.9)
    train(recipe, ToyTask(), output=tmp_path)
    file = tmp_path / "checkpoints/step-00000015" / name
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ValueError, match=rf"step-00000015/{name} cannot be read.*remove .*step-00000015 to"):
        train(recipe, ToyTask(), output=tmp_path)
    shutil.rmtree(file.parent)  # as the message says
    before = fingerprint(tmp_path)
    train(recipe, ToyTask(), output=tmp_path)
    assert fingerprint(tmp_path) == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    train(TOY, ToyTask(), output=tmp_path)
    (tmp_path / "checkpoints/step-00000015/state.pt").unlink()
    with pytest.raises(ValueError, match=r"step-00000015/state.pt is missing"):
        train(TOY, ToyTask(), output=tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    train(TOY, ToyTask(), output=tmp_path)
    wider = nn.Linear(5, 2)
    before = flat(wider)
    with pytest.raises(
        ValueError,
        match=r"model.safetensors holds .* another model: other shapes: bias is \(1,\), the model's \(2,\)",
    ):
        load_weights(wider, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: 0.bias, 0.weight; not in the model: bias, weight"):
        load_weights(nn.Sequential(nn.Linear(5, 1)), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"nowhere.safetensors is missing"):
        load_weights(wider, tmp_path / "nowhere.safetensors")
    assert torch.equal(flat(wider), before)
    with pytest.raises(ValueError, match=r"step-00000015/model.safetensors holds .* another model"):
        train(TOY, ToyTask(nn.Linear(5, 1, bias=False)), output=tmp_path)


def test_a_changed_recipe_is_refused_by_field(tmp_path: Path) -> None:
    train(TOY, ToyTask(), output=tmp_path)
    before = fingerprint(tmp_path)
    changed = replace(TOY, epochs=4, learning_rate=0.2, log_every=7)
    with pytest.raises(
        ValueError,
        match=r"recipe.json is of another recipe: epochs was 3 and is now 4; "
        r"learning_rate was 0.1 and is now 0.2\. .*only checkpoint_every, log_every, workers",
    ):
        train(changed, ToyTask(), output=tmp_path)
    with pytest.raises(ValueError, match=r"holds a run already: resume it"):
        train(TOY, ToyTask(), output=tmp_path, resume=False)
    assert fingerprint(tmp_path) == before


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    train(replace(TOY, seed=3), ToyTask(), output=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    train(TOY, ToyTask(), output=tmp_path)
    train(TOY, ToyTask(), output=tmp_path / "new")
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
    train(recipe, ToyTask(), output=tmp_path / "reference")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(110_000))
    with pytest.raises(OSError, match=r"cannot write .*; free some space, then rerun") as raised:
        train(recipe, ToyTask(), output=small_disk / "run")
    assert raised.value.errno == errno.ENOSPC
    saved = list_checkpoints(small_disk / "run/checkpoints")
    assert saved
    assert not [name for name in names(small_disk / "run/checkpoints") if name.endswith(module._UNFINISHED)]
    ballast.unlink()
    train(recipe, ToyTask(), output=small_disk / "run")
    assert fingerprint(small_disk / "run") == fingerprint(tmp_path / "reference")
