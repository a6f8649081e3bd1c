"""Visual-Contrast Attention in float64, written apart from the package: one head of one image at a time,
from the equations of the paper (arXiv 2511.00833, sections 3.2 and 3.3)."""

import math

import torch


def softmax_rows(x):
    e = torch.exp(x - x.max(dim=1, keepdim=True).values)
    return e / e.sum(dim=1, keepdim=True)


def rms_norm(x, gain, eps):
    rows = [row / torch.sqrt(torch.dot(row, row) / row.numel() + eps) for row in x]
    return torch.stack(rows) * gain


def one_head(
    q,
    k,
    v,
    pos,
    neg,
    l1,
    l2,
    g1,
    g2,
    i1,
    i2,
    *,
    softmax="separate",
    global_contrast="differential",
    patchwise="differential",
    eps=1e-5,
):
    d = q.shape[1]
    half = d // 2

    def attend(a, b):
        return softmax_rows(torch.einsum("id,jd->ij", a, b) / math.sqrt(a.shape[1]))

    if global_contrast == "plain":
        v_hat = attend(pos, k) @ v
    else:
        if global_contrast == "differential":
            plus, minus = attend(pos, k), attend(neg, k)
        else:
            plus, minus = attend(pos[:, :half], k[:, :half]), attend(pos[:, half:], k[:, half:])
        v_hat = (1 - i1) * rms_norm(plus @ v - l1 * (minus @ v), g1, eps)

    if patchwise == "plain":
        return attend(q, pos) @ v_hat
    pairs = ((q, pos), (q, neg))
    if patchwise == "halves":
        pairs = ((q[:, :half], pos[:, :half]), (q[:, half:], pos[:, half:]))
    if softmax == "separate":
        plus, minus = (attend(a, b) for a, b in pairs)
    else:
        scores = [torch.einsum("id,jd->ij", a, b) / math.sqrt(a.shape[1]) for a, b in pairs]
        both = softmax_rows(torch.cat(scores, dim=1))
        plus, minus = both[:, : pos.shape[0]], both[:, pos.shape[0] :]
    return (1 - i2) * rms_norm((plus - l2 * minus) @ v_hat, g2, eps)


def vca(q, k, v, pos, neg, *, lambdas, gains, lambda_inits, **options):
    """Shapes of the op; every tensor float64."""
    heads = [
        [
            one_head(*(x[b, h] for x in (q, k, v, pos, neg)), *lambdas, *gains, *lambda_inits, **options)
            for h in range(q.shape[1])
        ]
        for b in range(q.shape[0])
    ]
    return torch.stack([torch.stack(row) for row in heads])


def inputs(B=2, heads=2, N=13, d=6, n=5, *, packed=True, seed=0, scale=1.0):
    """Random float64 arguments of the op; packed q, k, v are non-contiguous views of one projection."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    if packed:
        q, k, v = (x.transpose(1, 2) for x in (scale * draw(B, N, 3, heads, d)).unbind(2))
    else:
        q, k, v = (scale * draw(B, heads, N, d) for _ in range(3))
    tensors = [q, k, v, draw(B, heads, n, d), draw(B, heads, n, d)]
    scalars = {
        "lambdas": (torch.tensor(0.31, dtype=torch.float64), torch.tensor(0.47, dtype=torch.float64)),
        "gains": (1 + 0.2 * draw(d), 1 + 0.2 * draw(d)),
        "lambda_inits": (0.2, 0.36),
    }
    return tensors, scalars


def cast(tensors, scalars, dtype):
    """Both in another type; lambdas and gains are float32 at least, as the layer keeps them."""
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(dtype) for x in tensors], {
        "lambdas": tuple(x.to(wide) for x in scalars["lambdas"]),
        "gains": tuple(x.to(wide) for x in scalars["gains"]),
        "lambda_inits": scalars["lambda_inits"],
    }


def gradients(function, tensors, scalars, weight, **options):
    """Output, and gradients of sum(weight * output) with respect to every tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, *scalars["lambdas"], *scalars["gains"])]
    out = function(
        *leaves[:5],
        lambdas=tuple(leaves[5:7]),
        gains=tuple(leaves[7:9]),
        lambda_inits=scalars["lambda_inits"],
        **options,
    )
    grads = torch.autograd.grad(out, leaves, weight.to(out.dtype), allow_unused=True)
    return out.detach(), [None if g is None else g.detach() for g in grads]
