"""Build any attention of this library by name, with one interface."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args

from torch import nn

from lineardiff.checks import check_heads
from lineardiff.layers.attention import Pool, Tokens, VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention, DifferentialAttention, SelfAttention
from lineardiff.ops import Softmax, Stage

__all__ = [
    "AttentionName",
    "AttentionOptions",
    "create_attention",
    "has_option",
    "list_attentions",
    "log_ignored",
    "per_block",
    "pools_queries",
]

AttentionName = Literal["vca", "mhsa", "mhsa_conv", "diff", "agent"]


@dataclass(frozen=True)
class AttentionOptions:
    """Options of :class:`VisualContrastAttention` that a model passes to its layers; None keeps the layer's default."""

    contrast_grid: tuple[int, int] | None = None
    tokens: Tokens | None = None
    global_contrast: Stage | None = None
    patchwise: Stage | None = None
    softmax: Softmax | None = None
    conv: bool | None = None
    pool: Literal["avg"] | Pool | None = None

    @classmethod
    def pop_from(cls, kwargs: dict[str, Any]) -> "AttentionOptions":
        """Remove these options from a model's keyword arguments and return them."""
        return cls(**{field.name: kwargs.pop(field.name) for field in fields(cls) if field.name in kwargs})

    def given(self) -> dict[str, Any]:
        """Return the options that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


_OPTIONS: dict[str, frozenset[str]] = {
    "vca": frozenset(field.name for field in fields(AttentionOptions)),
    "agent": frozenset({"contrast_grid", "conv", "pool"}),
}


def list_attentions() -> tuple[str, ...]:
    """Return the names that :func:`create_attention` accepts."""
    return get_args(AttentionName)


def per_block(
    attention: str | Sequence[str], count: int, *, host: str | None = None, of: str = "blocks"
) -> tuple[str, ...]:
    """Return the attention of each block (or stage) of a model.

    Args:
        attention: One name for all, or one for each.
        count: Number of blocks or stages.
        host: Name of the attention of the host model, allowed in addition to :func:`list_attentions`.
        of: "blocks" or "stages", for error messages.

    Raises:
        ValueError: A name is unknown, or the number of names is not `count`.
    """
    if not isinstance(attention, (str, tuple, list)):
        raise ValueError(f"attention={attention!r} must be one name, or one for each of the {count} {of}.")
    names = (attention,) * count if isinstance(attention, str) else tuple(attention)
    if len(names) != count:
        raise ValueError(
            f"attention has {len(names)} names for {count} {of}; pass one name for all, or one for each."
        )
    known = (*list_attentions(), *((host,) if host else ()))
    for index, name in enumerate(names):
        if name not in known:
            where = "" if isinstance(attention, str) else f" of {of[:-1]} {index + 1}"
            raise ValueError(f"Unknown attention {name!r}{where}; choose one of {', '.join(known)}.")
    return names


def has_option(name: str, option: str) -> bool:
    """Return whether an attention has an option of :class:`AttentionOptions`; a host's own attention has none."""
    return option in _OPTIONS.get(name, frozenset())


def pools_queries(name: str) -> bool:
    """Return whether an attention pools its queries into a contrast grid."""
    return has_option(name, "contrast_grid")


def create_attention(
    name: str,
    dim: int,
    num_heads: int,
    *,
    options: AttentionOptions | None = None,
    depth: int = 0,
    attn_drop: float = 0.0,
    **common: Any,
) -> nn.Module:
    """Build an attention by name; each is called as `forward(x, feat_size)`.

    Args:
        name: "vca", "mhsa" (self-attention), "mhsa_conv" (self-attention with VCA's depth-wise convolution),
            "diff" (differential attention) or "agent" (agent attention).
        dim: Number of channels C.
        num_heads: Number of heads.
        options: Options of :class:`VisualContrastAttention`; those an attention lacks are ignored and logged once.
        depth: Index of the block, from 0 ("vca" and "diff").
        attn_drop: Dropout of the attention map ("mhsa", "mhsa_conv" and "diff").
        **common: qkv_bias, proj_bias, proj_drop, device and dtype.

    Raises:
        ValueError: The name is unknown, or an option does not fit.
    """
    per_block(name, 1)
    given = (options or AttentionOptions()).given()
    for option in sorted(given.keys() - _OPTIONS.get(name, frozenset())):
        log_ignored(name, option)
        del given[option]
    if name in _OPTIONS and attn_drop:
        raise ValueError(
            f"Attention {name!r} has no dropout of the attention map; set attn_drop={attn_drop} to 0."
        )
    if name == "vca":
        return VisualContrastAttention(dim, num_heads, depth=depth, **given, **common)
    if name == "agent":
        return AgentAttention(dim, num_heads, **given, **common)
    if name == "diff":
        check_heads(dim, num_heads, multiple=2)
        return DifferentialAttention(dim, num_heads, depth=depth, attn_drop=attn_drop, **common)
    return SelfAttention(dim, num_heads, conv=name == "mhsa_conv", attn_drop=attn_drop, **common)


@cache
def log_ignored(name: str, option: str) -> None:
    """Log, once, that an attention ignores an option."""
    logging.getLogger("lineardiff").info("Attention %r has no option %s; it is ignored.", name, option)
