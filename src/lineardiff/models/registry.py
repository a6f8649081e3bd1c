"""What the classifiers share with timm's registry: their configurations, and how they are built."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg
from torch import nn

from lineardiff.models.weights import checkpoint_filter_fn


def imagenet_cfg(**kwargs: Any) -> dict[str, Any]:
    """timm's pretrained configuration for 224 x 224 images of ImageNet-1k; what differs is given."""
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
    """A model by timm's builder, with feature maps from `forward_intermediates`.

    Args:
        model_class: to be built.
        variant: its name in the registry.
        pretrained: load the published weights.
        out_indices: of features_only=True; None takes all four stages.
        **kwargs: of the builder and of the model.
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
