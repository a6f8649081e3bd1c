"""Configurations and builder of the classifiers in timm's registry."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg
from torch import nn

from lineardiff.models.weights import checkpoint_filter_fn

__all__ = ["check_weight_init", "create", "imagenet_cfg"]


def imagenet_cfg(**kwargs: Any) -> dict[str, Any]:
    """Return timm's pretrained configuration for 224 x 224 images of ImageNet-1k, updated with `kwargs`."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "license": "apache-2.0",
        **kwargs,
    }


def create(
    model_class: type[nn.Module], variant: str, pretrained: bool, *, out_indices: Any = None, **kwargs: Any
) -> nn.Module:
    """Build a model with timm's builder; feature maps come from `forward_intermediates`.

    Args:
        model_class: Class of the model.
        variant: Name in the registry.
        pretrained: Load the published weights.
        out_indices: Stages or blocks of `features_only=True`. Default: all four stages.
        **kwargs: Arguments of the builder and of the model.
    """
    indices = (0, 1, 2, 3) if out_indices is None else out_indices
    return build_model_with_cfg(
        model_class,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": indices, "feature_cls": "getter"},
        **kwargs,
    )


def check_weight_init(weight_init: object) -> None:
    """Check the name of one of timm's rules for initial weights."""
    known = ("", "skip", "reset", "jax", "jax_nlhb", "moco")
    if weight_init not in known:
        raise ValueError(
            f"weight_init={weight_init!r} is unknown; choose one of {', '.join(map(repr, known))}."
        )
