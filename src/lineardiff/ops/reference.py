"""Visual-Contrast Attention, equation by equation: the definition that the other backends are compared with.

Pu et al., "Linear Differential Vision Transformer: Learning Visual Contrasts via Pairwise Differentials",
NeurIPS 2025, https://arxiv.org/abs/2511.00833, sections 3.2 (stage I) and 3.3 (stage II). Nothing is
optimized. Matrix products are computed in the type of the inputs, softmaxes and norms in float32 at least.
"""

import torch
from torch import Tensor

from lineardiff.ops.inputs import Inputs, with_tokens


def run(inputs: Inputs) -> Tensor:
    """Compute both stages. Shapes as in :func:`lineardiff.visual_contrast_attention`."""
    inputs = with_tokens(inputs)
    return read_contrast(inputs, contrast_map(inputs))


def contrast_map(inputs: Inputs) -> Tensor:
    """Compute stage I: the contrast map v^ (B, heads, n, d)."""
    k, v, pos, neg = inputs[1:5]
    if inputs.global_contrast == "plain":  # v^ = softmax(t+ k^T / sqrt d) v
        return _attend(pos, k) @ v
    if inputs.global_contrast == "halves":
        (t1, t2), (k1, k2) = pos.chunk(2, -1), k.chunk(2, -1)
        v_pos, v_neg = _attend(t1, k1) @ v, _attend(t2, k2) @ v
    else:
        assert neg is not None
        v_pos = _attend(pos, k) @ v  # v+ = softmax(t+ k^T / sqrt d) v
        v_neg = _attend(neg, k) @ v  # v- = softmax(t- k^T / sqrt d) v
    # v^ = (1 - l1_init) RMSNorm1(v+ - l1 v-)
    return _normed_difference(v_pos, v_neg, inputs, stage=0)


def attention_map(inputs: Inputs) -> Tensor:
    """Compute the signed attention A (B, heads, N, n) of stage II: of every query over the contrast tokens."""
    q, _, _, pos, neg = inputs[:5]
    if inputs.patchwise == "plain":  # A = softmax(q t+^T / sqrt d)
        return _attend(q, pos)
    if inputs.patchwise == "halves":
        (q1, q2), (t1, t2) = q.chunk(2, -1), pos.chunk(2, -1)
        score_pos, score_neg = _scores(q1, t1), _scores(q2, t2)
    else:
        assert neg is not None
        score_pos, score_neg = _scores(q, pos), _scores(q, neg)
    if inputs.softmax == "joint":  # one softmax over the 2n concatenated tokens
        a_pos, a_neg = _softmax(torch.cat([score_pos, score_neg], -1)).chunk(2, -1)
    else:  # the paper's two softmaxes
        a_pos, a_neg = _softmax(score_pos), _softmax(score_neg)
    # A = softmax(q t+^T / sqrt d) - l2 softmax(q t-^T / sqrt d)
    return a_pos - _lambda(inputs, 1).to(a_pos.dtype) * a_neg


def read_contrast(inputs: Inputs, v_hat: Tensor) -> Tensor:
    """Compute the output of stage II: o = (1 - l2_init) RMSNorm2(A v^), (B, heads, N, d)."""
    o = attention_map(inputs) @ v_hat
    return o if inputs.patchwise == "plain" else _norm(o, inputs, stage=1)


def _scores(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.transpose(-2, -1) / a.shape[-1] ** 0.5


def _softmax(scores: Tensor) -> Tensor:
    return _at_least_float32(scores).softmax(-1).to(scores.dtype)


def _attend(a: Tensor, b: Tensor) -> Tensor:
    return _softmax(_scores(a, b))


def _lambda(inputs: Inputs, stage: int) -> Tensor:
    value = inputs.lambdas[stage]
    assert value is not None
    return value.reshape(())


def _normed_difference(v_pos: Tensor, v_neg: Tensor, inputs: Inputs, *, stage: int) -> Tensor:
    return _norm(v_pos - _lambda(inputs, stage).to(v_pos.dtype) * v_neg, inputs, stage=stage)


def _norm(x: Tensor, inputs: Inputs, *, stage: int) -> Tensor:
    """Return (1 - l_init) RMSNorm(x) with a learned gain."""
    gain = inputs.gains[stage]
    assert gain is not None
    y = _at_least_float32(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + inputs.eps) * gain.to(y.dtype)
    return ((1 - inputs.lambda_inits[stage]) * y).to(x.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
