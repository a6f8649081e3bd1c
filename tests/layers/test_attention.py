"""The layer against an independent composition: timm-style projection, torch's adaptive pooling and
convolution, and the float64 op of truth.py."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
import truth

from lineardiff import VisualContrastAttention
from lineardiff.layers import SelfAttention


def expected(layer, x, feat_size, dtype=torch.float64):
    """Compute the layer's output in `dtype` from its parameters by name."""
    p = {name: value.detach().to(dtype) for name, value in layer.state_dict().items()}
    B, N, C = x.shape
    (H, W), (h, w), heads = feat_size, layer.contrast_grid, layer.num_heads
    P, d = N - H * W, C // heads
    q, k, v = F.linear(x.to(dtype), p["qkv.weight"], p.get("qkv.bias")).split(C, dim=-1)

    def split(t):
        return torch.stack([t[..., i * d : (i + 1) * d] for i in range(heads)], dim=1)

    def on_grid(t):
        return t[:, P:].reshape(B, H, W, C).permute(0, 3, 1, 2)

    pooled = F.adaptive_avg_pool2d(on_grid(q), (h, w)).flatten(2).transpose(1, 2)
    if layer.tokens == "embed":
        pooled = torch.zeros_like(pooled)
    pos = pooled + p.get("pos_embed_pos", 0)
    neg = pooled + p.get("pos_embed_neg", 0)
    init = layer.lambda_init
    lambdas, gains = [], []
    for i in (1, 2):
        if f"lambda{i}_q1" in p:
            first = torch.exp(torch.dot(p[f"lambda{i}_q1"], p[f"lambda{i}_k1"]))
            second = torch.exp(torch.dot(p[f"lambda{i}_q2"], p[f"lambda{i}_k2"]))
            lambdas.append(first - second + init)
            gains.append(p[f"norm{i}.weight"])
        else:
            lambdas.append(None)
            gains.append(None)
    o = truth.vca(
        *(split(t) for t in (q, k, v, pos, neg)),
        lambdas=lambdas,
        gains=gains,
        lambda_inits=(init, init),
        softmax=layer.softmax,
        global_contrast=layer.global_contrast,
        patchwise=layer.patchwise,
    )
    o = torch.cat(list(o.unbind(1)), dim=-1)
    if "conv.weight" in p:
        local = F.conv2d(on_grid(v), p["conv.weight"], p["conv.bias"], padding=1, groups=C)
        o[:, P:] += local.flatten(2).transpose(1, 2)
    return F.linear(o, p["proj.weight"], p.get("proj.bias"))


def make(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = VisualContrastAttention(24, 3, **{"contrast_grid": (2, 3), "dtype": dtype, **options})
    with torch.no_grad():  # gains away from 1
        for norm in (layer.norm1, layer.norm2):
            if norm is not None:
                norm.weight.add_(0.2 * torch.randn_like(norm.weight))
    return layer


OPTIONS = [
    {},
    {"conv": False},
    {"qkv_bias": False, "proj_bias": False},
    {"softmax": "joint"},
    {"depth": 5},
    {"tokens": "embed"},
    {"tokens": "pool"},
    {"global_contrast": "plain"},
    {"patchwise": "plain"},
    {"global_contrast": "plain", "patchwise": "plain", "tokens": "pool"},
    {"global_contrast": "halves", "patchwise": "halves"},
    {"global_contrast": "halves", "patchwise": "differential", "softmax": "joint"},
]


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_the_independent_composition(options, prefix):
    layer = make(**options)
    for H, W in ((4, 6), (5, 7), (2, 3)):  # divisible by the contrast grid, not divisible, equal to it
        x = torch.randn(2, prefix + H * W, 24, dtype=torch.float64)
        assert torch.allclose(layer(x, (H, W)), expected(layer, x, (H, W)), atol=1e-12, rtol=1e-12)
        x32, layer32 = x.float(), copy.deepcopy(layer).float()
        assert torch.allclose(
            layer32(x32, (H, W)).double(), expected(layer32, x32, (H, W)), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_parameter_has_a_gradient_that_finite_differences_confirm(options):
    layer = make(**options)
    x = torch.randn(2, 1 + 5 * 4, 24, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, (5, 4)))

    assert torch.autograd.gradcheck(call, (x, *layer.parameters()), fast_mode=True)
    layer(x, (5, 4)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


def test_lambda_and_initial_values():
    layer = VisualContrastAttention(512, 4, depth=3, contrast_grid=(16, 16))
    assert layer.lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.9))
    for name in ("pos_embed_pos", "pos_embed_neg"):
        embed = getattr(layer, name)
        assert embed.shape == (256, 512)
        assert embed.mean().item() == pytest.approx(0, abs=0.02)
        assert embed.std().item() == pytest.approx(1, abs=0.02)
    vectors = torch.stack(
        [getattr(layer, f"lambda{i}_{v}") for i in (1, 2) for v in ("q1", "k1", "q2", "k2")]
    )
    assert vectors.shape == (8, 128)
    assert vectors.std().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(layer.norm1.weight, torch.ones(128))
    assert layer.norm2.eps == 1e-5


