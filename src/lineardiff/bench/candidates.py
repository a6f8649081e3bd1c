"""What is timed: attention as an op on given q, k, v, and as a layer on x, by name."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, DiffAttention
from torch import Tensor, nn

from lineardiff import ops
from lineardiff.bench.rows import SDPA
from lineardiff.extras import install_command, missing_extra
from lineardiff.layers import VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention
from lineardiff.suggest import suggest

__all__ = [
    "PAPER_SHAPES",
    "PAPER_SWEEP",
    "Candidate",
    "Shape",
    "choose_backends",
    "choose_peers",
    "layer_candidates",
    "most_square",
    "op_candidates",
    "tensors",
]

AttentionLevel = Literal["op", "layer"]
Function = Callable[..., Tensor]


class Shape(NamedTuple):
    """B images, heads, N tokens, d channels per head, n contrast tokens."""

    B: int
    heads: int
    N: int
    d: int
    n: int

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W) with H W = N, as square as possible."""
        return most_square(self.N)

    @property
    def contrast_grid(self) -> tuple[int, int]:
        """(h, w) with h w = n, as square as possible."""
        return most_square(self.n)

    @property
    def dim(self) -> int:
        """Channels C = heads d."""
        return self.heads * self.d


PAPER_SHAPES = (
    Shape(8, 3, 196, 64, 49),  # DeiT-T
    Shape(8, 6, 256, 64, 64),  # SiT-S/2 at 256 pixels
    Shape(1, 6, 1024, 64, 64),
    Shape(1, 6, 4096, 64, 64),
    Shape(1, 3, 3136, 32, 9),  # the first stage of VCA-PVT and VCA-Swin
)
PAPER_SWEEP = tuple(Shape(1, 6, N, 64, 49) for N in (49, 196, 784, 3136, 16384, 65536))


class Candidate(NamedTuple):
    """Something to time. `build` returns a function of :func:`tensors` of its level, and its parameters."""

    name: str
    level: AttentionLevel
    build: Callable[[Shape, torch.dtype, torch.device], tuple[Function, list[Tensor]]]
    quadratic: bool = False
    """Whether its cost grows with N^2."""


class Peer(NamedTuple):
    """An attention layer to compare with."""

    name: str
    distribution: str | None
    """The package on PyPI that holds it; None for a layer of timm or of this package."""
    make: Callable[[Shape], nn.Module]
    quadratic: bool = False

    @property
    def installed(self) -> bool:
        return self.distribution is None or find_spec(self.distribution.replace("-", "_")) is not None


