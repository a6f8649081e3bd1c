"""Networks by name: timm's classifiers, with mistakes in their arguments reported in one sentence."""

from collections.abc import Mapping
from typing import Any

import timm
import torch
from torch import nn

from lineardiff.suggest import suggest

__all__ = ["build_model"]

_SIZES = ("depth", "depths", "embed_dim", "embed_dims", "num_heads", "patch_size", "img_size")


def build_model(
    name: str,
    model_args: Mapping[str, Any],
    *,
    num_classes: int,
    image_size: int,
    drop_path: float = 0.0,
    seed: int = 0,
) -> nn.Module:
    """Build a classifier of timm's registry and check that it takes images of the given size.

    Args:
        name: As `timm.create_model` takes it.
        model_args: Further arguments of the model.
        num_classes: Number of outputs.
        image_size: Side of the square images in pixels.
        drop_path: Stochastic depth; ignored at 0 by models that have none.
        seed: Determines the initial weights. The global random state is left as it was.

    Returns:
        The model in eval mode: (B, 3, image_size, image_size) to (B, num_classes).

    Raises:
        ValueError: timm has no such model, or the model does not take the arguments or the image size.
    """
    if not timm.is_model(name):
        raise ValueError(
            f"There is no model {name!r}; {suggest(name, timm.list_models())}.".replace("?.", "?")
        )
    for key in _SIZES:
        if key in model_args and not _positive(model_args[key]):
            raise ValueError(f"model_args {key}={model_args[key]!r}: expected whole numbers of at least 1.")

    def create(**drop: float) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return timm.create_model(name, num_classes=num_classes, **drop, **model_args)

    given = " ".join(f"{key}={value!r}" for key, value in model_args.items()) or "its default arguments"
    try:
        try:
            # Passed at 0 too, because some models have another default.
            model = create(drop_path_rate=drop_path)
        except TypeError as error:
            if drop_path or "drop_path_rate" not in str(error):
                raise
            model = create()
    except ValueError:
        raise
    except Exception as error:  # timm's constructors assert, divide and index
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{name} cannot be built with model_args {given}: {reason}.".replace("..", ".")
        ) from error
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name} does not take images of {image_size} x {image_size} pixels ({error}). Set image_size to the "
            f"size the model is for, or pass img_size={image_size} in model_args."
        ) from error
    return model


def _positive(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_positive, value))
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
