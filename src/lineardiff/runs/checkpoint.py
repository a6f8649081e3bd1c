"""Checkpoints and result files that are whole or absent, whenever the process or the disk stops.

A checkpoint is a folder `step-00000100` holding one safetensors file for each set of weights and `state.pt`
with the rest. It is written under another name, forced to the disk, and renamed, so that a folder of that
name is complete.
"""

import io
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lineardiff.files import explain_disk_errors, sync_folder

KEEP = 2  # the newest, and the one before it in case the newest is damaged
_UNFINISHED = ".unfinished"


def save_checkpoint(
    folder: Path, step: int, *, weights: Mapping[str, nn.Module], state: Mapping[str, Any]
) -> Path:
    """Writes `folder/step-%08d` and removes all but the newest two.

    Args:
        folder: the `checkpoints` folder of a run.
        step: updates done.
        weights: file name without suffix -> module whose parameters and buffers go into it.
        state: everything else, of types that `torch.load(weights_only=True)` reads.

    Raises:
        OSError: the disk is full or cannot be written; the older checkpoints are untouched, nothing is left
            behind.
    """
    path = folder / f"step-{step:08d}"
    if path.exists():
        return path
    unfinished = path.with_name(path.name + _UNFINISHED)
    with explain_disk_errors(path):
        try:
            unfinished.mkdir(parents=True)
            for name, module in weights.items():
                _write(unfinished / f"{name}.safetensors", weights_as_bytes(module))
            buffer = io.BytesIO()
            torch.save(dict(state), buffer)
            _write(unfinished / "state.pt", buffer.getvalue())
            unfinished.rename(path)
            sync_folder(folder)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    for old in list_checkpoints(folder)[:-KEEP]:
        # Renamed first, so that a checkpoint is never there in part.
        shutil.rmtree(old.rename(old.with_name(old.name + _UNFINISHED)))
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run's `checkpoints` folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and p.suffix != _UNFINISHED)


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed process left half written in a run's `checkpoints` folder."""
    for path in folder.glob(f"step-*{_UNFINISHED}"):
        shutil.rmtree(path)


def load_checkpoint(path: Path, *, weights: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Loads the weights of a checkpoint into `weights` (see save_checkpoint) and returns its state, on the
    CPU.

    Raises:
        ValueError: a file is missing or cut short, or the weights are those of another model.
    """
    for name, module in weights.items():
        load_weights(module, path / f"{name}.safetensors")
    file = path / "state.pt"
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable(file, error) from error


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads a safetensors file into `model`; every tensor must be there, of the same shape, and no other.

    Raises:
        ValueError: the file is missing, cut short, or holds the weights of another model; the message says
            which tensors differ.
    """
    path = Path(path)
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    differences = _differences(model.state_dict(), tensors)
    if differences:
        raise ValueError(
            f"{path} holds the weights of another model: {'; '.join(differences)}. "
            "Build the model with the name and the arguments it was trained with (config.json, recipe.json)"
        )
    model.load_state_dict(tensors)


def weights_as_bytes(module: nn.Module) -> bytes:
    """The parameters and buffers of a module in the safetensors format."""
    return safetensors.torch.save(
        {name: t.detach().contiguous().cpu() for name, t in module.state_dict().items()}
    )


def _differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, shown: int = 3) -> list[str]:
    shapes = [
        f"{name} is {tuple(found[name].shape)}, the model's {tuple(expected[name].shape)}"
        for name in expected.keys() & found.keys()
        if found[name].shape != expected[name].shape
    ]
    kinds = {
        "other shapes": sorted(shapes),
        "missing": sorted(expected.keys() - found.keys()),
        "not in the model": sorted(found.keys() - expected.keys()),
    }
    return [
        f"{kind}: {', '.join(names[:shown])}"
        + (f" and {len(names) - shown} more" if len(names) > shown else "")
        for kind, names in kinds.items()
        if names
    ]


def _unreadable(file: Path, error: Exception) -> ValueError:
    if not file.exists():
        return ValueError(f"{file} is missing: the checkpoint is incomplete or the path wrong")
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ValueError(
        f"{file} cannot be read, it is cut short or damaged ({reason}): "
        f"remove {file.parent} to go on from the checkpoint before it, or copy the file again"
    )


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
