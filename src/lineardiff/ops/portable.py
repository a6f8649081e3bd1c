"""Visual-Contrast Attention in fast plain PyTorch: runs on any device, compiles, exports, differentiates.

Each of these was measured to be faster: both streams are stacked to 2n tokens, so that each stage is two batched matrix
products and one softmax; the heads are part of the batch axis; without gradients on a CPU the heads are processed in
chunks whose scores stay in cache, which also bounds the memory; bfloat16 and float16 are computed in float32 on a CPU
without instructions for them, where PyTorch's own products are many times slower.
"""

import os
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lineardiff.ops.inputs import ConvInputs, Inputs, with_tokens
from lineardiff.ops.modes import exporting, transformed

# Scores (elements, not bytes) computed at a time without gradients on a CPU: 2 MB of float32 stay in cache.
CHUNK = 1 << 19


def _cpu_flags() -> frozenset[str]:
    """Return the names of this CPU's instruction sets as Linux lists them; other systems list none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def _computes_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 matrices with instructions for them.

    On x86, oneDNN supports bfloat16 from AVX-512 on, but emulates it with float32 instructions where there is nothing
    better, which is slower than float32. The environment variable ONEDNN_MAX_CPU_ISA can exclude the instructions.
    ATEN_CPU_CAPABILITY does not concern oneDNN.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    instructions = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    if limit in ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"):
        instructions = set()
    elif limit == "AVX2_VNNI_2":
        instructions = {"avx_ne_convert"}
    return not instructions.isdisjoint(_cpu_flags())


def _slow_on_cpu() -> tuple[torch.dtype, ...]:
    """Return the types that this CPU's matrix products have no instructions for."""
    onednn = torch.backends.mkldnn.is_available()
    native = {
        torch.bfloat16: onednn and _computes_bfloat16(),
        torch.float16: onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # never emulated
    }
    return tuple(dtype for dtype, fast in native.items() if not fast)


_SLOW_ON_CPU = _slow_on_cpu()


def run(inputs: Inputs) -> Tensor:
    """Compute both stages. Shapes as in :func:`lineardiff.visual_contrast_attention`."""
    q = inputs.q
    compute = _compute_dtype(q.device.type, q.dtype)
    inputs = with_tokens(inputs, compute)
    compiled = torch.compiler.is_compiling() or exporting() or transformed()
    if compiled or torch.is_grad_enabled() or q.device.type != "cpu":
        return all_heads(inputs, compute)

    B, heads, N, d = q.shape
    out = q.new_empty(B, N, heads, d).transpose(1, 2)  # joining the heads again needs no copy
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
    """Compute all heads at once, in the type `compute`. TorchScript compiles it too.

    `in_place` overwrites intermediate results, which autograd would need: allocating memory takes as long as the
    arithmetic.
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
        v_hat = _norm(_difference(v_hat[:, :n], v_hat[:, n:], l1), gain1, 1 - init1, inputs.eps, in_place)

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
        o = _norm(o, gain2, 1 - init2, inputs.eps, in_place)
    return o.to(inputs.q.dtype).view(B, heads, N, d)


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Flatten (B, heads, rows, d) to (B heads, rows, d)."""
    return x.to(dtype).flatten(0, 1)


def _scaled(t: Tensor) -> Tensor:
    return t * t.shape[-1] ** -0.5


def _difference(x_pos: Tensor, x_neg: Tensor, scalar: Tensor) -> Tensor:
    # not addcmul(..., value=-1): tracing its forward-mode derivative crashes PyTorch 2.14
    return torch.addcmul(x_pos, x_neg, -scalar.reshape(()).to(x_pos.dtype))


def _softmax(scores: Tensor, in_place: bool) -> Tensor:
    return torch.softmax(scores, -1, out=scores) if in_place else scores.softmax(-1)


def _norm(x: Tensor, gain: Tensor, factor: float, eps: float, in_place: bool) -> Tensor:
    """Return factor * RMSNorm(x), computed in float32 at least."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    gain = gain.to(y.dtype) * factor
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)  # reads y once, square().mean() twice
    scale = torch.rsqrt(norm * norm / y.shape[-1] + eps)
    y = y.mul_(scale).mul_(gain) if in_place else y * scale * gain
    return y.to(x.dtype)


def _compute_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if device == "cpu" and dtype in _SLOW_ON_CPU else dtype


def add_value_conv(inputs: ConvInputs) -> Tensor:
    """Add the convolution of the values. Shapes as in :func:`lineardiff.ops.add_value_conv`."""
    o, v = inputs.o, inputs.v
    H, W = inputs.feat_size
    heads, prefix = v.shape[1], v.shape[2] - H * W
    grid = v.transpose(1, 2).flatten(2)[:, prefix:].transpose(1, 2).unflatten(2, (H, W))
    local = F.conv2d(grid, inputs.weight, inputs.bias, padding=1, groups=grid.shape[1])
    local = F.pad(local.flatten(2).transpose(1, 2), (0, 0, prefix, 0))
    return o + local.unflatten(2, (heads, -1)).transpose(1, 2)
