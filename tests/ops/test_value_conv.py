"""The convolution of the values against PyTorch's own in float64: both ways to compute it, outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F

import lineardiff
from lineardiff.ops import add_value_conv, cpu

BACKENDS = ["portable", "cpu"] if cpu.why_not(None) is None else ["portable"]
CASES = (  # B, heads, d, (H, W), prefix tokens
    (2, 3, 64, (14, 14), 1),
    (1, 2, 24, (5, 9), 0),
    (2, 1, 7, (3, 4), 2),
    (1, 2, 8, (1, 6), 0),
    (1, 1, 8, (6, 1), 3),
    (1, 1, 40, (1, 1), 0),
)


def truth(o, v, weight, bias, feat_size):
    H, W = feat_size
    B, heads, N, d = v.shape
    prefix = N - H * W
    image = v[:, :, prefix:].permute(0, 1, 3, 2).reshape(B, heads * d, H, W)
    local = F.conv2d(image, weight, bias, padding=1, groups=heads * d)
    local = local.reshape(B, heads, d, H * W).permute(0, 1, 3, 2)
    return o + torch.cat([torch.zeros(B, heads, prefix, d, dtype=v.dtype), local], 2)


def arguments(B, heads, d, feat_size, prefix, dtype):
    g = torch.Generator().manual_seed(0)
    N = prefix + feat_size[0] * feat_size[1]
    o = torch.randn(B, heads, N, d, generator=g).to(dtype)
    v = torch.randn(B, N, 3, heads, d, generator=g).to(dtype)[:, :, 2].transpose(1, 2)
    weight, bias = torch.randn(heads * d, 1, 3, 3, generator=g), torch.randn(heads * d, generator=g)
    return o, v, weight, bias


def error(x, true):
    return (x.double() - true).abs().max().item() / max(true.abs().max().item(), 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients(case, dtype, backend):
    feat_size = case[3]
    tensors = arguments(*case, dtype)
    if backend == "portable":
        tensors = (*tensors[:2], *(x.to(dtype) for x in tensors[2:]))
    grad = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    double = [x.double().requires_grad_() for x in tensors]
    true = truth(*double, feat_size)
    true_grads = torch.autograd.grad(true, double, grad.double())
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    with lineardiff.backend(backend):
        out = add_value_conv(*leaves, feat_size=feat_size, overwrite=False)
        grads = torch.autograd.grad(out, leaves, grad)
    assert out.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 1e-2  # of bfloat16, one rounding of the result or of a sum
    for mine, theirs in zip((out, *grads), (true, *true_grads), strict=True):
        assert error(mine, theirs) <= bound


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no CPU kernel")
def test_opcheck():
    o, v, weight, bias = (x.requires_grad_() for x in arguments(2, 2, 8, (3, 5), 1, torch.float32))
    torch.library.opcheck(torch.ops.lineardiff.add_value_conv, (o, v, weight, bias, 3, 5))
    plain = [x.detach() for x in (o, v, weight)]
    torch.library.opcheck(torch.ops.lineardiff.value_conv_backward, (*plain, 3, 5))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no CPU kernel")
def test_same_bits_with_any_number_of_threads():
    tensors = arguments(3, 2, 24, (7, 9), 1, torch.float32)
    leaves = [x.requires_grad_() for x in tensors]
    threads, answers = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        with lineardiff.backend("cpu"):
            out = add_value_conv(*leaves, feat_size=(7, 9), overwrite=False)
            answers.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no CPU kernel")
def test_the_op_itself_checks_what_would_read_outside_of_tensors():
    o, v, weight, bias = arguments(1, 2, 8, (3, 5), 1, torch.float32)
    conv = torch.ops.lineardiff.add_value_conv
    for bad, message in (
        ((o, v, weight, bias, 4, 5), "grid must fit N"),
        ((o, v, weight[:8], bias, 3, 5), "weight must be"),
        ((o[:, :1], v, weight, bias, 3, 5), "the same shape"),
        ((o, v, weight, bias[:3], 3, 5), "bias must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            conv(*bad)


def test_weights_of_any_strides():
    o, v, weight, bias = arguments(1, 2, 8, (3, 5), 1, torch.float32)
    turned = weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    expected = add_value_conv(o, v, weight, bias, feat_size=(3, 5), overwrite=False)
    assert torch.equal(add_value_conv(o, v, turned, bias, feat_size=(3, 5), overwrite=False), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwriting_gives_the_same_bits_and_only_without_gradients(backend):
    o, v, weight, bias = arguments(2, 2, 24, (5, 9), 1, torch.float32)
    before = o.clone()
    with lineardiff.backend(backend):
        expected = add_value_conv(o, v, weight, bias, feat_size=(5, 9), overwrite=True)
        assert torch.equal(o, before)
        with torch.no_grad():
            out = add_value_conv(o, v, weight, bias, feat_size=(5, 9), overwrite=True)
    assert torch.equal(out, expected)
    assert (out.data_ptr() == o.data_ptr()) == (backend == "cpu")
