"""DeiT (https://arxiv.org/abs/2012.12877) with Visual-Contrast Attention or another arm, on timm's ViT."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.models import checkpoint, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_filter_fn
from torch import Tensor, nn

from lineardiff.layers import check_arms, create_attention
from lineardiff.models.block import Block
from lineardiff.models.registry import create, imagenet_cfg
from lineardiff.models.weights import vca_terms_without_decay

__all__ = ["VCAVisionTransformer", "VCAVisionTransformerDistilled"]  # timm adds the registered functions


def _block(
    dim: int,
    num_heads: int,
    *,
    arms: Sequence[str],
    options: dict[str, Any],
    depth: int,
    mlp_ratio: float,
    mlp_layer: Any,
    act_layer: Any,
    norm_layer: Any,
    qkv_bias: bool,
    proj_bias: bool,
    attn_drop: float,
    proj_drop: float,
    drop_path: float,
    init_values: float | None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **unsupported: Any,
) -> Block:
    """As timm's VisionTransformer asks for its blocks."""
    for name in ("qk_norm", "scale_attn_norm", "scale_mlp_norm"):
        if unsupported.get(name):
            raise ValueError(f"{name}=True is not available in the vca_deit models; leave it False.")
    attn = create_attention(
        arms[depth],
        dim,
        num_heads,
        depth=depth,
        attn_drop=attn_drop,
        options=options,
        qkv_bias=qkv_bias,
        proj_bias=proj_bias,
        proj_drop=proj_drop,
        device=device,
        dtype=dtype,
    )
    return Block(
        attn,
        dim,
        mlp_ratio=mlp_ratio,
        mlp_layer=mlp_layer,
        act_layer=act_layer,
        norm_layer=norm_layer,
        bias=proj_bias,
        proj_drop=proj_drop,
        drop_path=drop_path,
        init_values=init_values,
        device=device,
        dtype=dtype,
    )


class VCAVisionTransformer(VisionTransformer):
    """timm's VisionTransformer whose blocks know the grid of their tokens.

    Args:
        attention: "vca", "mhsa", "mhsa_conv", "diff" or "agent" for all blocks, or one for each.
        contrast_grid, tokens, global_contrast, patchwise, softmax, conv, pool: options of
            :class:`lineardiff.VisualContrastAttention`; None keeps its default.
        depth: number of blocks.
        *args, **kwargs: of timm's VisionTransformer.

    Raises:
        ValueError: an option does not fit, or a contrast grid is larger than the grid of the patches.
    """

    def __init__(
        self,
        *args: Any,
        attention: str | Sequence[str] = "vca",
        depth: int = 12,
        contrast_grid: tuple[int, int] | None = None,
        tokens: str | None = None,
        global_contrast: str | None = None,
        patchwise: str | None = None,
        softmax: str | None = None,
        conv: bool | None = None,
        pool: Any = None,
        patch_drop_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        for name in ("attn_layer", "block_fn"):
            if name in kwargs:
                raise ValueError(
                    f"{name} cannot be set on a vca_deit model; choose the attention with attention=."
                )
        if patch_drop_rate:
            raise ValueError(
                f"patch_drop_rate={patch_drop_rate} removes tokens from the grid that attention pools; leave it 0."
            )
        arms = check_arms(attention, depth)
        given = {
            "contrast_grid": contrast_grid,
            "tokens": tokens,
            "global_contrast": global_contrast,
            "patchwise": patchwise,
            "softmax": softmax,
            "conv": conv,
            "pool": pool,
        }
        options = {name: value for name, value in given.items() if value is not None}
        super().__init__(*args, depth=depth, block_fn=partial(_block, arms=arms, options=options), **kwargs)
        self.blocks: nn.ModuleList = nn.ModuleList(self.blocks)  # a Sequential cannot hand on the grid
        self._check_grid()

    def _check_grid(self) -> None:
        H, W = self.patch_embed.grid_size
        for index, block in enumerate(self.blocks):
            h, w = getattr(block.attn, "contrast_grid", (1, 1))
            if h > H or w > W:
                raise ValueError(
                    f"blocks.{index} pools into a {h} x {w} contrast grid, but images of {self.patch_embed.img_size} "
                    f"pixels have only {H} x {W} patches; pass contrast_grid=({min(h, H)}, {min(w, W)}) "
                    "or a larger img_size."
                )

    @torch.jit.ignore
    def filter_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """timm's filter for ViT checkpoints: other image and patch sizes, other libraries' names."""
        return dict(vit_filter_fn(state_dict, self, adapt_layer_scale=True))

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Embeddings, tokens, and the lambdas and contrast embeddings of the VCA blocks."""
        return super().no_weight_decay() | vca_terms_without_decay(self)

    @torch.jit.ignore
    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the image or patch size; position embeddings are resampled, contrast tokens stay as many."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        self._check_grid()

    def forward_tokens(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Images (B, 3, height, width) -> tokens before the blocks (B, P + H*W, C) and their grid (H, W)."""
        if self.dynamic_img_size:
            feat_size = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        else:
            feat_size = self.patch_embed.grid_size
        return self.norm_pre(self._pos_embed(self.patch_embed(x))), feat_size

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, 3, height, width) -> normalised tokens (B, P + H*W, C)."""
        x, feat_size = self.forward_tokens(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, feat_size)
            else:
                x = block(x, feat_size)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, height, width) -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """As timm's, without masks: the features after the chosen blocks."""
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt={output_fmt!r} is unknown; choose 'NCHW' or 'NLC'.")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        blocks = self.blocks[: max_index + 1] if stop_early else self.blocks
        x, feat_size = self.forward_tokens(x)
        taken = []
        for index, block in enumerate(blocks):
            x = checkpoint(block, x, feat_size) if self.grad_checkpointing else block(x, feat_size)
            if index in take_indices:
                taken.append(self.norm(x) if norm else x)

        P = self.num_prefix_tokens
        prefix_tokens = [y[:, :P] for y in taken] if P else None
        features = [y[:, P:] for y in taken]
        if output_fmt == "NCHW":
            features = [y.transpose(1, 2).unflatten(2, feat_size).contiguous() for y in features]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": features}
            if return_prefix_tokens and prefix_tokens is not None:
                result["image_intermediates_prefix"] = prefix_tokens
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        intermediates: list[Any] = features
        if return_prefix_tokens and prefix_tokens is not None:
            intermediates = list(zip(features, prefix_tokens, strict=True))
        return intermediates if intermediates_only else (self.norm(x), intermediates)


