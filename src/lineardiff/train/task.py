"""What the training loop asks of an objective."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset


class Task(Protocol):
    """An objective: a model, the data it learns from, its loss and its measure of success.

    The loop in `train/loop.py` knows nothing else of what is being learnt. Random numbers in `loss` come from
    the global generators of Python, NumPy and torch, which the loop seeds before every update.
    """

    @property
    def model(self) -> nn.Module:
        """The network, with its initial weights, on the CPU."""

    @property
    def train_data(self) -> Dataset[Any]:
        """The samples, of known length; the keys are the pairs of `data.sampling.EpochBatches`."""

    @property
    def repeats(self) -> int:
        """How often each drawn sample appears in a row (repeated augmentation); 1 for once."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """From samples to a batch, a nest of tensors; goes to the loader's processes, so it must pickle."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over `batch`, a scalar; `model` is `self.model` as prepared for the hardware."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Measures of success by name; every process calls it, what the main process returns is logged."""

    def picture(self, model: nn.Module) -> Tensor | None:
        """What the model makes, uint8 (3, H, W), logged at every validation by the main process; None: nothing."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Writes the result in formats of the objective's own into the folder of the run, in the main process."""

    def config(self) -> dict[str, Any]:
        """What `config.json` says of the model beside its weights: enough to build and to use it."""
