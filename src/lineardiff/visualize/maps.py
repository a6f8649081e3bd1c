"""Maps of what Visual-Contrast Attention adds and subtracts."""

from collections.abc import Sequence

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from lineardiff.visualize.curves import INK


def signed_attention(model: nn.Module, images: Tensor, *, block: int = -1) -> Tensor:
    """Return how the class token weighs the contrast tokens in one block of a vca_deit model.

    Args:
        model: A ViT with a class token whose `blocks[block].attn` is a VisualContrastAttention.
        images: (B, C, H, W), preprocessed for the model.
        block: Index of the block.

    Returns:
        (B, heads, h, w): the class token's row of the signed attention A of stage II, on the contrast grid.
        Positive entries add the contrast of a region to the class token, negative ones subtract it.

    Raises:
        ValueError: The block uses another attention.
    """
    attention = model.blocks[block].attn  # type: ignore[index, union-attr]
    if not hasattr(attention, "attention_maps"):
        raise ValueError(
            f"blocks[{block}].attn is a {type(attention).__name__}, which has no signed attention; "
            "expected a VisualContrastAttention."
        )
    calls: list[tuple[Tensor, tuple[int, int]]] = []
    hook = attention.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    try:
        with torch.no_grad():
            model(images)
    finally:
        hook.remove()
    _, maps = attention.attention_maps(*calls[0])
    return maps[:, :, 0].unflatten(-1, attention.contrast_grid)


def plot_signed_attention(
    images: Sequence[Image.Image], maps: Tensor, *, dark: bool = False, narrow: bool = False
) -> Figure:
    """Plot each image above its signed attention, one row per head; red adds, blue subtracts.

    Args:
        images: B images.
        maps: (B, heads, h, w), from :func:`signed_attention`.
        dark: Use light text on a transparent background, for a dark page.
        narrow: Fit the width of a phone.
    """
    heads = maps.shape[1]
    limit = float(maps.abs().max()) or 1.0
    cell = 0.5 if narrow else 1.0
    bar = {"location": "bottom", "aspect": 30} if narrow else {"shrink": 0.8}
    size = (cell * len(images) + (0.3 if narrow else 1.0), 1.05 * cell * (heads + 1) + 0.7 * narrow)
    figure = Figure(figsize=size, layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0.0 if dark else 1.0)
    axes = figure.subplots(heads + 1, len(images), squeeze=False)
    for column, image in enumerate(images):
        axes[0, column].imshow(image)
        for head in range(heads):
            shown = axes[head + 1, column].imshow(maps[column, head], cmap="RdBu_r", vmin=-limit, vmax=limit)
    for row, label in enumerate(["image", *(f"head {head + 1}" for head in range(heads))]):
        axes[row, 0].set_ylabel(label, color=INK[dark], fontsize=7 if narrow else 10)
    for panel in axes.flat:
        panel.set_xticks([])
        panel.set_yticks([])
    colorbar = figure.colorbar(shown, ax=axes[1:], **bar)
    colorbar.set_label("subtracts   adds", color=INK[dark])
    colorbar.ax.tick_params(colors=INK[dark])
    return figure
