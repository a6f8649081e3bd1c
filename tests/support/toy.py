"""A task without images, and a small recipe with images, for the tests of this folder."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from lineardiff.recipes import TrainingRecipe, demo

TOY = TrainingRecipe(
    name="toy",
    model="toy",
    epochs=3,
    batch_size=8,
    warmup_epochs=1,
    learning_rate=0.1,
    min_learning_rate=0.01,
    warmup_learning_rate=0.001,
    weight_decay=0.0,
    optimizer="sgd",
    workers=0,
    log_every=1,
    checkpoint_every=4,
)  # 40 samples: 5 updates an epoch, 15 in all

TINY = replace(
    demo(),
    name="tiny",
    model_args=(
        "img_size=16",
        "patch_size=4",
        "embed_dim=32",
        "depth=2",
        "num_heads=2",
        "contrast_grid=(2,2)",
    ),
    image_size=16,
    epochs=2,
    batch_size=16,
    train_limit=96,
    validation_limit=32,
    warmup_epochs=1,
    workers=0,
    log_every=3,
    checkpoint_every=4,
)  # 6 updates an epoch, 12 in all

HARD = replace(
    TINY,
    name="hard",
    accumulate=2,
    label_smoothing=0.1,
    mixup=0.8,
    cutmix=1.0,
    drop_path=0.2,
    random_erasing=0.5,
    auto_augment="rand-m9-mstd0.5-inc1",
    ema_decay=0.9,
    clip_grad=1.0,
    repeated_augmentation=2,
    log_every=5,
)  # everything random is on; rows, epochs and checkpoints never fall on the same update


class Points(Dataset[tuple[Tensor, Tensor]]):
    """40 points in 5 dimensions with a noisy linear target; the noise is that of the sample's seed."""

    def __init__(self) -> None:
        self.x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        index, seed = key
        noise = torch.randn((), generator=torch.Generator().manual_seed(seed))
        return self.x[index], self.x[index].sum() + 0.1 * noise


class ToyTask:
    """Linear regression. `seen` holds the weights that each call of `loss` found."""

    repeats = 1

    def __init__(self, recipe: TrainingRecipe = TOY, model: nn.Module | None = None) -> None:
        self.recipe = recipe
        self.model = nn.Linear(5, 1) if model is None else model
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(0.1)
        self.train_data = Points()
        self.collate = default_collate
        self.seen: list[Tensor] = []

    def data_record(self) -> dict[str, Any]:
        return {"train": {"points": {"label": 0, "images": 40, "checksum": ""}}}

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.seen.append(flat(self.model))
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

    def validate(self, model: nn.Module) -> dict[str, float]:
        return {"distance": (flat(model) - 1).norm().item()}

    def picture(self, model: nn.Module) -> None:
        pass

    def export(self, model: nn.Module, folder: Path) -> None:
        pass

    def config(self) -> dict[str, Any]:
        return {"architecture": "toy"}


def flat(model: nn.Module) -> Tensor:
    """All parameters in one new vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def fingerprint(run: Path) -> dict[str, str]:
    """What must be equal for two runs to be the same, bit for bit."""
    names = ("train.csv", "validation.csv", "model.safetensors", "config.json")
    return {name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names}


def rows(file: Path) -> list[dict[str, float]]:
    """A table of a run folder."""
    head, *lines = file.read_text().splitlines()
    return [dict(zip(head.split(","), map(float, line.split(",")), strict=True)) for line in lines]
