"""Files that are complete or absent, folders that belong to one set of settings, hashes, and names on the hub.

A file is written next to its destination under a name containing `.unfinished`, flushed to disk, and renamed.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "HUB_NAME",
    "check_settings",
    "explain_disk_errors",
    "fingerprint",
    "is_unfinished",
    "read_blocks",
    "sync_folder",
    "unfinished",
    "write_atomically",
    "write_settings",
    "written_whole",
]

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""A repository on the Hugging Face hub, owner/name."""

_MARK = ".unfinished"


def unfinished(path: Path) -> Path:
    """Return the name under which `path` is written until it is complete; the suffix is kept."""
    return path.with_name(f"{path.stem}{_MARK}{path.suffix}")


def is_unfinished(path: Path) -> bool:
    """Return whether `path` is a name given by :func:`unfinished`."""
    return path.stem.endswith(_MARK) or path.suffix == _MARK


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; rename it to `path` at the end of the block, or remove it if the block fails.

    Raises:
        OSError: The disk is full or the folder cannot be written; the message names the file.
    """
    part = unfinished(path)
    try:
        with explain_disk_errors(path):
            yield part
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
            sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file that holds either its old or its new content at any moment.

    Raises:
        OSError: The disk is full or the folder cannot be written; the message names the file.
    """
    with written_whole(path) as part:
        part.write_bytes(data.encode() if isinstance(data, str) else data)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError raised while writing `path` into one that names the file and the fix."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "free some space" if full else "check that the folder is writable"
        message = f"cannot write {path}: {error.strerror}; {fix}, then rerun the command to resume"
        raise OSError(error.errno, message) from error


def fingerprint(blocks: Iterable[bytes]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of the concatenated blocks."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()[:16]


def read_blocks(path: Path, *, size: int = 2**22) -> Iterator[bytes]:
    """Yield the content of a file in blocks of `size` bytes."""
    with path.open("rb") as file:
        while block := file.read(size):
            yield block


def check_settings(folder: Path, settings: Mapping[str, Any], *, pieces: str) -> bool:
    """Return whether `folder` already holds pieces written with these settings.

    Args:
        folder: May not exist yet.
        settings: JSON-serialisable.
        pieces: Glob pattern of the files that depend on the settings. Without any of them `settings.json` is ignored.

    Raises:
        ValueError: The folder holds pieces of other settings, its `settings.json` is damaged, or it is a file; the
            message names the settings that differ.
    """
    file = folder / "settings.json"
    if folder.is_file():
        raise ValueError(f"{folder} is a file; expected a folder.")
    if next(folder.glob(pieces), None) is None:
        return False
    if not file.exists():
        raise ValueError(f"{folder} holds {pieces} but no settings.json; choose another folder.")
    try:
        before = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}); choose another folder.") from error
    now = json.loads(json.dumps(dict(settings)))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = "; ".join(f"{name} was {before.get(name)!r} and is now {now.get(name)!r}" for name in names)
        raise ValueError(
            f"{folder} was started with other settings: {changes}. Pass the previous settings or choose another folder."
        )
    return True


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Create `folder` and write `settings.json`, which :func:`check_settings` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "settings.json", json.dumps(dict(settings), indent=2) + "\n")
