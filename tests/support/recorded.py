"""Weights and inputs of the recorded answers of the authors' code: drawn anew from their names, with NumPy."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor


class Recorded(NamedTuple):
    """One file: its metadata, and the tensors that the authors' code gave."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]

    def weights(self) -> dict[str, Tensor]:
        """The parameters of the authors' model, under their names."""
        return {name: _weight(name, shape) for name, shape in json.loads(self.metadata["keys"]).items()}


def read(path: Path) -> Recorded:
    with safe_open(str(path), "pt") as file:
        return Recorded(dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def normal(key: str, *shape: int) -> Tensor:
    """N(0, 1) of a generator seeded by the key."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def _weight(name: str, shape: list[int]) -> Tensor:
    value = 0.02 * normal(name, *shape)
    return 1 + value if len(shape) == 1 and name.endswith(".weight") else value
