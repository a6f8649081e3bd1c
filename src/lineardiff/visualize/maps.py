"""Pictures of what Visual-Contrast Attention adds and what it subtracts."""

from collections.abc import Sequence

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn


def signed_attention(model: nn.Module, images: Tensor, *, block: int = -1) -> Tensor:
    """How the class token weighs the contrast tokens in one block of a vca_deit model.

    Args:
        model: A ViT whose `blocks[block].attn` is a VisualContrastAttention, with a class token in front.
        images: (B, C, H, W), as the model takes them.
        block: Index of the block.

    Returns:
        (B, heads, h, w): row 0 of stage II's A, the difference of the two softmaxes, on the contrast grid.
        Positive entries add the contrast of a region to the class token, negative ones subtract it.

    Raises:
        ValueError: The block has another attention.
    """
    attention = model.blocks[block].attn  # type: ignore[index, union-attr]
    if not hasattr(attention, "attention_maps"):
        raise ValueError(f"blocks[{block}].attn is a {type(attention).__name__}: it has no signed attention")
    seen: list[tuple[Tensor, tuple[int, int]]] = []
    hook = attention.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    try:
        with torch.no_grad():
            model(images)
    finally:
        hook.remove()
    _, maps = attention.attention_maps(*seen[0])
    return maps[:, :, 0].unflatten(-1, attention.contrast_grid)


def plot_signed_attention(pictures: Sequence[Image.Image], maps: Tensor) -> Figure:
    """Draw each picture above its signed attention, one row for each head; red adds, blue subtracts.

    Args:
        pictures: B of them.
        maps: (B, heads, h, w), from :func:`signed_attention`.
    """
    heads = maps.shape[1]
    limit = float(maps.abs().max()) or 1.0
    figure = Figure(figsize=(len(pictures) + 1.0, 1.05 * (heads + 1)), layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    axes = figure.subplots(heads + 1, len(pictures), squeeze=False)
    for column, picture in enumerate(pictures):
        axes[0, column].imshow(picture)
        for head in range(heads):
            shown = axes[head + 1, column].imshow(maps[column, head], cmap="RdBu_r", vmin=-limit, vmax=limit)
    for row, label in enumerate(["image", *(f"head {head + 1}" for head in range(heads))]):
        axes[row, 0].set_ylabel(label)
    for panel in axes.flat:
        panel.set_xticks([])
        panel.set_yticks([])
    figure.colorbar(shown, ax=axes[1:], shrink=0.8, label="subtracts   adds")
    return figure
