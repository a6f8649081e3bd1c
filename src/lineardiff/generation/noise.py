"""What samplers are given: a denoiser, and the source of every random number."""

from collections.abc import Callable

import torch
from torch import Tensor

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""``denoiser(x, t)``: x (B, C, H, W), t (B,). Labels and everything else are bound by the caller."""

Noise = torch.Generator | Callable[[int], Tensor]
"""A generator, or a function from the number of the step (0, 1, ...) to standard normal noise (B, C, H, W)."""

Callback = Callable[[int, int], None]
"""``callback(step, total)`` is called after step 1, 2, ..., total."""


def draw(noise: Noise, step: int, like: Tensor) -> Tensor:
    """Standard normal noise of the shape, type and device of `like`.

    A generator draws on its own device: a CPU generator gives the same noise whatever device computes.
    """
    if isinstance(noise, torch.Generator):
        drawn = torch.randn(like.shape, generator=noise, device=noise.device, dtype=like.dtype)
    else:
        drawn = noise(step)
        if drawn.shape != like.shape:
            raise ValueError(
                f"noise({step}) has shape {tuple(drawn.shape)}, the samples have {tuple(like.shape)}: give equal shapes"
            )
    return drawn.to(like)


def check_start(x: Tensor) -> None:
    """Samplers compute in the type of their start, whose low-precision types cannot hold the times.

    Raises:
        ValueError: `x` is not (B, C, H, W) of float32 or float64.
    """
    if x.ndim != 4 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected float32 or float64 of shape (B, C, H, W), got {x.dtype} of shape {tuple(x.shape)}: "
            "convert it, and let the denoiser compute in low precision (torch.autocast)"
        )


def check_name(kind: str, given: object, allowed: tuple[object, ...]) -> None:
    """Refuse a name that is not offered.

    Raises:
        ValueError: `given` is none of `allowed`.
    """
    if given not in allowed:
        raise ValueError(f"unknown {kind} {given!r}: choose from {', '.join(map(repr, allowed))}")


def expand(coefficient: Tensor, x: Tensor) -> Tensor:
    """(B,) to (B, 1, 1, 1), to be multiplied with x (B, C, H, W)."""
    return coefficient.reshape(-1, *[1] * (x.ndim - 1))


def mean_per_sample(x: Tensor) -> Tensor:
    """(B, ...) to (B,)."""
    return x.flatten(1).mean(1)
