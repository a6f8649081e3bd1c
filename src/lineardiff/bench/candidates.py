"""What is timed against each other: attention as an op (of given q, k, v) and as a layer (of x), by name."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, DiffAttention
from torch import Tensor, nn

from lineardiff import ops
from lineardiff.layers import VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention

Level = Literal["op", "layer"]
Function = Callable[..., Tensor]

SDPA = "sdpa"
"""Softmax self-attention by `scaled_dot_product_attention`: what everything is compared with."""


class Shape(NamedTuple):
    """B images, heads, N tokens, d channels a head, n contrast tokens."""

    B: int
    heads: int
    N: int
    d: int
    n: int

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W) with H W = N, as square as can be."""
        return most_square(self.N)

    @property
    def contrast_grid(self) -> tuple[int, int]:
        """(h, w) with h w = n, as square as can be."""
        return most_square(self.n)

    @property
    def dim(self) -> int:
        """Channels C = heads d."""
        return self.heads * self.d


class Candidate(NamedTuple):
    """Something to time. `build` answers a function of :func:`tensors` of its level and its parameters."""

    name: str
    level: Level
    build: Callable[[Shape, torch.dtype, torch.device], tuple[Function, list[Tensor]]]
    quadratic: bool = False
    """Whether its cost grows with N^2."""


class Peer(NamedTuple):
    """A layer to compare with, and the distribution on PyPI and module that it is of; None: it comes with us."""

    name: str
    distribution: str | None
    module: str | None
    make: Callable[[Shape], nn.Module]
    quadratic: bool = False

    @property
    def installed(self) -> bool:
        return self.module is None or find_spec(self.module) is not None


def tensors(level: Level, shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """What the candidates of a level are called with, the same for all of them.

    "layer": x (B, N, C). "op": q, k, v (B, heads, N, d), views of one packed projection as in a model; the contrast
    tokens pos, neg (B, heads, n, d); l1, l2, gain1, gain2 in float32.
    """
    B, heads, N, d, n = shape
    generator = torch.Generator(device).manual_seed(0)
    # made in the type wanted: a copy in another would be the peak of memory
    draw = partial(torch.randn, generator=generator, dtype=dtype, device=device)
    if level == "layer":
        return (draw(B, N, shape.dim),)
    q, k, v = (x.transpose(1, 2) for x in draw(B, N, 3, heads, d).unbind(2))
    scalars = torch.tensor([0.3, 0.4], device=device).unbind()
    return (
        q,
        k,
        v,
        draw(B, heads, n, d),
        draw(B, heads, n, d),
        *scalars,
        *torch.ones(2, d, device=device).unbind(),
    )


def op_candidates(backends: Iterable[str], *, pooling: bool = False) -> list[Candidate]:
    """SDPA and the backends of Visual-Contrast Attention, each also with pooling of q where `pooling` is set."""
    candidates = [Candidate(SDPA, "op", _sdpa, quadratic=True)]
    for backend in backends:
        candidates.append(Candidate(f"vca-{backend}", "op", partial(_vca, backend=backend, pooling=False)))
        if pooling:
            name = f"vca-{backend}+pool"
            candidates.append(Candidate(name, "op", partial(_vca, backend=backend, pooling=True)))
    return candidates


def layer_candidates(backends: Iterable[str], peers: Iterable[str]) -> list[Candidate]:
    """timm's self-attention, our layer on each backend, and the peers of these names, which are installed."""
    candidates = [Candidate(SDPA, "layer", partial(_layer, make=_self_attention), quadratic=True)]
    for backend in backends:
        candidates.append(
            Candidate(f"vca-{backend}", "layer", partial(_layer, make=_vca_layer, backend=backend))
        )
    known = {peer.name: peer for peer in PEERS}
    for peer in (known[name] for name in peers):
        candidates.append(
            Candidate(peer.name, "layer", partial(_layer, make=peer.make), quadratic=peer.quadratic)
        )
    return candidates


def runnable_backends() -> tuple[str, ...]:
    """Names of the backends of the op that can run on this machine."""
    return tuple(backend.name for backend in ops.BACKENDS if backend.why_not(None) is None)


def most_square(number: int) -> tuple[int, int]:
    """The two factors nearest to each other, the smaller first."""
    first = next(i for i in range(math.isqrt(number), 0, -1) if number % i == 0)
    return first, number // first


def _sdpa(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Function, list[Tensor]]:
    return lambda q, k, v, *rest: F.scaled_dot_product_attention(q, k, v), []


def _vca(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, backend: str, pooling: bool
) -> tuple[Function, list[Tensor]]:
    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos: Tensor,
        neg: Tensor,
        l1: Tensor,
        l2: Tensor,
        gain1: Tensor,
        gain2: Tensor,
    ) -> Tensor:
        return ops.visual_contrast_attention(
            q,
            k,
            v,
            pos,
            neg,
            lambdas=(l1, l2),
            gains=(gain1, gain2),
            lambda_inits=(0.2, 0.2),
            pool=(*shape.grid, *shape.contrast_grid) if pooling else None,  # then pos and neg are e+ and e-
            backend=backend,
        )

    return attend, []


def _layer(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    make: Callable[[Shape], nn.Module],
    backend: str | None = None,
) -> tuple[Function, list[Tensor]]:
    torch.manual_seed(0)
    layer = make(shape).to(device, dtype)

    def attend(x: Tensor) -> Tensor:
        with nullcontext() if backend is None else ops.backend(backend):
            return layer(x)

    return attend, list(layer.parameters())


def _self_attention(shape: Shape) -> nn.Module:
    return Attention(shape.dim, num_heads=shape.heads, qkv_bias=True)


def _vca_layer(shape: Shape) -> nn.Module:
    return VisualContrastAttention(
        shape.dim, shape.heads, contrast_grid=shape.contrast_grid, grid_size=shape.grid
    )


def _agent(shape: Shape) -> nn.Module:
    return AgentAttention(shape.dim, shape.heads, contrast_grid=shape.contrast_grid, grid_size=shape.grid)


def _diff(shape: Shape) -> nn.Module:
    return DiffAttention(shape.dim, num_heads=shape.heads, qkv_bias=True)


def _linformer(shape: Shape) -> nn.Module:
    from linformer import LinformerSelfAttention

    return LinformerSelfAttention(shape.dim, seq_len=shape.N, k=shape.n, heads=shape.heads)


def _nystrom(shape: Shape) -> nn.Module:
    from nystrom_attention import NystromAttention

    return NystromAttention(shape.dim, dim_head=shape.d, heads=shape.heads, num_landmarks=shape.n)


def _performer(shape: Shape) -> nn.Module:
    from performer_pytorch import SelfAttention

    return SelfAttention(shape.dim, heads=shape.heads, dim_head=shape.d)


PEERS = (
    Peer("agent", None, None, _agent),
    Peer("diff", None, None, _diff, quadratic=True),
    Peer("linformer", "linformer", "linformer", _linformer),
    Peer("nystrom", "nystrom-attention", "nystrom_attention", _nystrom),
    Peer("performer", "performer-pytorch", "performer_pytorch", _performer),
)
"""Each with as many landmarks as there are contrast tokens (Performer: its own default of d ln d features)."""
