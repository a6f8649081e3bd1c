"""Checkpoints that are complete and verified, or refused.

A checkpoint is a folder `step-00000100` with one safetensors file for each set of weights, `state.pt` with the rest,
and `manifest.json` with the checksums of these files, written last. It is written under another name, flushed to
disk, and renamed, so that a folder of that name is complete.
"""

import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lineardiff.files import (
    explain_disk_errors,
    fingerprint,
    is_unfinished,
    read_blocks,
    sync_folder,
    unfinished,
)
from lineardiff.runs.weights import load_weights, weights_as_bytes

__all__ = [
    "check_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "newest_checkpoint",
    "remove_unfinished",
    "save_checkpoint",
]

KEEP = 2  # the newest, and the one before it in case the newest is damaged
_MANIFEST = "manifest.json"
_STATE = "state.pt"

_logger = logging.getLogger("lineardiff")


def save_checkpoint(
    folder: Path, step: int, *, weights: Mapping[str, nn.Module], state: Mapping[str, Any]
) -> Path:
    """Write `folder/step-%08d` and remove all but the newest two.

    An intact checkpoint of the same step is kept, a damaged one is replaced.

    Args:
        folder: The `checkpoints` folder of a run.
        step: Updates done.
        weights: File name without suffix -> module whose parameters and buffers go into it.
        state: Everything else, of types that `torch.load(weights_only=True)` reads.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: The disk is full or cannot be written. The older checkpoints are intact and nothing is left behind.
    """
    path = folder / f"step-{step:08d}"
    if path.exists():
        try:
            check_checkpoint(path)
        except ValueError:
            _remove(path)
        else:
            return path
    part = unfinished(path)
    with explain_disk_errors(path):
        try:
            part.mkdir(parents=True)
            buffer = io.BytesIO()
            torch.save(dict(state), buffer)
            manifest = {}
            files = [
                (f"{name}.safetensors", lambda m=module: weights_as_bytes(m))
                for name, module in weights.items()
            ]
            for name, content in (*files, (_STATE, buffer.getvalue)):
                data = content()
                manifest[name] = {"bytes": len(data), "sha256": fingerprint([data])}
                _write(part / name, data)
            _write(part / _MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
            sync_folder(part)
            part.rename(path)
            sync_folder(folder)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            raise
    for old in list_checkpoints(folder)[:-KEEP]:
        _remove(old)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run's `checkpoints` folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and not is_unfinished(p))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest intact checkpoint of a run's `checkpoints` folder, or None if there are no checkpoints.

    A damaged one is named in the log and skipped.

    Raises:
        ValueError: All of them are damaged.
    """
    damages = []
    for path in reversed(list_checkpoints(folder)):
        try:
            check_checkpoint(path)
        except ValueError as error:
            damages.append(error)
        else:
            for damage in damages:
                _logger.warning("%s Using %s instead.", damage, path.name)
            return path
    if damages:
        raise damages[0]
    return None


def check_checkpoint(path: Path) -> None:
    """Verify the files of a checkpoint against its manifest.

    Raises:
        ValueError: A file is missing or damaged; the message names it.
    """
    file = path / _MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        expected = {
            str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest.items()
        }
        if _STATE not in expected:
            raise ValueError(f"it does not list {_STATE}")
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} has no {_MANIFEST}, so its files cannot be verified: it is incomplete, or was written by a "
            "version before checksums. Restore the checkpoint from a copy, or choose another output folder."
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({error}). Restore it from a copy.") from error
    for name, (size, checksum) in expected.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing. Restore it from a copy.")
        found = (
            fingerprint(read_blocks(file)) if file.stat().st_size == size else f"{file.stat().st_size} bytes"
        )
        if found != checksum:
            raise ValueError(
                f"{file} is damaged ({found}, expected {checksum} and {size} bytes). Restore it from a copy."
            )


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half written in a run's `checkpoints` folder."""
    for path in folder.glob("step-*"):
        if is_unfinished(path):
            shutil.rmtree(path)


def load_checkpoint(path: Path, *, weights: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Load the weights of an intact checkpoint into `weights` (see :func:`save_checkpoint`) and return its state.

    Returns:
        The state, on the CPU.

    Raises:
        ValueError: A file is missing, or the weights are those of another model.
    """
    for name, module in weights.items():
        load_weights(module, path / f"{name}.safetensors")
    file = path / _STATE
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, TypeError, ValueError, pickle.UnpicklingError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} is damaged ({reason}). Restore it from a copy.") from error


def _remove(path: Path) -> None:
    # Renamed first, so that a folder of that name is never incomplete.
    shutil.rmtree(path.rename(unfinished(path)))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
