"""DiT (https://arxiv.org/abs/2212.09748) and SiT (https://arxiv.org/abs/2401.08740): one network, with self-attention,
Visual-Contrast Attention or another arm, as a diffusers model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed, to_2tuple
from torch import Tensor, nn

from lineardiff.layers import check_arms, create_attention, has_option
from lineardiff.models.dit_layers import DiTBlock, FinalLayer, LabelEmbedder, TimestepEmbedder, sincos_table

try:
    from diffusers import ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config
    from diffusers.utils import BaseOutput
except ImportError as error:
    raise ImportError("DiT and SiT are diffusers models: pip install 'lineardiff[generate]'.") from error


@dataclass
class DiTOutput(BaseOutput):
    """What :class:`DiT` answers.

    Attributes:
        sample: (B, C, H, W), or (B, 2 C, H, W) with a learned variance.
    """

    sample: Tensor


class DiT(ModelMixin, ConfigMixin):
    """A transformer on the patches of a noisy latent, conditioned on its timestep and class.

    `from_pretrained` and `save_pretrained` are those of diffusers; parameters are named as by the authors. A new
    network answers zero (adaLN-Zero).

    Args:
        sample_size: side of the latents in their pixels, or (height, width).
        patch_size: side of a patch; must divide both sides.
        in_channels: channels C of the latents.
        dim: channels of a token; a multiple of 4 and of `num_heads`.
        depth: number of blocks.
        num_heads: heads.
        mlp_ratio: hidden channels of the MLP, as a multiple of `dim`.
        num_classes: classes; the label `num_classes` is the null label of classifier-free guidance.
        class_dropout_prob: share of labels replaced by the null label in training; 0 makes a network without
            a null label.
        learn_sigma: compute 2 C channels: the prediction, then the variance.
        return_sigma: answer all of them (DiT); False answers the first C, and the others stay unused (SiT).
        attention: "mhsa" (the authors'), "vca", "mhsa_conv", "diff" or "agent" for all blocks, or one for each.
        contrast_grid: (h, w) of :class:`lineardiff.VisualContrastAttention`; None takes half the grid of the
            patches per side, at most 8 x 8.
        tokens, global_contrast, patchwise, softmax, conv: options of :class:`lineardiff.VisualContrastAttention`;
            None keeps its default.
        frequency_shift, mlp_norm_eps: 0 and 1e-6 by the authors; diffusers' DiT has 1 (frequencies of the
            timestep run to 1 / 10000) and 1e-5 (of the layer norm before the MLP).

    Raises:
        ValueError: sizes do not fit each other, or an option is unknown.
    """

    default_cfg: ClassVar = {"classifier": "y_embedder.embedding_table"}  # not loaded for other classes
    _supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["DiTBlock"]
    _repeated_blocks: ClassVar = ["DiTBlock"]
    _skip_layerwise_casting_patterns: ClassVar = ["x_embedder", "norm"]

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        class_dropout_prob: float = 0.1,
        learn_sigma: bool = True,
        return_sigma: bool = True,
        attention: str | Sequence[str] = "mhsa",
        contrast_grid: tuple[int, int] | None = None,
        tokens: str | None = None,
        global_contrast: str | None = None,
        patchwise: str | None = None,
        softmax: str | None = None,
        conv: bool | None = None,
        frequency_shift: int = 0,
        mlp_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.sample_size = _checked_size(sample_size, patch_size)
        if depth < 1 or mlp_ratio <= 0:
            raise ValueError(f"depth={depth} must be at least 1, and mlp_ratio={mlp_ratio} above 0.")
        if dim < 1 or dim % 4 or num_heads < 1 or dim % num_heads:
            raise ValueError(
                f"dim={dim} must be a multiple of 4 (the position table) and of num_heads={num_heads}."
            )
        if num_classes < 1 or not 0 <= class_dropout_prob < 1:
            raise ValueError(
                f"num_classes={num_classes} must be at least 1 and class_dropout_prob={class_dropout_prob} in [0, 1)."
            )
        H, W = (side // patch_size for side in self.sample_size)
        self.grid_size = (H, W)
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.head_channels = 2 * in_channels if learn_sigma else in_channels
        self.out_channels = self.head_channels if return_sigma else in_channels
        self.class_dropout_prob = class_dropout_prob
        self.null_label = num_classes if class_dropout_prob > 0 else None
        self.gradient_checkpointing = False

        arms = check_arms(attention, depth)
        if contrast_grid is None and any(has_option(arm, "contrast_grid") for arm in arms):
            contrast_grid = (max(1, min(8, H // 2)), max(1, min(8, W // 2)))
        given = {
            "contrast_grid": contrast_grid,
            "tokens": tokens,
            "global_contrast": global_contrast,
            "patchwise": patchwise,
            "softmax": softmax,
            "conv": conv,
        }
        options = {name: value for name, value in given.items() if value is not None}

        self.x_embedder = PatchEmbed(self.sample_size, patch_size, in_channels, dim)
        self.t_embedder = TimestepEmbedder(dim, frequency_shift=frequency_shift)
        self.y_embedder = LabelEmbedder(num_classes + (class_dropout_prob > 0), dim)
        self.register_buffer("pos_embed", sincos_table(self.grid_size, dim))
        self.blocks = nn.ModuleList(
            DiTBlock(
                create_attention(arm, dim, num_heads, depth=index, options=options, qkv_bias=True),
                dim,
                mlp_ratio=mlp_ratio,
                mlp_norm_eps=mlp_norm_eps,
            )
            for index, arm in enumerate(arms)
        )
        self.final_layer = FinalLayer(dim, patch_size**2 * self.head_channels)
        self.contrast_grid = self._checked_contrast_grid()
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """As the authors do: linear layers Xavier-uniform, embeddings N(0, 0.02), modulation and output zero.

        What an attention adds (e+ and e-, lambdas, norms, convolution) keeps the rule of its layer.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        nn.init.zeros_(self.x_embedder.proj.bias)
        embeddings: tuple[Any, ...] = (
            self.y_embedder.embedding_table,
            self.t_embedder.mlp[0],
            self.t_embedder.mlp[2],
        )
        for embedding in embeddings:
            nn.init.normal_(embedding.weight, std=0.02)
        modulations = [module.adaLN_modulation[1] for module in (*self.blocks, self.final_layer)]
        for linear in (*modulations, self.final_layer.linear):
            nn.init.zeros_(linear.weight)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        class_labels: Tensor,
        force_drop_ids: Tensor | None = None,
        return_dict: bool = True,
    ) -> DiTOutput | tuple[Tensor]:
        """Predict.

        In training, labels are dropped at random once a call, from the global generator.

        Args:
            sample: noisy latents (B, C, H, W).
            timestep: (B,), taken as it is: 0 to 999 for DiT, 0 to 1 for SiT.
            class_labels: (B,) integers from 0 to `num_classes`, the null label.
            force_drop_ids: (B,), true where the label is dropped; instead of at random, and in evaluation too.
            return_dict: answer a :class:`DiTOutput`; False a tuple.

        Raises:
            ValueError: shapes or types do not fit, or a label is too large (checked on the CPU).
        """
        self._check(sample, timestep, class_labels, force_drop_ids)
        # positions in the type of the latents: under autocast the tokens stay float32 between the layers
        x = (self.x_embedder(sample) + self.pos_embed).to(sample.dtype)
        labels = self._drop(class_labels.long(), force_drop_ids)
        c = self.t_embedder(timestep, dtype=x.dtype) + self.y_embedder(labels)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, c, self.grid_size)
            else:
                x = block(x, c, self.grid_size)
        output = self._unpatchify(self.final_layer(x, c))[:, : self.out_channels]
        return DiTOutput(sample=output) if return_dict else (output,)

    def filter_checkpoint(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights for latents of any size, as this model takes them: with its own position table."""
        if any(name.startswith("transformer_blocks.") for name in state_dict):
            raise ValueError(
                "these weights are in diffusers' layout; convert the model with from_diffusers()."
            )
        return {**state_dict, "pos_embed": self.pos_embed}

    def _checked_contrast_grid(self) -> tuple[int, int] | None:
        """The contrast grid of the blocks that have one."""
        found: tuple[int, int] | None = None
        for block in self.blocks:
            found = getattr(block.attn, "contrast_grid", found)
        (h, w), (H, W) = found or (1, 1), self.grid_size
        if h > H or w > W:
            raise ValueError(
                f"the contrast grid {h} x {w} is larger than the {H} x {W} patches of latents of {self.sample_size}; "
                f"pass contrast_grid=({min(h, H)}, {min(w, W)}) or a smaller patch_size."
            )
        return found

    def _drop(self, labels: Tensor, force_drop_ids: Tensor | None) -> Tensor:
        if self.null_label is None:
            return labels
        if force_drop_ids is not None:
            drop = force_drop_ids.bool()
        elif self.training:
            drop = torch.rand(labels.shape, device=labels.device) < self.class_dropout_prob
        else:
            return labels
        return labels.masked_fill(drop, self.null_label)

    def _unpatchify(self, x: Tensor) -> Tensor:
        """(B, H*W, p*p*C) -> (B, C, H*p, W*p)."""
        p = self.patch_size
        x = x.unflatten(1, self.grid_size).unflatten(3, (p, p, self.head_channels))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def _check(
        self, sample: Tensor, timestep: Tensor, class_labels: Tensor, force_drop_ids: Tensor | None
    ) -> None:
        wanted = (self.in_channels, *self.sample_size)
        if sample.ndim != 4 or sample.shape[1:] != wanted:
            raise ValueError(
                f"sample has shape {tuple(sample.shape)}, expected (B, {', '.join(map(str, wanted))}); for latents of "
                "another size make a network with resize_generator()."
            )
        for name, value in (
            ("timestep", timestep),
            ("class_labels", class_labels),
            ("force_drop_ids", force_drop_ids),
        ):
            if value is not None and value.shape != sample.shape[:1]:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, expected ({sample.shape[0]},): one for each sample."
                )
        if class_labels.is_floating_point() or class_labels.dtype == torch.bool:
            raise ValueError(f"class_labels are {class_labels.dtype}; give integers.")
        if force_drop_ids is not None and self.null_label is None:
            raise ValueError(
                "this network has no null label; make it with class_dropout_prob > 0 to drop labels."
            )
        # reading a label would wait for a GPU and break a compiled graph
        if class_labels.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = self.y_embedder.embedding_table.num_embeddings
            if len(class_labels) and not 0 <= int(class_labels.min()) <= int(class_labels.max()) < rows:
                raise ValueError(f"class_labels must be from 0 to {rows - 1}; got {class_labels.tolist()}.")


def _checked_size(sample_size: int | Sequence[int], patch_size: int) -> tuple[int, int]:
    size = to_2tuple(sample_size)
    if len(size) != 2 or patch_size < 1 or any(side < 1 or side % patch_size for side in size):
        raise ValueError(
            f"sample_size={sample_size!r} must be one side or (height, width), positive multiples of "
            f"patch_size={patch_size}."
        )
    return int(size[0]), int(size[1])
