"""Keep the tests off the network, and find their data."""

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
    """Return the folder of recorded outputs of the authors' code."""
    return Path(__file__).parent / "parity" / "data"
