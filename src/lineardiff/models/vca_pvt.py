"""Pyramid Vision Transformer (PVT v1, https://arxiv.org/abs/2102.12122), with its own spatial-reduction attention,
Visual-Contrast Attention or another arm in each stage."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from typing_extensions import Unpack

from lineardiff.layers import AttentionOptions
from lineardiff.models.pyramid import PyramidTransformer
from lineardiff.models.pyramid_stage import PyramidStage, pyramid_blocks, resize_positions
from lineardiff.models.registry import create, imagenet_cfg
from lineardiff.models.spatial_reduction import SpatialReductionAttention
from lineardiff.models.stages import Grid, check_depths, image_grid, stage_attentions

__all__ = ["PyramidVisionTransformer"]  # timm adds the registered functions

SPATIAL_REDUCTION = "spatial_reduction"
_LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class PyramidVisionTransformer(PyramidTransformer):
    """PVT v1. Images of any size that is a multiple of `patch_size` * 8 pass; learned positions are
    interpolated bilinearly, as by the authors.

    Args:
        attention: "spatial_reduction" (PVT's own), "vca", "mhsa", "mhsa_conv", "diff" or "agent" for all
            stages, or one for each.
        contrast_grids: (h, w) of each stage, None for a stage without contrast tokens; None altogether takes the
            paper's 9, 16, 49 and 49 contrast tokens.
        img_size: pixels of a side, or (height, width), that the positions are made for.
        patch_size: side of the patches of the first stage; the others halve the map.
        global_pool: "token" (the class token of the last stage), "avg", or "" for none.
        embed_dims, depths, num_heads, mlp_ratios, sr_ratios: of the four stages.
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: dropout before the classifier, after the
            positions and projections, of attention maps; stochastic depth of the last block.
        norm_layer: of blocks and the final norm.
        **options: tokens, global_contrast, patchwise, softmax, conv and pool of
            :class:`lineardiff.VisualContrastAttention`, for all its stages.

    Raises:
        ValueError: an option does not fit, or a stage cannot take images of `img_size`.
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
        **options: Unpack[AttentionOptions],
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_depths(
            embed_dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=mlp_ratios,
            sr_ratios=sr_ratios,
        )
        attentions = stage_attentions(
            attention,
            contrast_grids,
            own=SPATIAL_REDUCTION,
            stages=len(depths),
            options=options,
        )
        blocks = pyramid_blocks(
            attentions,
            lambda stage: SpatialReductionAttention(
                embed_dims[stage],
                num_heads[stage],
                sr_ratio=sr_ratios[stage],
                qkv_bias=qkv_bias,
                attn_drop=attn_drop_rate,
                proj_drop=proj_drop_rate,
                **factory,
            ),
            own=SPATIAL_REDUCTION,
            dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=mlp_ratios,
            qkv_bias=qkv_bias,
            proj_drop=proj_drop_rate,
            attn_drop=attn_drop_rate,
            drop_path=drop_path_rate,
            norm_layer=norm_layer,
            **factory,
        )
        height, width = image_grid(img_size)
        patch_sizes = (patch_size, *(2,) * (len(depths) - 1))
        stages, chans, side = [], in_chans, 1
        for index, (dim, patch) in enumerate(zip(embed_dims, patch_sizes, strict=True)):
            side *= patch
            stages.append(
                PyramidStage(
                    nn.Conv2d(chans, dim, patch, stride=patch, **factory),
                    dim,
                    blocks[index],
                    grid_size=(max(height // side, 1), max(width // side, 1)),
                    class_token=index == len(depths) - 1,
                    pos_drop=proj_drop_rate,
                    **factory,
                )
            )
            chans = dim
        super().__init__(
            stages,
            attentions,
            patch_sizes=patch_sizes,
            pads=False,
            img_size=(height, width),
            in_chans=in_chans,
            num_classes=num_classes,
            norm=norm_layer(embed_dims[-1], **factory),
        )
        self.global_pool = self._check_pool(global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = (
            nn.Linear(embed_dims[-1], num_classes, **factory) if num_classes > 0 else nn.Identity()
        )
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The linear layer of the logits."""
        return self.head

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, or none for 0 classes; None keeps the pooling."""
        if global_pool is not None:
            self.global_pool = self._check_pool(global_pool)
        self.num_classes = num_classes
        head: nn.Module = nn.Identity()
        if num_classes > 0:
            own = next(self.parameters())
            head = nn.Linear(self.num_features, num_classes, device=own.device, dtype=own.dtype)
        self.head = head.train(self.training)

    def _check_pool(self, global_pool: str) -> str:
        known = ("token", "avg", "") if self.num_prefix_tokens else ("avg", "")
        if global_pool not in known:
            raise ValueError(f"global_pool={global_pool!r} is unknown here; choose one of {known}.")
        return global_pool

    @torch.jit.ignore
    def filter_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The authors' names become ours, their q and kv one qkv where a stage has another attention, and
        positions of another number of tokens, which must be of square images, are interpolated."""
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
                        f"{key} has positions of {tokens} tokens, no square grid; build the model with the img_size "
                        "that the weights are of, load them, then call set_input_size()."
                    )
                given[key] = resize_positions(
                    given[key],
                    stage.grid_size,
                    old_grid=(side, side),
                    prefix_tokens=stage.num_prefix_tokens,
                )
        return given

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (B, 1 + H*W, C) -> logits (B, num_classes), or pooled features (B, C)."""
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
    """A key of PVT's published checkpoints as a key of :class:`PyramidVisionTransformer`; others are kept.

    `patch_embed1.proj` is `stages.0.embed`, `patch_embed1.norm` is `stages.0.embed_norm`, `pos_embed1` is
    `stages.0.pos_embed`, `block1.0` is `stages.0.blocks.0`, and `cls_token` is `stages.3.cls_token`.
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
    """PVT-Tiny, the baseline: 13,229,288 parameters."""
    return _pvt("tiny", pretrained, **kwargs)


@register_model
def pvt_v1_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-Small, the baseline."""
    return _pvt("small", pretrained, **kwargs)


@register_model
def pvt_v1_medium(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-Medium, the baseline."""
    return _pvt("medium", pretrained, **kwargs)


@register_model
def pvt_v1_large(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """PVT-Large, the baseline."""
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
