"""An exclusive lock on a folder that the kernel releases when its process ends."""

import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["locked"]

_logger = logging.getLogger("lineardiff")
_held: set[Path] = set()  # locks of fcntl belong to the process, so they do not stop a second run in it


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on `file` within the block; `file` is created and stays.

    The lock is POSIX's (`fcntl.lockf`), which works across the nodes of a shared file system and is released when
    the process dies. Processes forked within the block do not inherit it.

    Raises:
        ValueError: Another process or thread holds the lock; the message names its process and host.
    """
    key = file.resolve()
    if key in _held:
        raise _taken(file, f"this process ({os.getpid()})")
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise _taken(file, _holder(descriptor)) from None
            _logger.warning(
                "%s cannot be locked (%s): do not start a second training there", file.parent, error
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _taken(file: Path, holder: str) -> ValueError:
    return ValueError(
        f"{file.parent} is in use by {holder}, which trains there. Wait for it to finish, stop it, or choose another "
        "output folder."
    )
