"""Peak memory of a call: of a fresh process on a CPU, of PyTorch's allocator on CUDA."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

__all__ = ["CallFailed", "can_measure", "in_one_line", "peak_memory"]

Prepare = Callable[[], Callable[[], object]]
"""Makes the inputs and returns the call to measure. For a CPU it must be picklable."""


class CallFailed(RuntimeError):
    """The call raised an exception or its process was stopped."""


def can_measure(device: torch.device) -> bool:
    """Return whether :func:`peak_memory` supports a device: CUDA does, and the CPU on Linux."""
    return device.type == "cuda" or (device.type == "cpu" and sys.platform == "linux")


def peak_memory(
    prepare: Prepare, *, device: torch.device, warm_up: Prepare | None = None, limit: float | None = None
) -> int:
    """Return the bytes a call needs beyond its inputs, for intermediate results and output.

    On a CPU, a fresh process prepares the inputs and makes the call; the result is its peak (`VmHWM` of Linux) less
    the resident memory before the call. On CUDA, the result is the peak of PyTorch's allocator in this process.

    Args:
        prepare: Makes the inputs and returns the call. For a CPU it must be a function of a module, or a
            `functools.partial` of one.
        device: The device the call computes on.
        warm_up: Prepares a small call that is made first, so that threads and libraries are not counted.
        limit: Seconds the process may take. None sets no limit.

    Raises:
        CallFailed: The call raised an exception, or its process was killed or took longer than `limit`.
    """
    if device.type == "cuda":
        return _peak_cuda(prepare, warm_up, device)
    context = multiprocessing.get_context(
        "forkserver"
    )  # imports once; a fork would inherit this process's memory
    context.set_forkserver_preload([__name__, "lineardiff"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, prepare, warm_up, torch.get_num_threads())
    process = context.Process(target=_measure, args=arguments, daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise CallFailed(f"no result after {limit:.0f} s")
        result = receiver.recv()
    except EOFError:
        process.join()
        hint = ", probably out of memory" if process.exitcode == -signal.SIGKILL else ""
        raise CallFailed(f"its process exited with code {process.exitcode}{hint}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(result, str):
        raise CallFailed(result)
    return cast(int, result)


def _measure(sender: Connection, prepare: Prepare, warm_up: Prepare | None, threads: int) -> None:
    """Run in the fresh process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; its parent ends it
    torch.set_num_threads(threads)
    result: Any
    try:
        if warm_up is not None:
            warm_up()()
        call = prepare()
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        call()
        # not ru_maxrss of getrusage, which a process inherits from its parent
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        result = max(0, int(status["VmHWM"].split()[0]) * 1024 - before)
    except Exception as error:
        result = in_one_line(error)
    sender.send(result)


def _peak_cuda(prepare: Prepare, warm_up: Prepare | None, device: torch.device) -> int:
    try:
        if warm_up is not None:
            warm_up()()
        call = prepare()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
    except Exception as error:
        raise CallFailed(in_one_line(error)) from error
    return torch.cuda.max_memory_allocated(device) - before


def in_one_line(error: Exception) -> str:
    """Return an exception as one line of at most 160 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
