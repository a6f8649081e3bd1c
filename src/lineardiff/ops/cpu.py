"""The compiled CPU kernel (ops/csrc): both stages of a head in cache, and the convolution of V, forward and backward.

It is one library on PyTorch's stable ABI, which chooses its instruction set at run time. It is optional: without it, or
on a machine that cannot run it, `why_not` says so and "auto" takes another backend.
"""

import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lineardiff.ops.inputs import ConvInputs, Inputs
from lineardiff.ops.modes import transformed

LIBRARY = Path(__file__).with_name("_cpu_kernel.so")
REASON = Path(__file__).with_name("_cpu_kernel.txt")
"""Written when the package is installed without the library: the reason."""

OPS = (
    "vca_forward",
    "vca_backward",
    "add_value_conv",
    "add_value_conv_",
    "value_conv_backward",
    "kernel_isa",
)


def _load() -> str | None:
    """Load the library. Return None, or why it cannot be used on this machine."""
    if not LIBRARY.exists():
        reason = REASON.read_text("utf-8").strip() if REASON.exists() else "run `make install` in a clone"
        return f"the kernel was not built when lineardiff was installed: {reason}"
    if _incomplete(LIBRARY):
        return f"{LIBRARY} is damaged; build it again (`make install` in a clone)"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the kernel does not load with PyTorch {torch.__version__}: {error}"
    if not all(hasattr(torch.ops.lineardiff, name) for name in OPS):
        return "the kernel belongs to another version of lineardiff; reinstall it (`make install` in a clone)"
    if not isa():
        return "this CPU has no AVX2"
    return None


def _incomplete(library: Path) -> bool:
    """Return whether the file ends before its ELF segments and section table do: loading it would kill the process.

    A recorded size or hash would not survive `auditwheel repair`, which rewrites the library of a wheel.
    """
    content = library.read_bytes()
    if len(content) < 64 or content[:4] != b"\x7fELF":
        return True
    segments, sections = struct.unpack_from("<QQ", content, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", content, 54)
    ends = [segments + segment_size * segment_count, sections + section_size * section_count]
    if ends[0] > len(content):
        return True
    for i in range(segment_count):
        offset, _, _, size = struct.unpack_from("<4Q", content, segments + i * segment_size + 8)
        ends.append(offset + size)
    return max(ends) > len(content)


def isa() -> str:
    """Return the name of the instruction set that the kernel uses here, empty if this CPU has none of them."""
    return torch.ops.lineardiff.kernel_isa("")


_missing = _load()
SUMMARY = "fused C++ kernel, float32 and bfloat16" + ("" if _missing else f", {isa()} on this machine")


def why_not(inputs: Inputs | ConvInputs | None) -> str | None:
    """Return why the kernel cannot compute these inputs (given None: anything on this machine), or None if it can."""
    if _missing is not None or inputs is None:
        return _missing
    values = inputs.v
    if values.device.type != "cpu":
        return f"the tensors are on {values.device.type}"
    if values.dtype not in (torch.float32, torch.bfloat16):
        return f"it computes float32 and bfloat16, not {values.dtype}"
    if transformed():
        return "it supports neither the transforms of torch.func nor forward-mode differentiation"
    if isinstance(inputs, ConvInputs):
        return None if inputs.o.dtype == values.dtype else f"o is {inputs.o.dtype} and v is {values.dtype}"
    if inputs.global_contrast != "differential" or inputs.patchwise != "differential":
        given = f"global_contrast={inputs.global_contrast!r}, patchwise={inputs.patchwise!r}"
        return f"it computes 'differential' stages only, not {given}"
    return None


def run(inputs: Inputs) -> Tensor:
    """Compute both stages. Shapes as in :func:`lineardiff.visual_contrast_attention`."""
    assert inputs.neg is not None
    lambdas = [x.float() for x in inputs.lambdas if x is not None]
    pairs = zip(inputs.gains, inputs.lambda_inits, strict=True)
    gains = [gain.float() * (1 - init) for gain, init in pairs if gain is not None]
    tensors = [inputs.q, inputs.k, inputs.v, inputs.pos, inputs.neg, *lambdas, *gains]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    joint = inputs.softmax == "joint"
    options = (inputs.eps, joint, list(inputs.pool or ()), save)
    return torch.ops.lineardiff.vca_forward(*tensors, *options)[0]


def add_value_conv(inputs: ConvInputs) -> Tensor:
    """Add the convolution of the values. Shapes as in :func:`lineardiff.ops.add_value_conv`."""
    o, v, weight, bias, feat_size, overwrite = inputs
    weight, bias = weight.float().contiguous(), bias.float().contiguous()
    in_place = overwrite and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if in_place and o.stride(3) == 1:
        torch.ops.lineardiff.add_value_conv_(o, v, weight, bias, *feat_size)
        return o
    return torch.ops.lineardiff.add_value_conv(o, v, weight, bias, *feat_size)


# ---- what PyTorch must know about the ops: shapes, gradients, costs


def _joined_heads(like: Tensor) -> Tensor:
    """Return an empty tensor laid out as (B, N, heads, d), so that joining the heads needs no copy."""
    B, heads, N, d = like.shape
    return like.new_empty(B, N, heads, d).transpose(1, 2)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, neg: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    B, heads, _, d = q.shape
    width = d + 2 if rest[-1] else 0
    return _joined_heads(q), q.new_empty(B, heads, 2 * pos.shape[2], width, dtype=torch.float32)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, neg: Tensor, *rest: Any
) -> Any:
    sums = q.new_empty(2 * q.shape[3] + 2, dtype=torch.float32)
    tokens = (pos.new_empty(pos.shape) for _ in range(2))
    return *(_joined_heads(q) for _ in range(3)), *tokens, sums


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
            "was made. Trace or export it with gradients on, or under `with lineardiff.backend('portable'):`."
        )
    q, l1, l2 = tensors[0], tensors[5], tensors[6]
    d = q.shape[3]
    dq, dk, dv, dpos, dneg, sums = torch.ops.lineardiff.vca_backward(grad, *tensors, saved, *ctx.options)
    gain1, gain2, dl1, dl2 = sums.split((d, d, 1, 1))
    return dq, dk, dv, dpos, dneg, dl1.reshape(l1.shape), dl2.reshape(l2.shape), gain1, gain2, *(None,) * 4


