"""Weights of DiT and SiT: the authors' checkpoints, diffusers' layout, and other sizes of the latents."""

import argparse
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lineardiff.layers import resize_contrast_embed
from lineardiff.models.dit import DiT
from lineardiff.models.weights import LoadReport, load_baseline

if TYPE_CHECKING:
    from diffusers import DiTTransformer2DModel

__all__ = ["from_diffusers", "load_dit", "read_checkpoint", "resize_dit", "to_diffusers"]

# the authors' names and diffusers': of a block, then outside the blocks
_BLOCK = {
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}
_OUTSIDE = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
# every block in diffusers holds a copy of the conditioning
_CONDITION = {
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Read a checkpoint of DiT's or SiT's authors; from a training checkpoint, the moving average ("ema").

    Args:
        path: A .pt file (read without unpickling code) or a .safetensors file.

    Raises:
        ValueError: The file is missing, damaged, or holds something other than weights.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file; pass a .pt or .safetensors file (for a folder, use DiT.from_pretrained)."
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the authors save their arguments too
            given = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as weights ({type(error).__name__}: {str(error).split('.')[0]}); pass a complete "
            ".safetensors file, or a .pt file that holds only tensors."
        ) from error
    for key in ("ema", "model"):
        if isinstance(given, Mapping) and key in given:
            given = given[key]
            break
    if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
        raise ValueError(
            f"{path} does not hold a state dict; expected one, or a training checkpoint with 'ema' or 'model'."
        )
    return dict(given)


def load_dit(model: DiT, weights: str | Path | Mapping[str, Tensor]) -> LoadReport:
    """Load the authors' weights, or those of another network of this library, into a DiT or SiT.

    From a baseline, a network with Visual-Contrast Attention takes everything but its VCA terms. It must be trained
    before it can generate.

    Args:
        model: Network, changed in place; the size of its latents may differ from that of the weights.
        weights: A state dict, or a path that :func:`read_checkpoint` accepts.

    Returns:
        What was and was not loaded; "classifier" is the table of the labels.

    Raises:
        ValueError: The weights are of another network, or the file cannot be read.
    """
    return load_baseline(model, weights if isinstance(weights, Mapping) else read_checkpoint(weights))


def resize_dit(
    model: DiT, sample_size: int | tuple[int, int], *, contrast_grid: tuple[int, int] | None = None
) -> DiT:
    """Return the same network, with copies of the weights, for latents of another size.

    The position table is recomputed. Where the contrast grid changes, the contrast embeddings are resized.

    Args:
        model: Network; it is not changed.
        sample_size: New size of the latents: one side, or (height, width).
        contrast_grid: New contrast grid. Default: that of the model's config, or half of the new grid of patches.

    Raises:
        ValueError: A size does not fit the patches.
    """
    changes = {"sample_size": sample_size, "contrast_grid": contrast_grid or model.config.contrast_grid}
    # Drop diffusers' private keys: one lists the arguments left at their defaults, which would not change.
    config = {name: value for name, value in model.config.items() if not name.startswith("_")}
    resized = type(model).from_config({**config, **changes})
    weights = resized.filter_checkpoint(model.state_dict())
    for name, embed in weights.items():
        if name.endswith(("pos_embed_pos", "pos_embed_neg")):
            weights[name] = resize_contrast_embed(
                embed, new_grid=resized.contrast_grid, old_grid=model.contrast_grid
            )
    return _filled(resized, weights, like=model)


