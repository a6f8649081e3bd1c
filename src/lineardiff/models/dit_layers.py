"""The parts of DiT and SiT, with the parameter names of their authors."""

import math
from functools import partial

import torch
from timm.layers import Mlp
from torch import Tensor, nn

FREQUENCIES = 256  # of the sinusoidal embedding of the timestep


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, attn: nn.Module, dim: int, *, mlp_ratio: float, mlp_norm_eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=mlp_norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=partial(nn.GELU, approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Tokens (B, H*W, dim) on the grid (H, W) and condition (B, dim) -> (B, H*W, dim)."""
        modulation = self.adaLN_modulation(c).unsqueeze(1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=2)
        x = x + gate_attn * self.attn(self.norm1(x) * (1 + scale_attn) + shift_attn, feat_size)
        return x + gate_mlp * self.mlp(self.norm2(x) * (1 + scale_mlp) + shift_mlp)


class FinalLayer(nn.Module):
    """Tokens to the pixels of their patches."""

    def __init__(self, dim: int, out_features: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(dim, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """(B, H*W, dim), (B, dim) -> (B, H*W, out_features)."""
        shift, scale = self.adaLN_modulation(c).unsqueeze(1).chunk(2, dim=2)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class TimestepEmbedder(nn.Module):
    """Sinusoids of the timestep, cosines first, through an MLP."""

    def __init__(self, dim: int, *, frequency_shift: int) -> None:
        super().__init__()
        self.frequency_shift = frequency_shift
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, timestep: Tensor, *, dtype: torch.dtype) -> Tensor:
        """(B,) -> (B, dim) in `dtype`; the sinusoids are computed in float32."""
        half = FREQUENCIES // 2
        steps = torch.arange(half, dtype=torch.float32, device=timestep.device)
        angles = timestep.float().unsqueeze(1) * torch.exp(
            -math.log(10000) * steps / (half - self.frequency_shift)
        )
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype))


class LabelEmbedder(nn.Module):
    """A row for each class and, where labels are dropped, one for the null label."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(rows, dim)

    def forward(self, labels: Tensor) -> Tensor:
        """(B,) -> (B, dim)."""
        return self.embedding_table(labels)


def sincos_table(grid_size: tuple[int, int], dim: int) -> Tensor:
    """The fixed position embedding (1, H*W, dim): half the channels for the column, half for the row."""
    H, W = grid_size
    omega = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))

    def encode(size: int) -> Tensor:
        angles = torch.outer(torch.arange(size, dtype=torch.float64), omega)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    columns = encode(W).expand(H, W, -1)
    rows = encode(H).unsqueeze(1).expand(H, W, -1)
    table = torch.cat([columns, rows], dim=2).view(1, H * W, dim)
    return table.to(
        torch.get_default_dtype()
    )  # as every parameter: diffusers builds models in the type wanted
