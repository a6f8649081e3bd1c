"""The attention that PVT comes with (https://arxiv.org/abs/2102.12122, section 3.3)."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn


@register_notrace_module
class SpatialReductionAttention(nn.Module):
    """PVT's attention: keys and values are of the map shrunk by a strided convolution. Parameters are named as
    by PVT's authors.

    Args:
        dim: channels C.
        num_heads: heads.
        sr_ratio: by which the sides of the map shrink; 1 leaves out the convolution.
        qkv_bias: bias of the projections of q, k, v.
        attn_drop, proj_drop: dropout of the attention map and after the output projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        sr_ratio: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim={dim} must be a multiple of num_heads={num_heads}; change one of them.")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_drop = attn_drop
        self.q = nn.Linear(dim, dim, bias=qkv_bias, **factory)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias, **factory)
        self.sr = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio, **factory) if sr_ratio > 1 else None
        self.norm = nn.LayerNorm(dim, **factory) if sr_ratio > 1 else None
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Tokens (B, P + H*W, C), without prefix tokens (P = 0) where the map shrinks -> the same shape."""
        B, N, C = x.shape
        q = self.q(x).view(B, N, self.num_heads, self.head_dim).transpose(1, 2)
        if self.sr is not None and self.norm is not None:
            x = self.sr(x.transpose(1, 2).unflatten(2, feat_size)).flatten(2).transpose(1, 2)
            x = self.norm(x)
        k, v = (
            self.kv(x).view(B, x.shape[1], 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        )
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop if self.training else 0.0)
        return self.proj_drop(self.proj(o.transpose(1, 2).reshape(B, N, C)))
