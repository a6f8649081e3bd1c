"""DeiT (https://arxiv.org/abs/2012.12877) on timm's ViT, with Visual-Contrast Attention or another attention."""

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

from lineardiff.checks import as_pair, check_heads, check_integer
from lineardiff.layers import AttentionOptions, create_attention
from lineardiff.layers.factory import per_block
from lineardiff.models.block import Block
from lineardiff.models.registry import check_weight_init, create, imagenet_cfg
from lineardiff.models.weights import vca_terms_without_decay

__all__ = ["VCAVisionTransformer", "VCAVisionTransformerDistilled"]  # timm adds the registered functions


def _block(
    dim: int,
    num_heads: int,
    *,
    attention: Sequence[str],
    options: AttentionOptions,
    depth: int,
    qkv_bias: bool,
    proj_bias: bool,
    attn_drop: float,
    proj_drop: float,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    attn_layer: object,
    qk_norm: bool,
    scale_attn_norm: bool,
    scale_mlp_norm: bool,
    **kwargs: Any,
) -> Block:
    """Build a block as timm's VisionTransformer calls its `block_fn`."""
    unavailable = {"qk_norm": qk_norm, "scale_attn_norm": scale_attn_norm, "scale_mlp_norm": scale_mlp_norm}
    for name, value in unavailable.items():
        if value:
            raise ValueError(f"{name}=True is not supported by the vca_deit models; leave it False.")
    factory: dict[str, Any] = {"device": device, "dtype": dtype, "proj_drop": proj_drop}
    attn = create_attention(
        attention[depth],
        dim,
        num_heads,
        options=options,
        depth=depth,
        attn_drop=attn_drop,
        qkv_bias=qkv_bias,
        proj_bias=proj_bias,
        **factory,
    )
    return Block(attn, dim, bias=proj_bias, **factory, **kwargs)


@torch.fx.wrap
def check_no_mask(attn_mask: Tensor | None, is_causal: bool) -> None:
    """Check that the masks of timm's ViTs, which these models do not support, have their defaults.

    Raises:
        ValueError: An argument was set.
    """
    if attn_mask is not None or is_causal:
        raise ValueError(
            "attn_mask and is_causal are not available in the vca_deit models, whose contrast tokens pool over all "
            "tokens; leave them None and False."
        )


class VCAVisionTransformer(VisionTransformer):
    """timm's VisionTransformer, whose blocks take the grid of their tokens.

    Args:
        attention: "vca", "mhsa", "mhsa_conv", "diff" or "agent", one name for all blocks or one for each.
        depth: Number of blocks.
        **kwargs: Arguments of timm's VisionTransformer, and `contrast_grid`, `tokens`, `global_contrast`,
            `patchwise`, `softmax`, `conv` and `pool` of :class:`lineardiff.VisualContrastAttention`.

    Raises:
        ValueError: An option does not fit, or the contrast grid is larger than the grid of the patches.
    """

    def __init__(self, *, attention: str | Sequence[str] = "vca", depth: int = 12, **kwargs: Any) -> None:
        for name in ("attn_layer", "block_fn"):
            if name in kwargs:
                raise ValueError(
                    f"{name} cannot be set on a vca_deit model; choose the attention with attention=."
                )
        if kwargs.get("patch_drop_rate"):
            raise ValueError(
                f"patch_drop_rate={kwargs['patch_drop_rate']} removes tokens from the grid that the attention pools; "
                "leave it 0."
            )
        check_integer("depth", depth)
        check_weight_init(kwargs.get("weight_init", ""))
        check_heads(kwargs.get("embed_dim", 768), kwargs.get("num_heads", 12))
        for name, default in (("img_size", 224), ("patch_size", 16)):
            as_pair(name, kwargs.get(name, default))
        options = AttentionOptions.pop_from(kwargs)
        block_fn = partial(_block, attention=per_block(attention, depth), options=options)
        super().__init__(depth=depth, block_fn=block_fn, **kwargs)
        self.blocks: nn.ModuleList = nn.ModuleList(self.blocks)  # a Sequential cannot pass on the grid
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
        """Apply timm's filter for ViT checkpoints: other image and patch sizes, other libraries' names."""
        return dict(vit_filter_fn(state_dict, self, adapt_layer_scale=True))

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of position embeddings, class tokens, lambdas and contrast embeddings."""
        return super().no_weight_decay() | vca_terms_without_decay(self)

    @torch.jit.ignore
    def set_input_size(
        self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None
    ) -> None:
        """Change the image or patch size: position embeddings are resampled, contrast grids are kept."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        self._check_grid()

    def forward_tokens(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Map images (B, 3, height, width) to the tokens before the blocks (B, P + H*W, C) and their grid (H, W)."""
        if self.dynamic_img_size:
            feat_size = self.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
        else:
            feat_size = self.patch_embed.grid_size
        return self.norm_pre(self._pos_embed(self.patch_embed(x))), feat_size

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map images (B, 3, height, width) to normalised tokens (B, P + H*W, C).

        `attn_mask` and `is_causal` are accepted for compatibility with timm and must have their defaults.
        """
        check_no_mask(attn_mask, is_causal)
        x, feat_size = self.forward_tokens(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, feat_size)
            else:
                x = block(x, feat_size)
        return self.norm(x)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map images (B, 3, height, width) to logits (B, num_classes); masks as in :meth:`forward_features`."""
        return self.forward_head(self.forward_features(x, attn_mask, is_causal))

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
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Return the features after the chosen blocks, as timm's ViTs do; masks as in :meth:`forward_features`."""
        check_no_mask(attn_mask, is_causal)
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
    """:class:`VCAVisionTransformer` with DeiT's distillation token: two prefix tokens and two heads."""


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
