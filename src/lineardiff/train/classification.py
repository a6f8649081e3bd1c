"""The objective "tell images apart": the data, timm's model and losses, accuracy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import PartialState
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.utils.data import default_collate

from lineardiff.data import (
    Augmented,
    check_same_classes,
    eval_transform,
    open_images,
    subset,
    train_transform,
)
from lineardiff.evaluate.accuracy import accuracy
from lineardiff.recipes import ClassificationRecipe
from lineardiff.suggest import suggest


class ClassificationTask:
    """Image classification as `train` takes it.

    Mixup and CutMix mix an image with one of the same process and part of the batch, by numbers that follow
    from (seed, step, rank): with mixing, another number of processes or parts is another experiment.

    Attributes:
        model: the network with weights drawn from the seed; (B, 3, image_size, image_size) to (B, classes).
        train_data: the augmented training images.
        validation: the validation images.
        classes: the class names; a label is an index into them.

    Raises:
        ValueError: data or model of the recipe do not exist or do not fit together.
    """

    def __init__(self, recipe: ClassificationRecipe) -> None:
        self.recipe = recipe
        splits = [open_images(recipe.data, s, bad_images=recipe.bad_images) for s in ("train", "validation")]
        check_same_classes(*splits)
        self.classes = splits[0].classes
        self.train_data = Augmented(
            subset(splits[0], limit=recipe.train_limit, seed=recipe.seed),
            train_transform(
                image_size=recipe.image_size,
                train_crop=recipe.train_crop,
                crop_scale=recipe.crop_scale,
                auto_augment=recipe.auto_augment,
                color_jitter=recipe.color_jitter,
                random_erasing=recipe.random_erasing,
                hflip=recipe.hflip,
                interpolation=recipe.interpolation,
                mean=IMAGENET_DEFAULT_MEAN,
                std=IMAGENET_DEFAULT_STD,
            ),
        )
        self.validation = subset(splits[1], limit=recipe.validation_limit, seed=recipe.seed)
        self.repeats = recipe.repeated_augmentation
        self.collate = default_collate
        self.model = build_model(recipe, num_classes=len(self.classes))
        self._mix = None
        self._criterion: Callable[[Tensor, Tensor], Tensor] = LabelSmoothingCrossEntropy(
            recipe.label_smoothing
        )
        if recipe.mixup or recipe.cutmix:
            self._criterion = SoftTargetCrossEntropy()
            self._mix = Mixup(
                mixup_alpha=recipe.mixup,
                cutmix_alpha=recipe.cutmix,
                prob=recipe.mixup_prob,
                switch_prob=recipe.mixup_switch_prob,
                label_smoothing=recipe.label_smoothing,
                num_classes=len(self.classes),
            )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of images (B, 3, H, W), labels (B,), mixed and smoothed as the recipe says."""
        images, targets = batch
        if self._mix is not None:
            if len(images) % 2:
                raise self.recipe.error(
                    "batch_size", f"Mixup mixes in pairs, but a process gets {len(images)} images at a time"
                )
            images, targets = self._mix(images, targets)
        return self._criterion(model(images), targets)

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Over all validation images: loss (nats), top1 and top5 (per cent). Only the main process works."""
        if not PartialState().is_main_process:
            return {}
        metrics = accuracy(
            model,
            self.validation,
            transform=eval_transform(
                image_size=self.recipe.image_size,
                crop_pct=self.recipe.crop_pct,
                interpolation=self.recipe.interpolation,
                mean=IMAGENET_DEFAULT_MEAN,
                std=IMAGENET_DEFAULT_STD,
            ),
            batch_size=self.recipe.batch_size // (self.recipe.accumulate * PartialState().num_processes),
            workers=self.recipe.workers,
            precision=self.recipe.precision,
        )
        return {name: metrics[name] for name in ("loss", "top1", "top5")}

    def picture(self, model: nn.Module) -> None:
        """There is none."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Nothing: the weights and config.json are what timm reads."""

    def config(self) -> dict[str, Any]:
        """Flat for people, and nested as `timm.create_model("local-dir:<run>", pretrained=True)` reads it."""
        recipe = self.recipe
        images = {
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "crop_pct": recipe.crop_pct,
            "interpolation": recipe.interpolation,
        }
        return {
            "architecture": recipe.model,
            "model_args": {**recipe.model_kwargs(), "num_classes": len(self.classes)},
            "classes": self.classes,
            "image_size": recipe.image_size,
            **images,
            "pretrained_cfg": {
                **images,
                "input_size": (3, recipe.image_size, recipe.image_size),
                "num_classes": len(self.classes),
                "label_names": self.classes,
            },
        }


def build_model(recipe: ClassificationRecipe, *, num_classes: int) -> nn.Module:
    """The recipe's model from timm's registry, its weights drawn from the recipe's seed.

    Raises:
        ValueError: timm knows no such model, it does not take the arguments, or not images of this size.
    """
    if not timm.is_model(recipe.model):
        hint = suggest(recipe.model, timm.list_models())
        raise recipe.error("model", f"no model of that name is registered; {hint}")

    def create(**drop_path: float) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            return timm.create_model(
                recipe.model, num_classes=num_classes, **drop_path, **recipe.model_kwargs()
            )

    try:
        try:
            model = create(
                drop_path_rate=recipe.drop_path
            )  # 0 too: some models would take another by default
        except TypeError as error:
            if recipe.drop_path or "drop_path_rate" not in str(error):
                raise
            model = create()  # this one has no stochastic depth
    except TypeError as error:
        raise recipe.error("model_args", f"{recipe.model} does not take them: {error}") from error
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, recipe.image_size, recipe.image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise recipe.error(
            "image_size",
            f"{recipe.model} does not take images of this size ({error}); "
            f"give the size the model is for, or model_args img_size={recipe.image_size}",
        ) from error
    return model
