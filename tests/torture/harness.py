"""Run one case in a forked process with a deadline, and classify how it ended."""

import atexit
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DEADLINE = 90.0
"""Seconds after which a case counts as hanging; the slowest correct one takes about ten."""


@dataclass
class Ending:
    """How a case ended: its exit code (negative for a signal, None for a hang), what it wrote, and its children."""

    code: int | None
    stderr: str
    orphans: int = 0

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.stderr

    @property
    def one_line_error(self) -> bool:
        lines = [line for line in self.stderr.splitlines() if line.startswith("lineardiff: error: ")]
        return self.code == 2 and len(lines) == 1 and not self.traceback


def in_child(work: Callable[[], int | None], *, deadline: float = DEADLINE) -> Ending:
    """Run `work` in a forked process group; its return value is the exit code, an exception gives 1."""
    with tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                code = work() or 0
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                atexit._run_exitfuncs()  # as at the end of a program: multiprocessing waits for loader processes
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(code)
        code = _wait(child, deadline)
        orphans = _kill_group(child)
        err.seek(0)
        return Ending(code, err.read().decode(errors="replace"), orphans)


def _wait(child: int, deadline: float) -> int | None:
    descriptor = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([descriptor], [], [], deadline)
    finally:
        os.close(descriptor)
    if not ready:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill_group(leader: int) -> int:
    """Kill what the child left running, and return whether there was anything."""
    time.sleep(0.05)
    alive = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            alive += int(fields[2]) == leader and fields[0] != "Z"
    if alive:
        os.killpg(leader, signal.SIGKILL)
    return alive


@dataclass
class Section:
    """Counts of one kind of case, and a description of each failure."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def record(self, outcome: str, *, failed: bool = False, detail: str = "") -> None:
        self.counts["cases"] += 1
        self.counts[outcome] += 1
        if failed:
            self.failures.append(f"{self.name}: {outcome}: {detail}")

    def must_be_refused(self, what: str, ending: Ending) -> None:
        """Count a case that must end with one line and exit code 2."""
        self._count(what, ending, refused_only=True)

    def must_not_crash(self, what: str, ending: Ending) -> None:
        """Count a case that may succeed or be refused."""
        self._count(what, ending, refused_only=False)

    def _count(self, what: str, ending: Ending, *, refused_only: bool) -> None:
        tail = ending.stderr.strip().splitlines()[-1:] or [""]
        detail = f"{what} -> exit {ending.code}: {tail[0][:200]}"
        if ending.code is None:
            self.record("hang", failed=True, detail=detail)
        elif ending.orphans:
            self.record("orphan processes", failed=True, detail=detail)
        elif ending.traceback or ending.code < 0:
            self.record("traceback" if ending.traceback else "crash", failed=True, detail=detail)
        elif ending.one_line_error:
            self.record("refused in one line")
        elif ending.code == 0 and not refused_only:
            self.record("accepted, ran")
        elif ending.code == 0:
            self.record("silently accepted", failed=True, detail=detail)
        else:
            self.record("poor message", failed=True, detail=detail)
