"""Visual-Contrast Attention in plain PyTorch, made fast: any device, compiles, exports, differentiates.

What makes it fast, each measured: both streams are one stack of 2n tokens, so that each stage is two batched
matrix products and one softmax; the heads are one batch axis; without gradients on a CPU the heads are done
in chunks whose scores stay in cache, which also bounds the memory; bfloat16 and float16 are computed in
float32 on a CPU without instructions for them, where PyTorch's own products are many times slower.
"""

import torch
from torch import Tensor

from lineardiff.ops.inputs import Inputs, with_tokens
from lineardiff.ops.modes import exporting, transformed

# Scores (numbers, not bytes) computed at a time without gradients on a CPU: 2 MB of float32 stays in cache.
CHUNK = 1 << 19

# Types that this CPU's products have no instructions for.
_SLOW_ON_CPU = tuple(
    dtype
    for dtype, native in (
        (torch.bfloat16, torch.ops.mkldnn._is_mkldnn_bf16_supported),
        (torch.float16, torch.ops.mkldnn._is_mkldnn_fp16_supported),
    )
    if not (torch.backends.mkldnn.is_available() and native())
)


def run(inputs: Inputs) -> Tensor:
    """Both stages. Shapes as in :func:`lineardiff.visual_contrast_attention`."""
    q = inputs.q
    compute = _compute_dtype(q.device.type, q.dtype)
    inputs = with_tokens(inputs, compute)
    compiled = torch.compiler.is_compiling() or exporting() or transformed()
    if compiled or torch.is_grad_enabled() or q.device.type != "cpu":
        return all_heads(inputs, compute)

    B, heads, N, d = q.shape
    out = q.new_empty(B, N, heads, d).transpose(1, 2)  # so that joining the heads again copies nothing
    scores = max(1, 2 * inputs.pos.shape[2] * N)
    step_heads = max(1, min(heads, CHUNK // scores))
    step_batch = max(1, CHUNK // (scores * heads))
    for b in range(0, B, step_batch):
        for h in range(0, heads, step_heads):
            part = slice(b, b + step_batch), slice(h, h + step_heads)
            neg = None if inputs.neg is None else inputs.neg[part]
            q, k, v, pos = (x[part] for x in inputs[:4])
            chunk = inputs._replace(q=q, k=k, v=v, pos=pos, neg=neg)
            out[part] = all_heads(chunk, compute, in_place=True)
    return out


def all_heads(inputs: Inputs, compute: torch.dtype, in_place: bool = False) -> Tensor:
    """Every head at once, in the type `compute`; TorchScript compiles it too.

    `in_place` overwrites intermediate results, which autograd would need: fresh memory costs as much time
    as the arithmetic.
    """
    B, heads, N, d = inputs.q.shape
    n = inputs.pos.shape[2]
    q, k, v = _flat(inputs.q, compute), _flat(inputs.k, compute), _flat(inputs.v, compute)
    t, neg = _flat(inputs.pos, compute), inputs.neg
    if neg is not None and (inputs.global_contrast == "differential" or inputs.patchwise == "differential"):
        t = torch.cat([t, _flat(neg, compute)], 1)  # the stack of 2n tokens
    l1, l2 = inputs.lambdas
    gain1, gain2 = inputs.gains
    init1, init2 = inputs.lambda_inits

    # stage I
    if inputs.global_contrast == "differential":
        scores = torch.bmm(_scaled(t), k.transpose(1, 2))  # (B heads, 2n, N)
    elif inputs.global_contrast == "plain":
        scores = torch.bmm(_scaled(t[:, :n]), k.transpose(1, 2))
    else:
        t1, t2 = t[:, :n].chunk(2, -1)
        k1, k2 = k.chunk(2, -1)
        scores = torch.cat(
            [torch.bmm(_scaled(t1), k1.transpose(1, 2)), torch.bmm(_scaled(t2), k2.transpose(1, 2))], 1
        )
    v_hat = torch.bmm(_softmax(scores, in_place), v)
    if inputs.global_contrast != "plain" and l1 is not None and gain1 is not None:
        v_hat = _norm(_difference(v_hat[:, :n], v_hat[:, n:], l1), gain1 * (1 - init1), inputs.eps, in_place)

    # stage II
    if inputs.patchwise == "differential":
        scores = torch.bmm(q, _scaled(t).transpose(1, 2))  # (B heads, N, 2n)
    elif inputs.patchwise == "plain":
        scores = torch.bmm(q, _scaled(t[:, :n]).transpose(1, 2))
    else:
        t1, t2 = t[:, :n].chunk(2, -1)
        q1, q2 = q.chunk(2, -1)
        scores = torch.cat(
            [torch.bmm(q1, _scaled(t1).transpose(1, 2)), torch.bmm(q2, _scaled(t2).transpose(1, 2))], 2
        )
    if inputs.patchwise == "plain" or l2 is None or gain2 is None:
        o = torch.bmm(_softmax(scores, in_place), v_hat)
    else:
        if inputs.softmax == "joint":
            a = _softmax(scores, in_place).unflatten(-1, (2, n))
        else:
            a = _softmax(scores.unflatten(-1, (2, n)), in_place)
        o = torch.bmm(_difference(a[:, :, 0], a[:, :, 1], l2), v_hat)
        o = _norm(o, gain2 * (1 - init2), inputs.eps, in_place)
    return o.to(inputs.q.dtype).view(B, heads, N, d)


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, heads, rows, d) -> (B heads, rows, d)."""
    return x.to(dtype).flatten(0, 1)


def _scaled(t: Tensor) -> Tensor:
    return t * t.shape[-1] ** -0.5


def _difference(x_pos: Tensor, x_neg: Tensor, scalar: Tensor) -> Tensor:
    return torch.addcmul(x_pos, x_neg, scalar.reshape(()).to(x_pos.dtype), value=-1)


def _softmax(scores: Tensor, in_place: bool) -> Tensor:
    return torch.softmax(scores, -1, out=scores) if in_place else scores.softmax(-1)


def _norm(x: Tensor, gain: Tensor, eps: float, in_place: bool) -> Tensor:
    """RMSNorm in float32 at least."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(
        y, dim=-1, keepdim=True
    )  # one pass over y, where square().mean() makes two
    scale = torch.rsqrt(norm * norm / y.shape[-1] + eps)
    y = y.mul_(scale).mul_(gain) if in_place else y * scale * gain
    return y.to(x.dtype)


def _compute_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if device == "cpu" and dtype in _SLOW_ON_CPU else dtype
