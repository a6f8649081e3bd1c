"""The comparison behind ``lineardiff demo``: models trained alike but for their attention."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lineardiff.bench import describe_machine, images_per_second, multiply_adds, parameters
from lineardiff.data import ImageSplit, Transform, eval_transform
from lineardiff.device import choose_device
from lineardiff.evaluate import agreement, paired_difference, predict
from lineardiff.files import write_atomically
from lineardiff.recipes import ClassificationRecipe
from lineardiff.visualize.curves import plot_curves
from lineardiff.visualize.maps import plot_signed_attention, signed_attention
from lineardiff.visualize.report import Example, Picture, as_png, report_html

SIGNIFICANCE = 0.05
"""A difference whose exact McNemar p-value is at least this is reported as within noise."""

_EXAMPLES = 6  # per group in the report


@dataclass(frozen=True)
class ScoredModel:
    """A trained model and its predictions on the validation images."""

    label: str
    recipe: ClassificationRecipe
    folder: Path
    """Of the run, which holds the learning curves."""
    model: nn.Module
    logits: Tensor
    """(M, classes), on the CPU."""
    labels: Tensor
    """(M,)"""

    @property
    def right(self) -> Tensor:
        """(M,) bool: whether the top-1 prediction is correct."""
        return self.logits.argmax(-1) == self.labels

    def scores(self) -> dict[str, float]:
        """Return top-1 and top-5 in per cent, and the mean cross-entropy in nats."""
        hits = self.logits.topk(min(5, self.logits.shape[-1])).indices == self.labels[:, None]
        return {
            "top1": 100 * float(self.right.double().mean()),
            "top5": 100 * float(hits.any(-1).double().mean()),
            "loss": float(F.cross_entropy(self.logits, self.labels)),
        }

    def confusion(self) -> list[list[int]]:
        """Return the number of images by true class (row) and predicted class (column)."""
        classes = self.logits.shape[-1]
        pairs = self.labels * classes + self.logits.argmax(-1)
        return torch.bincount(pairs, minlength=classes**2).view(classes, classes).tolist()


def score_model(
    label: str, recipe: ClassificationRecipe, folder: Path, model: nn.Module, split: ImageSplit
) -> ScoredModel:
    """Run a trained model over the validation images, on the accelerator if there is one.

    Raises:
        ValueError: An image cannot be read.
    """
    batches = predict(
        model, split, transform=_transform(recipe), batch_size=recipe.batch_size, device=choose_device()
    )
    logits, labels = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
    if len(labels) < len(split):
        raise ValueError(
            f"{len(split) - len(labels)} of {len(split)} images of {split.source} cannot be read; "
            "a comparison needs all of them."
        )
    return ScoredModel(label, recipe, folder, model, logits, labels)


def compare_models(
    models: Mapping[str, ScoredModel],
    split: ImageSplit,
    *,
    train_images: int,
    scaling_sizes: Sequence[int] = (64, 128, 256),
    seconds: float = 0.3,
) -> dict[str, Any]:
    """Measure accuracy, size, cost and speed side by side, and test the differences in accuracy.

    Args:
        models: Attention to the model trained with it, at least two; recipes differ in the attention only. The last
            two are the comparison that the report leads with.
        split: The validation images on which the models were scored.
        train_images: Number of training images.
        scaling_sizes: Sides in pixels of larger images on which to measure cost and speed.
        seconds: Duration of each speed measurement.

    Returns:
        The content of results.json: "arms" (by attention), "comparisons" (of two arms each, the leading one first),
        "images", "classes", "class_scores", "confusion", "scaling", "recipe" and "environment".
    """
    recipe = next(iter(models.values())).recipe
    networks = {name: scored.model for name, scored in models.items()}
    speed_of = partial(
        images_per_second,
        networks,
        image_size=recipe.image_size,
        batch_size=recipe.batch_size,
        seconds=seconds,
    )
    speeds = {"train": speed_of(mode="train"), "forward": speed_of(mode="forward")}
    pairs = list(itertools.combinations(models, 2))[::-1]
    return {
        "arms": {
            name: {
                "label": scored.label,
                **scored.scores(),
                "parameters": parameters(scored.model),
                "multiply_adds": multiply_adds(scored.model, recipe.image_size),
                **{mode: asdict(speed[name]) for mode, speed in speeds.items()},
            }
            for name, scored in models.items()
        },
        "comparisons": [_compare(first, second, models) for first, second in pairs],
        "images": {"train": train_images, "validation": len(split)},
        "classes": list(split.classes),
        "class_scores": _class_scores(models, split.classes),
        "confusion": {name: scored.confusion() for name, scored in models.items()},
        "scaling": [_scaling(models, image_size, seconds=seconds) for image_size in scaling_sizes],
        "recipe": asdict(recipe),
        "environment": describe_machine(),
    }


def write_comparison(
    results: Mapping[str, Any], models: Mapping[str, ScoredModel], split: ImageSplit, *, output: Path
) -> list[Path]:
    """Write report.html, curves.png and results.json.

    Args:
        results: From :func:`compare_models`, with "command" added.
        models: Those that were compared; the last one is a VCA model, whose contrast maps are shown.
        split: The validation images on which the models were scored.
        output: Folder to write to.

    Returns:
        The three paths.

    Raises:
        OSError: The disk is full or the folder cannot be written.
    """
    runs = {scored.label: scored.folder for scored in models.values()}
    page = report_html(
        results,
        curves=partial(plot_curves, runs),
        examples=_examples(models, split),
        pictures=[_contrast_picture(list(models.values())[-1], split)],
    )
    files: dict[str, bytes | str] = {
        "report.html": page,
        "curves.png": as_png(plot_curves(runs)),
        "results.json": json.dumps(results, indent=2) + "\n",
    }
    for name, data in files.items():
        write_atomically(output / name, data)
    return [output / name for name in files]


def _compare(first: str, second: str, models: Mapping[str, ScoredModel]) -> dict[str, Any]:
    right = models[first].right, models[second].right
    difference = paired_difference(*right)
    return {
        "first": first,
        "second": second,
        **difference,
        "within_noise": difference["p_value"] >= SIGNIFICANCE,
        "agreement": agreement(*right),
    }


def _transform(recipe: ClassificationRecipe) -> Transform:
    return eval_transform(
        image_size=recipe.image_size, crop_pct=recipe.crop_pct, interpolation=recipe.interpolation
    )


def _class_scores(models: Mapping[str, ScoredModel], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return images and top-1 in per cent of each class that has images."""
    labels = next(iter(models.values())).labels
    return [
        {
            "name": name,
            "images": int(members.sum()),
            "top1": {arm: 100 * float(m.right[members].double().mean()) for arm, m in models.items()},
        }
        for name, members in ((name, labels == index) for index, name in enumerate(classes))
        if members.any()
    ]


