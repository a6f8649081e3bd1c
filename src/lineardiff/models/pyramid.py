"""What PVT and CSwin share: four stages of convolutional patch embedding and blocks, as timm asks of a backbone."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.models import named_apply
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import get_init_weights_vit
from torch import Tensor, nn

from lineardiff.models.pyramid_stage import PyramidStage
from lineardiff.models.stages import Geometry, Grid, StageAttention, check_image, geometry, image_grid
from lineardiff.models.weights import vca_terms_without_decay

try:
    from timm.models._input import update_model_input_size  # so that a saved model is rebuilt at its new size
except ImportError:  # an older timm, which keeps no such record
    update_model_input_size = None


class PyramidTransformer(nn.Module):
    """The features of a hierarchical vision transformer; a subclass adds the head.

    Args:
        stages: first to last, each halving the map before.
        attentions: of the stages.
        patch_sizes: by which each stage divides the sides of the map before.
        pads: whether stages after the first take grids that do not divide.
        img_size: (height, width) that the model is built for.
    """

    def __init__(
        self,
        stages: Sequence[PyramidStage],
        attentions: Sequence[StageAttention],
        *,
        patch_sizes: tuple[int, ...],
        pads: bool,
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
        self.geometry: Geometry = geometry(patch_sizes, attentions, pads=pads)
        dims = [stage.embed.out_channels for stage in stages]
        self.num_features = self.head_hidden_size = dims[-1]
        self.feature_info: list[dict[str, Any]] = []
        reduction = 1
        for index, (dim, patch) in enumerate(zip(dims, patch_sizes, strict=True)):
            reduction *= patch
            self.feature_info.append(
                {"num_chs": dim, "reduction": reduction, "module": f"stages.{index}"},
            )
        check_image(*img_size, self.geometry)

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Draw all weights anew, linear layers from a truncated N(0, 0.02) as the authors of both hosts do."""
        named_apply(get_init_weights_vit("timm", needs_reset=needs_reset), self)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Positions, class token, and the lambdas and contrast embeddings of VCA stages."""
        own = {name for name, _ in self.named_parameters() if name.endswith((".pos_embed", ".cls_token"))}
        return own | vca_terms_without_decay(self)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups by depth, for layer-wise learning rates."""
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
        """Build for another image size: positions are resampled, contrast tokens stay as many.

        Raises:
            ValueError: the images do not go through every stage.
        """
        size = image_grid(img_size)
        check_image(*size, self.geometry)
        for stage, grid in zip(self.stages, self.geometry.grids(size), strict=True):
            stage.set_grid_size(grid)
        self.img_size = size
        if update_model_input_size is not None:
            update_model_input_size(self, size)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C_in, height, width) -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, C_in, height, width) -> normalised features of the last stage, of PVT (B, 1 + H*W, C) with
        the class token, of CSwin (B, H, W, C)."""
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
        """As timm's: the maps (B, C, H, W) of the chosen stages.

        Args:
            x: images (B, C_in, height, width).
            indices: the last so many stages, or these; None for all.
            norm: apply the final norm to the map of the last stage.
            stop_early: leave out the stages after the last one chosen.
            output_fmt: "NCHW", the only one.
            intermediates_only: leave out the final features.

        Returns:
            A list of maps, or the features (as of `forward_features`) and this list.

        Raises:
            ValueError: another `output_fmt`, or images that do not go through the stages needed.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r} is not available here; use 'NCHW'.")
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
        """What `forward_features` returns, of the tokens of the last stage."""
        return tokens

    @torch.jit.ignore
    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As timm's: drop the stages after the last one of `indices`, and the head."""
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
        """A new classifier, or none for 0 classes; None keeps the pooling."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features -> logits (B, num_classes), or pooled features (B, C)."""
        raise NotImplementedError