def test_parameter_names_and_count_are_those_of_the_design():
    layer = VisualContrastAttention(192, 3)
    own = {name for name, _ in layer.named_parameters()}
    lambdas = {f"lambda{i}_{v}" for i in (1, 2) for v in ("q1", "k1", "q2", "k2")}
    assert own == lambdas | {
        *("qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "conv.weight", "conv.bias"),
        *("pos_embed_pos", "pos_embed_neg", "norm1.weight", "norm2.weight"),
    }
    mhsa = 4 * 192 * 192 + 4 * 192
    assert sum(p.numel() for p in layer.parameters()) == mhsa + 2 * 49 * 192 + 10 * 192 + 8 * 64 + 2 * 64


def test_reset_parameters_draws_anew_after_the_meta_device():
    layer = VisualContrastAttention(24, 3, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert layer.pos_embed_pos.std().item() == pytest.approx(1, abs=0.1)


def test_meta_device_gives_shapes():
    layer = VisualContrastAttention(24, 3, device="meta")
    assert layer(torch.empty(2, 1 + 81, 24, device="meta"), (9, 9)).shape == (2, 82, 24)


def test_dtype_argument():
    layer = VisualContrastAttention(24, 3, dtype=torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer(torch.randn(1, 49, 24, dtype=torch.bfloat16), (7, 7)).dtype == torch.bfloat16


def test_contrast_grid_changes_with_the_embeddings_resized():
    layer = make(contrast_grid=(2, 4))
    before = layer.pos_embed_neg.detach().clone()
    layer.pos_embed_neg.requires_grad_(False)
    layer.set_contrast_grid((4, 3))
    assert layer.pos_embed_pos.shape == (12, 24)
    assert not layer.pos_embed_neg.requires_grad
    resized = F.interpolate(before.T.reshape(1, 24, 2, 4).float(), (4, 3), mode="bicubic", antialias=True)
    assert torch.allclose(layer.pos_embed_neg.float(), resized[0].flatten(1).T, atol=1e-5)
    x = torch.randn(1, 30, 24, dtype=torch.float64)
    assert torch.allclose(layer(x, (5, 6)), expected(layer, x, (5, 6)), atol=1e-12)


def test_pool_can_be_a_function():
    def maximum(x, feat_size, grid):
        return (
            F.adaptive_max_pool2d(x.transpose(1, 2).unflatten(2, feat_size), grid).flatten(2).transpose(1, 2)
        )

    layer, average = make(pool=maximum), make()
    constant = torch.ones(1, 24, 24, dtype=torch.float64)
    assert torch.allclose(
        layer(constant, (4, 6)), average(constant, (4, 6)), atol=1e-12
    )  # the maximum is the mean
    x = torch.randn(1, 24, 24, dtype=torch.float64)
    assert not torch.allclose(layer(x, (4, 6)), average(x, (4, 6)))


def test_attention_maps_compose_to_the_output():
    layer = make(conv=False)
    x = torch.randn(2, 25, 24, dtype=torch.float64)
    v_hat, a = layer.attention_maps(x, (4, 6))
    assert v_hat.shape == (2, 3, 6, 8)
    assert a.shape == (2, 3, 25, 6)
    init, gain = layer.lambda_init, layer.norm2.weight
    l2 = layer._lambda(layer.lambda2_q1, layer.lambda2_k1, layer.lambda2_q2, layer.lambda2_k2)
    assert torch.allclose(a.sum(-1), (1 - l2).expand(2, 3, 25))  # two softmaxes, one subtracted l2 times
    o = a @ v_hat
    o = (1 - init) * o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * gain
    out = layer.proj(o.transpose(1, 2).flatten(2))
    assert torch.allclose(out, layer(x, (4, 6)), atol=1e-12)


def test_cost_is_linear_in_the_number_of_tokens():
    from torch.utils.flop_counter import FlopCounterMode

    def multiply_adds(side):
        layer = VisualContrastAttention(64, 1, conv=False, tokens="embed", device="meta")
        with FlopCounterMode(display=False) as counter:
            layer(torch.empty(1, side * side, 64, device="meta"), (side, side))
        return counter.get_total_flops() // 2

    for side in (14, 28):
        N = side * side
        assert multiply_adds(side) == 4 * N * 64 * 64 + 7 * 49 * N * 64  # projections, then 7 n N d


def test_two_sizes_through_one_checkpointed_layer_before_one_backward():
    layer = make()
    xs = [(torch.randn(1, 1 + H * W, 24, dtype=torch.float64), (H, W)) for H, W in ((4, 6), (6, 5))]
    sum(layer(x, size).square().sum() for x, size in xs).backward()
    plain = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    outs = [torch.utils.checkpoint.checkpoint(layer, x, size, use_reentrant=False) for x, size in xs]
    sum(out.square().sum() for out in outs).backward()
    for before, parameter in zip(plain, layer.parameters(), strict=True):
        assert torch.equal(before, parameter.grad)


def test_deepcopy_pickle_and_state_dict_keep_the_answer():
    layer = make(contrast_grid=(3, 2), grid_size=(6, 4), global_contrast="halves")
    x = torch.randn(1, 26, 24, dtype=torch.float64)
    answer = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), answer)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), answer)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = VisualContrastAttention(
        24, 3, contrast_grid=(3, 2), grid_size=(6, 4), global_contrast="halves", dtype=torch.float64
    )
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), answer)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_autocast_is_no_worse_than_plain_arithmetic_in_its_type(options, weights, autocast):
    """As for self-attention, the output has the type of autocast, which leaves float64 alone."""
    layer = make(weights, **options)
    x = torch.randn(4, 1 + 8 * 9, 24, dtype=weights, generator=torch.Generator().manual_seed(1))
    truth, naive = expected(layer, x, (8, 9)), expected(layer, x, (8, 9), autocast)
    self_attention = SelfAttention(24, 3, dtype=weights)
    with torch.autocast("cpu", autocast):
        out = layer(x, (8, 9))
        assert out.dtype == self_attention(x).dtype
    if weights == torch.float64:
        assert torch.allclose(out, truth, atol=1e-12, rtol=1e-12)
    else:
        assert (out - truth).norm() <= 1.5 * (naive - truth).norm()
    out.float().square().sum().backward()
    assert all(p.grad.dtype == weights and p.grad.isfinite().all() for p in layer.parameters())


