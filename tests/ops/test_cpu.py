"""The compiled CPU kernel against the float64 computation of truth.py, with every instruction set of this machine."""

import subprocess
import sys

import pytest
import torch
import truth

import lineardiff
from lineardiff import visual_contrast_attention as vca
from lineardiff.ops import cpu

pytestmark = pytest.mark.skipif(cpu.why_not(None) is not None, reason=f"no CPU kernel: {cpu.why_not(None)}")

ISAS = ("AVX2", "AVX-512", "AVX-512 with bfloat16")
SHAPES = (  # B, heads, N, d, n
    (2, 3, 196, 64, 49),
    (1, 2, 197, 64, 49),
    (1, 1, 5, 24, 1),
    (1, 1, 1, 24, 3),
    (2, 1, 33, 40, 9),
    (1, 2, 50, 72, 81),
    (1, 1, 130, 80, 128),
    (1, 1, 17, 7, 2),
    (1, 1, 40, 3, 4),
    (1, 1, 600, 32, 16),
)


@pytest.fixture(params=ISAS)
def isa(request):
    """Each object that this CPU can run."""
    limit = torch.ops.lineardiff.kernel_isa
    if limit(request.param) != request.param:
        limit(ISAS[-1])
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    limit(ISAS[-1])


@pytest.fixture(params=[1, 3])
def threads(request):
    """One thread computes a head at a time; three split the few heads here into chunks."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_case(shape, dtype, packed=True, seed=0):
    tensors, scalars = truth.cast(*truth.inputs(*shape, packed=packed, seed=seed), dtype)
    weight = torch.randn(shape[:4], generator=torch.Generator().manual_seed(1)).to(dtype)
    return tensors, scalars, weight


def exact(function, tensors, scalars, weight):
    double = {"lambda_inits": scalars["lambda_inits"]}
    double |= {name: tuple(x.double() for x in scalars[name]) for name in ("lambdas", "gains")}
    return truth.gradients(function, [x.double() for x in tensors], double, weight.double())


def error(x, true):
    """Relative to the largest true value, or to 1, the size of the inputs, where that is larger."""
    return (x.double() - true).abs().max().item() / max(true.abs().max().item(), 1)


def lambda_scales(tensors, scalars, weight, **options):
    """What the queries contribute to the gradients of l1 and l2, summed without sign: of contributions that cancel,
    rounding leaves an error in proportion to this, not to the gradient.
    """
    double = [x.double() for x in tensors]
    gains = tuple(x.double() for x in scalars["gains"])

    def out(l1, l2):
        rest = {"lambdas": (l1, l2), "gains": gains, "lambda_inits": scalars["lambda_inits"]}
        return vca(*double, backend="reference", **rest, **options)

    lambdas = tuple(x.double() for x in scalars["lambdas"])
    one, zero = torch.ones_like(lambdas[0]), torch.zeros_like(lambdas[0])
    for direction in ((one, zero), (zero, one)):
        slope = torch.func.jvp(out, lambdas, direction)[1]
        yield (weight.double() * slope).sum(-1).abs().sum().item()


def assert_accurate(case, **options):
    """Output and every gradient: float32 to 1e-5, bfloat16 to twice the error of the reference in bfloat16."""
    tensors, scalars, weight = case
    out, grads = truth.gradients(vca, tensors, scalars, weight, backend="cpu", **options)
    true = exact(lambda *x, **rest: vca(*x, backend="reference", **rest, **options), tensors, scalars, weight)
    naive = truth.gradients(vca, tensors, scalars, weight, backend="reference", **options)
    scales = [1] * 6 + [max(1, x) for x in lambda_scales(*case, **options)] + [1] * 2
    low = tensors[0].dtype == torch.bfloat16
    answers = zip((out, *grads), (true[0], *true[1]), (naive[0], *naive[1]), scales, strict=True)
    for mine, theirs, yardstick, scale in answers:
        assert mine.dtype == yardstick.dtype
        assert mine.shape == theirs.shape
        bound = 2 * error(yardstick, theirs) + torch.finfo(torch.bfloat16).eps if low else 1e-5
        assert (mine.double() - theirs).abs().max().item() <= bound * max(theirs.abs().max().item(), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape, packed, dtype, isa):
    assert_accurate(random_case(shape, dtype, packed))
    assert_accurate(random_case(shape, dtype, packed), softmax="joint")


def test_truth_written_apart_agrees(isa):
    """The reference serves as truth above, because it is fast; here it is truth.py itself."""
    tensors, scalars, weight = random_case((2, 2, 50, 24, 9), torch.float32)
    out, grads = truth.gradients(vca, tensors, scalars, weight, backend="cpu")
    true, true_grads = exact(truth.vca, tensors, scalars, weight)
    for mine, theirs in zip((out, *grads), (true, *true_grads), strict=True):
        assert error(mine, theirs) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 1000, 32, 16), (1, 1, 391, 64, 49)], ids=str)
def test_heads_cut_into_chunks(shape, dtype, isa, threads):
    assert_accurate(random_case(shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("grid", "prefix"), [((14, 14, 7, 7), 0), ((15, 13, 7, 5), 1), ((30, 20, 4, 3), 5), ((3, 2, 3, 2), 0)]
)
def test_pooling_inside(grid, prefix, dtype, isa, threads):
    H, W, h, w = grid
    assert_accurate(random_case((2, 1, prefix + H * W, 40, h * w), dtype), pool=grid)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_a_large_channel_of_the_tokens_costs_no_accuracy(size, isa, threads):
    """Softmaxes are one-hot, so that the gradient of k is a vanishing difference times the large channel."""
    tensors, scalars, weight = random_case((1, 1, 400, 64, 49), torch.float32)
    tensors[3][..., 3] = size
    tensors[4][..., 5] = size
    mine, portable = (
        truth.gradients(vca, tensors, scalars, weight, backend=name)[1][1] for name in ("cpu", "portable")
    )
    true = exact(truth.vca, tensors, scalars, weight)[1][1]
    assert error(mine, true) <= 2 * error(portable, true) + 1e-6  # rounding of the scores is common to both


def test_embeddings_may_be_float32_and_broadcast():
    tensors, scalars, weight = random_case((3, 2, 36, 16, 4), torch.bfloat16)
    q, k, v = tensors[:3]
    embed = torch.randn(2, 1, 2, 4, 16).requires_grad_()

    def call(backend, dtype):
        pos, neg = (x.expand(3, -1, -1, -1).to(dtype) for x in embed)
        q_, k_, v_ = (x.to(torch.bfloat16 if dtype == torch.float32 else dtype) for x in (q, k, v))
        out = vca(q_, k_, v_, pos, neg, pool=(6, 6, 2, 2), backend=backend, **scalars)
        return out, torch.autograd.grad(out, embed, weight.to(out.dtype))[0]

    mine, naive, true = (
        call("cpu", torch.float32),
        call("reference", torch.float32),
        call("reference", torch.float64),
    )
    for x, yardstick, theirs in zip(mine, naive, true, strict=True):
        assert error(x, theirs) <= 2 * error(yardstick, theirs) + torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_logits_stay_finite_and_close(dtype, isa):
    """Logits of about 1e4, where softmaxes are nearly one-hot."""
    tensors, scalars, weight = random_case((1, 2, 130, 16, 6), dtype)
    tensors = [50 * x for x in tensors[:3]] + [50 * x for x in tensors[3:]]
    scores = tensors[0].double() @ tensors[3].double().transpose(-2, -1) / 4
    assert scores.abs().max() > 1e4
    out, grads = truth.gradients(vca, tensors, scalars, weight, backend="cpu")
    assert all(x.isfinite().all() for x in (out, *grads))
    assert_output_close(out, exact(truth.vca, tensors, scalars, weight)[0], tensors, scalars, weight)


def assert_output_close(out, true, tensors, scalars, weight):
    naive = truth.gradients(vca, tensors, scalars, weight, backend="reference")[0]
    assert error(out, true) <= 2 * error(naive, true) + 1e-3


def test_a_later_block_raises_the_maximum(isa):
    """Scores that grow along the keys make stage I scale down what it summed so far, again and again."""
    tensors, scalars, weight = random_case((1, 1, 512, 16, 4), torch.float32)
    tensors[1] = tensors[1] * torch.linspace(0.1, 12, 512)[:, None]
    true = exact(truth.vca, tensors, scalars, weight)[0]
    assert error(vca(*tensors, backend="cpu", **scalars), true) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_is_passed_on(dtype, isa):
    tensors, scalars, _ = random_case((1, 2, 40, 16, 4), dtype)
    tensors[0] = tensors[0].clone()
    tensors[0][0, 1, 7] = torch.nan
    out = vca(*tensors, backend="cpu", **scalars)
    assert out[0, 1, 7].isnan().all()
    assert out[0, 0].isfinite().all()
    tensors[2] = tensors[2].clone()
    tensors[2][0, 0, 3] = torch.nan
    assert vca(*tensors, backend="cpu", **scalars)[0, 0].isnan().all()


@pytest.mark.parametrize("shape", [(2, 3, 196, 64, 49), (1, 1, 1000, 32, 9)], ids=str)
def test_same_bits_from_run_to_run(shape, isa, threads):
    case = random_case(shape, torch.float32)
    first = truth.gradients(vca, *case, backend="cpu")
    for _ in range(3):
        again = truth.gradients(vca, *case, backend="cpu")
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_any_strides():
    tensors, scalars, weight = random_case((2, 2, 30, 8, 4), torch.float32)
    expected = truth.gradients(vca, tensors, scalars, weight, backend="cpu")
    odd = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in tensors]  # last stride is not 1
    odd[2] = torch.cat([tensors[2], tensors[2]], 2)[:, :, 30:]
    odd[3] = tensors[3][:1].expand(2, -1, -1, -1)
    with torch.no_grad():
        out = vca(*odd, backend="cpu", **scalars)
    assert torch.equal(out[0], expected[0][0])
    leaf = tensors[0].clone().requires_grad_()
    vca(leaf, *tensors[1:], backend="cpu", **scalars).backward(
        weight.transpose(2, 3).contiguous().transpose(2, 3)
    )
    assert torch.equal(leaf.grad, expected[1][0])


def test_empty_batch():
    tensors, scalars, _ = random_case((1, 2, 30, 8, 4), torch.float32)
    leaves = [x[:0].requires_grad_() for x in tensors]
    out = vca(*leaves, backend="cpu", **scalars)
    out.sum().backward()
    assert out.shape == leaves[0].grad.shape == (0, 2, 30, 8)


@pytest.mark.parametrize("pool", [[], [4, 5, 2, 2]], ids=str)
def test_opcheck(pool):
    tensors, scalars, weight = random_case((2, 3, 20, 16, 4), torch.float32)
    leaves = [x.requires_grad_() for x in (*tensors, *scalars["lambdas"], *scalars["gains"])]
    options = (1e-5, False, pool)
    torch.library.opcheck(torch.ops.lineardiff.vca_forward, (*leaves, *options, True))
    torch.library.opcheck(torch.ops.lineardiff.vca_forward, (*(x.detach() for x in leaves), *options, False))
    saved = torch.ops.lineardiff.vca_forward(*leaves, *options, True)[1]
    plain = [x.detach() for x in (weight, *leaves, saved)]
    torch.library.opcheck(torch.ops.lineardiff.vca_backward, (*plain, *options))


def test_compiled_layer_gives_the_same_bits_at_several_sizes():
    torch._dynamo.reset()
    layer = lineardiff.VisualContrastAttention(32, 2, contrast_grid=(3, 3))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for side in (6, 7, 9):
        x = torch.randn(2, 1 + side * 5, 32, requires_grad=True)
        with lineardiff.backend("cpu"):
            out = compiled(x, (side, 5))
            expected = layer(x, (side, 5))
        assert torch.equal(out, expected)
        assert torch.equal(
            *(torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected)),
        )


def test_export_leaves_the_kernel_out_unless_it_is_named():
    layer = lineardiff.VisualContrastAttention(32, 2, contrast_grid=(3, 3), grid_size=(6, 5)).eval()
    x = torch.randn(2, 30, 32)

    def kernels(program):
        return [str(node.target) for node in program.graph.nodes if "lineardiff" in str(node.target)]

    assert kernels(torch.export.export(layer, (x,))) == []
    with lineardiff.backend("cpu"):
        program = torch.export.export(layer, (x,))
        assert kernels(program) == ["lineardiff.vca_forward.default", "lineardiff.add_value_conv.default"]
        assert torch.equal(program.module()(x), layer(x))


def test_autocast():
    tensors, scalars, _ = random_case((2, 2, 30, 16, 9), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = vca(*tensors, backend="cpu", **scalars)
    assert torch.equal(out, vca(*(x.bfloat16() for x in tensors), backend="cpu", **scalars))


def test_second_derivatives_are_refused():
    tensors, scalars, _ = random_case((1, 1, 10, 8, 4), torch.float32)
    q = tensors[0].requires_grad_()
    out = vca(q, *tensors[1:], backend="cpu", **scalars)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiable once.*backend\('portable'\)"):
        torch.autograd.grad(grad.sum(), q)


def test_inference_saves_nothing_for_a_backward_pass():
    tensors, scalars, _ = random_case((1, 2, 20, 8, 4), torch.float32)
    scalars = [*scalars["lambdas"], *scalars["gains"]]
    saved = torch.ops.lineardiff.vca_forward(*tensors, *scalars, 1e-5, False, [], False)[1]
    assert saved.numel() == 0


def test_flops_are_counted():
    tensors, scalars, _ = random_case((2, 3, 20, 16, 4), torch.float32)
    q = tensors[0].requires_grad_()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        out = vca(q, *tensors[1:], backend="cpu", **scalars)
        assert counter.get_total_flops() == 2 * 7 * (2 * 3) * 4 * 20 * 16
        out.sum().backward()
    assert counter.get_total_flops() == 2 * (7 + 17) * (2 * 3) * 4 * 20 * 16


def test_scores_beyond_the_precision_of_float32_stay_finite(isa, threads):
    """Of scores of 1e10 the rounding errors alone are in the thousands."""
    tensors, scalars, weight = random_case((1, 1, 500, 64, 4), torch.float32)
    tensors = [1e5 * x if i != 2 else x for i, x in enumerate(tensors)]
    out, grads = truth.gradients(vca, tensors, scalars, weight, backend="cpu")
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("conv", [True, False])
def test_transforms_of_torch_func_take_another_backend(conv):
    layer = lineardiff.VisualContrastAttention(8, 1, contrast_grid=(2, 2), conv=conv)
    x, direction = torch.randn(2, 2, 16, 8).unbind(0)

    def call(z):
        return layer(z, (4, 4))

    slope = torch.func.jvp(call, (x,), (direction,))[1]
    step = 1e-2 * direction
    assert error(slope, (call(x + step) - call(x - step)).double() / 2e-2) < 1e-3
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(call(dual)).tangent, slope)
    leaf = x.clone().requires_grad_()
    call(leaf).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda z: call(z).sum())(x), leaf.grad)
    batch = torch.randn(3, 2, 16, 8)
    torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([call(z) for z in batch]))
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([call(z) for z in batch]))


def test_traced_graph_runs_without_the_library():
    layer = lineardiff.VisualContrastAttention(8, 1, contrast_grid=(2, 2), grid_size=(4, 4)).eval()
    x = torch.randn(2, 16, 8)
    with torch.no_grad():
        traced = torch.jit.trace(layer, x)
    assert "lineardiff::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), layer(x))


def test_graph_made_without_gradients_says_so_in_backward():
    tensors, scalars, _ = random_case((1, 1, 10, 8, 4), torch.float32)
    leaves = [x.requires_grad_() for x in tensors]
    rest = [*scalars["lambdas"], *scalars["gains"]]
    out = torch.ops.lineardiff.vca_forward(*leaves, *rest, 1e-5, False, [], False)[0]
    with pytest.raises(RuntimeError, match="gradients were off when this graph was made"):
        out.sum().backward()


@pytest.mark.parametrize("share", [0, 0.00005, 0.001, 0.5, 0.9, 1 - 1e-6])
def test_a_truncated_library_is_not_loaded(share, tmp_path, monkeypatch):
    content = cpu.LIBRARY.read_bytes()
    library = tmp_path / "kernel.so"
    library.write_bytes(content[: int(share * len(content))])
    monkeypatch.setattr(cpu, "LIBRARY", library)
    assert "kernel.so is damaged" in cpu._load()


FORWARD_MODE = """
import sys, torch, lineardiff, lineardiff.ops
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx

