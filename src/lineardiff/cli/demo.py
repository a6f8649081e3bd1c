"""``lineardiff demo``: train a small ViT with three attentions and compare them."""

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineardiff.cli.arguments import parse
from lineardiff.recipes import ClassificationRecipe, demo

if TYPE_CHECKING:
    from lineardiff.train import ClassificationTask

ARMS = {"mhsa": "MHSA", "mhsa_conv": "MHSA + conv", "vca": "VCA"}
"""Attention to its label, in the order of training; the report leads with the last two."""

_logger = logging.getLogger("lineardiff")


@dataclass
class Demo:
    """Train a small ViT with self-attention (MHSA), with self-attention plus VCA's convolution, and with VCA.

    All three use the embedded images, one recipe, one seed and one order of images. Interrupt at any time and rerun to
    resume; finished models are not trained again.
    """

    output: Path = Path("demo")
    """Folder for the three runs, the report and the numbers."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and the augmentation. Use one output folder per seed."""
    markdown: bool = False
    """Print the table as Markdown, as README.md shows it."""


def run(words: Sequence[str]) -> None:
    arguments = parse(Demo, words, prog="lineardiff demo")
    recipe = replace(demo(), seed=arguments.seed)
    try:
        _run(recipe, arguments)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"rerun the command to resume; finished models and checkpoints are kept in {arguments.output}."
        ) from None


def _run(recipe: ClassificationRecipe, arguments: Demo) -> None:
    results, written = compare(recipe, output=arguments.output)
    # Imported here because it takes seconds, which --help and mistakes in flags should not wait for.
    from lineardiff.visualize import comparison_table, describe_comparison

    print(comparison_table(results, markdown=arguments.markdown) + "\n")
    for comparison in results["comparisons"]:
        print(describe_comparison(results, comparison))
    print("One seed per model: a test on images cannot tell what another seed would change; try --seed 1.")
    print("\nWrote " + ", ".join(map(str, written)) + ".")
    print(f"Score a model again with: {_program()} evaluate {arguments.output / 'vca'}")


def compare(
    recipe: ClassificationRecipe, *, output: Path, **measuring: Any
) -> tuple[dict[str, Any], list[Path]]:
    """Train a model with each attention of :data:`ARMS`, compare them, and write the report.

    Args:
        recipe: For a ViT that takes `attention` and `img_size`.
        output: Folder for one run per attention, report.html, curves.png and results.json.
        **measuring: `scaling_sizes` and `seconds` of :func:`lineardiff.visualize.compare_models`.

    Returns:
        The content of results.json, and the paths of the three files.

    Raises:
        ValueError: `output` holds runs of another recipe.
    """
    import torch

    from lineardiff.device import cpu_cores
    from lineardiff.visualize import compare_models, score_model, write_comparison

    # Leave a core to each loader: more busy threads than cores make PyTorch's threads wait for each other.
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (cpu_cores() or 1) - recipe.workers)))
    models = {}
    for number, (arm, label) in enumerate(ARMS.items(), start=1):
        _logger.info("%d of %d: %s", number, len(ARMS), label)
        task = _trained(_with_attention(recipe, arm), output / arm)
        models[arm] = score_model(label, task.recipe, output / arm, task.model, task.validation)

    _logger.info("Measuring the three side by side.")
    results = compare_models(models, task.validation, train_images=len(task.train_data), **measuring)
    results["recipe"] = {**results["recipe"], "model_args": recipe.model_args}
    results["command"] = f"lineardiff demo --output {output.name} --seed {recipe.seed}"
    return results, write_comparison(results, models, task.validation, output=output)


def _with_attention(recipe: ClassificationRecipe, arm: str) -> ClassificationRecipe:
    """Return the recipe for one attention, without the model arguments that only others take."""
    from lineardiff.layers.factory import AttentionOptions, has_option

    options = AttentionOptions.__dataclass_fields__
    kept = (
        argument
        for argument in recipe.model_args
        if (name := argument.partition("=")[0]) not in options or has_option(arm, name)
    )
    return replace(recipe, model_args=(*kept, f"attention={arm}"))


def _trained(recipe: ClassificationRecipe, folder: Path) -> "ClassificationTask":
    """Return the task with trained weights, from the run folder if it is finished."""
    from lineardiff.runs import load_run
    from lineardiff.train import ClassificationTask, train

    task = ClassificationTask(recipe)
    if (folder / "summary.json").exists() and not recipe.changes(load_run(folder).recipe()):
        _logger.info("%s is finished and is not trained again.", folder)
    else:
        train(task, output=folder)
    task.model = load_run(folder).model()
    return task


def _program() -> str:
    """Return the command line's name as the user can type it: with its path where it is not on PATH."""
    return "lineardiff" if shutil.which("lineardiff") else sys.argv[0]
