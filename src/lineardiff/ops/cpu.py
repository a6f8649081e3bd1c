"""The compiled CPU kernel (ops/csrc): both stages of a head in cache, forward and backward.

It is one library on PyTorch's stable ABI, chosen at run time among AVX2, AVX-512 and AVX-512 with bfloat16, and
optional: without it, or on another machine, `why_not` says so and `portable` runs.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lineardiff.ops.inputs import Inputs
from lineardiff.ops.modes import transformed

LIBRARY = Path(__file__).with_name("_cpu_kernel.so")
REASON = Path(__file__).with_name("_cpu_kernel.txt")
"""Written when the package is installed without the library: why."""

OPS = ("vca_forward", "vca_backward", "add_value_conv", "add_value_conv_", "value_conv_backward", "vca_isa")
_ISAS = {0: "none", 2: "AVX2", 5: "AVX-512", 6: "AVX-512 with bfloat16"}


def _load() -> str | None:
    """Load the library; None, or in words why it cannot be used on this machine."""
    if not LIBRARY.exists():
        reason = REASON.read_text("utf-8").strip() if REASON.exists() else "run `make install` in a clone"
        return f"the kernel was not built when lineardiff was installed: {reason}"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the kernel does not load with PyTorch {torch.__version__}: {error}"
    if not all(hasattr(torch.ops.lineardiff, name) for name in OPS):
        return (
            "the kernel is that of another version of lineardiff; install again (`make install` in a clone)"
        )
    if isa() == "none":
        return "this CPU has no AVX2"
    return None


def isa() -> str:
    """The instruction set that the kernel uses here, in words."""
    return _ISAS[torch.ops.lineardiff.vca_isa(-1)]


_missing = _load()
SUMMARY = "fused C++ kernel, float32 and bfloat16" + ("" if _missing else f", {isa()} on this machine")


def why_not(inputs: Inputs | None) -> str | None:
    """None, or why the kernel cannot compute these inputs (or, for None, anything on this machine)."""
    if _missing is not None or inputs is None:
        return _missing
    if inputs.q.device.type != "cpu":
        return f"the tensors are on {inputs.q.device.type}"
    if inputs.q.dtype not in (torch.float32, torch.bfloat16):
        return f"it computes float32 and bfloat16, and q is {inputs.q.dtype}"
    if transformed():
        return "it knows nothing of torch.func's transforms and of forward-mode differentiation"
    if inputs.global_contrast != "differential" or inputs.patchwise != "differential":
        given = f"global_contrast={inputs.global_contrast!r}, patchwise={inputs.patchwise!r}"
        return f"it computes 'differential' stages only, not {given}"
    return None


def run(inputs: Inputs) -> Tensor:
    """Both stages. Shapes as in :func:`lineardiff.visual_contrast_attention`."""
    assert inputs.neg is not None
    lambdas = [x.float() for x in inputs.lambdas if x is not None]
    pairs = zip(inputs.gains, inputs.lambda_inits, strict=True)
    gains = [gain.float() * (1 - init) for gain, init in pairs if gain is not None]
    tensors = [inputs.q, inputs.k, inputs.v, inputs.pos, inputs.neg, *lambdas, *gains]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    joint = inputs.softmax == "joint"
    options = (inputs.eps, joint, list(inputs.pool or ()), save)
    return torch.ops.lineardiff.vca_forward(*tensors, *options)[0]


# ---- what PyTorch must know of the two ops: shapes, gradients, costs


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, neg: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    B, heads, _, d = q.shape
    width = d + 2 if rest[-1] else 0
    return joined_heads(q), q.new_empty(B, heads, 2 * pos.shape[2], width, dtype=torch.float32)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, neg: Tensor, *rest: Any
) -> Any:
    sums = q.new_empty(2 * q.shape[3] + 2, dtype=torch.float32)
    tokens = (pos.new_empty(pos.shape) for _ in range(2))
    return *(joined_heads(q) for _ in range(3)), *tokens, sums


def joined_heads(like: Tensor) -> Tensor:
    """Empty, in the layout of a projection, so that joining the heads again copies nothing."""
    B, heads, N, d = like.shape
    return like.new_empty(B, N, heads, d).transpose(1, 2)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], output[1])
    ctx.options = inputs[9:12]


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    *tensors, saved = ctx.saved_tensors
    if saved.shape[-1] == 0:
        raise RuntimeError(
            "Visual-Contrast Attention saved nothing for a backward pass, because gradients were off when this graph "
            "was made; trace or export it with gradients on, or under `with lineardiff.backend('portable'):`."
        )
    q, l1, l2 = tensors[0], tensors[5], tensors[6]
    d = q.shape[3]
    dq, dk, dv, dpos, dneg, sums = torch.ops.lineardiff.vca_backward(grad, *tensors, saved, *ctx.options)
    gain1, gain2, dl1, dl2 = sums.split((d, d, 1, 1))
    return dq, dk, dv, dpos, dneg, dl1.reshape(l1.shape), dl2.reshape(l2.shape), gain1, gain2, *(None,) * 4


def no_second_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "the backend 'cpu' of lineardiff is differentiable once, and create_graph=True asks for gradients of "
        "gradients; compute this under `with lineardiff.backend('portable'):`."
    )


def _tokens_flops(q: Any, pos: Any, factor: int) -> int:
    B, heads, N, d = q
    return factor * B * heads * N * pos[2] * d


if _missing is None:
    torch.library.register_fake("lineardiff::vca_forward", _fake_forward)
    torch.library.register_fake("lineardiff::vca_backward", _fake_backward)
    torch.library.register_autograd("lineardiff::vca_forward", _backward, setup_context=_setup_context)
    torch.library.register_autograd("lineardiff::vca_backward", no_second_backward)

    @register_flop_formula(torch.ops.lineardiff.vca_forward)
    def _forward_flops(q: Any, k: Any, v: Any, pos: Any, *_: Any, **__: Any) -> int:
        return _tokens_flops(q, pos, 14)

    @register_flop_formula(torch.ops.lineardiff.vca_backward)
    def _backward_flops(grad: Any, q: Any, k: Any, v: Any, pos: Any, *_: Any, **__: Any) -> int:
        return _tokens_flops(q, pos, 34)
