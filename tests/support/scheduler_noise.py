"""Known noise for the steps of diffusers' schedulers, which draw it themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from torch import Tensor


@contextmanager
def scheduler_noise(noise: Callable[[int], Tensor]) -> Iterator[None]:
    """Give the steps that draw noise noise(0), noise(1), ... in order."""
    steps = count()

    def draw(shape: Any, **options: Any) -> Tensor:
        drawn = noise(next(steps))
        assert drawn.shape == shape
        return drawn

    with pytest.MonkeyPatch.context() as patch:
        for module in ("scheduling_ddpm", "scheduling_ddim"):
            patch.setattr(f"diffusers.schedulers.{module}.randn_tensor", draw)
        yield
