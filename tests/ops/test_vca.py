"""The op against the float64 computation of truth.py: every backend, option, type, odd shapes, gradients."""

import itertools

import pytest
import torch
import truth

from lineardiff import visual_contrast_attention as vca
from lineardiff.ops import portable

BACKENDS = ("reference", "portable")
SHAPES = (  # B, heads, N, d, n
    (2, 2, 13, 6, 5),
    (1, 3, 50, 16, 9),
    (2, 1, 7, 4, 1),
    (1, 2, 1, 8, 3),
    (3, 2, 31, 10, 31),
)
OPTIONS = [
    {"softmax": softmax, "global_contrast": global_contrast, "patchwise": patchwise}
    for softmax, global_contrast, patchwise in itertools.product(
        ("separate", "joint"), ("differential", "plain", "halves"), ("differential", "plain", "halves")
    )
]


def worst(a, b):
    """Largest error relative to the largest true value, or to 1, the size of the inputs, where that is larger."""
    return (a.double() - b).abs().max().item() / max(b.abs().max().item(), 1)


def compare(dtype, shape, options, backend, packed=True):
    tensors, scalars = truth.inputs(*shape, packed=packed)
    weight = torch.randn(
        shape[0], shape[1], shape[2], shape[3], generator=torch.Generator().manual_seed(1)
    ).double()
    low = truth.cast(tensors, scalars, dtype)
    exact = ([x.double() for x in low[0]], {k: tuple(map(_double, v)) for k, v in low[1].items()})
    expected, expected_grads = truth.gradients(truth.vca, *exact, weight.to(dtype).double(), **options)
    out, grads = truth.gradients(vca, *low, weight, backend=backend, **options)
    assert out.dtype == dtype
    pairs = [(out, expected)]
    for mine, theirs in zip(grads, expected_grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            pairs.append((mine, theirs))
    return pairs


def _double(x):
    return x.double() if torch.is_tensor(x) else x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o.values()))
def test_every_option_equals_float64_truth_outputs_and_gradients(options, backend):
    for mine, theirs in compare(torch.float64, SHAPES[0], options, backend):
        assert worst(mine, theirs) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_and_strides(shape, packed, backend):
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for mine, theirs in compare(dtype, shape, {}, backend, packed):
            assert worst(mine, theirs) <= bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grid", [(4, 6, 2, 3), (5, 7, 2, 3), (2, 3, 2, 3)], ids=str)
def test_pooling_inside_equals_adaptive_average_pooling_outside(grid, backend):
    H, W, h, w = grid
    tensors, scalars = truth.inputs(2, 3, 2 + H * W, 8, h * w)  # two prefix tokens

    def outside(q, k, v, pos, neg, **rest):
        image = q[:, :, 2:].transpose(2, 3).reshape(-1, 8, H, W)
        pooled = torch.nn.functional.adaptive_avg_pool2d(image, (h, w)).view(2, 3, 8, h * w).transpose(2, 3)
        return truth.vca(q, k, v, pooled + pos, pooled + neg, **rest)

    def inside(*tensors, **rest):
        return vca(*tensors, pool=grid, backend=backend, **rest)

    weight = torch.randn(2, 3, 2 + H * W, 8).double()
    expected, expected_grads = truth.gradients(outside, tensors, scalars, weight)
    out, grads = truth.gradients(inside, tensors, scalars, weight)
    for mine, theirs in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert worst(mine, theirs) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"softmax": "joint"}, {"global_contrast": "halves", "patchwise": "halves"}], ids=str
)
@pytest.mark.parametrize("shape", [(2, 2, 64, 16, 9), (1, 3, 197, 64, 49)], ids=str)
def test_low_precision_is_at_most_twice_the_naive_error(shape, options, dtype):
    naive = compare(dtype, shape, options, "reference")
    portable = compare(dtype, shape, options, "portable")
    for (a, truth_a), (b, truth_b) in zip(naive, portable, strict=True):
        assert torch.equal(truth_a, truth_b)
        assert worst(b, truth_b) <= 2 * worst(a, truth_a) + torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    tensors, scalars = truth.inputs(1, 2, 6, 4, 3)
    leaves = [x.clone().requires_grad_() for x in (*tensors, *scalars["lambdas"], *scalars["gains"])]

    def call(*x):
        return vca(
            *x[:5], lambdas=x[5:7], gains=x[7:9], lambda_inits=scalars["lambda_inits"], backend=backend
        )

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_in_chunks_equals_training(backend, monkeypatch):
    tensors, scalars = truth.inputs(3, 4, 20, 8, 5)
    expected = truth.vca(*tensors, **scalars)
    for chunk in (
        1,
        2 * 5 * 20 * 3,
        2 * 5 * 20 * 4 * 2,
        1 << 30,
    ):  # one head, 3 of 4 heads, 2 of 3 images, all
        monkeypatch.setattr("lineardiff.ops.portable.CHUNK", chunk)
        with torch.no_grad():
            assert worst(vca(*tensors, backend=backend, **scalars), expected) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores_stay_finite(backend, dtype):
    tensors, scalars = truth.inputs(1, 2, 16, 8, 4, scale=100.0)
    tensors = [*tensors[:3], 100 * tensors[3], 100 * tensors[4]]
    tensors, scalars = truth.cast(tensors, scalars, dtype)
    out, grads = truth.gradients(vca, tensors, scalars, torch.ones(1, 2, 16, 8), backend=backend)
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize(
    ("flags", "limit", "supported", "native"),
    [
        ("avx2 avx512f", "", True, False),  # emulated
        ("avx512f avx512_bf16", "", True, True),
        ("avx512f avx512_bf16 amx_bf16", "ALL", True, True),
        ("avx512f avx512_bf16 amx_bf16", "avx512_core", True, False),
        ("avx512f avx512_bf16", "AVX512_CORE_BF16", True, True),
        ("avx512f avx512_bf16", "AVX2", False, False),
        ("avx2 avx_ne_convert", "AVX2_VNNI_2", True, True),
        ("avx512f avx512_bf16", "AVX2_VNNI_2", True, False),
    ],
)
def test_bfloat16_is_native_only_with_instructions_for_it(flags, limit, supported, native, monkeypatch):
    monkeypatch.setattr(portable, "_cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(portable.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert (torch.bfloat16 not in portable._slow_on_cpu()) == native


def test_autocast_computes_in_its_type_and_keeps_lambdas_and_gains():
    tensors, scalars = truth.cast(*truth.inputs(2, 2, 30, 16, 9), torch.float32)
    exact = truth.vca(*(x.bfloat16().double() for x in tensors), **truth.cast([], scalars, torch.float64)[1])
    with torch.autocast("cpu", torch.bfloat16):
        out = vca(*tensors, **scalars)
    by_hand = vca(*(x.bfloat16() for x in tensors), **scalars)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, by_hand)
    assert worst(out, exact) < 0.05


