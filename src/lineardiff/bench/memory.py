"""Peak memory of a call: of a process of its own on a CPU, of PyTorch's allocator on a GPU."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

Prepare = Callable[[], Callable[[], object]]
"""Makes the inputs, then returns the call whose memory is asked for; a CPU's is pickled."""


class CallFailed(RuntimeError):
    """The call raised, or its process was stopped; the message says what happened."""


def can_measure(device: torch.device) -> bool:
    """Whether :func:`peak_memory` has a number for calls on this device: Linux and CUDA tell one."""
    return device.type == "cuda" or (device.type == "cpu" and sys.platform == "linux")


def peak_memory(
    prepare: Prepare, *, device: torch.device, warm_up: Prepare | None = None, limit: float | None = None
) -> int:
    """How many bytes a call needs beyond its inputs: its intermediate results and its output.

    On a CPU a fresh process makes the inputs and then the call; its peak (VmHWM of Linux) less what was resident
    before the call is the answer. On CUDA it is the peak of PyTorch's allocator in this process.

    Args:
        prepare: Makes the inputs and returns the call. For a CPU a function of a module, or a
            `functools.partial` of one.
        device: What the call computes on.
        warm_up: The same for a small call, made first, so that threads and libraries, which any call needs, are
            not counted.
        limit: Seconds that the process may take; None waits for it.

    Raises:
        CallFailed: The call raised, the process was killed (for want of memory) or took longer than `limit`.
    """
    if device.type == "cuda":
        return _peak_cuda(prepare, warm_up, device)
    context = multiprocessing.get_context("forkserver")  # imports once; a fork of this process has its memory
    context.set_forkserver_preload([__name__, "lineardiff"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, prepare, warm_up, torch.get_num_threads())
    process = context.Process(target=_measure, args=arguments, daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise CallFailed(f"not done after {limit:.0f} s")
        answer = receiver.recv()
    except EOFError:
        process.join()
        hint = ", killed for want of memory?" if process.exitcode == -signal.SIGKILL else ""
        raise CallFailed(f"its process ended with {process.exitcode}{hint}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    if isinstance(answer, str):
        raise CallFailed(answer)
    return cast(int, answer)


def _measure(sender: Connection, prepare: Prepare, warm_up: Prepare | None, threads: int) -> None:
    """In the fresh process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it too; the parent ends it
    torch.set_num_threads(threads)
    answer: Any
    try:
        if warm_up is not None:
            warm_up()()
        call = prepare()
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        call()
        # not getrusage's ru_maxrss, which a process inherits from its parent
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        answer = max(0, int(status["VmHWM"].split()[0]) * 1024 - before)
    except Exception as error:
        answer = in_one_line(error)
    sender.send(answer)


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
    """An exception as a cell of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
