"""``lineardiff info``: what there is to work with here."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from lineardiff.cli.arguments import parse
from lineardiff.device import cpu_cores
from lineardiff.ops.backends import BACKENDS, VARIABLE
from lineardiff.table import format_table

PACKAGES = ("lineardiff", "torch", "timm", "torchvision", "accelerate", "datasets", "safetensors", "tyro")


@dataclass
class Info:
    """Show versions, devices, and which attention backends can run on this machine."""


def run(words: Sequence[str]) -> None:
    parse(Info, words, prog="lineardiff info")
    print(format_table(("package", "version"), [*versions().items()], left=2))
    print("\n" + format_table(("hardware", ""), [*hardware().items()], left=2))
    header = ("backend", "can run", "what it is, or why it cannot run")
    print("\n" + format_table(header, backends(), left=3))
    chosen = os.environ.get(VARIABLE, "auto")
    meaning = " (for each call the first of them that can run it)" if chosen == "auto" else ""
    print(f"\n{VARIABLE}={chosen}{meaning}")


def versions() -> dict[str, str]:
    """Version of Python and of each package of :data:`PACKAGES`, "not installed" where it is not."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def hardware() -> dict[str, str]:
    """Devices and threads that PyTorch sees, in words."""
    found = {
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CPU cores": str(cpu_cores()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found["accelerator"] = "none" if accelerator is None else str(accelerator)
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"capability {properties.major}.{properties.minor}"
        found[f"cuda:{index}"] = f"{properties.name}, {memory}, {capability}"
    return found


def backends() -> list[tuple[str, str, str]]:
    """Name of each backend, whether it can run here, and what it is or why it cannot."""
    reasons = {backend: backend.why_not(None) for backend in BACKENDS}
    return [
        (backend.name, "yes" if reason is None else "no", reason or backend.summary)
        for backend, reason in reasons.items()
    ]
