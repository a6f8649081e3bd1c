"""CSWin Transformer (https://arxiv.org/abs/2107.00652) with a choice of attention in each stage: CSWin's cross-shaped
windows, Visual-Contrast Attention or another."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import ClassifierHead, register_notrace_module
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from lineardiff.checks import as_pair, check_heads, check_integer
from lineardiff.layers import AttentionOptions
from lineardiff.models.pyramid import PyramidStage, PyramidTransformer
from lineardiff.models.registry import create, imagenet_cfg
from lineardiff.models.stages import Geometry, Grid, check_depths, stage_options

__all__ = ["CSWinTransformer"]  # timm adds the registered functions

CROSS_WINDOW = "cross_window"


@register_notrace_module
class CrossWindowAttention(nn.Module):
    """CSWin's attention: half of the heads attend within vertical stripes of the map, half within horizontal ones.

    A depth-wise convolution of V inside each stripe encodes positions (LePE). Sections 3.2 and 3.3 of the paper.

    Args:
        dim: Number of channels C.
        num_heads: Number of heads; even where there are stripes.
        split_size: Width of the stripes; None attends over the complete map.
        qkv_bias: Whether the projection of q, k and v has a bias.
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
        split_size: int | None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        branches = 1 if split_size is None else 2
        check_heads(dim, num_heads)
        if split_size is not None:
            check_integer("split_size", split_size)
        if num_heads % branches:
            raise ValueError(
                f"num_heads={num_heads} must be even: half of the heads see each kind of stripe."
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
        """Map grid tokens (B, H*W, C) to (B, H*W, C); there are no prefix tokens."""
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
        """Split (B, H, W, 3, c) into q, k, v of windows (B * windows, heads, h * w, head_dim), the last ones padded."""
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
        """Return which keys of each window are on the map, (B * windows, 1, 1, h * w), or None if all are."""
        h, w = window
        B, H, W = qkv.shape[0], qkv.shape[1], qkv.shape[2]
        if H % h == 0 and W % w == 0:
            return None
        inside = F.pad(torch.ones(H, W, dtype=torch.bool, device=qkv.device), (0, -W % w, 0, -H % h))
        inside = inside.view(inside.shape[0] // h, h, inside.shape[1] // w, w).transpose(1, 2)
        return inside.reshape(1, -1, h * w).expand(B, -1, -1).reshape(-1, 1, 1, h * w)

    def _merge(self, x: Tensor, window: tuple[int, int], feat_size: tuple[int, int]) -> Tensor:
        """Join windows (B * windows, h * w, c) to tokens (B, H*W, c) without the padding."""
        h, w = window
        H, W = feat_size
        rows, columns = (H + h - 1) // h, (W + w - 1) // w
        x = x.reshape(-1, rows, columns, h, w, self.branch_dim).transpose(2, 3)
        x = x.reshape(-1, rows * h, columns * w, self.branch_dim)
        return x[:, :H, :W].flatten(1, 2)


class CSWinTransformer(PyramidTransformer):
    """CSWin, for images of any size that is a multiple of 4.

    Stripes that do not divide a map are padded, and the padding is masked.

    The Visual-Contrast Attention of a stage sees all channels of the complete map, without CSWin's two branches:
    these exist for two shapes of stripe, and a global map has only one. The published parameter count (20.4 M) does
    not distinguish this reading from one attention for each half of the channels: the two have 20,413,928 and
    20,415,848 parameters.

    Args:
        attention: "cross_window" (CSWin's own), "vca", "mhsa", "mhsa_conv", "diff" or "agent", one name for all
            stages or one for each.
        contrast_grids: Contrast grid (h, w) of each stage, None for a stage without contrast tokens. Default: 9,
            16, 49 and 49 contrast tokens where the attention has them.
        img_size: Image size to check: one side, or (height, width).
        in_chans: Channels of the images.
        num_classes: Number of classes.
        global_pool: Pooling of timm's ClassifierHead ("avg", "max", ...), or "" for no pooling.
        embed_dim: Number of channels of the first stage; each further stage doubles it.
        depths: Number of blocks of each stage.
        num_heads: Number of heads of each stage.
        split_sizes: Width of the stripes of each stage; None attends over the complete map.
        mlp_ratio: Hidden channels of the MLPs as a multiple of the channels.
        qkv_bias: Whether the projections of q, k and v have biases.
        drop_rate: Dropout before the classifier.
        proj_drop_rate: Dropout after projections.
        attn_drop_rate: Dropout of the attention maps.
        drop_path_rate: Stochastic depth of the last block.
        norm_layer: Class of all norms.
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
        **options: Any,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_depths(depths=depths, num_heads=num_heads, split_sizes=split_sizes)
        check_integer("embed_dim", embed_dim)
        chosen = stage_options(
            attention,
            contrast_grids,
            AttentionOptions(**options),
            host=CROSS_WINDOW,
            dims=[embed_dim * 2**index for index in range(len(depths))],
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=(mlp_ratio,) * len(depths),
            drop_path=drop_path_rate,
            norm_layer=norm_layer,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            **factory,
        )
        stages, chans = [], in_chans
        for stage, split_size in zip(chosen, split_sizes, strict=True):
            first = stage is chosen[0]
            kernel, stride, padding = (7, 4, 2) if first else (3, 2, 1)
            embed = nn.Conv2d(chans, stage.dim, kernel, stride=stride, padding=padding, **factory)
            blocks = stage.blocks(partial(CrossWindowAttention, split_size=split_size))
            stages.append(PyramidStage(embed, stage.dim, blocks, norm_layer=norm_layer, **factory))
            chans = stage.dim
        super().__init__(
            stages,
            Geometry.of(chosen, 4, pads=True),
            img_size=as_pair("img_size", img_size),
            in_chans=in_chans,
            num_classes=num_classes,
            norm=norm_layer(chans, **factory),
        )
        self.output_fmt = "NHWC"
        self.global_pool = global_pool
        self.head = self._create_head(drop_rate, **factory)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """Return the linear layer of the logits."""
        return self.head.fc

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, or remove it for 0 classes; None keeps the pooling."""
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
        """Rename the authors' weights to this library's names."""
        return {authors_key(key): value for key, value in state_dict.items()}

    def _features(self, tokens: Tensor, feat_size: tuple[int, int]) -> Tensor:
        return tokens.unflatten(1, feat_size)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map features (B, H, W, C) to logits (B, num_classes), or to pooled features (B, C)."""
        return self.head(x, pre_logits=True) if pre_logits else self.head(x)


_AUTHORS_KEYS = (
    (r"stage1_conv_embed\.0\.", "stages.0.embed."),
    (r"stage1_conv_embed\.2\.", "stages.0.embed_norm."),
    (r"merge(\d)\.conv\.", r"stages.\1.embed."),
    (r"merge(\d)\.norm\.", r"stages.\1.embed_norm."),
    (r"head\.(?!fc)", "head.fc."),
)


def authors_key(key: str) -> str:
    """Return a key of CSWin's published checkpoints as a key of :class:`CSWinTransformer`; keep any other.

    `stage1_conv_embed.0` and `.2` become `stages.0.embed` and `.embed_norm`; `merge1.conv` and `.norm` become those
    of `stages.1`; `stage1.0.qkv`, `.proj` and `.attns.0.get_v` become `stages.0.blocks.0.attn.qkv`, `.proj` and
    `.lepe.0`; `head` becomes `head.fc`.
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
    """CSWin-Tiny, a baseline, with the depths of its authors' paper: 22,320,552 parameters."""
    return _create("cswin_tiny_224", pretrained, **{**_TINY, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_tiny_24181_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Tiny, a baseline, with the depths 2, 4, 18, 1 of VCA-CSWin-Tiny: 20,393,320 parameters."""
    return _create("cswin_tiny_24181_224", pretrained, **{**_TINY_24181, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_small_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Small, a baseline."""
    return _create("cswin_small_224", pretrained, **{**_SMALL, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_base_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Base, a baseline."""
    return _create("cswin_base_224", pretrained, **{**_BASE, "attention": CROSS_WINDOW, **kwargs})


@register_model
def cswin_large_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CSWin-Large, a baseline."""
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
