"""Swin Transformer (https://arxiv.org/abs/2103.14030) on timm's, with a choice of attention in each stage: Swin's
windows, Visual-Contrast Attention or another."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer import checkpoint_filter_fn as swin_filter_fn
from torch import Tensor, nn

from lineardiff.checks import as_pair, check_integer
from lineardiff.layers import AttentionOptions
from lineardiff.models.block import MapBlock
from lineardiff.models.registry import check_weight_init, create, imagenet_cfg
from lineardiff.models.stages import Geometry, Grid, check_depths, check_image, stage_options
from lineardiff.models.weights import vca_terms_without_decay

__all__ = ["VCASwinTransformer"]  # timm adds the registered functions

WINDOW = "window"


class VCASwinTransformer(SwinTransformer):
    """timm's SwinTransformer, whose stages without windows attend over the complete map.

    Such a stage has no windows, no shift and no relative position bias. Images of any size that is a multiple of
    `patch_size` are accepted; stages with windows pad their map, as in timm.

    Args:
        attention: "window" (Swin's own), "vca", "mhsa", "mhsa_conv", "diff" or "agent", one name for all stages or
            one for each.
        contrast_grids: Contrast grid (h, w) of each stage, None for a stage without contrast tokens. Default: the
            paper's 9, 16 and 49 contrast tokens (and 49 in stage 4 where it pools).
        strict_img_size: Reject images of other sizes than `img_size`.
        img_size, patch_size, in_chans, num_classes, global_pool, embed_dim, depths, num_heads, window_size,
            always_partition, mlp_ratio, qkv_bias, drop_rate, proj_drop_rate, attn_drop_rate, drop_path_rate,
            norm_layer, weight_init, device, dtype: As in timm's SwinTransformer.
        **options: `tokens`, `global_contrast`, `patchwise`, `softmax`, `conv` and `pool` of
            :class:`lineardiff.VisualContrastAttention`, for all stages.

    Raises:
        ValueError: An option does not fit, or a stage cannot take images of `img_size`.
    """

    def __init__(
        self,
        *,
        attention: str | Sequence[str] = ("vca", "vca", "vca", WINDOW),
        contrast_grids: Sequence[Grid | None] | None = None,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        num_heads: tuple[int, ...] = (3, 6, 12, 24),
        window_size: Any = 7,
        always_partition: bool = False,
        strict_img_size: bool = False,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        norm_layer: Any = nn.LayerNorm,
        weight_init: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        check_depths(depths=depths, num_heads=num_heads)
        check_integer("embed_dim", embed_dim)
        check_weight_init(weight_init)
        chosen = stage_options(
            attention,
            contrast_grids,
            AttentionOptions(**options),
            host=WINDOW,
            dims=[embed_dim * 2**index for index in range(len(depths))],
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=(mlp_ratio,) * len(depths),
            drop_path=drop_path_rate,
            norm_layer=norm_layer,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            device=device,
            dtype=dtype,
        )
        geometry = Geometry.of(chosen, patch_size, pads=True)
        check_image(*as_pair("img_size", img_size), geometry)
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dim=embed_dim,
            depths=depths,
            num_heads=num_heads,
            window_size=window_size,
            always_partition=always_partition,
            strict_img_size=strict_img_size,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            drop_rate=drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
            norm_layer=norm_layer,
            weight_init="skip",
            device=device,
            dtype=dtype,
        )
        self.geometry = geometry
        for layer, stage in zip(self.layers, chosen, strict=True):
            if stage.attention != WINDOW:
                layer.blocks = nn.Sequential(*stage.blocks(block_class=MapBlock))
        self.weight_init_mode = "reset" if weight_init == "skip" else weight_init
        if weight_init != "skip":
            self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of relative position biases, lambdas and contrast embeddings."""
        return super().no_weight_decay() | vca_terms_without_decay(self)

    @torch.jit.ignore
    def set_input_size(
        self,
        img_size: tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        window_size: Any = None,
        **options: Any,
    ) -> None:
        """Change the image size as timm does: windows scale with the map unless `window_size` is given.

        Raises:
            ValueError: The images do not fit every stage.
        """
        patch = self.patch_embed.patch_size if patch_size is None else to_2tuple(patch_size)
        stages = self.geometry._replace(patch_sizes=(patch[0], *self.geometry.patch_sizes[1:]))
        check_image(*as_pair("img_size", img_size or self.patch_embed.img_size), stages)
        self.geometry = stages
        super().set_input_size(img_size=img_size, patch_size=patch_size, window_size=window_size, **options)

    @torch.jit.ignore
    def filter_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Apply timm's filter for Swin checkpoints (the authors' names, other windows and patches), without looking
        for windows in stages without them."""
        bias = "relative_position_bias_table"
        modules = dict(self.named_modules())
        windows = {
            name: value
            for name, value in state_dict.items()
            if name.endswith(f".{bias}") and not hasattr(modules.get(name.removesuffix(f".{bias}")), bias)
        }
        kept = swin_filter_fn({n: v for n, v in state_dict.items() if n not in windows}, self)
        return {**kept, **{name: state_dict[name] for name in windows}}

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the normalised features of the last stage (B, H, W, C) of images (B, C_in, height, width)."""
        if not torch.jit.is_scripting():
            check_image(x.shape[2], x.shape[3], self.geometry)
        return self.norm(self.layers(self.patch_embed(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C_in, height, width) to logits (B, num_classes)."""
        # defined here, so that torch.fx finds check_image by its name
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the maps (B, C, H, W) of the chosen stages, as timm's models do.

        Raises:
            ValueError: `output_fmt` is not "NCHW", or the images do not fit the stages needed.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r} is not supported; use 'NCHW'.")
        last = feature_take_indices(len(self.layers), indices)[1]
        check_image(x.shape[2], x.shape[3], self.geometry.first(last + 1 if stop_early else len(self.layers)))
        return super().forward_intermediates(
            x, indices, norm=norm, stop_early=stop_early, intermediates_only=intermediates_only
        )

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last one of `indices`, and the head, as timm's models do."""
        taken = super().prune_intermediate_layers(indices, prune_norm=prune_norm, prune_head=prune_head)
        self.geometry = self.geometry.first(len(self.layers))
        return taken


_create = partial(create, VCASwinTransformer)
_cfg = partial(
    imagenet_cfg,
    min_input_size=(3, 112, 112),  # 7 x 7 contrast tokens in stage 3
    first_conv="patch_embed.proj",
    classifier="head.fc",
)

default_cfgs = generate_default_cfgs(
    {
        "vca_swin_tiny_patch4_224": _cfg(),
        "vca_swin_small_patch4_224": _cfg(),
        "vca_swin_base_patch4_224": _cfg(),
    }
)

_TINY: dict[str, Any] = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
_SMALL: dict[str, Any] = {**_TINY, "depths": (2, 2, 18, 2)}
_BASE: dict[str, Any] = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}


@register_model
def vca_swin_tiny_patch4_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-Swin-Tiny: 9, 16 and 49 contrast tokens in stages 1 to 3, windows in stage 4, 28,546,680 parameters."""
    return _create("vca_swin_tiny_patch4_224", pretrained, **{**_TINY, **kwargs})


@register_model
def vca_swin_small_patch4_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-Swin-Small."""
    return _create("vca_swin_small_patch4_224", pretrained, **{**_SMALL, **kwargs})


@register_model
def vca_swin_base_patch4_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-Swin-Base."""
    return _create("vca_swin_base_patch4_224", pretrained, **{**_BASE, **kwargs})