torch.manual_seed(0)
layer = lineardiff.VisualContrastAttention(8, 1, contrast_grid=(2, 2))
x, direction = torch.randn(2, 2, 16, 8).unbind(0)
call = lambda z: layer(z, (4, 4))
compiled = torch.compile(call, backend="aot_eager")

def dual():
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, direction))).tangent

weight, bias, tokens = torch.randn(8, 1, 3, 3), torch.randn(8), torch.randn(2, 1, 1, 4, 8)
numbers = {"lambdas": torch.tensor([0.3, 0.4]).unbind(), "gains": torch.ones(2, 8).unbind(), "lambda_inits": (0.2, 0.2)}

def conv(z):
    return lineardiff.ops.add_value_conv(z, z, weight, bias, feat_size=(4, 4), overwrite=False)

def op(z):
    return lineardiff.visual_contrast_attention(z, z, z, *tokens, **numbers)

def compile_of_jvp(function):
    z = torch.randn(1, 1, 16, 8), torch.randn(1, 1, 16, 8)  # PyTorch itself fails when these are views
    tangent = lambda a, b: jvp(function, (a,), (b,))[1]
    torch.testing.assert_close(torch.compile(tangent, backend="aot_eager")(*z), tangent(*z))
    return jvp(call, (x,), (direction,))[1]

