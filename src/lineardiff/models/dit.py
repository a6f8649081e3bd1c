"""DiT (https://arxiv.org/abs/2212.09748) and SiT (https://arxiv.org/abs/2401.08740) as one diffusers model, with
self-attention, Visual-Contrast Attention or another attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import Mlp, PatchEmbed
from torch import Tensor, nn

from lineardiff.checks import as_pair, check_bool, check_heads, check_integer, check_number
from lineardiff.extras import missing_extra
from lineardiff.layers import AttentionOptions, create_attention
from lineardiff.layers.factory import per_block, pools_queries

try:
    from diffusers import ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config
    from diffusers.utils import BaseOutput
except ImportError as error:
    raise missing_extra("generate", package="diffusers") from error


__all__ = ["DiT", "DiTOutput"]

FREQUENCIES = 256  # channels of the sinusoidal embedding of the timestep


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the conditioning (adaLN-Zero)."""

    def __init__(self, attn: nn.Module, dim: int, *, mlp_ratio: float, mlp_norm_eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=mlp_norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=partial(nn.GELU, approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Map tokens (B, H*W, dim) on the grid `feat_size` (H, W) and conditioning (B, dim) to (B, H*W, dim)."""
        modulation = self.adaLN_modulation(c).unsqueeze(1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, dim=2)
        x = x + gate_attn * self.attn(self.norm1(x) * (1 + scale_attn) + shift_attn, feat_size)
        return x + gate_mlp * self.mlp(self.norm2(x) * (1 + scale_mlp) + shift_mlp)


class FinalLayer(nn.Module):
    """Map tokens to the pixels of their patches."""

    def __init__(self, dim: int, out_features: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(dim, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Map tokens (B, H*W, dim) and conditioning (B, dim) to (B, H*W, out_features)."""
        shift, scale = self.adaLN_modulation(c).unsqueeze(1).chunk(2, dim=2)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class TimestepEmbedder(nn.Module):
    """Embed the timestep by sinusoids, cosines first, and an MLP."""

    def __init__(self, dim: int, *, frequency_shift: int) -> None:
        super().__init__()
        self.frequency_shift = frequency_shift
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, timestep: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Map timesteps (B,) to (B, dim) in `dtype`; the sinusoids are computed in float32."""
        half = FREQUENCIES // 2
        steps = torch.arange(half, dtype=torch.float32, device=timestep.device)
        angles = timestep.float().unsqueeze(1) * torch.exp(
            -math.log(10000) * steps / (half - self.frequency_shift)
        )
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype))


class LabelEmbedder(nn.Module):
    """Embed the labels: a row for each class and, if labels are dropped, one for the null label."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(rows, dim)

    def forward(self, labels: Tensor) -> Tensor:
        """Map labels (B,) to (B, dim)."""
        return self.embedding_table(labels)


def sincos_table(grid_size: tuple[int, int], dim: int) -> Tensor:
    """Return the fixed position embedding (1, H*W, dim): half of the channels for the column, half for the row."""
    H, W = grid_size
    omega = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))

    def encode(size: int) -> Tensor:
        angles = torch.outer(torch.arange(size, dtype=torch.float64), omega)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    columns = encode(W).expand(H, W, -1)
    rows = encode(H).unsqueeze(1).expand(H, W, -1)
    table = torch.cat([columns, rows], dim=2).view(1, H * W, dim)
    # in the default type like every parameter: diffusers sets it to build a model in another
    return table.to(torch.get_default_dtype())


@dataclass
class DiTOutput(BaseOutput):
    """Output of :class:`DiT`.

    Attributes:
        sample: Prediction (B, C, H, W), or (B, 2 C, H, W) with a learned variance.
    """

    sample: Tensor


