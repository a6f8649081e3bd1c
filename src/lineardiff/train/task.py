"""The interface between the training loop and an objective."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from lineardiff.recipes import TrainingRecipe

__all__ = ["Task"]


class Task(Protocol):
    """An objective: a recipe, a model, the data it learns from, its loss and its metrics.

    The loop in `train/loop.py` knows nothing else about what is learned. Random numbers in `loss` come from the global
    generators of Python, NumPy and torch, which the loop seeds before every update.
    """

    @property
    def recipe(self) -> TrainingRecipe:
        """How to train."""

    @property
    def model(self) -> nn.Module:
        """The network with its initial weights, on the CPU."""

    @property
    def train_data(self) -> Dataset[Any]:
        """The samples, of known length; the keys are the pairs of `data.sampling.EpochBatches`."""

    @property
    def repeats(self) -> int:
        """How often each drawn sample appears consecutively (repeated augmentation); usually 1."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Function from samples to a batch of nested tensors; it is sent to loader processes, so it must pickle."""

    def data_record(self) -> dict[str, Any]:
        """Return a record of the data that shows whether they changed, JSON-serialisable.

        It is {split: {class name: {"label": index, "images": count, "checksum": of names and sizes}}}.
        """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over `batch`, a scalar; `model` is `self.model` as prepared for the hardware."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return metrics by name. Every process calls it; the result of the main process is logged."""

    def picture(self, model: nn.Module) -> Tensor | None:
        """Return a picture of the model's output, uint8 (3, H, W), to log at validation, or None."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the result in further formats into the folder of the run; only the main process calls it."""

    def config(self) -> dict[str, Any]:
        """Return the content of config.json: what is needed to build and use the model, except its weights."""
