"""Kill a process at every moment at which it changes its files; run a test module as a program that forks."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

CHANGES = ("fsync", "link", "mkdir", "remove", "rename", "replace", "rmdir", "unlink")
"""Functions of `os` through which every change of a file goes that must survive a kill."""


def in_child(work: Callable[[], Any]) -> int:
    """Return the exit code of a forked process that does `work`; the negative number of the signal if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(work: Callable[[], Any], *, folder: Path, change: int) -> bool:
    """Do `work` in a forked process killed just before its change number `change` in `folder`, counted from 1.

    A file being flushed is left with half of what was written to it since its last flush.

    Returns:
        Whether there were that many changes; if not, `work` ran to its end.
    """
    code = in_child(lambda: (_arm(folder, change), work()))
    assert code in (0, -signal.SIGKILL)
    return code != 0


def kills(work: Callable[[Path], Any], folder: Path) -> int:
    """For each change, kill `work(folder/N)` before it and then let it finish; return the number of kills."""
    for changes in itertools.count():
        again = partial(work, folder / str(changes))
        if not killed(again, folder=folder, change=changes + 1):
            return changes
        assert in_child(again) == 0
    raise AssertionError  # not reached


def run_module(file: str, *arguments: object, launcher: tuple[str, ...] = ()) -> None:
    """Run a test module as a program, with the import path of the tests; fail with what it printed."""
    done = subprocess.run(
        [sys.executable, *launcher, file, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _arm(folder: Path, change: int) -> None:
    root, left = str(folder.resolve()), change
    flushed: dict[int, int] = {}

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal left
            if name == "fsync":
                target = os.readlink(f"/proc/self/fd/{path}")
            else:
                start = options.get("dir_fd") or options.get("src_dir_fd")
                target = os.path.join(os.readlink(f"/proc/self/fd/{start}") if start else os.getcwd(), path)
            if target.startswith(root):
                left -= 1
                if left == 0:
                    if name == "fsync" and os.path.isfile(target):
                        status = os.stat(target)
                        os.truncate(target, (flushed.get(status.st_ino, 0) + status.st_size) // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "fsync":
                    flushed[os.fstat(path).st_ino] = os.fstat(path).st_size
            return original(path, *arguments, **options)

        return changed

    for name in CHANGES:
        setattr(os, name, wrap(name, getattr(os, name)))