def _scaling(models: Mapping[str, ScoredModel], image_size: int, *, seconds: float) -> dict[str, Any]:
    networks = {}
    for name, scored in models.items():
        recipe = scored.recipe
        options = {**recipe.model_kwargs(), "img_size": image_size, "num_classes": scored.logits.shape[-1]}
        device = next(scored.model.parameters()).device
        networks[name] = timm.create_model(recipe.model, **options).to(device)
    speeds = images_per_second(networks, image_size=image_size, batch_size=1, rounds=5, seconds=seconds)
    return {
        "image_size": image_size,
        "patches": next(iter(networks.values())).patch_embed.num_patches,
        "arms": {
            name: {
                "multiply_adds": multiply_adds(network, image_size),
                "images_per_second": speeds[name].median,
            }
            for name, network in networks.items()
        },
    }


def _examples(models: Mapping[str, ScoredModel], split: ImageSplit) -> dict[str, list[Example]]:
    """Return the first images of each case of agreement between the last two models, by a title for the case."""
    first, second = list(models.values())[-2:]
    groups = {
        "Both right": first.right & second.right,
        f"Only {second.label} right": ~first.right & second.right,
        f"Only {first.label} right": first.right & ~second.right,
        "Both wrong": ~first.right & ~second.right,
    }
    return {
        title: [_example((first, second), split, int(row)) for row in members.nonzero()[:_EXAMPLES, 0]]
        for title, members in groups.items()
    }


def _example(models: Sequence[ScoredModel], split: ImageSplit, row: int) -> Example:
    sample = split[row]
    assert sample is not None  # it was read for the predictions
    guesses = {scored.label: split.classes[int(scored.logits[row].argmax())] for scored in models}
    return Example(sample[0], truth=split.classes[sample[1]], guesses=guesses)


def _contrast_picture(scored: ScoredModel, split: ImageSplit) -> Picture:
    """Plot the signed attention of the last block for the first validation images."""
    images = [sample[0] for row in range(min(8, len(split))) if (sample := split[row]) is not None]
    transform = _transform(scored.recipe)
    device = next(scored.model.parameters()).device
    maps = signed_attention(scored.model, torch.stack([transform(image) for image in images]).to(device))
    _, heads, h, w = maps.shape
    return Picture(
        partial(plot_signed_attention, images, maps.cpu()),
        caption="The first validation images, and how the class token weighs their contrast tokens in each head "
        f"of the last block, on the {h} x {w} contrast grid: red is added, blue subtracted.",
        alt=f"{len(images)} images in a row, and below each {heads} grids of {h} x {w} red and blue cells.",
    )
