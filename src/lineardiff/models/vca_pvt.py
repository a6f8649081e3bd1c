"""Pyramid Vision Transformer (PVT v1, https://arxiv.org/abs/2102.12122) with a choice of attention in each stage:
PVT's spatial reduction, Visual-Contrast Attention or another."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from lineardiff.checks import as_pair, check_heads, check_integer
from lineardiff.layers import AttentionOptions
from lineardiff.models.pyramid import PyramidStage, PyramidTransformer, resize_positions
from lineardiff.models.registry import create, imagenet_cfg
from lineardiff.models.stages import Geometry, Grid, check_depths, stage_options

__all__ = ["PyramidVisionTransformer"]  # timm adds the registered functions

SPATIAL_REDUCTION = "spatial_reduction"
_LayerNorm = partial(nn.LayerNorm, eps=1e-6)


@register_notrace_module
class SpatialReductionAttention(nn.Module):
    """PVT's attention, whose keys and values come from the map shrunk by a strided convolution (section 3.3).

    Parameters are named as by PVT's authors.

    Args:
        dim: Number of channels C.
        num_heads: Number of heads; must divide `dim`.
        sr_ratio: Factor by which the sides of the map shrink; 1 omits the convolution.
        qkv_bias: Whether the projections of q, k and v have biases.
        attn_drop: Dropout of the attention map.
        proj_drop: Dropout after the output projection.
        device: Device of the parameters.
        dtype: Type of the parameters.
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
        check_heads(dim, num_heads)
        check_integer("sr_ratio", sr_ratio)
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
        """Map tokens (B, P + H*W, C) to the same shape; with `sr_ratio` > 1 there must be no prefix tokens."""
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