class DiT(ModelMixin, ConfigMixin):
    """A transformer on the patches of noisy latents, conditioned on the timestep and the class.

    `from_pretrained` and `save_pretrained` are those of diffusers; parameters are named as by the authors. The
    output of a new network is zero (adaLN-Zero).

    Args:
        sample_size: Size of the latents: one side, or (height, width).
        patch_size: Side of the patches; must divide both sides.
        in_channels: Channels C of the latents.
        dim: Channels of the tokens; a multiple of 4 and of `num_heads`.
        depth: Number of blocks.
        num_heads: Number of heads.
        mlp_ratio: Hidden channels of the MLPs as a multiple of `dim`.
        num_classes: Number of classes; the label `num_classes` is the null label of classifier-free guidance.
        class_dropout_prob: Probability that a label is replaced by the null label in training; 0 builds a network
            without a null label.
        learn_sigma: Compute 2 C channels: the prediction, then the variance.
        return_sigma: Return all of them (DiT); False returns only the first C (SiT).
        attention: "mhsa" (as the authors), "vca", "mhsa_conv", "diff" or "agent"; one name for all blocks, or one per
            block.
        contrast_grid: Contrast grid (h, w) of the attention. Default: half of the grid of patches per side, at most
            8 x 8.
        tokens, global_contrast, patchwise, softmax, conv: Options of :class:`lineardiff.VisualContrastAttention`;
            None keeps its default.
        frequency_shift: 0 by the authors; diffusers' DiT has 1 (frequencies of the timestep down to 1 / 10000).
        mlp_norm_eps: Epsilon of the layer norm before the MLPs: 1e-6 by the authors, 1e-5 in diffusers' DiT.

    Raises:
        ValueError: Sizes do not fit each other, or an option is unknown.
    """

    default_cfg: ClassVar = {
        "classifier": "y_embedder.embedding_table"
    }  # not loaded for another number of classes
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
        check_integer("in_channels", in_channels)
        check_integer("depth", depth)
        check_integer("num_classes", num_classes)
        check_integer("patch_size", patch_size)
        check_heads(dim, num_heads)
        if dim % 4:
            raise ValueError(f"dim={dim} must be a multiple of 4, because of the position table.")
        check_number("mlp_ratio", mlp_ratio, above=0)
        check_number("class_dropout_prob", class_dropout_prob, high=1)
        check_number("mlp_norm_eps", mlp_norm_eps, above=0)
        check_integer("frequency_shift", frequency_shift, minimum=0)
        check_bool("learn_sigma", learn_sigma)
        check_bool("return_sigma", return_sigma)
        self.sample_size = as_pair("sample_size", sample_size)
        if any(side % patch_size for side in self.sample_size):
            raise ValueError(f"sample_size={sample_size!r} must be a multiple of patch_size={patch_size}.")
        H, W = (side // patch_size for side in self.sample_size)
        self.grid_size = (H, W)
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.head_channels = 2 * in_channels if learn_sigma else in_channels
        self.out_channels = self.head_channels if return_sigma else in_channels
        self.class_dropout_prob = class_dropout_prob
        self.null_label = num_classes if class_dropout_prob > 0 else None
        self.gradient_checkpointing = False

        attentions = per_block(attention, depth)
        if contrast_grid is None and any(pools_queries(name) for name in attentions):
            contrast_grid = (max(1, min(8, H // 2)), max(1, min(8, W // 2)))
        given: dict[str, Any] = {"tokens": tokens, "global_contrast": global_contrast, "patchwise": patchwise}
        options = AttentionOptions(contrast_grid=contrast_grid, softmax=softmax, conv=conv, **given)  # type: ignore[arg-type]

        self.x_embedder = PatchEmbed(self.sample_size, patch_size, in_channels, dim)
        self.t_embedder = TimestepEmbedder(dim, frequency_shift=frequency_shift)
        self.y_embedder = LabelEmbedder(num_classes + (class_dropout_prob > 0), dim)
        self.register_buffer("pos_embed", sincos_table(self.grid_size, dim))
        self.blocks = nn.ModuleList(
            DiTBlock(
                create_attention(name, dim, num_heads, options=options, depth=index, qkv_bias=True),
                dim,
                mlp_ratio=mlp_ratio,
                mlp_norm_eps=mlp_norm_eps,
            )
            for index, name in enumerate(attentions)
        )
        self.final_layer = FinalLayer(dim, patch_size**2 * self.head_channels)
        self.contrast_grid = self._checked_contrast_grid()
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Initialise as the authors do: linear layers Xavier-uniform, embeddings N(0, 0.02), modulation and output 0.

        The parameters that only an attention has (e+ and e-, lambdas, norms, convolution) keep its initialisation.
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
        """Predict the noise (DiT) or the velocity (SiT).

        In training mode, labels are dropped at random once per call, from the global generator.

        Args:
            sample: Noisy latents (B, C, H, W).
            timestep: Timesteps (B,), used as given: 0 to 999 for DiT, 0 to 1 for SiT.
            class_labels: Integers (B,) from 0 to `num_classes`, the null label.
            force_drop_ids: Mask (B,) of the labels to drop, in any mode. Default: random in training, else none.
            return_dict: Return a :class:`DiTOutput` instead of a tuple.

        Raises:
            ValueError: Shapes or types do not fit, or a label is out of range (checked on the CPU).
        """
        self._check(sample, timestep, class_labels, force_drop_ids)
        # positions in the type of the latents: under autocast, tokens stay float32 between the layers
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
        """Return the weights with the position table replaced by this model's, so that they fit its latents."""
        if any(name.startswith("transformer_blocks.") for name in state_dict):
            raise ValueError(
                "These weights are in diffusers' layout; convert the model with from_diffusers()."
            )
        return {**state_dict, "pos_embed": self.pos_embed}

    def _checked_contrast_grid(self) -> tuple[int, int] | None:
        """Return the contrast grid of the blocks that have one."""
        found: tuple[int, int] | None = None
        for block in self.blocks:
            found = getattr(block.attn, "contrast_grid", found)
        (h, w), (H, W) = found or (1, 1), self.grid_size
        if h > H or w > W:
            raise ValueError(
                f"The contrast grid {h} x {w} is larger than the {H} x {W} patches of latents of {self.sample_size}; "
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
        """Map the pixels of patches (B, H*W, p*p*C) to latents (B, C, H*p, W*p)."""
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
                "another size, resize the network with resize_dit()."
            )
        for name, value in (
            ("timestep", timestep),
            ("class_labels", class_labels),
            ("force_drop_ids", force_drop_ids),
        ):
            if value is not None and value.shape != sample.shape[:1]:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, expected ({sample.shape[0]},), one for each sample."
                )
        if class_labels.is_floating_point() or class_labels.dtype == torch.bool:
            raise ValueError(f"class_labels are {class_labels.dtype}; pass integers.")
        if force_drop_ids is not None and self.null_label is None:
            raise ValueError(
                "This network has no null label; build it with class_dropout_prob > 0 to drop labels."
            )
        # reading labels would synchronise with a GPU and break a compiled graph
        if class_labels.device.type == "cpu" and not torch.compiler.is_compiling():
            rows = self.y_embedder.embedding_table.num_embeddings
            if len(class_labels) and not 0 <= int(class_labels.min()) <= int(class_labels.max()) < rows:
                raise ValueError(f"class_labels must be from 0 to {rows - 1}; got {class_labels.tolist()}.")
