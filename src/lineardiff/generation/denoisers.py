"""Denoisers: the functions that losses and samplers evaluate, their checks, and classifier-free guidance."""

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from lineardiff.checks import check_integer

__all__ = [
    "Callback",
    "Denoiser",
    "Noise",
    "check_name",
    "check_start",
    "draw",
    "expand",
    "guided",
    "mean_per_sample",
]

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""``denoiser(x, t)`` with x of shape (B, C, H, W) and t of shape (B,). The caller binds labels and anything else."""

Noise = torch.Generator | Callable[[int], Tensor]
"""A generator, or a function from the step index (0, 1, ...) to standard normal noise (B, C, H, W)."""

Callback = Callable[[int, int], None]
"""``callback(step, total)`` is called after step 1, 2, ..., total."""


def guided(
    denoiser: Callable[[Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    *,
    null_label: int,
    scale: float,
    channels: int | None = None,
    interval: tuple[float, float] | None = None,
) -> Denoiser:
    """Return a denoiser with classifier-free guidance: unconditional + scale * (conditional - unconditional).

    Both outputs come from one call with 2B samples. With ``scale=1``, or outside the interval, only the conditional
    output is computed, from a call with B samples.

    Sources: Ho and Salimans, arXiv 2207.12598; the interval: Kynkäänniemi et al., arXiv 2404.07724.

    Args:
        denoiser: ``denoiser(x, t, labels)``, such as a DiT. Its output has the C channels of x or more; channels
            beyond C (a learned variance) are never guided.
        labels: Class labels (B,).
        null_label: Label that means "no class".
        scale: Guidance scale. 1 disables guidance; larger values trade diversity for fidelity to the class.
        channels: Number of leading channels to guide, by default all C. The authors of DiT and SiT guide 3 of the 4
            channels of a latent.
        interval: (lowest, highest) time at which to guide, inclusive, in the denoiser's own times. By default guides
            at all times.

    Returns:
        A denoiser of x (B, C, H, W) and t (B,), for the samplers.

    Raises:
        ValueError: `labels` is not (B,), `scale` is not finite, `channels` is below 1 or, when called, above C,
            `interval` is not an increasing pair, or, when called, x and labels differ in B.
    """
    if labels.ndim != 1:
        raise ValueError(f"labels have shape {tuple(labels.shape)}; expected (B,), one class per sample.")
    if not _is_number(scale) or not math.isfinite(scale):
        raise ValueError(f"scale={scale!r}; expected a finite number, such as 4.0.")
    if channels is not None:
        check_integer("channels", channels)
    if interval is not None and not (
        isinstance(interval, (tuple, list))
        and len(interval) == 2
        and all(map(_is_number, interval))
        and interval[0] <= interval[1]
    ):
        raise ValueError(f"interval={interval!r}; expected (lowest, highest) time.")
    null = torch.full_like(labels, null_label)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        if len(x) != len(labels):
            raise ValueError(
                f"x has {len(x)} samples but there are {len(labels)} labels; pass one label per sample."
            )
        count = x.shape[1] if channels is None else channels
        if count > x.shape[1]:
            raise ValueError(f"channels={channels}, but x has {x.shape[1]} channels.")
        scales = torch.full(t.shape, scale, dtype=x.dtype, device=x.device)
        if interval is not None:
            inside = (t >= interval[0]) & (t <= interval[1])
            scales = scales.where(inside, 1.0)
        if scale == 1 or (interval is not None and not inside.any()):
            return denoiser(x, t, labels)
        both = denoiser(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))
        conditional, unconditional = both.chunk(2)
        first, rest = conditional[:, :count], conditional[:, count:]
        unguided = unconditional[:, :count]
        return torch.cat([unguided + expand(scales, x) * (first - unguided), rest], dim=1)

    return denoise


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def draw(noise: Noise, step: int, like: Tensor) -> Tensor:
    """Return standard normal noise with the shape, dtype and device of `like`.

    A generator draws on its own device, so a CPU generator gives the same noise on every device.

    Raises:
        ValueError: `noise(step)` has another shape.
    """
    if isinstance(noise, torch.Generator):
        drawn = torch.randn(like.shape, generator=noise, device=noise.device, dtype=like.dtype)
    else:
        drawn = noise(step)
        if drawn.shape != like.shape:
            raise ValueError(
                f"noise({step}) has shape {tuple(drawn.shape)}, but the samples have {tuple(like.shape)}; "
                "return equal shapes."
            )
    return drawn.to(like)


def check_start(x: Tensor) -> None:
    """Check the initial state of a sampler, which also sets the dtype of its computations.

    Raises:
        ValueError: `x` is not float32 or float64 of shape (B, C, H, W).
    """
    # lower precision cannot hold the times
    if x.ndim != 4 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected float32 or float64 of shape (B, C, H, W), got {x.dtype} of shape {tuple(x.shape)}; "
            "convert it, and run only the denoiser in low precision (torch.autocast)."
        )


def check_name(kind: str, given: object, allowed: tuple[object, ...]) -> None:
    """Check that `given` is one of the allowed names.

    Raises:
        ValueError: `given` is unknown; the message lists the names.
    """
    if given not in allowed:
        raise ValueError(f"unknown {kind} {given!r}; choose from {', '.join(map(repr, allowed))}.")


def expand(coefficient: Tensor, x: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, 1, 1), to broadcast with x (B, C, H, W)."""
    return coefficient.reshape(-1, *[1] * (x.ndim - 1))


def mean_per_sample(x: Tensor) -> Tensor:
    """Return the mean over all dimensions but the first: (B, ...) to (B,)."""
    return x.flatten(1).mean(1)
