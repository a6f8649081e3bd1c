"""Weights of DiT and SiT: the authors' checkpoints, diffusers' layout, another size of the latents."""

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

# ours, in the authors' names -> diffusers'; of a block, then of the whole
_BLOCK = {
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}
_WHOLE = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
# every block of diffusers' holds a copy of the conditioning
_CONDITION = {
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The weights in a file of DiT's or SiT's authors: of a training checkpoint the moving average ("ema").

    Args:
        path: a .pt file (read without unpickling code) or a .safetensors file.

    Raises:
        ValueError: the file is missing, damaged, or holds other things than weights.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path} is no file; give a .pt or .safetensors file (a folder: DiT.from_pretrained)."
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # the authors save their arguments, too
            given = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as weights ({type(error).__name__}: {str(error).split('.')[0]}); give a complete "
            ".safetensors file, or a .pt file that holds tensors only."
        ) from error
    for key in ("ema", "model"):
        if isinstance(given, Mapping) and key in given:
            given = given[key]
            break
    if not isinstance(given, Mapping) or not all(isinstance(value, Tensor) for value in given.values()):
        raise ValueError(
            f"{path} holds no state dict; expected one, or a training checkpoint with 'ema' or 'model'."
        )
    return dict(given)


def load_generator(model: DiT, weights: str | Path | Mapping[str, Tensor]) -> LoadReport:
    """Load the authors' weights, or those of another network of this library, into a DiT or SiT.

    A network with Visual-Contrast Attention takes everything but its VCA terms from a baseline: a network to train
    on, not one that already generates.

    Args:
        model: changed in place; its latents may be of another size than those of the weights.
        weights: a state dict, or a path as :func:`read_checkpoint` takes.

    Returns:
        What was and was not loaded; "classifier" is the table of the labels.

    Raises:
        ValueError: the weights are of another network, or the file cannot be read.
    """
    return load_baseline(model, weights if isinstance(weights, Mapping) else read_checkpoint(weights))


def resize_generator(
    model: DiT, sample_size: int | tuple[int, int], *, contrast_grid: tuple[int, int] | None = None
) -> DiT:
    """The same network for latents of another size, with copies of the weights.

    The position table is computed anew. Where the contrast grid changes, the contrast embeddings are resampled.

    Args:
        model: stays as it is.
        sample_size: side of the latents, or (height, width).
        contrast_grid: None keeps the one that the model was made with, or half the new grid where it had none.

    Raises:
        ValueError: a size does not fit the patches.
    """
    changes = {"sample_size": sample_size, "contrast_grid": contrast_grid or model.config.contrast_grid}
    # without diffusers' private keys: one names the arguments left at their defaults, which would not be changed
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
    """A diffusers DiT as a DiT of this library, with the same answers.

    Its timestep frequencies and the epsilon of its second layer norm, which are not the authors', are kept as
    `frequency_shift` and `mlp_norm_eps`.

    Raises:
        ValueError: its blocks were trained apart in what the authors share, or an option has no counterpart.
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
                f"the blocks differ in {_sources(name, depth=1)[0][0].split('.', 2)[2]}, which DiT has once for all."
            )
        weights[name] = first
    return _filled(result, weights, like=model)


def to_diffusers(model: DiT) -> "DiTTransformer2DModel":
    """A DiT with self-attention as a diffusers DiT, with the same answers in evaluation.

    diffusers cannot save the authors' timestep frequencies (`frequency_shift=0`): once saved and loaded, the model
    uses its own, up to 7 % lower, and answers a little differently. The log says so.

    Raises:
        ValueError: the model is not of the kind that diffusers has.
    """
    from diffusers import DiTTransformer2DModel

    config = model.config
    H, W = model.sample_size
    for fits, needed in (
        (isinstance(config.attention, str) and config.attention == "mhsa", "attention='mhsa'"),
        (H == W, "square latents"),
        (config.mlp_ratio == 4, "mlp_ratio=4"),
        (model.null_label is not None, "class_dropout_prob > 0"),
        (model.out_channels == model.head_channels, "return_sigma=True (no SiT)"),
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
            "diffusers does not save the authors' timestep frequencies: the model answers a little differently once "
            "saved and loaded."
        )
    return _filled(result, weights, like=model)


def _filled(model: Any, weights: Mapping[str, Tensor], *, like: Any) -> Any:
    """The model with copies of the weights, of the device, type and mode of another."""
    copies = {name: value.to(like.device, like.dtype, copy=True) for name, value in weights.items()}
    model.to(like.device).load_state_dict(copies, assign=True)
    return model.train(like.training)


def _sources(name: str, *, depth: int) -> list[list[str]]:
    """Names in diffusers of one of our parameters: a list for each copy, of the parts to be joined."""
    module, kind = name.rsplit(".", 1)
    if module in _CONDITION:
        return [[f"transformer_blocks.{index}.{_CONDITION[module]}.{kind}"] for index in range(depth)]
    if module in _WHOLE:
        return [[f"{_WHOLE[module]}.{kind}"]]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    assert match is not None, name
    prefix, inner = f"transformer_blocks.{match[1]}", match[2]
    if inner == "attn.qkv":
        return [[f"{prefix}.attn1.to_{part}.{kind}" for part in "qkv"]]
    return [[f"{prefix}.{_BLOCK[inner]}.{kind}"]]