class VCAVisionTransformerDistilled(VCAVisionTransformer, VisionTransformerDistilled):
    """With DeiT's distillation token: two prefix tokens and two heads."""


def _create(variant: str, pretrained: bool, *, distilled: bool = False, **kwargs: Any) -> nn.Module:
    model_class = VCAVisionTransformerDistilled if distilled else VCAVisionTransformer
    return create(model_class, variant, pretrained, out_indices=kwargs.pop("out_indices", 3), **kwargs)


_cfg = partial(
    imagenet_cfg,
    pool_size=None,
    fixed_input_size=True,
    first_conv="patch_embed.proj",
    classifier="head",
)

default_cfgs = generate_default_cfgs(
    {
        "vca_deit_tiny_patch16_224": _cfg(),
        "vca_deit_small_patch16_224": _cfg(),
        "vca_deit_base_patch16_224": _cfg(),
        "vca_deit_tiny_distilled_patch16_224": _cfg(classifier=("head", "head_dist")),
        "vca_deit_small_distilled_patch16_224": _cfg(classifier=("head", "head_dist")),
        "vca_deit_base_distilled_patch16_224": _cfg(classifier=("head", "head_dist")),
    }
)

_TINY: dict[str, Any] = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
_SMALL: dict[str, Any] = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
_BASE: dict[str, Any] = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}


@register_model
def vca_deit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-DeiT-Tiny: 49 contrast tokens in 12 blocks, 5,973,928 parameters."""
    return _create("vca_deit_tiny_patch16_224", pretrained, **{**_TINY, **kwargs})


@register_model
def vca_deit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-DeiT-Small: 49 contrast tokens in 12 blocks, 22,556,008 parameters."""
    return _create("vca_deit_small_patch16_224", pretrained, **{**_SMALL, **kwargs})


@register_model
def vca_deit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-DeiT-Base: 49 contrast tokens in 12 blocks."""
    return _create("vca_deit_base_patch16_224", pretrained, **{**_BASE, **kwargs})


@register_model
def vca_deit_tiny_distilled_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-DeiT-Tiny with a distillation token: two prefix tokens."""
    return _create("vca_deit_tiny_distilled_patch16_224", pretrained, distilled=True, **{**_TINY, **kwargs})


@register_model
def vca_deit_small_distilled_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-DeiT-Small with a distillation token: two prefix tokens."""
    return _create("vca_deit_small_distilled_patch16_224", pretrained, distilled=True, **{**_SMALL, **kwargs})


@register_model
def vca_deit_base_distilled_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VCA-DeiT-Base with a distillation token: two prefix tokens."""
    return _create("vca_deit_base_distilled_patch16_224", pretrained, distilled=True, **{**_BASE, **kwargs})