def test_compiles_whole_and_serves_other_grids():
    torch._dynamo.reset()
    layer = make(torch.float32)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for H, W in ((4, 6), (9, 5), (7, 12)):
        x = torch.randn(2, 1 + H * W, 24, requires_grad=True)
        out = compiled(x, (H, W))
        assert torch.allclose(out, layer(x, (H, W)), atol=1e-5)
        out.sum().backward()
        assert x.grad.isfinite().all()


def test_torchscript_gives_the_same():
    for options in OPTIONS:
        layer = make(**options)
        x = torch.randn(2, 25, 24, dtype=torch.float64)
        assert torch.allclose(torch.jit.script(layer)(x, (4, 6)), layer(x, (4, 6)), atol=1e-12)


@pytest.mark.parametrize("grad", [True, False])
def test_torch_jit_trace_gives_the_same(grad):
    """The trace is checked by torch with and without gradients."""
    layer = make(torch.float32, grid_size=(4, 6)).eval()
    x = torch.randn(2, 25, 24)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(layer, x)
        y = torch.randn(2, 25, 24)
        assert torch.allclose(traced(y), layer(y), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "dim=24 must be a multiple of num_heads=5"),
        ({"contrast_grid": (0, 2)}, "contrast_grid must be two positive integers"),
        ({"contrast_grid": 7}, "contrast_grid must be two positive integers .* got 7"),
        ({"grid_size": (4,)}, "grid_size must be two positive integers"),
        ({"tokens": "max"}, "tokens='max' is unknown"),
        ({"patchwise": "linear"}, "patchwise='linear' is unknown"),
        ({"softmax": "none"}, "softmax='none' is unknown"),
        ({"pool": "max"}, "pool='max' is unknown"),
        ({"depth": -1}, "depth=-1 must be an integer of at least 0"),
        ({"depth": float("nan")}, "depth=nan must be an integer"),
        ({"depth": True}, "depth=True must be an integer"),
        ({"dim": 24.0}, "dim=24.0 must be an integer of at least 1"),
        ({"dim": 0}, "dim=0 must be"),
        ({"num_heads": True}, "num_heads=True must be"),
        ({"contrast_grid": (2, True)}, "contrast_grid must be two positive integers"),
        ({"contrast_grid": (2.0, 3)}, "contrast_grid must be two positive integers"),
        ({"grid_size": (4, float("nan"))}, "grid_size must be two positive integers"),
        ({"num_heads": 8, "global_contrast": "halves"}, "even head dimension"),
    ],
)
def test_bad_options_say_what_to_do(options, message):
    with pytest.raises(ValueError, match=message):
        VisualContrastAttention(**{"dim": 24, "num_heads": 3, **options})


def test_bad_grids_say_what_to_do():
    layer = make(contrast_grid=(7, 7))
    x = torch.randn(1, 50, 24, dtype=torch.float64)
    with pytest.raises(ValueError, match="grid of the tokens is unknown"):
        layer(x)
    with pytest.raises(ValueError, match="grid 5 x 9 is smaller than the contrast grid 7 x 7"):
        layer(x, (5, 9))
    with pytest.raises(ValueError, match="50 tokens, fewer than the 8 x 8 grid"):
        layer(x, (8, 8))


def test_module_hooks_and_trackers_see_no_gradient_under_no_grad():
    layer = VisualContrastAttention(8, 2, contrast_grid=(2, 2))
    seen = []
    for norm in (layer.norm1, layer.norm2):
        norm.register_forward_hook(lambda module, _, gain: seen.append((module.weight, gain)))
    x = torch.randn(1, 9, 8)
    with torch.no_grad():
        layer(x, (3, 3))
    layer(x, (3, 3))
    assert [gain.requires_grad for _, gain in seen] == [False, False, True, True]
    assert all(torch.equal(weight, gain) for weight, gain in seen)
