"""Classifier-free guidance.

Source: Ho and Salimans, arXiv 2207.12598; the interval: Kynkäänniemi et al., arXiv 2404.07724.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lineardiff.generation.noise import Denoiser, expand


def guided(
    denoiser: Callable[[Tensor, Tensor, Tensor], Tensor],
    labels: Tensor,
    *,
    null_label: int,
    scale: float,
    channels: int | None = None,
    interval: tuple[float, float] | None = None,
) -> Denoiser:
    """A denoiser that answers unconditional + scale (conditional - unconditional).

    Both answers come from one call with 2B samples; with scale 1, or outside of the interval, the conditional
    one comes alone, from a call with B.

    Args:
        denoiser: ``denoiser(x, t, labels)``, such as a DiT; its answer has the C channels of x, or more: those
            after the first C (a learned variance) are never guided.
        labels: (B,) the classes.
        null_label: The label of "no class".
        scale: 1 is no guidance; above 1 the classes show more clearly and vary less.
        channels: How many of the first channels are guided; None all C. DiT's and SiT's authors guide 3 of the 4
            channels of a latent.
        interval: (lowest, highest) time of guidance, both included, in the denoiser's own times; None is always.

    Returns:
        The denoiser of x (B, C, H, W) and t (B,), for the samplers.

    Raises:
        ValueError: `labels` is not (B,); `channels` below 1 or, when called, above C; an interval whose ends are
            exchanged; when called, x of another B than the labels.
    """
    if labels.ndim != 1:
        raise ValueError(f"labels have shape {tuple(labels.shape)}: expected (B,), one class for each sample")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: expected a number, such as 4.0")
    if channels is not None and channels < 1:
        raise ValueError(f"channels={channels}: expected at least 1, or None for all")
    if interval is not None and not interval[0] <= interval[1]:
        raise ValueError(f"interval={interval}: expected (lowest, highest) time")
    null = torch.full_like(labels, null_label)

    def answer(x: Tensor, t: Tensor) -> Tensor:
        if len(x) != len(labels):
            raise ValueError(f"x holds {len(x)} samples, there are {len(labels)} labels: give one label each")
        count = x.shape[1] if channels is None else channels
        if count > x.shape[1]:
            raise ValueError(f"channels={channels}: x has {x.shape[1]} channels")
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

    return answer
