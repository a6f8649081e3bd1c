"""``lineardiff train RECIPE``: train, or resume a run."""

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from lineardiff.cli.arguments import parse
from lineardiff.recipes import RECIPES, GenerationRecipe, TrainingRecipe, get_recipe
from lineardiff.table import format_table

if TYPE_CHECKING:
    from lineardiff.train import ClassificationTask, GenerationTask


@dataclass
class Train:
    """Train a recipe. If the output folder holds a run of the same recipe, resume it."""

    recipe: tyro.conf.OmitArgPrefixes[TrainingRecipe]
    output: Path | None = None
    """Folder of the run: curves, checkpoints, weights. None uses runs/RECIPE."""
    resume: bool = True
    """Use --no-resume to refuse a folder that already holds a run."""
    accept_changed_data: bool = False
    """Resume even if images were added, removed or replaced since the run was started."""
    dry_run: bool = False
    """Show the resolved recipe, the size of the model and the number of steps without training."""


def run(words: Sequence[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return
    name, *flags = words
    if name.startswith("-"):
        raise ValueError(f"The recipe comes first, then flags. The recipes are {', '.join(RECIPES)}.")
    arguments = parse(Train, flags, prog=f"lineardiff train {name}", default=Train(get_recipe(name)))
    recipe, output = arguments.recipe, arguments.output or Path("runs") / name
    if arguments.dry_run:
        print(_resolved(recipe, get_recipe(name)))

    # Imported here because it takes seconds: help and mistakes in flags do not wait for it.
    from accelerate import PartialState

    from lineardiff.train import train

    task = _task(recipe)
    if arguments.dry_run:
        print("\n" + _size(recipe, task))
        return
    summary = train(
        task, output=output, resume=arguments.resume, accept_changed_data=arguments.accept_changed_data
    )
    if PartialState().is_main_process:
        rows = [
            (key, f"{value:.4f}" if isinstance(value, float) else str(value))
            for key, value in summary.items()
            if key != "machine"
        ]
        print(format_table(("summary", ""), rows, left=2))
        if isinstance(recipe, GenerationRecipe):
            then = f"lineardiff sample {output} --output samples"
        else:
            then = f"lineardiff evaluate {output}"
        print(f"\nwrote {output}; next: {then}")


def _task(recipe: Any) -> "ClassificationTask | GenerationTask":
    from lineardiff.train import ClassificationTask, GenerationTask

    return GenerationTask(recipe) if isinstance(recipe, GenerationRecipe) else ClassificationTask(recipe)


def _usage() -> str:
    families = itertools.groupby(RECIPES, key=lambda name: _first_line(RECIPES[name].__doc__))
    recipes = "\n".join(
        textwrap.fill(", ".join(names), 100, initial_indent="  ", subsequent_indent="  ") + f"\n      {what}"
        for what, names in families
    )
    return (
        "usage: lineardiff train RECIPE [flags]\n\n"
        f"{_first_line(Train.__doc__)}\n\nrecipes:\n{recipes}\n\n"
        "lineardiff train RECIPE --help lists the flags: every field of the recipe is one."
    )


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]


def _resolved(recipe: TrainingRecipe, original: TrainingRecipe) -> str:
    before = asdict(original)
    rows = [
        (field, _text(value), "" if value == before[field] else _text(before[field]))
        for field, value in asdict(recipe).items()
    ]
    return format_table(("field", "value", "instead of"), rows, left=3)


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _size(recipe: TrainingRecipe, task: "ClassificationTask | GenerationTask") -> str:
    import torch

    from lineardiff.bench import multiply_adds, parameters
    from lineardiff.data import steps_per_epoch
    from lineardiff.train import GenerationTask

    if isinstance(task, GenerationTask):
        cost = multiply_adds(
            task.model,
            task.model.sample_size,
            in_chans=task.model.in_channels,
            conditions=(torch.zeros(1), torch.zeros(1, dtype=torch.long)),
        )
    else:
        cost = multiply_adds(task.model, task.recipe.image_size)
    images = len(task.train_data)
    steps = recipe.total_steps(steps_per_epoch(images, batch_size=recipe.batch_size))
    rows = [
        ("training images", images),
        ("validation images", len(task.validation)),
        ("classes", len(task.classes)),
        ("parameters", parameters(task.model)),
        ("multiply-adds of one image", cost),
        ("updates", steps),
        ("images seen", steps * recipe.batch_size),
    ]
    return format_table(("size", ""), [(name, f"{number:,}") for name, number in rows])
