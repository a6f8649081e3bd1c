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
    """Return how much more accurate the second model is than the first, with its uncertainty.

    Both statistics describe the choice of images, in pairs: images on which the models agree carry no
    information. Neither says anything about the choice of the seed.

    Args:
        first_right: (M,) bool, whether the first model is right about each image.
        second_right: The same for the second model, in the same order.

    Returns:
        "top1" (second minus first) and "standard_error", both in percentage points, and "p_value" of the exact
        two-sided McNemar test, in [0, 1].
    """
    gain = second_right.double() - first_right.double()
    wins, losses = int((gain > 0).sum()), int((gain < 0).sum())
    return {
        "top1": 100 * float(gain.mean()),
        "standard_error": 100 * float(gain.std(correction=0)) / math.sqrt(len(gain)),
        "p_value": _sign_test(wins, losses),
    }


def _sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p-value of `wins` successes in `wins + losses` fair coin flips."""
    tail = sum(math.comb(wins + losses, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2 ** (wins + losses))
