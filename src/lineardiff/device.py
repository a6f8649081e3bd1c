"""Devices, precision and processes."""

import os
import signal
import traceback
from collections.abc import Generator, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from accelerate import PartialState

Batch = TypeVar("Batch")

__all__ = [
    "PRECISIONS",
    "autocast",
    "choose_device",
    "cpu_cores",
    "ignore_interrupts",
    "iterate",
    "join_processes",
    "sum_over_processes",
]

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Autocast type by the name that recipes and flags use; "no" is the model's own."""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context of a precision in :data:`PRECISIONS`."""
    return torch.autocast(device.type, dtype=PRECISIONS[precision], enabled=precision != "no")


def choose_device(name: str | None = None) -> torch.device:
    """Return the device called `name`, by default the accelerator if there is one, else the CPU.

    Raises:
        ValueError: The device is not available or computes nothing.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} is not available: {error}") from error
    if device.type == "meta":
        raise ValueError(f"device {name!r} computes nothing; choose cpu or an accelerator such as cuda:0.")
    return device


def cpu_cores() -> int | None:
    """Return the number of cores this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def join_processes(device: str | None = None) -> "tuple[PartialState, torch.device]":
    """Join the processes started by torchrun, or run alone, and return Accelerate's state and this process's device.

    Args:
        device: For example "cpu" or "cuda:0"; by default the accelerator assigned to this process, if any.

    Raises:
        ValueError: The device is not available.
    """
    from accelerate import PartialState

    chosen = None if device is None else choose_device(device)
    on_cpu = not torch.accelerator.is_available() if chosen is None else chosen.type == "cpu"
    # A process may wait for another one as long as a whole unit of work takes.
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=1))
    return state, state.device if chosen is None else chosen


def sum_over_processes(values: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of each value over all processes, in every process; a process may lack some names."""
    from accelerate.utils import gather_object

    parts = gather_object([dict(values)])
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a loader process, as the `worker_init_fn` of a DataLoader.

    A terminal sends Ctrl-C to loader processes too, and their parent may need one more batch. SIGTERM gets its default
    action back, because multiprocessing waits at exit for the processes that it has sent SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def iterate(loader: Iterable[Batch]) -> Generator[Batch, None, None]:
    """Yield the batches of a DataLoader and end its processes when the generator ends, fails or is closed.

    Otherwise the traceback of an error keeps them alive until the exit of the program, which then waits for them.

    Raises:
        RuntimeError: A loader process was killed; the message begins with "DataLoader worker".
    """
    batches = iter(loader)
    try:
        yield from batches
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, (ConnectionError, EOFError)):  # killed while it was handing over a batch
            raise RuntimeError("DataLoader worker exited unexpectedly") from error
        raise
    finally:
        del batches