ways = {
    "compile of jvp over the op": lambda: compile_of_jvp(op),
    "compile of jvp over the convolution": lambda: compile_of_jvp(conv),
    "jvp of compile": lambda: jvp(compiled, (x,), (direction,))[1],
    "dual numbers through compile": dual,
    "compile of jacfwd": lambda: torch.einsum(
        "abcdef,def->abc", torch.compile(jacfwd(call), backend="aot_eager")(x), direction
    ),
    "linearize": lambda: linearize(call, x)[1](direction),
    "make_fx of jvp": lambda: make_fx(lambda a, b: jvp(call, (a,), (b,))[1])(x, direction)(x, direction),
}
torch.testing.assert_close(ways[sys.argv[1]](), jvp(call, (x,), (direction,))[1])
"""


@pytest.mark.parametrize(
    "way",
    [
        "compile of jvp over the op",
        "compile of jvp over the convolution",
        "jvp of compile",
        "dual numbers through compile",
        "compile of jacfwd",
        "linearize",
        "make_fx of jvp",
    ],
)
def test_forward_mode_gives_the_tangents_of_eager(way):
    """In a process each, because some of them used to crash it."""
    done = subprocess.run([sys.executable, "-c", FORWARD_MODE, way], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_library_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(cpu, "OPS", (*cpu.OPS, "op_of_a_later_version"))
    assert "another version of lineardiff" in cpu._load()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float32 and bfloat16, not torch.float64"),
        ({"global_contrast": "plain"}, "global_contrast='plain'"),
        ({"patchwise": "halves"}, "patchwise='halves'"),
        ({"device": "meta"}, "the tensors are on meta"),
    ],
)
def test_what_it_cannot_do_is_said(change, reason):
    tensors, scalars, _ = random_case((1, 1, 10, 8, 4), torch.float32)
    move = {name: change.pop(name) for name in ("dtype", "device") if name in change}
    with pytest.raises(ValueError, match=f"backend 'cpu' cannot run here: .*{reason}"):
        vca(*(x.to(**move) for x in tensors), backend="cpu", **scalars, **change)


def test_the_op_itself_checks_what_would_read_outside_of_tensors():
    tensors, scalars, _ = random_case((1, 2, 20, 8, 4), torch.float32)
    q, k, v, pos, neg = tensors
    rest = [*scalars["lambdas"], *scalars["gains"]]
    forward = torch.ops.lineardiff.vca_forward
    for bad, message in (
        ((q, k[:, :, :10], v, pos, neg, *rest, 1e-5, False, [], False), "the same shape"),
        ((q, k, v, pos, neg[:, :, :2], *rest, 1e-5, False, [], False), r"\(B, heads, n, d\)"),
        (
            (q, k, v, pos, neg, *rest[:3], rest[3][:4], 1e-5, False, [], False),
            r"gains must have shape \(d,\)",
        ),
        ((q, k, v, pos, neg, *rest, 1e-5, False, [5, 5, 2, 2], False), "grids of pool"),
        ((q.double(), k, v, pos, neg, *rest, 1e-5, False, [], False), "float32 or all be bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            forward(*bad)
