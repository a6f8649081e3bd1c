"""What is timed computes what its name says."""

import pytest
import timm.layers
import torch
import torch.nn.functional as F
import truth
from torch import nn

from lineardiff.bench.candidates import (
    PEERS,
    SDPA,
    Shape,
    layer_candidates,
    most_square,
    op_candidates,
    tensors,
)

CPU = torch.device("cpu")
SHAPE = Shape(B=2, heads=2, N=24, d=8, n=6)
F64 = torch.float64


def peer_layer(name: str, shape: Shape = SHAPE) -> nn.Module:
    peer = next(peer for peer in PEERS if peer.name == name)
    if not peer.installed:
        pytest.skip(f"{peer.distribution} is not installed")
    torch.manual_seed(0)
    return peer.make(shape).double()


def split(x: torch.Tensor, shape: Shape = SHAPE) -> torch.Tensor:
    """(B, rows, C) -> (B, heads, rows, d)."""
    return x.unflatten(-1, (shape.heads, shape.d)).transpose(1, 2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_grids_are_as_square_as_can_be() -> None:
    assert [most_square(number) for number in (49, 24, 13, 65536, 1)] == [
        (7, 7),
        (4, 6),
        (1, 13),
        (256, 256),
        (1, 1),
    ]


def test_q_k_v_are_views_of_one_projection() -> None:
    q, k, v, pos, *_ = tensors("op", SHAPE, torch.bfloat16, CPU)
    assert q.shape == k.shape == v.shape == (2, 2, 24, 8)
    assert pos.shape == (2, 2, 6, 8)
    assert q.stride() == (24 * 3 * 16, 8, 3 * 16, 1)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert tensors("layer", SHAPE, torch.bfloat16, CPU)[0].shape == (2, 24, 16)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_the_ops_compute_what_their_names_say(backend: str) -> None:
    inputs = tensors("op", SHAPE, F64, CPU)
    q, k, v, pos, neg, l1, l2, gain1, gain2 = (x.double() for x in inputs)
    functions = {c.name: c.build(SHAPE, F64, CPU)[0] for c in op_candidates([backend], pooling=True)}
    assert list(functions) == [SDPA, f"vca-{backend}", f"vca-{backend}+pool"]
    torch.testing.assert_close(functions[SDPA](*inputs), attention(q, k, v))
    rest = {"lambdas": (l1, l2), "gains": (gain1, gain2), "lambda_inits": (0.2, 0.2)}
    expected = truth.vca(q, k, v, pos, neg, **rest)
    torch.testing.assert_close(functions[f"vca-{backend}"](*inputs), expected, rtol=1e-6, atol=1e-6)
    grid = q.transpose(2, 3).reshape(4, 8, 4, 6)  # (B heads, d, H, W)
    pooled = F.adaptive_avg_pool2d(grid, (2, 3)).reshape(2, 2, 8, 6).transpose(2, 3)
    expected = truth.vca(q, k, v, pooled + pos, pooled + neg, **rest)
    torch.testing.assert_close(functions[f"vca-{backend}+pool"](*inputs), expected, rtol=1e-6, atol=1e-6)


def test_the_layers_are_timms_attention_and_ours_on_the_named_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (x,) = tensors("layer", SHAPE, F64, CPU)
    built = {c.name: c.build(SHAPE, F64, CPU) for c in layer_candidates(["portable", "reference"], [])}
    attend, parameters = built[SDPA]
    theirs = timm.layers.Attention(16, 2, qkv_bias=True, dtype=F64)
    theirs.load_state_dict(dict(zip(theirs.state_dict(), parameters, strict=True)))
    torch.testing.assert_close(attend(x), theirs(x))
    portable, reference = built["vca-portable"][0], built["vca-reference"][0]
    torch.testing.assert_close(portable(x), reference(x))
    from lineardiff.ops import backends

    called = []
    spied = [b._replace(run=lambda i, b=b: (called.append(b.name), b.run(i))[1]) for b in backends.BACKENDS]
    monkeypatch.setattr(backends, "BACKENDS", tuple(spied))
    reference(x), portable(x)
    assert called == ["reference", "portable"]


def test_agent_attention_attends_through_pooled_queries() -> None:
    layer = peer_layer("agent")
    (x,) = tensors("layer", SHAPE, F64, CPU)
    q, k, v = (split(y) for y in layer.qkv(x).chunk(3, -1))
    agents = F.adaptive_avg_pool2d(q.transpose(2, 3).reshape(4, 8, 4, 6), (2, 3)).reshape(2, 2, 8, 6).mT
    o = layer.conv(attention(q, agents, attention(agents, k, v)), v, (4, 6))
    torch.testing.assert_close(layer(x), layer.proj(o.transpose(1, 2).flatten(2)))


def test_linformer_attends_to_as_many_projected_keys_as_contrast_tokens() -> None:
    layer = peer_layer("linformer")
    (x,) = tensors("layer", SHAPE, F64, CPU)
    assert layer.proj_k.shape == (24, 6)
    k, v = (split(p.T @ f(x)) for p, f in ((layer.proj_k, layer.to_k), (layer.proj_v, layer.to_v)))
    o = attention(split(layer.to_q(x)), k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), layer.to_out(o))


def test_nystrom_with_a_landmark_for_each_token_is_softmax_attention() -> None:
    layer = peer_layer("nystrom", SHAPE._replace(n=24)).float()  # it makes float32 itself
    assert layer.num_landmarks == 24
    layer.res_conv.weight.data.zero_()
    layer.pinv_iterations = 40
    (x,) = tensors("layer", SHAPE, torch.float32, CPU)
    q, k, v = (split(y) for y in layer.to_qkv(x).chunk(3, -1))
    expected = layer.to_out(attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-2, atol=1e-2)


def test_performer_comes_near_softmax_attention() -> None:
    layer = peer_layer("performer")
    (x,) = tensors("layer", SHAPE, F64, CPU)
    torch.manual_seed(0)
    layer.fast_attention.nb_features = 8192  # its error falls with the root of the features
    layer.fast_attention.create_projection.keywords["nb_rows"] = 8192
    layer.fast_attention.projection_matrix = layer.fast_attention.create_projection().double()
    o = attention(*(split(f(x)) for f in (layer.to_q, layer.to_k, layer.to_v))).transpose(1, 2).flatten(2)
    expected = layer.to_out(o)
    assert (layer(x) - expected).norm() < 0.1 * expected.norm()
    uniform = layer.to_out(layer.to_v(x).mean(1, keepdim=True).expand_as(x))  # what no attention would give
    assert (uniform - expected).norm() > 0.2 * expected.norm()


def test_differential_attention_is_timms() -> None:
    assert isinstance(peer_layer("diff"), timm.layers.DiffAttention)
