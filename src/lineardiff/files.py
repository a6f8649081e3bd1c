"""Files that are complete or absent, hashes, and names on the hub.

A file is written next to its destination under a name containing `.unfinished`, flushed to disk, and renamed.
"""

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "HUB_NAME",
    "explain_disk_errors",
    "fingerprint",
    "is_unfinished",
    "read_blocks",
    "sync_folder",
    "unfinished",
    "write_atomically",
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
