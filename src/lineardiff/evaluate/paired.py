"""Two models on the same images: where they agree, and how sure the difference of their accuracies is."""

import math

from torch import Tensor


def agreement(first_right: Tensor, second_right: Tensor) -> dict[str, int]:
    """Count images by who is right.

    Args:
        first_right: (M,) bool, whether the first model is right about each image.
        second_right: The same of the second model, in the same order.
    """
    return {
        "both_right": int((first_right & second_right).sum()),
        "only_first_right": int((first_right & ~second_right).sum()),
        "only_second_right": int((~first_right & second_right).sum()),
        "both_wrong": int((~first_right & ~second_right).sum()),
    }


def paired_difference(first_right: Tensor, second_right: Tensor) -> dict[str, float]:
    """Top-1 of the second model minus that of the first, in percentage points, with its standard error.

    The error is that of the choice of images, in pairs: images on which the models agree carry none. It says
    nothing about the choice of the seed.

    Args:
        first_right, second_right: As in :func:`agreement`.

    Returns:
        {"top1", "standard_error"}.
    """
    gain = second_right.double() - first_right.double()
    return {
        "top1": 100 * float(gain.mean()),
        "standard_error": 100 * float(gain.std(correction=0)) / math.sqrt(len(gain)),
    }
