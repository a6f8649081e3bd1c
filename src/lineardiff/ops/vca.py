"""The attention: check the arguments, choose a backend, call it."""

from contextlib import nullcontext

import torch
from torch import Tensor

from lineardiff.ops.backends import check_environment, select
from lineardiff.ops.inputs import Inputs, Softmax, Stage, check_inputs
from lineardiff.ops.portable import all_heads


def visual_contrast_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    neg: Tensor | None,
    *,
    lambdas: tuple[Tensor | None, Tensor | None],
    gains: tuple[Tensor | None, Tensor | None],
    lambda_inits: tuple[float, float],
    softmax: Softmax = "separate",
    global_contrast: Stage = "differential",
    patchwise: Stage = "differential",
    eps: float = 1e-5,
    pool: tuple[int, int, int, int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute Visual-Contrast Attention of the given queries, keys, values and contrast tokens.

    Stage I: both streams of contrast tokens attend to all keys; their normalized difference is the contrast map
    v^ = (1 - l1_init) RMSNorm1(softmax(t+ k^T / sqrt d) v - l1 softmax(t- k^T / sqrt d) v).
    Stage II: every query attends to the contrast map, o = (1 - l2_init) RMSNorm2(A v^) with
    A = softmax(q t+^T / sqrt d) - l2 softmax(q t-^T / sqrt d). The cost is 7 n N d multiply-adds per head.
    Source: https://arxiv.org/abs/2511.00833, sections 3.2 and 3.3.

    Args:
        q: Queries (B, heads, N, d), with any strides. Prefix tokens are ordinary rows.
        k: Keys, shape of q.
        v: Values, shape of q.
        pos: Positive contrast tokens t+ (B, heads, n, d); with `pool`, their embeddings e+.
        neg: Negative contrast tokens t- (B, heads, n, d), or e-; None if no stage is "differential".
        lambdas: l1 and l2, tensors with one element; None for a "plain" stage.
        gains: Gains of RMSNorm1 and RMSNorm2, (d,) each; None for a "plain" stage.
        lambda_inits: l1_init and l2_init, the constants of the factors (1 - l_init).
        softmax: Normalization of stage II: "separate", the paper's two softmaxes, or "joint", one over the 2n tokens.
        global_contrast: Stage I: "differential"; "plain", a single stream softmax(t+ k^T / sqrt d) v without lambda and
            norm; or "halves", the form of differential attention in language models, where the two halves of the
            channels of t+ and k are the two streams.
        patchwise: Stage II: the same, with q and t+.
        eps: Added to the mean square in the norms.
        pool: (H, W, h, w): the last H*W queries form a grid, which is averaged into h x w cells, n = h w, and
            t+ = average + pos, t- = average + neg. Prefix tokens are not pooled. The embeddings may be float32
            whatever the type of q. None uses pos and neg as they are.
        backend: "auto", or the name of a backend; see :func:`lineardiff.list_backends`.

    Returns:
        (B, heads, N, d) in the type of q. Under autocast, q, k, v, pos and neg are converted to its type unless they
        are float64, which autocast leaves alone; softmaxes, norms, lambdas and gains stay in float32.

    Raises:
        ValueError: Shapes, types or options do not fit, or a named backend cannot run.
    """
    inputs = Inputs(
        q, k, v, pos, neg, lambdas, gains, lambda_inits, softmax, global_contrast, patchwise, eps, pool
    )
    return attend(inputs, backend)


def attend(inputs: Inputs, backend: str = "auto") -> Tensor:
    """Compute :func:`visual_contrast_attention` of packed arguments. TorchScript compiles the portable path."""
    if torch.jit.is_scripting():
        return all_heads(inputs, inputs.q.dtype)
    check_environment()
    device = inputs.q.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    if autocast:
        inputs = _autocast(inputs, torch.get_autocast_dtype(device))
    check_inputs(inputs)
    chosen = select(backend, inputs)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        return chosen.run(inputs)


def _autocast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Convert the tensors as autocast converts those of a matrix product: all but float64 ones, to `dtype`.

    Gains are multiplied, and embeddings of pooled queries added, in float32: both may have yet another type.
    """
    if torch.float64 in (x.dtype for x in inputs[:3]):
        return inputs
    q, k, v = (x.to(dtype) for x in inputs[:3])
    pos, neg = inputs.pos, inputs.neg
    added = dtype if inputs.pool is None or pos.dtype == dtype else torch.float32
    neg = None if neg is None else neg.to(added)
    gain1, gain2 = (None if gain is None else gain.float() for gain in inputs.gains)
    return inputs._replace(q=q, k=k, v=v, pos=pos.to(added), neg=neg, gains=(gain1, gain2))
