"""Image classification: the data, timm's models and losses, accuracy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from lineardiff.runs.model import build_model
from lineardiff.train.data_record import data_record


class ClassificationTask:
    """Image classification, for :func:`lineardiff.train.train`.

    Mixup and CutMix mix images of the same process and the same part of the batch, with random numbers that are a
    function of (seed, step, rank): with mixing, another number of processes or parts is another experiment.

    Attributes:
        model: The network with weights drawn from the seed; (B, 3, image_size, image_size) to (B, classes).
        train_data: The augmented training images.
        validation: The validation images.
        classes: The class names; a label is an index into them.

    Raises:
        ValueError: The data or the model of the recipe do not exist or do not fit together.
    """

    def __init__(self, recipe: ClassificationRecipe) -> None:
        self.recipe = recipe
        splits = [open_images(recipe.data, s, bad_images=recipe.bad_images) for s in ("train", "validation")]
        check_same_classes(*splits)
        self._splits = splits
        self.classes = splits[0].classes
        if len(self.classes) < 2:
            raise ValueError(
                f"{recipe.data} has one class, {self.classes[0]}; expected at least two to classify."
            )
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
        self.model = build_model(
            recipe.model,
            recipe.model_kwargs(),
            num_classes=len(self.classes),
            image_size=recipe.image_size,
            drop_path=recipe.drop_path,
            seed=recipe.seed,
        )
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

    def data_record(self) -> dict[str, Any]:
        """Return the record of the training and the validation images."""
        return data_record(train=self._splits[0], validation=self._splits[1])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy of images (B, 3, H, W) and labels (B,), mixed and smoothed as in the recipe."""
        images, targets = batch
        if self._mix is not None:
            if len(images) % 2:
                raise self.recipe.error(
                    "batch_size", f"Mixup mixes in pairs, but a process gets {len(images)} images at a time"
                )
            images, targets = self._mix(images, targets)
        return self._criterion(model(images), targets)

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return loss (nats), top1 and, for six classes or more, top5 (percent) over all validation images.

        The processes share the images.
        """
        state = PartialState()
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
            batch_size=self.recipe.batch_size // (self.recipe.accumulate * state.num_processes),
            workers=self.recipe.workers,
            precision=self.recipe.precision,
            rank=state.process_index,
            world_size=state.num_processes,
        )
        return {name: metrics[name] for name in ("loss", "top1", "top5") if name in metrics}

    def picture(self, model: nn.Module) -> None:
        """Return None: there is nothing to show."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Do nothing: timm reads the weights and config.json."""

    def config(self) -> dict[str, Any]:
        """Return a description that `timm.create_model("local-dir:<run>", pretrained=True)` reads too."""
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
