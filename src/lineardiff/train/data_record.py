"""A record of training data, to detect that they changed while a run was interrupted."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from lineardiff.data import ImageSplit
from lineardiff.data.latents import Latents

__all__ = ["data_record"]


def data_record(**splits: ImageSplit | Latents) -> dict[str, Any]:
    """Return what `Task.data_record` returns, for the given splits.

    Of image folders it covers the names and sizes of the files, of tables the rows and the sizes of the local files, of
    latents the index; the pixels are not read.
    """
    return {name: _classes(split) for name, split in splits.items()}


def _classes(split: ImageSplit | Latents) -> dict[str, dict[str, Any]]:
    digests = [hashlib.sha256() for _ in split.classes]
    counts = [0] * len(split.classes)
    common = _common(split)
    for index, label in enumerate(split.labels.tolist()):
        digest = digests[label]
        if not counts[label]:
            digest.update(common)
        counts[label] += 1
        digest.update(_image(split, index))
    return {
        name: {"label": label, "images": counts[label], "checksum": digests[label].hexdigest()[:16]}
        for label, name in enumerate(split.classes)
    }


def _common(split: ImageSplit | Latents) -> bytes:
    if isinstance(split, Latents):
        return json.dumps(split.settings, sort_keys=True).encode()
    files = sorted(Path(split.source).expanduser().rglob("*.parquet")) if split.source != "fashion" else []
    return json.dumps([(file.name, file.stat().st_size) for file in files]).encode()


def _image(split: ImageSplit | Latents, index: int) -> bytes:
    if isinstance(split, Latents):
        return f"{index}\n".encode()
    place = split.locate(index)
    try:
        size = os.stat(place).st_size
    except OSError:  # a row, or a file that reading will report
        return f"{index}\n".encode()
    return f"{Path(place).name} {size}\n".encode()
