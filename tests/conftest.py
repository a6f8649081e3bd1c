"""Makes tests/ importable (truth.py), keeps tests off the network, and finds the shared data."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _shared(name: str) -> Path:
    root = Path(os.environ.get("LINEARDIFF_SHARED", Path(__file__).parents[2] / "shared")) / name
    if not root.is_dir():
        pytest.skip(f"{root} does not exist: set LINEARDIFF_SHARED to the folder with the shared data")
    return root


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of CIFAR-10 and of the ImageNet samples, which the package does without."""
    return _shared("data")


@pytest.fixture(scope="session")
def parity_data() -> Path:
    """The folder of what the authors' code answers."""
    return _shared("parity")