def test_compiles_whole_with_dynamic_shapes():
    torch._dynamo.reset()
    compiled = torch.compile(vca, fullgraph=True, dynamic=True, backend="aot_eager")
    for N in (12, 20, 31):
        tensors, scalars = truth.inputs(2, 2, N, 8, 4)
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = compiled(*leaves, **scalars)
        out.sum().backward()
        assert worst(out.detach(), truth.vca(*tensors, **scalars)) <= 1e-12
        assert all(x.grad is not None for x in leaves)


def test_compiled_by_inductor_equals_truth():
    torch._dynamo.reset()
    tensors, scalars = truth.cast(*truth.inputs(2, 2, 24, 16, 4), torch.float32)
    out = torch.compile(vca, fullgraph=True)(*tensors, **scalars)
    exact = truth.vca(*(x.double() for x in tensors), **truth.cast([], scalars, torch.float64)[1])
    assert worst(out, exact) <= 1e-5


def broken(**changes):
    tensors, scalars = truth.inputs(1, 2, 8, 4, 3)
    arguments = dict(zip(("q", "k", "v", "pos", "neg"), tensors, strict=True)) | scalars | changes
    return lambda: vca(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(1, 2, 9, 4).double()}, r"the same shape.*\(1, 2, 9, 4\)"),
        ({"q": torch.zeros(2, 8, 4).double()}, "the same shape"),
        ({"pos": torch.zeros(2, 3, 4).double()}, r"pos must have shape \(B, heads, n, d\).*batch axis"),
        ({"neg": torch.zeros(1, 2, 4, 4).double()}, "neg must have shape"),
        ({"neg": None}, "neg is None.*'differential'"),
        ({"v": torch.zeros(1, 2, 8, 4)}, "v is torch.float32.*Convert"),
        ({"softmax": "both"}, "softmax='both' is unknown; choose one of 'separate', 'joint'"),
        ({"global_contrast": "none"}, "global_contrast='none' is unknown"),
        ({"lambdas": (None, torch.tensor(1.0))}, r"lambdas\[0\] must be a tensor with one element"),
        ({"gains": (torch.ones(4), torch.ones(5))}, r"gains\[1\] must have shape \(d,\) = \(4,\)"),
        ({"pool": (3, 3, 1, 3)}, r"pool=\(3, 3, 1, 3\).*N=8 queries.*n=3"),
        ({"pool": (2, 4, 3, 1)}, r"pool=\(2, 4, 3, 1\).*h <= H"),
        ({"pool": (2.0, 4, 1, 3)}, r"pool=\(2.0, 4, 1, 3\)"),
        (
            dict.fromkeys(("pos", "neg"), torch.zeros(1, 2, 0, 4).double()),
            "at least one channel and one contrast",
        ),
        (
            {"neg": torch.zeros(1, 2, 3, 4), "pool": (2, 4, 1, 3)},
            "pos is torch.float64, but neg is torch.float32",
        ),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"eps": float("inf")}, "eps=inf"),
        ({"lambda_inits": (0.2, float("nan"))}, r"lambda_inits=\(0.2, nan\)"),
        ({"lambda_inits": (0.2,)}, r"lambda_inits=\(0.2,\)"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; choose 'auto', 'cpu', 'portable'"),
    ],
)
def test_bad_input_says_what_to_do(changes, message):
    with pytest.raises(ValueError, match=message):
        broken(**changes)()


def test_halves_need_even_channels():
    tensors, scalars = truth.inputs(1, 1, 5, 3, 2)
    with pytest.raises(ValueError, match="d=3 is odd"):
        vca(*tensors, global_contrast="halves", **scalars)


def test_integers_are_refused():
    tensors, scalars = truth.inputs(1, 1, 5, 4, 2)
    with pytest.raises(ValueError, match="floating point"):
        vca(*(x.int() for x in tensors), **scalars)
