"""The arms of a comparison: every attention of this library by name, built alike."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, get_args

from torch import nn

from lineardiff.layers.attention import VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention, DifferentialAttention, SelfAttention

Arm = Literal["vca", "mhsa", "mhsa_conv", "diff", "agent"]

_OPTIONS: dict[str, frozenset[str]] = {
    "vca": frozenset({"contrast_grid", "tokens", "stage1", "stage2", "softmax", "conv", "pool"}),
    "mhsa": frozenset(),
    "mhsa_conv": frozenset(),
    "diff": frozenset(),
    "agent": frozenset({"contrast_grid", "conv", "pool"}),
}


def check_arms(attention: str | Sequence[str], blocks: int) -> tuple[Arm, ...]:
    """One arm for each of the blocks (or stages) of a model.

    Args:
        attention: one name for all, or one for each.
        blocks: how many there are.

    Raises:
        ValueError: a name is unknown, or there are not as many as blocks.
    """
    arms = (attention,) * blocks if isinstance(attention, str) else tuple(attention)
    if len(arms) != blocks:
        raise ValueError(
            f"attention names {len(arms)} arms for {blocks} blocks; give one name for all, or one for each block."
        )
    for arm in arms:
        if arm not in get_args(Arm):
            raise ValueError(f"unknown attention {arm!r}; choose one of {', '.join(get_args(Arm))}.")
    return arms  # type: ignore[return-value]


def create_attention(
    arm: Arm,
    dim: int,
    num_heads: int,
    *,
    depth: int = 0,
    attn_drop: float = 0.0,
    options: dict[str, Any] | None = None,
    **common: Any,
) -> nn.Module:
    """Build one arm; every one is called as `forward(x, feat_size)`.

    Args:
        arm: "vca", "mhsa", "mhsa_conv" (with VCA's depth-wise convolution), "diff" (differential attention)
            or "agent".
        dim: channels C.
        num_heads: heads.
        depth: index of the block from 0 ("vca" and "diff").
        attn_drop: dropout of the attention map ("mhsa", "mhsa_conv", "diff").
        options: of :class:`VisualContrastAttention`; those that the arm does not have are ignored, and
            the log says so once.
        **common: qkv_bias, proj_bias, proj_drop, device, dtype.

    Raises:
        ValueError: the arm is unknown, or an option does not fit.
    """
    check_arms(arm, 1)
    options = dict(options or {})
    for name in sorted(set(options) - _OPTIONS[arm]):
        _say_ignored(arm, name)
        del options[name]
    if arm in ("vca", "agent") and attn_drop:
        raise ValueError(
            f"attention {arm!r} has no dropout of the attention map; got attn_drop={attn_drop}, use 0."
        )
    if arm == "vca":
        return VisualContrastAttention(dim, num_heads, depth=depth, **options, **common)
    if arm == "agent":
        return AgentAttention(dim, num_heads, **options, **common)
    if arm == "diff":
        if dim % (2 * num_heads):
            raise ValueError(
                f"attention 'diff' halves the channels of a head: dim={dim} must be a multiple "
                f"of 2 * num_heads={2 * num_heads}."
            )
        return DifferentialAttention(dim, num_heads, depth=depth, attn_drop=attn_drop, **common)
    return SelfAttention(dim, num_heads, conv=arm == "mhsa_conv", attn_drop=attn_drop, **common)


@cache
def _say_ignored(arm: str, name: str) -> None:
    logging.getLogger("lineardiff").info("attention %r has no %s: the option is ignored.", arm, name)
