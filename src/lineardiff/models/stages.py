"""Options, grids and checks of the stages of the hierarchical backbones PVT, Swin and CSwin."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from timm.layers import calculate_drop_path_rates, register_notrace_function
from torch import nn

from lineardiff.checks import check_heads, check_integer, check_pair
from lineardiff.layers import AttentionOptions, create_attention, list_attentions
from lineardiff.layers.factory import log_ignored, per_block, pools_queries
from lineardiff.models.block import Block

__all__ = [
    "CONTRAST_GRIDS",
    "Geometry",
    "Grid",
    "StageOptions",
    "check_depths",
    "check_image",
    "stage_options",
]

Grid = tuple[int, int]

CONTRAST_GRIDS: tuple[Grid, ...] = ((3, 3), (4, 4), (7, 7), (7, 7))
"""Contrast grids of the paper: 9, 16, 49 and 49 contrast tokens in the four stages."""


@dataclass(frozen=True)
class StageOptions:
    """Options of the blocks of one stage.

    Attributes:
        attention: Name of the attention: one of :func:`lineardiff.layers.list_attentions`, or the host's.
        options: Options of the attention.
        dim: Number of channels C.
        num_heads: Number of heads.
        mlp_ratio: Hidden channels of the MLPs as a multiple of `dim`.
        first_block: Index of the first block, counted through the network from 0.
        drop_paths: Stochastic depth of each block.
        norm_layer: Norm of the blocks.
        qkv_bias: Whether the projection of q, k and v has a bias.
        attn_drop: Dropout of the attention maps.
        proj_drop: Dropout after the projections.
        device: Device of the parameters.
        dtype: Type of the parameters.
    """

    attention: str
    options: AttentionOptions
    dim: int
    num_heads: int
    mlp_ratio: float
    first_block: int
    drop_paths: Sequence[float]
    norm_layer: Any = nn.LayerNorm
    qkv_bias: bool = True
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def blocks(
        self, host_attention: Callable[..., nn.Module] | None = None, *, block_class: type[Block] = Block
    ) -> list[Block]:
        """Build the blocks.

        Args:
            host_attention: Builds the host's attention, as `host_attention(dim, num_heads, **arguments)`.
            block_class: Class of the blocks.
        """
        factory: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "proj_drop": self.proj_drop}
        common: dict[str, Any] = {**factory, "qkv_bias": self.qkv_bias, "attn_drop": self.attn_drop}

        def attention(depth: int) -> nn.Module:
            if self.attention in list_attentions():
                return create_attention(
                    self.attention, self.dim, self.num_heads, options=self.options, depth=depth, **common
                )
            assert host_attention is not None
            return host_attention(self.dim, self.num_heads, **common)

        return [
            block_class(
                attention(self.first_block + index),
                self.dim,
                mlp_ratio=self.mlp_ratio,
                norm_layer=self.norm_layer,
                drop_path=drop_path,
                **factory,
            )
            for index, drop_path in enumerate(self.drop_paths)
        ]


def stage_options(
    attention: str | Sequence[str],
    contrast_grids: Sequence[Grid | None] | None,
    options: AttentionOptions,
    *,
    host: str,
    dims: Sequence[int],
    depths: Sequence[int],
    num_heads: Sequence[int],
    mlp_ratios: Sequence[float],
    drop_path: float,
    **shared: Any,
) -> tuple[StageOptions, ...]:
    """Return the options of each stage of a backbone.

    Args:
        attention: One name for all stages, or one for each.
        contrast_grids: Contrast grid (h, w) of each stage, None for a stage without contrast tokens. Default: the
            paper's.
        options: Options of the attentions of all stages.
        host: Name of the host's attention.
        dims: Number of channels of each stage.
        depths: Number of blocks of each stage.
        num_heads: Number of heads of each stage.
        mlp_ratios: Ratio of the MLPs of each stage.
        drop_path: Stochastic depth of the last block; it rises linearly from 0 through the network.
        **shared: Further fields of :class:`StageOptions`, the same for all stages.

    Raises:
        ValueError: A name is unknown, or a contrast grid is missing or not two positive integers.
    """
    count = len(depths)
    names = per_block(attention, count, host=host, of="stages")
    if options.contrast_grid is not None:
        raise ValueError(
            f"contrast_grid={options.contrast_grid!r} is an option of models without stages; pass contrast_grids, one "
            "(h, w) for each stage."
        )
    grids: Any = contrast_grids
    if grids is None:
        paper = [CONTRAST_GRIDS[min(index, len(CONTRAST_GRIDS) - 1)] for index in range(count)]
        grids = [grid if pools_queries(name) else None for name, grid in zip(names, paper, strict=True)]
    if not isinstance(grids, (tuple, list)) or len(grids) != count:
        raise ValueError(
            f"contrast_grids={contrast_grids!r} must hold one (h, w), or None, for each of the {count} stages, "
            f"such as {CONTRAST_GRIDS}."
        )
    for index, (name, grid) in enumerate(zip(names, grids, strict=True)):
        check_heads(dims[index], num_heads[index])
        if grid is not None or pools_queries(name):
            check_pair(f"contrast_grids[{index}] of attention {name!r}", grid)
        if name == host:
            for option in (*options.given(), *(("contrast_grid",) if grid is not None else ())):
                log_ignored(name, option)
    rates = calculate_drop_path_rates(drop_path, list(depths), stagewise=True)
    return tuple(
        StageOptions(
            name,
            replace(options, contrast_grid=None if grid is None else tuple(grid)),
            dim=dims[index],
            num_heads=num_heads[index],
            mlp_ratio=mlp_ratios[index],
            first_block=sum(depths[:index]),
            drop_paths=rates[index],
            **shared,
        )
        for index, (name, grid) in enumerate(zip(names, grids, strict=True))
    )


def check_depths(*, depths: Sequence[object], **per_stage: Sequence[object]) -> None:
    """Check that every stage has at least one block and a value of every option.

    Raises:
        ValueError: The lengths differ, or a depth is not a positive integer.
    """
    lengths = {name: len(values) for name, values in {"depths": depths, **per_stage}.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"Every option needs one value per stage, but the lengths differ: {lengths}.")
    for index, depth in enumerate(depths):
        check_integer(f"depths[{index}]", depth)


class Geometry(NamedTuple):
    """How a backbone divides images, and the contrast grids that must fit.

    Attributes:
        patch_sizes: Side of the patches that each stage merges, such as (4, 2, 2, 2).
        pads: Whether the stages after the first pad maps that their patches do not divide.
        contrast_grids: Contrast grid of each stage, None where queries are not pooled.
    """

    patch_sizes: tuple[int, ...]
    pads: bool
    contrast_grids: tuple[Grid | None, ...]

    @classmethod
    def of(cls, stages: Sequence[StageOptions], patch_size: int, *, pads: bool) -> "Geometry":
        """Return the geometry of stages that merge `patch_size` pixels (first stage) or 2 patches per side."""
        check_integer("patch_size", patch_size)
        grids = tuple(s.options.contrast_grid if pools_queries(s.attention) else None for s in stages)
        return cls((patch_size, *(2,) * (len(stages) - 1)), pads, grids)

    def grids(self, image_size: Grid) -> list[Grid]:
        """Return the grid (H, W) of each stage for images of this size, rounded up."""
        grids, (H, W) = [], image_size
        for patch in self.patch_sizes:
            H, W = -(-H // patch), -(-W // patch)
            grids.append((H, W))
        return grids

    def first(self, stages: int) -> "Geometry":
        """Return the geometry of the first stages."""
        return Geometry(self.patch_sizes[:stages], self.pads, self.contrast_grids[:stages])


@register_notrace_function  # torch.fx cannot trace comparisons
def check_image(height: int, width: int, geometry: Geometry) -> None:
    """Check that images of this size fit every stage.

    Raises:
        ValueError: A stage cannot divide them into patches, or its grid is smaller than its contrast grid; the
            message names the stage and sizes that fit.
    """
    multiple = 1
    for patch in geometry.patch_sizes[: 1 if geometry.pads else None]:
        multiple *= patch
    if height % multiple or width % multiple:
        stage, side = 0, 1
        while not (
            height % (side * geometry.patch_sizes[stage]) or width % (side * geometry.patch_sizes[stage])
        ):
            side *= geometry.patch_sizes[stage]
            stage += 1
        raise ValueError(
            f"Images of {height} x {width} pixels give stage {stage + 1} a map of {height // side} x {width // side}, "
            f"which does not divide into patches of {geometry.patch_sizes[stage]} x {geometry.patch_sizes[stage]}; "
            f"resize or pad the images to multiples of {multiple}, such as "
            f"{_round_up(height, multiple)} x {_round_up(width, multiple)}."
        )
    grids = geometry.grids((height, width))
    for index, ((H, W), pooled) in enumerate(zip(grids, geometry.contrast_grids, strict=True)):
        if pooled is not None and (H < pooled[0] or W < pooled[1]):
            fitting = tuple(
                None if p is None else (min(p[0], grid[0]), min(p[1], grid[1]))
                for p, grid in zip(geometry.contrast_grids, grids, strict=True)
            )
            raise ValueError(
                f"Stage {index + 1} pools into a {pooled[0]} x {pooled[1]} contrast grid, but has only {H} x {W} "
                f"tokens for images of {height} x {width} pixels; use larger images, or build the model "
                f"with contrast_grids={fitting}."
            )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
