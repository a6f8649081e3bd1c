"""The attentions that Visual-Contrast Attention is compared with, called as `forward(x, feat_size)`."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DiffAttention, register_notrace_module
from torch import Tensor, nn

from lineardiff.checks import check_heads
from lineardiff.layers.attention import VisualContrastAttention
from lineardiff.layers.parts import ValueConv

__all__ = ["AgentAttention", "DifferentialAttention", "SelfAttention"]


@register_notrace_module
class SelfAttention(nn.Module):
    """Fused multi-head self-attention (`scaled_dot_product_attention`) with timm's parameter names.

    Args:
        dim: Number of channels C.
        num_heads: Number of heads; must divide `dim`.
        qkv_bias: Whether the projection of q, k and v has a bias.
        proj_bias: Whether the output projection has a bias.
        attn_drop: Dropout of the attention map.
        proj_drop: Dropout after the output projection.
        conv: Add the depth-wise 3x3 convolution of V that Visual-Contrast Attention has, so that a comparison can
            separate the effect of the attention from that of the convolution.

    Raises:
        ValueError: `num_heads` does not divide `dim`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        conv: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.conv = ValueConv(dim, **factory) if conv else None
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int] | None = None) -> Tensor:
        """Map tokens (B, P + H*W, C) to (B, P + H*W, C); only the convolution needs the grid `feat_size` (H, W)."""
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop if self.training else 0.0)
        if self.conv is not None:
            if feat_size is None:
                raise ValueError(
                    "The convolution of V needs the grid of the tokens; call with feat_size=(H, W)."
                )
            o = self.conv(o, v, feat_size)
        return self.proj_drop(self.proj(o.transpose(1, 2).reshape(B, N, C)))


@register_notrace_module
class AgentAttention(VisualContrastAttention):
    """Agent attention (Han et al., ECCV 2024, https://arxiv.org/abs/2312.08874).

    Pooled queries ("agents") attend to all keys, then every query attends to the agents: Visual-Contrast Attention
    with a single stream and without embeddings, lambdas and norms. The position biases of the original,
    which fix the image size, are left out.

    Args:
        dim: Number of channels C.
        num_heads: Number of heads.
        **options: Options of :class:`VisualContrastAttention`; `contrast_grid` is the grid of the agents.
    """

    def __init__(self, dim: int, num_heads: int = 8, **options: Any) -> None:
        super().__init__(dim, num_heads, tokens="pool", global_contrast="plain", patchwise="plain", **options)


class DifferentialAttention(DiffAttention):
    """timm's differential attention (Ye et al., ICLR 2025, https://arxiv.org/abs/2410.05258).

    `feat_size` is accepted for a uniform interface and ignored. TorchScript cannot compile this class.
    """

    def forward(self, x: Tensor, feat_size: tuple[int, int] | None = None) -> Tensor:
        return super().forward(x)
