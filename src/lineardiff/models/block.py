"""The pre-norm transformer block of the classifiers, around an attention that takes the grid of its tokens."""

from typing import Any

import torch
from timm.layers import DropPath, LayerScale, Mlp
from torch import Tensor, nn

__all__ = ["Block", "MapBlock"]


class Block(nn.Module):
    """timm's pre-norm block, called with the grid of the tokens; parameters are named as in timm.

    Args:
        attn: An attention called as `attn(x, feat_size)`.
        dim: Number of channels C.
        mlp_ratio: Hidden channels of the MLP as a multiple of `dim`.
        mlp_layer: Class of the MLP.
        act_layer: Activation of the MLP.
        norm_layer: Norm before the attention and before the MLP.
        bias: Whether the MLP has biases.
        proj_drop: Dropout in the MLP.
        drop_path: Stochastic depth of both branches.
        init_values: Initial value of LayerScale. Default: no LayerScale.
        device: Device of the parameters.
        dtype: Type of the parameters.
    """

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        mlp_layer: Any = Mlp,
        act_layer: Any = nn.GELU,
        norm_layer: Any = nn.LayerNorm,
        bias: bool = True,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        init_values: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm1 = norm_layer(dim, **factory)
        self.attn = attn
        self.ls1 = LayerScale(dim, init_values=init_values, **factory) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = norm_layer(dim, **factory)
        self.mlp = mlp_layer(
            in_features=dim,
            hidden_features=int(dim * mlp_ratio),
            act_layer=act_layer,
            bias=bias,
            drop=proj_drop,
            **factory,
        )
        self.ls2 = LayerScale(dim, init_values=init_values, **factory) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Map tokens (B, P + H*W, C) on the grid `feat_size` (H, W) to (B, P + H*W, C)."""
        return self._tokens(x, feat_size)

    def _tokens(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), feat_size)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class MapBlock(Block):
    """The block with the interface of timm's Swin blocks: on a feature map of any size."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Map (B, H, W, C) to (B, H, W, C)."""
        H, W = x.shape[1], x.shape[2]
        return self._tokens(x.flatten(1, 2), (H, W)).unflatten(1, (H, W))

    @torch.jit.ignore
    def set_input_size(
        self, feat_size: tuple[int, int], window_size: Any, always_partition: bool | None = None
    ) -> None:
        """Do nothing: the block has no windows, and the grid is passed with each call."""
