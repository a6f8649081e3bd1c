"""Base of PVT and CSwin: stages of a convolutional patch embedding and blocks, with timm's interface."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, trunc_normal_
from timm.models import checkpoint, named_apply
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import get_init_weights_vit
from torch import Tensor, nn

from lineardiff.checks import as_pair
from lineardiff.models.block import Block
from lineardiff.models.stages import Geometry, Grid, check_image
from lineardiff.models.weights import vca_terms_without_decay

try:
    from timm.models._input import update_model_input_size  # so that a saved model is rebuilt at its new size
except ImportError:  # older versions of timm keep no such record
    update_model_input_size = None

__all__ = ["PyramidStage", "PyramidTransformer", "resize_positions"]


class PyramidStage(nn.Module):
    """Embed the patches of the previous map by a convolution, then apply blocks.

    Args:
        embed: Convolution (B, C_in, H_in, W_in) -> (B, dim, H, W).
        dim: Number of channels C.
        blocks: Blocks of the stage.
        norm_layer: Norm after the convolution.
        grid_size: Grid (H, W) of the learned positions. Default: no positions.
        class_token: Prepend a class token.
        pos_drop: Dropout after the positions.
        device: Device of the parameters.
        dtype: Type of the parameters.
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
        """Initialise the positions and the class token."""
        for parameter in (self.cls_token, self.pos_embed):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)

    @torch.jit.ignore
    @torch.no_grad()
    def set_grid_size(self, grid_size: Grid) -> None:
        """Resample the positions for another grid, bilinearly as :meth:`forward` does for each image."""
        if self.pos_embed is not None:
            resized = resize_positions(
                self.pos_embed, grid_size, old_grid=self.grid_size, prefix_tokens=self.num_prefix_tokens
            )
            self.pos_embed = nn.Parameter(resized.clone(), requires_grad=self.pos_embed.requires_grad)
            self.grid_size = grid_size

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Map the previous map (B, C_in, H_in, W_in) to tokens (B, P + H*W, C) and their grid (H, W)."""
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
        """Return tokens (B, P + H*W, C) as a map (B, C, H, W), a view without the prefix tokens."""
        return x[:, self.num_prefix_tokens :].transpose(1, 2).unflatten(2, feat_size)


def resize_positions(positions: Tensor, grid: Grid, *, old_grid: Grid, prefix_tokens: int) -> Tensor:
    """Resize learned positions (1, P + H*W, C) to another grid, bilinearly as PVT's authors do."""
    return resample_abs_pos_embed(
        positions,
        new_size=list(grid),
        old_size=list(old_grid),
        num_prefix_tokens=prefix_tokens,
        interpolation="bilinear",
        antialias=False,
    )


class PyramidTransformer(nn.Module):
    """Base of hierarchical vision transformers; subclasses add the head.

    Args:
        stages: Stages from first to last, each halving the previous map.
        geometry: Patches and contrast grids of the stages.
        img_size: Size (height, width) that the model is built for.
        in_chans: Channels of the images.
        num_classes: Number of classes.
        norm: Norm after the last stage.
    """

    def __init__(
        self,
        stages: Sequence[PyramidStage],
        geometry: Geometry,
        *,
        img_size: Grid,
        in_chans: int,
        num_classes: int,
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList(stages)
        self.norm = norm
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.img_size: Grid = img_size
        self.num_prefix_tokens = stages[-1].num_prefix_tokens
        self.geometry: Geometry = geometry
        dims = [stage.embed.out_channels for stage in stages]
        self.num_features = self.head_hidden_size = dims[-1]
        self.feature_info: list[dict[str, Any]] = []
        reduction = 1
        for index, (dim, patch) in enumerate(zip(dims, geometry.patch_sizes, strict=True)):
            reduction *= patch
            self.feature_info.append(
                {"num_chs": dim, "reduction": reduction, "module": f"stages.{index}"},
            )
        check_image(*img_size, geometry)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise all weights: linear layers from a truncated N(0, 0.02), as the authors of both hosts do."""
        named_apply(get_init_weights_vit("timm", needs_reset=needs_reset), self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Return the names of positions, class token, lambdas and contrast embeddings."""
        own = {name for name, _ in self.named_parameters() if name.endswith((".pos_embed", ".cls_token"))}
        return own | vca_terms_without_decay(self)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that group the parameters by depth, for layer-wise learning rates."""
        return {
            "stem": r"^stages\.0\.(?:embed|pos_embed)",
            "blocks": r"^stages\.(\d+)"
            if coarse
            else [
                (r"^stages\.(\d+)\.(?:embed|pos_embed|cls_token)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ],
        }

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the blocks in the backward pass."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Change the image size: positions are resampled, contrast grids are kept.

        Raises:
            ValueError: The images do not fit every stage.
        """
        size = as_pair("img_size", img_size)
        check_image(*size, self.geometry)
        for stage, grid in zip(self.stages, self.geometry.grids(size), strict=True):
            stage.set_grid_size(grid)
        self.img_size = size
        if update_model_input_size is not None:
            update_model_input_size(self, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C_in, height, width) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the normalised features of the last stage: (B, 1 + H*W, C) of PVT, (B, H, W, C) of CSwin."""
        if not torch.jit.is_scripting():
            check_image(x.shape[2], x.shape[3], self.geometry)
        tokens, feat_size = x, (0, 0)
        for stage in self.stages:
            tokens, feat_size = stage(x)
            x = stage.to_map(tokens, feat_size)
        return self._features(self.norm(tokens), feat_size)

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

        Args:
            x: Images (B, C_in, height, width).
            indices: Number of last stages, or their indices. Default: all.
            norm: Apply the final norm to the map of the last stage.
            stop_early: Skip the stages after the last one chosen.
            output_fmt: Only "NCHW".
            intermediates_only: Return the maps without the final features.

        Returns:
            A list of maps, or the features of :meth:`forward_features` and this list.

        Raises:
            ValueError: `output_fmt` is not "NCHW", or the images do not fit the stages needed.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r} is not supported; use 'NCHW'.")
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        check_image(
            x.shape[2], x.shape[3], self.geometry.first(max_index + 1 if stop_early else len(self.stages))
        )
        last = len(self.stages) - 1
        intermediates = []
        tokens, feat_size = x, (0, 0)
        for index, stage in enumerate(self.stages[: max_index + 1] if stop_early else self.stages):
            tokens, feat_size = stage(x)
            x = stage.to_map(tokens, feat_size)
            if index == last:
                tokens = self.norm(tokens)
            if index in take_indices:
                taken = stage.to_map(tokens, feat_size) if norm and index == last else x
                intermediates.append(taken.contiguous())
        return intermediates if intermediates_only else (self._features(tokens, feat_size), intermediates)

    def _features(self, tokens: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Return the tokens of the last stage as `forward_features` does."""
        return tokens

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the stages after the last one of `indices`, and the head, as timm's models do."""
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        cut = max_index < len(self.stages) - 1
        self.stages = self.stages[: max_index + 1]
        self.geometry = self.geometry.first(max_index + 1)
        if prune_norm or cut:
            self.norm = nn.Identity()
        self.num_prefix_tokens = self.stages[-1].num_prefix_tokens
        if cut:
            self.num_features = self.head_hidden_size = self.feature_info[max_index]["num_chs"]
        if prune_head or cut:
            self.reset_classifier(0, "")
        return take_indices

    @torch.jit.ignore
    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, or remove it for 0 classes; None keeps the pooling."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map features to logits (B, num_classes), or to pooled features (B, C)."""
        raise NotImplementedError
