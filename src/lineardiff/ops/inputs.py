"""The arguments of the ops: their names, their shapes, and the checks that every backend relies on."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lineardiff.ops.pooling import pool_queries

Stage = Literal["differential", "plain", "halves"]
Softmax = Literal["separate", "joint"]


class Inputs(NamedTuple):
    """The checked arguments of the attention. Shapes as in :func:`lineardiff.visual_contrast_attention`.

    A backend that does not pool itself starts with :func:`with_tokens`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor
    neg: Tensor | None
    lambdas: tuple[Tensor | None, Tensor | None]
    gains: tuple[Tensor | None, Tensor | None]
    lambda_inits: tuple[float, float]
    softmax: str  # a Softmax; the three are plain strings because TorchScript does not support Literal
    global_contrast: str  # a Stage
    patchwise: str  # a Stage
    eps: float
    pool: tuple[int, int, int, int] | None = None  # (H, W, h, w): pos and neg are e+ and e-


class ConvInputs(NamedTuple):
    """The arguments of the convolution of V. Shapes as in :func:`lineardiff.ops.add_value_conv`."""

    o: Tensor
    v: Tensor
    weight: Tensor
    bias: Tensor
    feat_size: tuple[int, int]
    overwrite: bool


def with_tokens(inputs: Inputs, compute: torch.dtype | None = None) -> Inputs:
    """Replace the embeddings by t+ and t-; without `pool`, return the inputs as they are.

    Args:
        inputs: The inputs.
        compute: The type to pool in, by default that of q.
    """
    if inputs.pool is None:
        return inputs
    pooled, neg = pool_queries(inputs.q.to(compute or inputs.q.dtype), inputs.pool), inputs.neg
    pos = (pooled + inputs.pos).to(inputs.q.dtype)
    neg = None if neg is None else (pooled + neg).to(inputs.q.dtype)
    return inputs._replace(pos=pos, neg=neg, pool=None)


def check_inputs(inputs: Inputs) -> None:
    """Check shapes, types, devices and options.

    Raises:
        ValueError: Something does not fit; the message says what was given, what was expected and how to fix it.
    """
    q, k, v, pos, neg = inputs[:5]
    check_options(softmax=inputs.softmax, global_contrast=inputs.global_contrast, patchwise=inputs.patchwise)
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"q, k and v must have the same shape (B, heads, N, d); got {_shape(q)}, {_shape(k)}, {_shape(v)}. "
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
                f"{name} must have shape (B, heads, n, d), where q has shape {_shape(q)} and n is that of pos; "
                f"got {_shape(t)}. If all images share the tokens, add a batch axis and expand it."
            )
    if neg is None and "differential" in (inputs.global_contrast, inputs.patchwise):
        raise ValueError(
            "neg is None, but a 'differential' stage needs the negative tokens t-. "
            "Pass neg (B, heads, n, d), or set both stages to 'plain' or 'halves'."
        )
    for name, t in {"k": k, "v": v, **streams}.items():
        # embeddings may be float32: pooled queries of lower precision are added to them
        wide = inputs.pool is not None and name in streams and t.dtype == torch.float32
        if (t.dtype != q.dtype and not wide) or t.device != q.device:
            raise ValueError(
                f"q is {q.dtype} on {q.device}, but {name} is {t.dtype} on {t.device}. "
                f"Convert one, for example {name}.to(q)."
            )
    if neg is not None and neg.dtype != pos.dtype:
        raise ValueError(f"pos is {pos.dtype}, but neg is {neg.dtype}. Convert one, for example neg.to(pos).")
    if inputs.pool is not None:
        H, W, h, w = inputs.pool
        integers = not any(isinstance(size, float) for size in inputs.pool)
        if not (integers and 0 < h <= H and 0 < w <= W and H * W <= q.shape[2] and h * w == pos.shape[2]):
            raise ValueError(
                f"pool={(H, W, h, w)} must be (H, W, h, w), where H*W <= N={q.shape[2]} queries form the grid, "
                f"h*w = n={pos.shape[2]} is the number of rows of pos, h <= H and w <= W."
            )
    if not q.is_floating_point():
        raise ValueError(
            f"q, k and v must be floating point; got {q.dtype}. Convert them, for example q.float()."
        )
    if not 0 <= inputs.eps < math.inf:
        raise ValueError(f"eps={inputs.eps} must be a finite number, 0 or greater.")
    if len(inputs.lambda_inits) != 2 or not all(-math.inf < x < math.inf for x in inputs.lambda_inits):
        raise ValueError(f"lambda_inits={inputs.lambda_inits} must be two finite numbers.")
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
    """Check the named options of the op.

    Raises:
        ValueError: An option is unknown.
    """
    for name, given, allowed in (
        ("softmax", softmax, get_args(Softmax)),
        ("global_contrast", global_contrast, get_args(Stage)),
        ("patchwise", patchwise, get_args(Stage)),
    ):
        if given not in allowed:
            raise ValueError(f"{name}={given!r} is unknown; choose one of {', '.join(map(repr, allowed))}.")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
