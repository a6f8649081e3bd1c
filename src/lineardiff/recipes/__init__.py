"""Experiments as typed, frozen dataclasses. Standard library only."""

from collections.abc import Callable
from functools import partial, update_wrapper

from lineardiff.suggest import suggest

from .classification import ClassificationRecipe, demo
from .generation import PATCH_SIZES, SIZES, GenerationRecipe, fashion_sit, imagenet_dit, imagenet_sit
from .imagenet import CSWIN, PVT, SWIN, imagenet_cswin, imagenet_deit, imagenet_pvt, imagenet_swin
from .training import TrainingRecipe

__all__ = [
    "RECIPES",
    "ClassificationRecipe",
    "GenerationRecipe",
    "TrainingRecipe",
    "demo",
    "fashion_sit",
    "get_recipe",
]

RECIPES: dict[str, Callable[[], ClassificationRecipe | GenerationRecipe]] = {
    "demo": demo,
    "fashion_sit": fashion_sit,
    "imagenet_deit": imagenet_deit,
}
# update_wrapper: the command line lists recipes with the first line of their docstrings.
for _family, _sizes in ((imagenet_pvt, PVT), (imagenet_swin, SWIN), (imagenet_cswin, CSWIN)):
    for _size in _sizes:
        RECIPES[f"{_family.__name__}_{_size}"] = update_wrapper(partial(_family, _size), _family)
for _dit in (imagenet_dit, imagenet_sit):
    for _size in SIZES:
        for _patch_size in PATCH_SIZES:
            RECIPES[f"{_dit.__name__}_{_size}_{_patch_size}"] = update_wrapper(
                partial(_dit, _size, _patch_size), _dit
            )


def get_recipe(name: str) -> ClassificationRecipe | GenerationRecipe:
    """Return the recipe called `name`, one of RECIPES.

    Raises:
        ValueError: There is no recipe of that name; the message suggests the nearest names.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}; {suggest(name, RECIPES)}")
    return RECIPES[name]()
