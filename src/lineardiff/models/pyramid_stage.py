"""A stage of PVT and of CSwin: patches of the map before embedded by a convolution, then blocks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates, resample_abs_pos_embed, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from lineardiff.layers import create_attention
from lineardiff.models.block import Block
from lineardiff.models.stages import Grid, StageAttention

HostAttention = Callable[[int], nn.Module]
"""Builds the host's own attention for the stage of this index."""


class PyramidStage(nn.Module):
    """Patches of the map before, embedded by a convolution, then blocks.

    Args:
        embed: the convolution, (B, C_in, H_in, W_in) -> (B, dim, H, W).
        dim: channels C.
        blocks: of the stage.
        norm_layer: after the convolution.
        grid_size: (H, W) of the learned positions; None for a stage without positions.
        class_token: put a class token before the grid.
        pos_drop: dropout after the positions.
    """

    def __init__(
        self,
        embed: nn.Conv2d,
        dim: int,
        blocks: Sequence[Block],
        *,
        norm_layer: Any = nn.LayerNorm,
        grid_size: Grid | None = None,
        class_token: bool = False,
        pos_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed = embed
        self.embed_norm = norm_layer(dim, **factory)
        self.num_prefix_tokens = int(class_token)
        self.grid_size: Grid = grid_size or (0, 0)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, **factory)) if class_token else None
        tokens = self.num_prefix_tokens + self.grid_size[0] * self.grid_size[1]
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, dim, **factory)) if grid_size else None
        self.pos_drop = nn.Dropout(pos_drop)
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw positions and class token anew."""
        for parameter in (self.cls_token, self.pos_embed):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)

    @torch.jit.ignore
    @torch.no_grad()
    def set_grid_size(self, grid_size: Grid) -> None:
        """Resample the positions for another grid, bilinearly as :meth:`forward` does for each other image."""
        if self.pos_embed is not None:
            resized = resize_positions(
                self.pos_embed, grid_size, old_grid=self.grid_size, prefix_tokens=self.num_prefix_tokens
            )
            self.pos_embed = nn.Parameter(resized.clone(), requires_grad=self.pos_embed.requires_grad)
            self.grid_size = grid_size

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The map before (B, C_in, H_in, W_in) -> tokens (B, P + H*W, C) and their grid (H, W)."""
        x = self.embed(x)
        feat_size = (x.shape[2], x.shape[3])
        x = self.embed_norm(x.flatten(2).transpose(1, 2))
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.pos_embed is not None:
            x = x + resample_abs_pos_embed(
                self.pos_embed,
                [feat_size[0], feat_size[1]],
                [self.grid_size[0], self.grid_size[1]],
                self.num_prefix_tokens,
                "bilinear",
                False,
            )
        x = self.pos_drop(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, feat_size)
            else:
                x = block(x, feat_size)
        return x, feat_size

    def to_map(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Tokens (B, P + H*W, C) -> (B, C, H, W), a view without the prefix tokens."""
        return x[:, self.num_prefix_tokens :].transpose(1, 2).unflatten(2, feat_size)


def resize_positions(positions: Tensor, grid: Grid, *, old_grid: Grid, prefix_tokens: int) -> Tensor:
    """Learned positions (1, P + H*W, C) for another grid, interpolated bilinearly as PVT's authors do."""
    return resample_abs_pos_embed(
        positions,
        new_size=list(grid),
        old_size=list(old_grid),
        num_prefix_tokens=prefix_tokens,
        interpolation="bilinear",
        antialias=False,
    )


def pyramid_blocks(
    attentions: Sequence[StageAttention],
    own_attention: HostAttention,
    *,
    own: str,
    dims: Sequence[int],
    depths: Sequence[int],
    num_heads: Sequence[int],
    mlp_ratios: Sequence[float],
    qkv_bias: bool,
    proj_drop: float,
    attn_drop: float,
    drop_path: float,
    norm_layer: Any,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> list[list[Block]]:
    """The blocks of every stage; `depth` of an attention counts blocks through the whole network, from 0."""
    rates = calculate_drop_path_rates(drop_path, list(depths), stagewise=True)
    return [
        stage_blocks(
            attention,
            partial(own_attention, stage) if attention.arm == own else None,
            dim=dims[stage],
            num_heads=num_heads[stage],
            first=sum(depths[:stage]),
            drop_paths=rates[stage],
            mlp_ratio=mlp_ratios[stage],
            qkv_bias=qkv_bias,
            proj_drop=proj_drop,
            attn_drop=attn_drop,
            norm_layer=norm_layer,
            device=device,
            dtype=dtype,
        )
        for stage, attention in enumerate(attentions)
    ]


def stage_blocks(
    attention: StageAttention,
    own_attention: Callable[[], nn.Module] | None = None,
    *,
    block_class: type[Block] = Block,
    dim: int,
    num_heads: int,
    first: int,
    drop_paths: Sequence[float],
    mlp_ratio: float,
    qkv_bias: bool,
    proj_drop: float,
    attn_drop: float,
    norm_layer: Any,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> list[Block]:
    """The blocks of one stage, as many as drop_paths; `first` is the index of its first block in the network.

    `own_attention` builds the attention of each; None builds the arm that `attention` names.
    """
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    blocks = []
    for index, drop_path in enumerate(drop_paths):
        if own_attention is not None:
            attn = own_attention()
        else:
            attn = create_attention(
                attention.arm,
                dim,
                num_heads,
                depth=first + index,
                attn_drop=attn_drop,
                options=attention.layer_options(),
                qkv_bias=qkv_bias,
                proj_drop=proj_drop,
                **factory,
            )
        blocks.append(
            block_class(
                attn,
                dim,
                mlp_ratio=mlp_ratio,
                norm_layer=norm_layer,
                proj_drop=proj_drop,
                drop_path=drop_path,
                **factory,
            )
        )
    return blocks