def from_diffusers(model: "DiTTransformer2DModel") -> DiT:
    """Convert a diffusers DiT to a DiT of this library with the same outputs.

    diffusers' timestep frequencies and epsilon of the second layer norm, which differ from the authors', are kept as
    `frequency_shift` and `mlp_norm_eps`.

    Raises:
        ValueError: Its blocks differ in weights that the authors' network shares, or an option has no counterpart.
    """
    config, given = model.config, model.state_dict()
    needed = {"attention_bias": True, "activation_fn": "gelu-approximate", "norm_elementwise_affine": False}
    for name, value in needed.items():
        if config[name] != value:
            raise ValueError(f"{name}={config[name]!r} has no counterpart in DiT; it must be {value!r}.")
    if model.out_channels not in (config.in_channels, 2 * config.in_channels):
        raise ValueError(
            f"out_channels={model.out_channels} must be in_channels={config.in_channels}, or twice as many."
        )
    conditioning = model.transformer_blocks[0].norm1.emb
    result = DiT(
        sample_size=config.sample_size,
        patch_size=config.patch_size,
        in_channels=config.in_channels,
        dim=model.inner_dim,
        depth=config.num_layers,
        num_heads=config.num_attention_heads,
        num_classes=config.num_embeds_ada_norm,
        class_dropout_prob=conditioning.class_embedder.dropout_prob,
        learn_sigma=model.out_channels != config.in_channels,
        frequency_shift=conditioning.time_proj.downscale_freq_shift,
        mlp_norm_eps=config.norm_eps,
    )
    weights = {"pos_embed": result.pos_embed}
    for name in result.state_dict():
        if name == "pos_embed":
            continue
        sources = [[given[key] for key in keys] for keys in _sources(name, depth=config.num_layers)]
        first, *copies = (torch.cat(parts) for parts in sources)
        if any(not torch.equal(first, copy) for copy in copies):
            raise ValueError(
                f"The blocks differ in {_sources(name, depth=1)[0][0].split('.', 2)[2]}, which DiT shares."
            )
        weights[name] = first
    return _filled(result, weights, like=model)


def to_diffusers(model: DiT) -> "DiTTransformer2DModel":
    """Convert a DiT with self-attention to a diffusers DiT with the same outputs in evaluation mode.

    diffusers cannot save the authors' timestep frequencies (`frequency_shift=0`): a saved and
    reloaded model uses diffusers' frequencies, up to 7 % lower, and its outputs differ slightly. A warning is logged.

    Raises:
        ValueError: The model has no counterpart in diffusers.
    """
    from diffusers import DiTTransformer2DModel

    config = model.config
    H, W = model.sample_size
    for fits, needed in (
        (isinstance(config.attention, str) and config.attention == "mhsa", "attention='mhsa'"),
        (H == W, "square latents"),
        (config.mlp_ratio == 4, "mlp_ratio=4"),
        (model.null_label is not None, "class_dropout_prob > 0"),
        (model.out_channels == model.head_channels, "return_sigma=True (a DiT, not a SiT)"),
    ):
        if not fits:
            raise ValueError(f"diffusers' DiT needs {needed}; this model has no counterpart.")
    result = DiTTransformer2DModel(
        num_attention_heads=config.num_heads,
        attention_head_dim=config.dim // config.num_heads,
        in_channels=config.in_channels,
        out_channels=model.out_channels,
        num_layers=config.depth,
        sample_size=H,
        patch_size=config.patch_size,
        num_embeds_ada_norm=config.num_classes,
        norm_eps=config.mlp_norm_eps,
    )
    weights: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        for keys in () if name == "pos_embed" else _sources(name, depth=config.depth):
            weights.update(zip(keys, value.chunk(len(keys)), strict=True))
    for block in result.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = config.frequency_shift
    if config.frequency_shift != 1:
        logging.getLogger("lineardiff").warning(
            "diffusers does not save the authors' timestep frequencies: the outputs will differ slightly once the "
            "model is saved and loaded."
        )
    return _filled(result, weights, like=model)


def _filled(model: Any, weights: Mapping[str, Tensor], *, like: Any) -> Any:
    """Load copies of the weights into a model, with the device, dtype and mode of `like`."""
    copies = {name: value.to(like.device, like.dtype, copy=True) for name, value in weights.items()}
    model.to(like.device).load_state_dict(copies, assign=True)
    return model.train(like.training)


def _sources(name: str, *, depth: int) -> list[list[str]]:
    """Return the names in diffusers of one of our parameters: for each copy, the list of parts to concatenate."""
    module, kind = name.rsplit(".", 1)
    if module in _CONDITION:
        return [[f"transformer_blocks.{index}.{_CONDITION[module]}.{kind}"] for index in range(depth)]
    if module in _OUTSIDE:
        return [[f"{_OUTSIDE[module]}.{kind}"]]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    assert match is not None, name
    prefix, inner = f"transformer_blocks.{match[1]}", match[2]
    if inner == "attn.qkv":
        return [[f"{prefix}.attn1.to_{part}.{kind}" for part in "qkv"]]
    return [[f"{prefix}.{_BLOCK[inner]}.{kind}"]]
