"""The arguments of the op: their names, shapes and the checks that every backend may rely on."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lineardiff.ops.pooling import pool_queries

Stage = Literal["differential", "plain", "halves"]
Softmax = Literal["separate", "joint"]


class Inputs(NamedTuple):
    """What a backend receives, checked. Shapes as in :func:`lineardiff.visual_contrast_attention`.

    A backend that cannot pool by itself begins with :func:`with_tokens`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor
    neg: Tensor | None
    lambdas: tuple[Tensor | None, Tensor | None]
    gains: tuple[Tensor | None, Tensor | None]
    lambda_inits: tuple[float, float]
    softmax: str  # a Softmax; the three are plain strings because TorchScript knows no Literal
    global_contrast: str  # a Stage
    patchwise: str  # a Stage
    eps: float
    pool: tuple[int, int, int, int] | None = None  # (H, W, h, w): pos and neg are e+ and e-


def with_tokens(inputs: Inputs, compute: torch.dtype | None = None) -> Inputs:
    """The same inputs with t+ and t- in place of the embeddings; `compute`: the type to pool in, if not that of q."""
    if inputs.pool is None:
        return inputs
    pooled, neg = pool_queries(inputs.q.to(compute or inputs.q.dtype), inputs.pool), inputs.neg
    pos = (pooled + inputs.pos).to(inputs.q.dtype)
    neg = None if neg is None else (pooled + neg).to(inputs.q.dtype)
    return inputs._replace(pos=pos, neg=neg, pool=None)


def check_inputs(inputs: Inputs) -> None:
    """Raise ValueError that says what was given, what was expected and how to mend it."""
    q, k, v, pos, neg = inputs[:5]
    check_options(softmax=inputs.softmax, global_contrast=inputs.global_contrast, patchwise=inputs.patchwise)
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"q, k, v must share one shape (B, heads, N, d); got {_shape(q)}, {_shape(k)}, {_shape(v)}. "
            "Project all three from the same tokens and split the heads first."
        )
    B, heads, _, d = q.shape
    if d < 1 or (pos.ndim == 4 and pos.shape[2] < 1):
        raise ValueError(
            f"q {_shape(q)} and pos {_shape(pos)} must have at least one channel and one contrast token."
        )
    streams = {"pos": pos} if neg is None else {"pos": pos, "neg": neg}
    for name, t in streams.items():
        if t.ndim != 4 or (t.shape[0], t.shape[1], t.shape[3]) != (B, heads, d) or t.shape[2] != pos.shape[2]:
            raise ValueError(
                f"{name} must have shape (B, heads, n, d) with B, heads, d of q {_shape(q)} and the n of pos; "
                f"got {_shape(t)}. Add a batch axis and expand it if the tokens are the same for every image."
            )
    if neg is None and "differential" in (inputs.global_contrast, inputs.patchwise):
        raise ValueError(
            "neg is None, but a stage is 'differential' and needs the negative stream t-; "
            "pass neg (B, heads, n, d), or set both stages to 'plain' or 'halves'."
        )
    for name, t in {"k": k, "v": v, **streams}.items():
        # embeddings may stay in float32, which pooled queries of low precision are added to
        wide = inputs.pool is not None and name in streams and t.dtype == torch.float32
        if (t.dtype != q.dtype and not wide) or t.device != q.device:
            raise ValueError(
                f"q is {q.dtype} on {q.device} but {name} is {t.dtype} on {t.device}; "
                f"convert one, for example {name}.to(q)."
            )
    if neg is not None and neg.dtype != pos.dtype:
        raise ValueError(f"pos is {pos.dtype} but neg is {neg.dtype}; convert one, for example neg.to(pos).")
    if inputs.pool is not None:
        H, W, h, w = inputs.pool
        whole = not any(isinstance(size, float) for size in inputs.pool)
        if not (whole and 0 < h <= H and 0 < w <= W and H * W <= q.shape[2] and h * w == pos.shape[2]):
            raise ValueError(
                f"pool={(H, W, h, w)} is (H, W, h, w), the grid of the last H*W of the N={q.shape[2]} queries and "
                f"the h x w cells, one for each of the n={pos.shape[2]} rows of pos; h <= H and w <= W."
            )
    if not q.is_floating_point():
        raise ValueError(
            f"q, k, v must be floating point; got {q.dtype}. Convert them, for example q.float()."
        )
    stages = (("global_contrast", inputs.global_contrast), ("patchwise", inputs.patchwise))
    for number, (name, stage) in enumerate(stages):
        if stage == "halves" and d % 2:
            raise ValueError(f"{name}='halves' splits the channels of a head in two; d={d} is odd.")
        if stage == "plain":
            continue
        scalar, gain = inputs.lambdas[number], inputs.gains[number]
        if scalar is None or scalar.numel() != 1:
            given = None if scalar is None else _shape(scalar)
            raise ValueError(
                f"lambdas[{number}] must be a tensor with one element for {name}={stage!r}; got {given}."
            )
        if gain is None or gain.shape != (d,):
            given = None if gain is None else _shape(gain)
            raise ValueError(
                f"gains[{number}] must have shape (d,) = ({d},) for {name}={stage!r}; got {given}."
            )


def check_options(*, softmax: str, global_contrast: str, patchwise: str) -> None:
    """The named choices of the op, which the layer checks too, before anything is built."""
    for name, given, allowed in (
        ("softmax", softmax, get_args(Softmax)),
        ("global_contrast", global_contrast, get_args(Stage)),
        ("patchwise", patchwise, get_args(Stage)),
    ):
        if given not in allowed:
            raise ValueError(f"{name}={given!r} is unknown; choose one of {', '.join(map(repr, allowed))}.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
