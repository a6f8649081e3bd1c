"""``lineardiff demo``: the same small ViT with MHSA and with VCA, trained and compared."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineardiff.cli.arguments import parse
from lineardiff.recipes import ClassificationRecipe, demo
from lineardiff.table import format_table

if TYPE_CHECKING:
    from lineardiff.train import ClassificationTask

ARMS = {"mhsa": "MHSA", "vca": "VCA"}

_logger = logging.getLogger("lineardiff")


@dataclass
class Demo:
    """Train a small ViT with MHSA and with VCA on the embedded images, compare them, and write a report.

    Both get the same recipe, seed and order of images. A model that is trained already is not trained again;
    an interrupted one is continued.
    """

    output: Path = Path("demo")
    """Folder of the two runs, the report and the numbers."""


def run(words: Sequence[str]) -> None:
    arguments = parse(Demo, words, prog="lineardiff demo")
    results = compare(demo(), output=arguments.output)
    print(summary_table(results))
    print(
        "\nOne seed and small images: a demonstration, no proof. VCA includes a convolution that MHSA lacks "
        "(attention=mhsa_conv has it), and saves time only where tokens are many; the report shows it."
    )
    names = ("report.html", "curves.png", "results.json", *(f"{arm}/model.safetensors" for arm in ARMS))
    print("\nwrote " + ", ".join(str(arguments.output / name) for name in names))


def compare(
    recipe: ClassificationRecipe,
    *,
    output: Path,
    scaling_sizes: Sequence[int] = (64, 128, 256),
    seconds: float = 0.3,
) -> dict[str, Any]:
    """Train a recipe's model with each attention, measure both side by side, and write the report.

    Args:
        recipe: Of a ViT that takes `attention` and `img_size`.
        output: Gets a run folder for each of :data:`ARMS`, report.html, curves.png and results.json.
        scaling_sizes: Sides of larger images, in pixels, to show cost and speed at.
        seconds: How long one of the measurements of speed lasts.

    Returns:
        The content of results.json.

    Raises:
        ValueError: The recipe does not fit, or `output` holds runs of another one.
    """
    # Here, because it takes seconds: help and mistakes in flags do not wait for it.
    import torch

    from lineardiff.cli.comparison import contrast_picture, examples, look_at, measure
    from lineardiff.device import cpu_cores
    from lineardiff.visualize import plot_curves, report_html

    # A core for each loader: more busy threads than cores make PyTorch's threads wait for each other.
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (cpu_cores() or 1) - recipe.workers)))
    tasks, recipes = {}, {}
    for number, (arm, label) in enumerate(ARMS.items(), start=1):
        _logger.info("%d of %d: %s", number, len(ARMS), label)
        recipes[arm] = replace(recipe, model_args=(*recipe.model_args, f"attention={arm}"))
        tasks[arm] = _trained(recipes[arm], output / arm)

    _logger.info("measuring both side by side")
    split = tasks["vca"].validation
    arms = {arm: look_at(label, recipes[arm], tasks[arm].model, split) for arm, label in ARMS.items()}
    results = measure(
        arms,
        split,
        train_images=len(tasks["vca"].train_data),
        scaling_sizes=scaling_sizes,
        seconds=seconds,
    )
    results |= {"recipe": asdict(recipe), "command": f"lineardiff demo --output {output.name}"}
    runs = {label: output / arm for arm, label in ARMS.items()}
    curves = plot_curves(runs)
    curves.savefig(output / "curves.png")
    page = report_html(
        results,
        curves=curves,
        curves_dark=plot_curves(runs, dark=True),
        examples=examples(arms, split),
        pictures=[contrast_picture(arms["vca"], split)],
    )
    (output / "report.html").write_text(page, "utf-8")
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def _trained(recipe: ClassificationRecipe, folder: Path) -> "ClassificationTask":
    """The task with the trained weights of the run folder, trained now unless they are there."""
    from lineardiff.runs.checkpoint import load_weights
    from lineardiff.train import ClassificationTask, train

    task = ClassificationTask(recipe)
    recipe_file = folder / "recipe.json"
    if (folder / "summary.json").exists() and not recipe.changes(recipe.from_json(recipe_file.read_text())):
        _logger.info("%s is finished and is not trained again; delete the folder to do so", folder)
    else:
        train(recipe, task, output=folder)
    load_weights(task.model, folder / "model.safetensors")
    return task


def summary_table(results: Mapping[str, Any]) -> str:
    """Accuracy, size, cost and speed of the arms as text."""
    arms = results["arms"].values()

    def speed(arm: Mapping[str, Any], mode: str) -> str:
        return f"{arm[mode]['median']:,.0f} ({arm[mode]['low']:,.0f} to {arm[mode]['high']:,.0f})"

    rows = [
        ("top-1 (%)", *(f"{arm['top1']:.2f}" for arm in arms)),
        ("parameters", *(f"{arm['parameters']:,}" for arm in arms)),
        ("multiply-adds", *(f"{arm['multiply_adds']:,}" for arm in arms)),
        ("training, images/s", *(speed(arm, "training") for arm in arms)),
        ("inference, images/s", *(speed(arm, "inference") for arm in arms)),
    ]
    return format_table(("", *(arm["label"] for arm in arms)), rows)
