"""The attention that CSWin comes with (https://arxiv.org/abs/2107.00652, sections 3.2 and 3.3)."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn


@register_notrace_module
class CrossWindowAttention(nn.Module):
    """CSWin's attention: half of the heads attend within vertical stripes of the map, half within horizontal
    ones, with a depth-wise convolution of V inside each stripe as position encoding (LePE).

    Args:
        dim: channels C.
        num_heads: heads, even where there are stripes.
        split_size: width of the stripes; None attends over the whole map.
        qkv_bias: bias of the projections of q, k, v.
        attn_drop, proj_drop: dropout of the attention map and after the output projection.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        split_size: int | None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        branches = 1 if split_size is None else 2
        if dim % num_heads or num_heads % branches:
            raise ValueError(
                f"dim={dim} must be a multiple of num_heads={num_heads}, and num_heads of the {branches} branches; "
                "change one of them."
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.head_dim = dim // num_heads
        self.split_size = 0 if split_size is None else split_size
        self.attn_drop = attn_drop
        self.branch_dim = dim // branches
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **factory)
        self.lepe = nn.ModuleList(
            nn.Conv2d(self.branch_dim, self.branch_dim, 3, padding=1, groups=self.branch_dim, **factory)
            for _ in range(branches)
        )
        self.proj = nn.Linear(dim, dim, **factory)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Grid tokens (B, H*W, C) -> (B, H*W, C); there are no prefix tokens."""
        H, W = feat_size
        qkv = self.qkv(x).unflatten(2, (3, x.shape[2])).unflatten(1, (H, W))  # B, H, W, 3, C
        outputs = []
        for index, lepe in enumerate(self.lepe):
            window = (H, W)
            if self.split_size > 0:
                window = (H, min(self.split_size, W)) if index == 0 else (min(self.split_size, H), W)
            branch = qkv[..., index * self.branch_dim : (index + 1) * self.branch_dim]
            q, k, v = self._windows(branch, window)
            o = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=self._inside(qkv, window),
                dropout_p=self.attn_drop if self.training else 0.0,
            )
            o = o.transpose(1, 2).flatten(2)
            v = v.transpose(1, 2).flatten(2).transpose(1, 2).unflatten(2, window)
            o = o + lepe(v).flatten(2).transpose(1, 2)
            outputs.append(self._merge(o, window, (H, W)))
        return self.proj_drop(self.proj(torch.cat(outputs, dim=-1)))

    def _windows(self, qkv: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, W, 3, c) -> q, k, v of the windows (B * windows, heads, h * w, head_dim), the last ones padded."""
        h, w = window
        c = self.branch_dim
        B, H, W = qkv.shape[0], qkv.shape[1], qkv.shape[2]
        qkv = F.pad(qkv, (0, 0, 0, 0, 0, -W % w, 0, -H % h))
        rows, columns = qkv.shape[1] // h, qkv.shape[2] // w
        qkv = qkv.reshape(B, rows, h, columns, w, 3, c // self.head_dim, self.head_dim)
        qkv = qkv.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(
            3, B * rows * columns, c // self.head_dim, h * w, self.head_dim
        )
        return qkv[0], qkv[1], qkv[2]

    def _inside(self, qkv: Tensor, window: tuple[int, int]) -> Tensor | None:
        """Which keys of each window lie on the map, (B * windows, 1, 1, h * w); None when all do."""
        h, w = window
        B, H, W = qkv.shape[0], qkv.shape[1], qkv.shape[2]
        if H % h == 0 and W % w == 0:
            return None
        inside = F.pad(torch.ones(H, W, dtype=torch.bool, device=qkv.device), (0, -W % w, 0, -H % h))
        inside = inside.view(inside.shape[0] // h, h, inside.shape[1] // w, w).transpose(1, 2)
        return inside.reshape(1, -1, h * w).expand(B, -1, -1).reshape(-1, 1, 1, h * w)

    def _merge(self, x: Tensor, window: tuple[int, int], feat_size: tuple[int, int]) -> Tensor:
        """Windows (B * windows, h * w, c) -> tokens (B, H*W, c), without the padding."""
        h, w = window
        H, W = feat_size
        rows, columns = (H + h - 1) // h, (W + w - 1) // w
        x = x.reshape(-1, rows, columns, h, w, self.branch_dim).transpose(2, 3)
        x = x.reshape(-1, rows * h, columns * w, self.branch_dim)
        return x[:, :H, :W].flatten(1, 2)
