"""Every experiment as a typed, frozen dataclass. Standard library only."""

from collections.abc import Callable
from functools import partial, update_wrapper

from lineardiff.suggest import suggest

from .classification import ClassificationRecipe, demo
from .generation import PATCH_SIZES, SIZES, GenerationRecipe, fashion_sit, imagenet_dit, imagenet_sit
from .imagenet import CSWIN, PVT, SWIN, imagenet_cswin, imagenet_deit, imagenet_pvt, imagenet_swin
from .training import TrainingRecipe

RECIPES: dict[str, Callable[[], ClassificationRecipe | GenerationRecipe]] = {
    "demo": demo,
    "fashion_sit": fashion_sit,
    "imagenet_deit": imagenet_deit,
}
# update_wrapper: the command line lists recipes with the first line of their docstrings.
for _family, _sizes in ((imagenet_pvt, PVT), (imagenet_swin, SWIN), (imagenet_cswin, CSWIN)):
    for _size in _sizes:
        RECIPES[f"{_family.__name__}_{_size}"] = update_wrapper(partial(_family, _size), _family)
for _generator in (imagenet_dit, imagenet_sit):
    for _size in SIZES:
        for _patch_size in PATCH_SIZES:
            RECIPES[f"{_generator.__name__}_{_size}_{_patch_size}"] = update_wrapper(
                partial(_generator, _size, _patch_size), _generator
            )


def get_recipe(name: str) -> ClassificationRecipe | GenerationRecipe:
    """The recipe called `name`, one of RECIPES.

    Raises:
        ValueError: there is none of that name; the message gives the nearest names.
    """
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}; {suggest(name, RECIPES)}")
    return RECIPES[name]()
