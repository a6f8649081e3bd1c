"""Every experiment as a typed, frozen dataclass. Standard library only."""

from collections.abc import Callable
from difflib import get_close_matches

from .classification import ClassificationRecipe, demo, imagenet_deit
from .training import TrainingRecipe

RECIPES: dict[str, Callable[[], ClassificationRecipe]] = {"demo": demo, "imagenet_deit": imagenet_deit}


def get_recipe(name: str) -> ClassificationRecipe:
    """The recipe called `name`, one of RECIPES.

    Raises:
        ValueError: there is none of that name; the message gives the nearest names.
    """
    if name not in RECIPES:
        nearest = get_close_matches(name, RECIPES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"choose one of {', '.join(RECIPES)}"
        raise ValueError(f"no recipe is called {name!r}: {hint}")
    return RECIPES[name]()
