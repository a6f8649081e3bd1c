"""The arms of a comparison: every attention of this library by name, built alike."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, TypedDict, get_args

from torch import nn

from lineardiff.layers.attention import Pool, Tokens, VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention, DifferentialAttention, SelfAttention
from lineardiff.ops import Softmax, Stage

Arm = Literal["vca", "mhsa", "mhsa_conv", "diff", "agent"]


class AttentionOptions(TypedDict, total=False):
    """Options of :class:`VisualContrastAttention` that a model hands on to all its layers."""

    tokens: Tokens
    global_contrast: Stage
    patchwise: Stage
    softmax: Softmax
    conv: bool
    pool: Literal["avg"] | Pool


_OPTIONS: dict[str, frozenset[str]] = {
    "vca": frozenset({"contrast_grid", *AttentionOptions.__annotations__}),
    "mhsa": frozenset(),
    "mhsa_conv": frozenset(),
    "diff": frozenset(),
    "agent": frozenset({"contrast_grid", "conv", "pool"}),
}


def check_arms(
    attention: str | Sequence[str], count: int, *, own: str | None = None, of: str = "blocks"
) -> tuple[str, ...]:
    """One arm for each of the blocks (or stages) of a model.

    Args:
        attention: one name for all, or one for each.
        count: how many blocks or stages there are.
        own: name of an attention that the host model adds to the arms.
        of: "blocks" or "stages", for the message.

    Raises:
        ValueError: a name is unknown, or there are not as many as blocks.
    """
    if not isinstance(attention, (str, tuple, list)):
        raise ValueError(
            f"attention={attention!r} must be the name of an arm, or one for each of the {count} {of}."
        )
    arms = (attention,) * count if isinstance(attention, str) else tuple(attention)
    if len(arms) != count:
        raise ValueError(
            f"attention names {len(arms)} arms for {count} {of}; give one name for all, or one for each."
        )
    known = (*get_args(Arm), *((own,) if own else ()))
    for index, arm in enumerate(arms):
        if arm not in known:
            where = "" if isinstance(attention, str) else f" of {of[:-1]} {index + 1}"
            raise ValueError(f"unknown attention {arm!r}{where}; choose one of {', '.join(known)}.")
    return arms


def has_option(arm: str, name: str) -> bool:
    """Whether an arm has an option of :class:`VisualContrastAttention`; the attention of a host has none."""
    return name in _OPTIONS.get(arm, ())


def create_attention(
    arm: str,
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
        say_ignored(arm, name)
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
def say_ignored(arm: str, name: str) -> None:
    """Say once in the log that an arm has no such option."""
    logging.getLogger("lineardiff").info("attention %r has no %s: the option is ignored.", arm, name)