def tensors(
    level: AttentionLevel, shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the inputs of all candidates of a level.

    Returns:
        Of "layer": x (B, N, C). Of "op": q, k, v (B, heads, N, d), views of one packed projection as in a model; the
        contrast tokens pos, neg (B, heads, n, d); l1, l2, gain1, gain2 in float32.
    """
    B, heads, N, d, n = shape
    generator = torch.Generator(device).manual_seed(0)
    # drawn in the final type: a copy in another one would raise the peak of memory
    draw = partial(torch.randn, generator=generator, dtype=dtype, device=device)
    if level == "layer":
        return (draw(B, N, shape.dim),)
    q, k, v = (x.transpose(1, 2) for x in draw(B, N, 3, heads, d).unbind(2))
    lambdas = torch.tensor([0.3, 0.4], device=device).unbind()
    gains = torch.ones(2, d, device=device).unbind()
    return q, k, v, draw(B, heads, n, d), draw(B, heads, n, d), *lambdas, *gains


def op_candidates(backends: Iterable[str], *, pooling: bool = False) -> list[Candidate]:
    """Return self-attention and the backends of Visual-Contrast Attention.

    Args:
        backends: Names of backends.
        pooling: Also time each backend with the pooling of q included.
    """
    candidates = [Candidate(SDPA, "op", _sdpa, quadratic=True)]
    for backend in backends:
        candidates.append(Candidate(f"vca-{backend}", "op", partial(_vca, backend=backend, pooling=False)))
        if pooling:
            name = f"vca-{backend}+pool"
            candidates.append(Candidate(name, "op", partial(_vca, backend=backend, pooling=True)))
    return candidates


def layer_candidates(backends: Iterable[str], peers: Iterable[str]) -> list[Candidate]:
    """Return timm's self-attention, our layer on each backend, and the peers of these names."""
    candidates = [Candidate(SDPA, "layer", partial(_layer, make=_self_attention), quadratic=True)]
    for backend in backends:
        build = partial(_layer, make=_vca_layer, backend=backend)
        candidates.append(Candidate(f"vca-{backend}", "layer", build))
    known = {peer.name: peer for peer in PEERS}
    for peer in (known[name] for name in peers):
        candidates.append(Candidate(peer.name, "layer", partial(_layer, make=peer.make), peer.quadratic))
    return candidates


def choose_backends(names: Sequence[str] | None = None, *, quick: bool = False) -> tuple[str, ...]:
    """Return the backends to time.

    Args:
        names: None takes every backend that can run here.
        quick: Leave out the slow `reference` unless it is named.

    Raises:
        ValueError: A backend is unknown or cannot run on this machine.
    """
    known = {backend.name: backend.reason for backend in ops.list_backends()}
    if names is None:
        able = [name for name, reason in known.items() if reason is None]
        return tuple(name for name in able if not (quick and name == "reference"))
    for name in names:
        if name not in known:
            raise ValueError(f"There is no backend {name!r}; {suggest(name, known)}")
        reason = known[name]
        if reason is not None:
            raise ValueError(f"Backend {name!r} cannot run here: {reason}")
    return tuple(dict.fromkeys(names))


def choose_peers(
    names: Sequence[str] | None = None, *, say: Callable[[str], object] = print
) -> tuple[str, ...]:
    """Return the peers to time.

    Args:
        names: None takes every peer that is installed.
        say: Receives one sentence that names the peers left out.

    Raises:
        ValueError: A named peer is unknown.
        ImportError: A named peer is not installed; the message says how to install it.
    """
    known = {peer.name: peer for peer in PEERS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"There is no peer {name!r}; {suggest(name, known)}")
        if not known[name].installed:
            raise missing_extra("bench", package=known[name].distribution or name)
    if names is not None:
        return tuple(dict.fromkeys(names))
    absent = [peer.distribution for peer in PEERS if not peer.installed and peer.distribution]
    if absent:
        command = install_command("bench", package=absent[0])
        say(f"Skipping peers that are not installed: {', '.join(absent)}; to include them run: {command}")
    return tuple(peer.name for peer in PEERS if peer.installed)


def most_square(number: int) -> tuple[int, int]:
    """Return the two factors of a number that are closest to each other, the smaller first."""
    first = next(i for i in range(math.isqrt(number), 0, -1) if number % i == 0)
    return first, number // first


def _sdpa(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Function, list[Tensor]]:
    return lambda q, k, v, *rest: F.scaled_dot_product_attention(q, k, v), []


def _vca(
    shape: Shape, dtype: torch.dtype, device: torch.device, *, backend: str, pooling: bool
) -> tuple[Function, list[Tensor]]:
    def attend(*inputs: Tensor) -> Tensor:
        q, k, v, pos, neg, l1, l2, gain1, gain2 = inputs
        return ops.visual_contrast_attention(
            q,
            k,
            v,
            pos,
            neg,
            lambdas=(l1, l2),
            gains=(gain1, gain2),
            lambda_inits=(0.2, 0.2),
            pool=(*shape.grid, *shape.contrast_grid)
            if pooling
            else None,  # with pooling, pos and neg are e+ and e-
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
    Peer("agent", None, _agent),
    Peer("diff", None, _diff, quadratic=True),
    Peer("linformer", "linformer", _linformer),
    Peer("nystrom", "nystrom-attention", _nystrom),
    Peer("performer", "performer-pytorch", _performer),
)
"""Each has as many landmarks as there are contrast tokens, except Performer with its default of d ln d features."""
