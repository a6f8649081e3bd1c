"""DiT and SiT by name, without importing diffusers: dit_s_2, vca_sit_b_4, ..."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lineardiff.suggest import suggest

__all__ = ["DIT_CONFIGS", "create_dit"]

if TYPE_CHECKING:
    from lineardiff.models.dit import DiT

_SIZES = {"s": (384, 12, 6), "b": (768, 12, 12), "l": (1024, 24, 16), "xl": (1152, 28, 16)}

DIT_CONFIGS: dict[str, dict[str, Any]] = {
    f"{prefix}{family}_{size}_{patch_size}": {
        "dim": dim,
        "depth": depth,
        "num_heads": num_heads,
        "patch_size": patch_size,
        "return_sigma": family == "dit",
        "attention": "vca" if prefix else "mhsa",
    }
    for prefix in ("", "vca_")
    for family in ("dit", "sit")
    for size, (dim, depth, num_heads) in _SIZES.items()
    for patch_size in (8, 4, 2)
}
"""Arguments of :class:`lineardiff.models.dit.DiT` by name."""


def create_dit(
    name: str,
    *,
    sample_size: int | tuple[int, int] = 32,
    num_classes: int = 1000,
    attention: str | Sequence[str] | None = None,
    **config: Any,
) -> "DiT":
    """Build an untrained DiT or SiT.

    Args:
        name: Key of :data:`DIT_CONFIGS`: an optional "vca_", then "dit" or "sit", the size "s", "b", "l" or "xl", and
            the patch size 8, 4 or 2.
        sample_size: Size of the latents: one side (an eighth of the image's with Stable Diffusion's VAE), or
            (height, width).
        num_classes: Number of classes.
        attention: Attention of all blocks, or one per block. Default: given by the name.
        **config: Further arguments of :class:`lineardiff.models.dit.DiT`.

    Raises:
        ValueError: The name is unknown, or an argument does not fit.
        ImportError: diffusers is not installed.
    """
    if name not in DIT_CONFIGS:
        raise ValueError(f"There is no DiT or SiT {name!r}; {suggest(name, DIT_CONFIGS)}")
    from lineardiff.models.dit import DiT

    chosen = {} if attention is None else {"attention": attention}
    return DiT(
        **{**DIT_CONFIGS[name], **chosen, **config, "sample_size": sample_size, "num_classes": num_classes}
    )