def _no_second_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "backend 'cpu' is differentiable once, but create_graph=True asks for gradients of gradients. "
        "Compute this under `with lineardiff.backend('portable'):`."
    )


def _setup_conv_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, v, weight, _, ctx.H, ctx.W = inputs
    ctx.save_for_backward(v, weight)


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    v, weight = ctx.saved_tensors
    dv, dweight, dbias = torch.ops.lineardiff.value_conv_backward(grad, v, weight, ctx.H, ctx.W)
    return grad, dv, dweight, dbias, None, None


def _fake_conv(added: Tensor, values: Tensor, weight: Tensor, bias: Tensor, H: int, W: int) -> Tensor:
    return _joined_heads(values)


def _fake_conv_backward(
    grad: Tensor, v: Tensor, weight: Tensor, H: int, W: int
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = torch.empty_like(weight[:, 0, 0, 0], memory_format=torch.contiguous_format)
    return _joined_heads(v), torch.empty_like(weight), dbias


def _tokens_flops(q: Any, pos: Any, factor: int) -> int:
    B, heads, N, d = q
    return factor * B * heads * N * pos[2] * d


def _register() -> None:
    ops, library = torch.ops.lineardiff, torch.library
    library.register_fake("lineardiff::vca_forward", _fake_forward)
    library.register_fake("lineardiff::vca_backward", _fake_backward)
    library.register_fake("lineardiff::add_value_conv", _fake_conv)
    library.register_fake("lineardiff::value_conv_backward", _fake_conv_backward)
    library.register_autograd("lineardiff::vca_forward", _backward, setup_context=_setup_context)
    library.register_autograd("lineardiff::vca_backward", _no_second_backward)
    library.register_autograd("lineardiff::add_value_conv", _conv_backward, setup_context=_setup_conv_context)
    library.register_autograd("lineardiff::value_conv_backward", _no_second_backward)

    @register_flop_formula(ops.vca_forward)
    def forward_flops(q: Any, k: Any, v: Any, pos: Any, *_: Any, **__: Any) -> int:
        return _tokens_flops(q, pos, 14)

    @register_flop_formula(ops.vca_backward)
    def backward_flops(grad: Any, q: Any, k: Any, v: Any, pos: Any, *_: Any, **__: Any) -> int:
        return _tokens_flops(q, pos, 34)

    @register_flop_formula(ops.add_value_conv)
    def conv_flops(added: Any, values: Any, weight: Any, bias: Any, H: int, W: int, **_: Any) -> int:
        return 2 * 9 * values[0] * weight[0] * H * W

    @register_flop_formula(ops.value_conv_backward)
    def conv_backward_flops(grad: Any, values: Any, weight: Any, H: int, W: int, **_: Any) -> int:
        return 2 * 2 * 9 * values[0] * weight[0] * H * W


if _missing is None:
    _register()
