"""The depth-wise 3x3 convolution of V that the paper adds to the attention's output: compiled, or PyTorch's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lineardiff.ops import backends, cpu
from lineardiff.ops.modes import transformed


def add_value_conv(
    o: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    feat_size: tuple[int, int],
    overwrite: bool,
) -> Tensor:
    """o + the convolution of the values on their grid, with zeros around it.

    Args:
        o: what the attention gives (B, heads, P + H*W, d).
        v: values, shape of o: prefix tokens, then the grid row by row.
        weight: (heads*d, 1, 3, 3).
        bias: (heads*d,).
        feat_size: (H, W).
        overwrite: the result may be written into o when gradients are off: fresh memory costs more time than
            the convolution.

    Returns:
        (B, heads, P + H*W, d); prefix tokens, which have no place on the grid, are those of o.
    """
    if torch.jit.is_scripting():
        return _portable(o, v, weight, bias, feat_size)
    if _compiled(o, v):
        weight, bias = weight.float().contiguous(), bias.float().contiguous()
        if (
            overwrite
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and o.stride(3) == 1
        ):
            torch.ops.lineardiff.add_value_conv_(o, v, weight, bias, *feat_size)
            return o
        return torch.ops.lineardiff.add_value_conv(o, v, weight, bias, *feat_size)
    return _portable(o, v, weight, bias, feat_size)


def _portable(o: Tensor, v: Tensor, weight: Tensor, bias: Tensor, feat_size: tuple[int, int]) -> Tensor:
    H, W = feat_size
    heads, prefix = v.shape[1], v.shape[2] - H * W
    grid = v.transpose(1, 2).flatten(2)[:, prefix:].transpose(1, 2).unflatten(2, (H, W))
    local = F.conv2d(grid, weight, bias, padding=1, groups=grid.shape[1])
    local = F.pad(local.flatten(2).transpose(1, 2), (0, 0, prefix, 0))
    return o + local.unflatten(2, (heads, -1)).transpose(1, 2)


def _compiled(o: Tensor, v: Tensor) -> bool:
    """Whether the compiled kernel may run: as for the attention, which has said in the log why not."""
    fits = v.device.type == "cpu" and v.dtype in (torch.float32, torch.bfloat16) and o.dtype == v.dtype
    return fits and cpu.why_not(None) is None and not transformed() and backends.may_choose("cpu")


def _setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, v, weight, _, ctx.H, ctx.W = inputs
    ctx.save_for_backward(v, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    v, weight = ctx.saved_tensors
    dv, dweight, dbias = torch.ops.lineardiff.value_conv_backward(grad, v, weight, ctx.H, ctx.W)
    return grad, dv, dweight, dbias, None, None


def _fake_backward(grad: Tensor, v: Tensor, weight: Tensor, H: int, W: int) -> tuple[Tensor, Tensor, Tensor]:
    dbias = torch.empty_like(weight[:, 0, 0, 0], memory_format=torch.contiguous_format)
    return cpu.joined_heads(v), torch.empty_like(weight), dbias


if cpu.why_not(None) is None:
    torch.library.register_fake(
        "lineardiff::add_value_conv", lambda added, values, weight, bias, H, W: cpu.joined_heads(values)
    )
    torch.library.register_fake("lineardiff::value_conv_backward", _fake_backward)
    torch.library.register_autograd("lineardiff::add_value_conv", _backward, setup_context=_setup_context)
    torch.library.register_autograd("lineardiff::value_conv_backward", cpu.no_second_backward)

    @register_flop_formula(torch.ops.lineardiff.add_value_conv)
    def _flops(added: Any, values: Any, weight: Any, bias: Any, H: int, W: int, **_: Any) -> int:
        return 2 * 9 * values[0] * weight[0] * H * W

    @register_flop_formula(torch.ops.lineardiff.value_conv_backward)
    def _backward_flops(grad: Any, values: Any, weight: Any, H: int, W: int, **_: Any) -> int:
        return 2 * 2 * 9 * values[0] * weight[0] * H * W
