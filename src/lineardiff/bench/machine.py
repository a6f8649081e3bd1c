"""The machine that a measurement was made on: hardware, threads and versions."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lineardiff.device import cpu_cores

__all__ = ["cpu_name", "describe_machine", "machine_line", "machine_table", "memory_bytes"]

PACKAGES = (
    *(
        "lineardiff",
        "torch",
        "timm",
        "torchvision",
        "accelerate",
        "datasets",
        "diffusers",
        "safetensors",
        "tyro",
    ),
    *("linformer", "nystrom-attention", "performer-pytorch"),
)


def describe_machine() -> dict[str, Any]:
    """Return hardware, threads and versions, ready for `json.dump`.

    The one description of a machine: `lineardiff info` prints it, `lineardiff bench` writes it beside its numbers,
    and a run keeps it in its `summary.json`.

    Returns:
        "cpu" (model name), "cores" (available to this process), "capability" (instruction set that PyTorch uses),
        "memory_gib" (None where unknown), "threads" (of PyTorch), "accelerators" (name and memory of each), "system",
        and "versions" (of Python and of the packages used here; None for one that is not installed).
    """
    memory = memory_bytes()
    return {
        "cpu": cpu_name(),
        "cores": cpu_cores(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "threads": torch.get_num_threads(),
        "accelerators": _accelerators(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def machine_table(about: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a description without its versions as rows of text."""
    return [
        ("CPU", about["cpu"]),
        ("CPU cores", str(about["cores"])),
        ("CPU capability", about["capability"]),
        ("memory", "unknown" if about["memory_gib"] is None else f"{about['memory_gib']} GiB"),
        ("threads", str(about["threads"])),
        ("accelerators", ", ".join(about["accelerators"]) or "none"),
        ("system", about["system"]),
    ]


def machine_line(about: dict[str, Any]) -> str:
    """Return a description in one line."""
    memory = f", {about['memory_gib']} GiB" if about["memory_gib"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    accelerators = "".join(f", {name}" for name in about["accelerators"])
    cpu = f"{about['cpu']}, {about['cores']} cores ({about['capability']}){memory}{accelerators}"
    return f"{cpu}; {about['threads']} threads; {versions}"


def cpu_name() -> str:
    """Return the model name in /proc/cpuinfo, or what Python's `platform` knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Return the memory available to this process, limited by its container; None where unknown."""
    if not hasattr(os, "sysconf"):  # Windows
        return None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return physical


def _accelerators() -> list[str]:
    if not torch.cuda.is_available():
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return [] if accelerator is None else [str(accelerator)]
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, {gpu.major}.{gpu.minor})" for gpu in found]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
