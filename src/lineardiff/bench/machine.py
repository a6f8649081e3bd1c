"""What a measurement was made on: hardware, threads, versions; goes into a file beside the numbers."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lineardiff.device import cpu_cores


def environment(packages: tuple[str, ...] = ("lineardiff", "torch", "timm")) -> dict[str, Any]:
    """Hardware, threads and versions, ready for `json.dump`.

    Args:
        packages: Whose versions; None stands for one that is not installed.

    Returns:
        "cpu" (model name), "cores" (that this process may use), "capability" (of the instructions that PyTorch
        found), "memory_gib", "threads" (that PyTorch computes with), "gpus" (names), "system", "versions".
    """
    memory = memory_bytes()
    return {
        "cpu": cpu_name(),
        "cores": cpu_cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def cpu_name() -> str:
    """Of /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Memory that this process may use: the machine's, or the limit of its container; None where unknown."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return physical


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
