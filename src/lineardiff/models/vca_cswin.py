"""CSWin Transformer (https://arxiv.org/abs/2107.00652), with its own cross-shaped windows, Visual-Contrast
Attention or another arm in each stage."""

import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from timm.layers import ClassifierHead
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from typing_extensions import Unpack

from lineardiff.layers import AttentionOptions
from lineardiff.models.cross_window import CrossWindowAttention
from lineardiff.models.pyramid import PyramidTransformer
from lineardiff.models.pyramid_stage import PyramidStage, pyramid_blocks
from lineardiff.models.registry import create, imagenet_cfg
from lineardiff.models.stages import Grid, check_depths, image_grid, stage_attentions

__all__ = ["CSWinTransformer"]  # timm adds the registered functions

CROSS_WINDOW = "cross_window"


class CSWinTransformer(PyramidTransformer):
    """CSWin. Images of any size that is a multiple of 4 pass; stripes that do not divide a map are padded, and
    the padding is masked.

    The Visual-Contrast Attention of a stage sees all channels of the whole map, without CSWin's two branches:
    they exist for two shapes of stripe, and one global map has only one. The published parameter count
    (20.4 M) does not tell this reading from one attention for each half of the channels: they give
    20,413,928 and 20,415,848.

    Args:
        attention: "cross_window" (CSWin's own), "vca", "mhsa", "mhsa_conv", "diff" or "agent" for all
            stages, or one for each.
        contrast_grids: (h, w) of each stage, None for a stage without contrast tokens; None altogether takes 9,
            16, 49 and 49 contrast tokens where the attention has them.
        img_size: pixels of a side, or (height, width), only to check that they pass.
        global_pool: "avg", "max", ... of timm's ClassifierHead, or "" for none.
        embed_dim: channels of the first stage, doubled by each of the others.
        depths, num_heads: of the four stages.
        split_sizes: widths of the stripes of each stage; None attends over the whole map.
        mlp_ratio: of the blocks.
        drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate: dropout before the classifier, of
            projections, of attention maps; stochastic depth of the last block.
        norm_layer: of all norms.
        **options: tokens, global_contrast, patchwise, softmax, conv and pool of
            :class:`lineardiff.VisualContrastAttention`, for all its stages.

    Raises:
        ValueError: an option does not fit, or a stage cannot take images of `img_size`.
    """

    def __init__(
        self,
        *,
        attention: str | Sequence[str] = ("vca", "vca", CROSS_WINDOW, CROSS_WINDOW),
        contrast_grids: Sequence[Grid | None] | None = None,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 64,
        depths: tuple[int, ...] = (2, 4, 18, 1),
        num_heads: tuple[int, ...] = (2, 4, 8, 16),
        split_sizes: tuple[int | None, ...] = (1, 2, 7, None),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: Any = nn.LayerNorm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[AttentionOptions],
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_depths(depths=depths, num_heads=num_heads, split_sizes=split_sizes)
        attentions = stage_attentions(
            attention, contrast_grids, own=CROSS_WINDOW, stages=len(depths), options=options
        )
        dims = [embed_dim * 2**index for index in range(len(depths))]
        blocks = pyramid_blocks(
            attentions,
            lambda stage: CrossWindowAttention(
                dims[stage],
                num_heads[stage],
                split_size=split_sizes[stage],
                qkv_bias=qkv_bias,
                attn_drop=attn_drop_rate,
                proj_drop=proj_drop_rate,
                **factory,
            ),
            own=CROSS_WINDOW,
            dims=dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=(mlp_ratio,) * len(depths),
            qkv_bias=qkv_bias,
            proj_drop=proj_drop_rate,
            attn_drop=attn_drop_rate,
            drop_path=drop_path_rate,
            norm_layer=norm_layer,
            **factory,
        )
        embeds = [nn.Conv2d(in_chans, dims[0], 7, stride=4, padding=2, **factory)]
        for chans, dim in pairwise(dims):
            embeds.append(nn.Conv2d(chans, dim, 3, stride=2, padding=1, **factory))
        super().__init__(
            [
                PyramidStage(embed, dim, blocks[index], norm_layer=norm_layer, **factory)
                for index, (embed, dim) in enumerate(zip(embeds, dims, strict=True))
            ],
            attentions,
            patch_sizes=(4, *(2,) * (len(depths) - 1)),
            pads=True,
            img_size=image_grid(img_size),
            in_chans=in_chans,
            num_classes=num_classes,
            norm=norm_layer(dims[-1], **factory),
        )
        self.output_fmt = "NHWC"
        self.global_pool = global_pool
        self.head = self._create_head(drop_rate, **factory)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The linear layer of the logits."""
        return self.head.fc

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, or none for 0 classes; None keeps the pooling."""
        if global_pool is not None:
            self.global_pool = global_pool
        self.num_classes = num_classes
        parameter = next(self.parameters())
        self.head = self._create_head(self.head.drop.p, device=parameter.device, dtype=parameter.dtype)
        self.head.train(self.training)

    def _create_head(self, drop_rate: float, **factory: Any) -> ClassifierHead:
        head = ClassifierHead(
            self.num_features,
            self.num_classes,
            pool_type=self.global_pool,
            drop_rate=drop_rate,
            input_fmt=self.output_fmt,
            **factory,
        )
        self.head_hidden_size = self.num_features * head.global_pool.feat_mult()
        return head

    @torch.jit.ignore
    def filter_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The authors' names become ours."""
        return {authors_key(key): value for key, value in state_dict.items()}

    def _features(self, tokens: Tensor, feat_size: tuple[int, int]) -> Tensor:
        return tokens.unflatten(1, feat_size)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (B, H, W, C) -> logits (B, num_classes), or pooled features (B, C)."""
        return self.head(x, pre_logits=True) if pre_logits else self.head(x)


_AUTHORS_KEYS = (
    (r"stage1_conv_embed\.0\.", "stages.0.embed."),
    (r"stage1_conv_embed\.2\.", "stages.0.embed_norm."),
    (r"merge(\d)\.conv\.", r"stages.\1.embed."),
    (r"merge(\d)\.norm\.", r"stages.\1.embed_norm."),
    (r"head\.(?!fc)", "head.fc."),
)


def authors_key(key: str) -> str:
    """A key of CSWin's published checkpoints as a key of :class:`CSWinTransformer`; others are kept.

    `stage1_conv_embed.0` and `.2` are `stages.0.embed` and `.embed_norm`; `merge1.conv` and `.norm` are those
    of `stages.1`; `global_contrast.0.qkv`, `.proj` and `.attns.0.get_v` are `stages.0.blocks.0.attn.qkv`, `.proj` and
    `.lepe.0`; `head` is `head.fc`.
    """
    for pattern, replacement in _AUTHORS_KEYS:
        renamed, count = re.subn(f"^{pattern}", replacement, key)
        if count:
            return renamed
    block = re.match(r"stage(\d)\.(\d+)\.(.*)", key)
    if block is None:
        return key
    rest = re.sub(r"^attns\.(\d)\.get_v", r"lepe.\1", block[3])
    inner = "attn." if rest.startswith(("qkv", "proj", "lepe")) else ""
    return f"stages.{int(block[1]) - 1}.blocks.{block[2]}.{inner}{rest}"


_create = partial(create, CSWinTransformer)
_cfg = partial(imagenet_cfg, crop_pct=0.9, first_conv="stages.0.embed", classifier="head.fc")

_TINY: dict[str, Any] = {"embed_dim": 64, "depths": (1, 2, 21, 1), "num_heads": (2, 4, 8, 16)}
_TINY_24181: dict[str, Any] = {**_TINY, "depths": (2, 4, 18, 1)}
_SMALL: dict[str, Any] = {**_TINY, "depths": (2, 4, 32, 2)}
_BASE: dict[str, Any] = {"embed_dim": 96, "depths": (2, 4, 32, 2), "num_heads": (4, 8, 16, 32)}
_LARGE: dict[str, Any] = {"embed_dim": 144, "depths": (2, 4, 32, 2), "num_heads": (6, 12, 24, 24)}

default_cfgs = generate_default_cfgs(
    {
        "cswin_tiny_224": _cfg(),
        "cswin_tiny_24181_224": _cfg(),
        "cswin_small_224": _cfg(),
        "cswin_base_224": _cfg(),
        "cswin_large_224": _cfg(),
        "vca_cswin_tiny_224": _cfg(),
        "vca_cswin_small_224": _cfg(),
        "vca_cswin_base_224": _cfg(),
    }
)


@register_model
def cswin_tiny_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Tiny, the baseline, with the depths of its authors' paper: 22,320,552 parameters."""
    return _create("cswin_tiny_224", pretrained, **{**_TINY, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_tiny_24181_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Tiny, the baseline, with the depths 2, 4, 18, 1 of VCA-CSWin-Tiny: 20,393,320 parameters."""
    return _create("cswin_tiny_24181_224", pretrained, **{**_TINY_24181, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_small_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Small, the baseline."""
    return _create("cswin_small_224", pretrained, **{**_SMALL, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_base_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Base, the baseline."""
    return _create("cswin_base_224", pretrained, **{**_BASE, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_large_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Large, the baseline."""
    return _create("cswin_large_224", pretrained, **{**_LARGE, "attention": CROSS_WINDOW, **kwargs})


@register_model
def vca_cswin_tiny_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-CSWin-Tiny: 9 and 16 contrast tokens in stages 1 and 2, cross-shaped windows in 3 and 4."""
    return _create("vca_cswin_tiny_224", pretrained, **{**_TINY_24181, **kwargs})


@register_model
def vca_cswin_small_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-CSWin-Small."""
    return _create("vca_cswin_small_224", pretrained, **{**_SMALL, **kwargs})


@register_model
def vca_cswin_base_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-CSWin-Base."""
    return _create("vca_cswin_base_224", pretrained, **{**_BASE, **kwargs})
