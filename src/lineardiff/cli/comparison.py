"""What `lineardiff demo` measures on its two trained models."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lineardiff.bench import images_per_second, multiply_adds, parameters
from lineardiff.cli.info import hardware, versions
from lineardiff.data import ImageSplit, eval_transform
from lineardiff.evaluate import agreement, paired_difference, predict
from lineardiff.recipes import ClassificationRecipe
from lineardiff.visualize import Example, Picture, plot_signed_attention, signed_attention

EXAMPLES = 6  # of each kind in the report
REPORTED = ("python", "lineardiff", "torch", "timm", "torchvision", "accelerate")


@dataclass(frozen=True)
class Arm:
    """One trained model and what it says about the validation images."""

    label: str
    recipe: ClassificationRecipe
    model: nn.Module
    logits: Tensor
    """(M, classes), on the CPU."""
    labels: Tensor
    """(M,)"""

    @property
    def right(self) -> Tensor:
        """(M,) bool: whether the first guess is the label."""
        return self.logits.argmax(-1) == self.labels

    def scores(self) -> dict[str, float]:
        """Top-1 and top-5 in per cent, and the mean cross-entropy in nats."""
        hits = self.logits.topk(min(5, self.logits.shape[-1])).indices == self.labels[:, None]
        return {
            "top1": 100 * float(self.right.double().mean()),
            "top5": 100 * float(hits.any(-1).double().mean()),
            "loss": float(F.cross_entropy(self.logits, self.labels)),
        }


def look_at(label: str, recipe: ClassificationRecipe, model: nn.Module, split: ImageSplit) -> Arm:
    """Run a trained model over the validation images, on the accelerator if there is one."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    batches = predict(model, split, transform=_transform(recipe), batch_size=recipe.batch_size, device=device)
    logits, labels = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
    if len(labels) < len(split):
        raise ValueError(
            f"{len(split) - len(labels)} images of {split.source} cannot be read; mend or remove them"
        )
    return Arm(label, recipe, model, logits, labels)


def measure(
    arms: Mapping[str, Arm],
    split: ImageSplit,
    *,
    train_images: int,
    scaling_sizes: Sequence[int],
    seconds: float,
) -> dict[str, Any]:
    """The content of results.json: accuracy, size, cost and speed of two arms, and where they agree.

    Args:
        arms: Two, by name, of the same recipe but for their attention.
        split: The validation images they have looked at.
        train_images: How many they were trained on.
        scaling_sizes: Sides of larger images, in pixels, to show cost and speed at.
        seconds: How long one of the measurements of speed lasts.
    """
    first, second = arms.values()
    recipe = first.recipe
    models = {name: arm.model for name, arm in arms.items()}
    speed_of = partial(
        images_per_second,
        models,
        image_size=recipe.image_size,
        batch_size=recipe.batch_size,
        seconds=seconds,
    )
    speeds = {"training": speed_of(mode="training"), "inference": speed_of(mode="inference")}
    return {
        "arms": {
            name: {
                "label": arm.label,
                **arm.scores(),
                "parameters": parameters(arm.model),
                "multiply_adds": multiply_adds(arm.model, recipe.image_size),
                **{mode: asdict(speed[name]) for mode, speed in speeds.items()},
            }
            for name, arm in arms.items()
        },
        "images": {"train": train_images, "validation": len(first.labels)},
        "difference": paired_difference(first.right, second.right),
        "agreement": agreement(first.right, second.right),
        "classes": _class_scores(arms, split.classes),
        "scaling": [_scaling(arms, image_size, seconds=seconds) for image_size in scaling_sizes],
        "environment": {
            **{name: version for name, version in versions().items() if name in REPORTED},
            **hardware(),
        },
    }


def examples(arms: Mapping[str, Arm], split: ImageSplit) -> dict[str, list[Example]]:
    """The first images of each of the four kinds of agreement, by a title for each."""
    first, second = arms.values()
    groups = {
        "Both right": first.right & second.right,
        f"Only {second.label} right": ~first.right & second.right,
        f"Only {first.label} right": first.right & ~second.right,
        "Both wrong": ~first.right & ~second.right,
    }
    return {
        title: [_example(arms, split, int(row)) for row in members.nonzero()[:EXAMPLES, 0]]
        for title, members in groups.items()
    }


def contrast_picture(arm: Arm, split: ImageSplit) -> Picture:
    """Signed attention of the last block for the first validation images."""
    images = [sample[0] for row in range(min(8, len(split))) if (sample := split[row]) is not None]
    device = next(arm.model.parameters()).device
    transform = _transform(arm.recipe)
    maps = signed_attention(arm.model, torch.stack([transform(image) for image in images]).to(device))
    _, heads, h, w = maps.shape
    return Picture(
        plot_signed_attention(images, maps.cpu()),
        caption="The first validation images, and how the class token reads their contrasts in each head of "
        f"the last block, on the {h} x {w} contrast grid: red is added, blue subtracted.",
        alt=f"{len(images)} images in a row, and below each {heads} grids of {h} x {w} red and blue cells.",
    )


def _transform(recipe: ClassificationRecipe) -> Any:
    return eval_transform(
        image_size=recipe.image_size, crop_pct=recipe.crop_pct, interpolation=recipe.interpolation
    )


def _class_scores(arms: Mapping[str, Arm], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Images and top-1 in per cent of each class that has images."""
    labels = next(iter(arms.values())).labels
    return [
        {
            "name": name,
            "images": int(members.sum()),
            "top1": {arm: 100 * float(a.right[members].double().mean()) for arm, a in arms.items()},
        }
        for name, members in ((name, labels == index) for index, name in enumerate(classes))
        if members.any()
    ]


def _scaling(arms: Mapping[str, Arm], image_size: int, *, seconds: float) -> dict[str, Any]:
    models = {}
    for name, arm in arms.items():
        options = {**arm.recipe.model_kwargs(), "img_size": image_size, "num_classes": arm.logits.shape[-1]}
        models[name] = timm.create_model(arm.recipe.model, **options).to(next(arm.model.parameters()).device)
    speeds = images_per_second(models, image_size=image_size, batch_size=1, rounds=5, seconds=seconds)
    patches = next(iter(models.values())).patch_embed.num_patches
    return {
        "image_size": image_size,
        "patches": patches,
        "arms": {
            name: {
                "multiply_adds": multiply_adds(model, image_size),
                "images_per_second": speeds[name].median,
            }
            for name, model in models.items()
        },
    }


def _example(arms: Mapping[str, Arm], split: ImageSplit, row: int) -> Example:
    sample = split[row]
    assert sample is not None  # it was read for the predictions
    guesses = {arm.label: split.classes[int(arm.logits[row].argmax())] for arm in arms.values()}
    return Example(sample[0], truth=split.classes[sample[1]], guesses=guesses)