class PyramidVisionTransformer(PyramidTransformer):
    """PVT v1, for images of any size that is a multiple of `patch_size` * 8.

    Learned positions are interpolated bilinearly, as by the authors.

    Args:
        attention: "spatial_reduction" (PVT's own), "vca", "mhsa", "mhsa_conv", "diff" or "agent", one name for all
            stages or one for each.
        contrast_grids: Contrast grid (h, w) of each stage, None for a stage without contrast tokens. Default: the
            paper's 9, 16, 49 and 49 contrast tokens.
        img_size: Image size that the positions are made for: one side, or (height, width).
        patch_size: Side of the patches of the first stage; the other stages halve the map.
        in_chans: Channels of the images.
        num_classes: Number of classes.
        global_pool: "token" (the class token of the last stage), "avg", or "" for no pooling.
        embed_dims: Number of channels of each stage.
        depths: Number of blocks of each stage.
        num_heads: Number of heads of each stage.
        mlp_ratios: Hidden channels of the MLPs of each stage, as multiples of its channels.
        sr_ratios: Spatial reduction of each stage.
        qkv_bias: Whether the projections of q, k and v have biases.
        drop_rate: Dropout before the classifier.
        proj_drop_rate: Dropout after positions and projections.
        attn_drop_rate: Dropout of the attention maps.
        drop_path_rate: Stochastic depth of the last block.
        norm_layer: Norm of the blocks and the final norm.
        device: Device of the parameters.
        dtype: Type of the parameters.
        **options: `tokens`, `global_contrast`, `patchwise`, `softmax`, `conv` and `pool` of
            :class:`lineardiff.VisualContrastAttention`, for all stages.

    Raises:
        ValueError: An option does not fit, or a stage cannot take images of `img_size`.
    """

    def __init__(
        self,
        *,
        attention: str | Sequence[str] = "vca",
        contrast_grids: Sequence[Grid | None] | None = None,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dims: tuple[int, ...] = (64, 128, 320, 512),
        depths: tuple[int, ...] = (2, 2, 2, 2),
        num_heads: tuple[int, ...] = (1, 2, 5, 8),
        mlp_ratios: tuple[float, ...] = (8.0, 8.0, 4.0, 4.0),
        sr_ratios: tuple[int, ...] = (8, 4, 2, 1),
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: Any = _LayerNorm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_depths(
            depths=depths,
            embed_dims=embed_dims,
            num_heads=num_heads,
            mlp_ratios=mlp_ratios,
            sr_ratios=sr_ratios,
        )
        chosen = stage_options(
            attention,
            contrast_grids,
            AttentionOptions(**options),
            host=SPATIAL_REDUCTION,
            dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=mlp_ratios,
            drop_path=drop_path_rate,
            norm_layer=norm_layer,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            **factory,
        )
        geometry = Geometry.of(chosen, patch_size, pads=False)
        size = as_pair("img_size", img_size)
        stages, chans, side = [], in_chans, 1
        for stage, patch, sr_ratio in zip(chosen, geometry.patch_sizes, sr_ratios, strict=True):
            side *= patch
            stages.append(
                PyramidStage(
                    nn.Conv2d(chans, stage.dim, patch, stride=patch, **factory),
                    stage.dim,
                    stage.blocks(partial(SpatialReductionAttention, sr_ratio=sr_ratio)),
                    grid_size=(max(size[0] // side, 1), max(size[1] // side, 1)),
                    class_token=stage is chosen[-1],
                    pos_drop=proj_drop_rate,
                    **factory,
                )
            )
            chans = stage.dim
        super().__init__(
            stages,
            geometry,
            img_size=size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=norm_layer(embed_dims[-1], **factory),
        )
        self._check_global_pool(global_pool)
        self.global_pool: str = global_pool
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = (
            nn.Linear(embed_dims[-1], num_classes, **factory) if num_classes > 0 else nn.Identity()
        )
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the linear layer of the logits."""
        return self.head

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, or remove it for 0 classes; None keeps the pooling."""
        if global_pool is not None:
            self._check_global_pool(global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        head: nn.Module = nn.Identity()
        if num_classes > 0:
            own = next(self.parameters())
            head = nn.Linear(self.num_features, num_classes, device=own.device, dtype=own.dtype)
        self.head = head.train(self.training)

    def _check_global_pool(self, global_pool: str) -> None:
        known = ("token", "avg", "") if self.num_prefix_tokens else ("avg", "")
        if global_pool not in known:
            raise ValueError(f"global_pool={global_pool!r} is unknown; choose one of {known}.")

    @torch.jit.ignore
    def filter_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert weights to the names and shapes of this model.

        The authors' names become this library's, q and kv become qkv where a stage has another attention, and
        positions of another number of tokens, which must be of square images, are interpolated.
        """
        given = {authors_key(key): value for key, value in state_dict.items()}
        for name, module in self.named_modules():
            if not hasattr(module, "qkv"):
                continue
            for ending in ("weight", "bias"):
                if f"{name}.q.{ending}" in given:
                    q, kv = given.pop(f"{name}.q.{ending}"), given.pop(f"{name}.kv.{ending}")
                    given[f"{name}.qkv.{ending}"] = torch.cat([q, kv])
        for index, stage in enumerate(self.stages):
            key = f"stages.{index}.pos_embed"
            if key in given and given[key].shape[1] != stage.pos_embed.shape[1]:
                tokens = given[key].shape[1] - stage.num_prefix_tokens
                side = round(tokens**0.5)
                if side * side != tokens:
                    raise ValueError(
                        f"{key} has positions of {tokens} tokens, which is not a square grid; build the model with the "
                        "img_size of the weights, load them, then call set_input_size()."
                    )
                given[key] = resize_positions(
                    given[key],
                    stage.grid_size,
                    old_grid=(side, side),
                    prefix_tokens=stage.num_prefix_tokens,
                )
        return given

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map features (B, 1 + H*W, C) to logits (B, num_classes), or to pooled features (B, C)."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)


_AUTHORS_KEYS = (
    (r"patch_embed(\d)\.proj\.", r"stages.\1.embed."),
    (r"patch_embed(\d)\.norm\.", r"stages.\1.embed_norm."),
    (r"pos_embed(\d)$", r"stages.\1.pos_embed"),
    (r"block(\d)\.(\d+)\.", r"stages.\1.blocks.\2."),
    (r"cls_token$", r"stages.4.cls_token"),
)


def authors_key(key: str) -> str:
    """Return a key of PVT's published checkpoints as a key of :class:`PyramidVisionTransformer`; keep any other.

    `patch_embed1.proj` becomes `stages.0.embed`, `patch_embed1.norm` `stages.0.embed_norm`, `pos_embed1`
    `stages.0.pos_embed`, `block1.0` `stages.0.blocks.0`, and `cls_token` `stages.3.cls_token`.
    """
    for pattern, replacement in _AUTHORS_KEYS:
        renamed, count = re.subn(f"^{pattern}", replacement, key)
        if count:
            return re.sub(r"^stages\.(\d)", lambda match: f"stages.{int(match[1]) - 1}", renamed)
    return key


_create = partial(create, PyramidVisionTransformer)
_cfg = partial(imagenet_cfg, first_conv="stages.0.embed", classifier="head")
_VCA_SIZE = {"min_input_size": (3, 224, 224)}  # 7 x 7 contrast tokens in the last stage
_DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}

default_cfgs = generate_default_cfgs(
    {
        **{f"pvt_v1_{size}": _cfg() for size in _DEPTHS},
        **{f"vca_pvt_{size}": _cfg(**_VCA_SIZE) for size in _DEPTHS},
    }
)


def _pvt(size: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    defaults = {"depths": _DEPTHS[size], "attention": SPATIAL_REDUCTION}
    return _create(f"pvt_v1_{size}", pretrained, **{**defaults, **kwargs})


def _vca_pvt(size: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    return _create(f"vca_pvt_{size}", pretrained, **{"depths": _DEPTHS[size], **kwargs})


@register_model
def pvt_v1_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-Tiny, a baseline: 13,229,288 parameters."""
    return _pvt("tiny", pretrained, **kwargs)


@register_model
def pvt_v1_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-Small, a baseline."""
    return _pvt("small", pretrained, **kwargs)


@register_model
def pvt_v1_medium(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-Medium, a baseline."""
    return _pvt("medium", pretrained, **kwargs)


@register_model
def pvt_v1_large(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-Large, a baseline."""
    return _pvt("large", pretrained, **kwargs)


@register_model
def vca_pvt_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-PVT-Tiny: 9, 16, 49 and 49 contrast tokens in the stages, no spatial reduction, 11,557,608 parameters."""
    return _vca_pvt("tiny", pretrained, **kwargs)


@register_model
def vca_pvt_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-PVT-Small."""
    return _vca_pvt("small", pretrained, **kwargs)


@register_model
def vca_pvt_medium(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-PVT-Medium."""
    return _vca_pvt("medium", pretrained, **kwargs)


@register_model
def vca_pvt_large(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-PVT-Large."""
    return _vca_pvt("large", pretrained, **kwargs)
