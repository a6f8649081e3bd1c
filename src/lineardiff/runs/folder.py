"""The folder of a run: what is written where, and whether it belongs to the recipe at hand."""

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from torchvision.transforms.functional import to_pil_image

from lineardiff.files import explain_disk_errors, write_atomically
from lineardiff.recipes import TrainingRecipe
from lineardiff.runs.checkpoint import list_checkpoints, remove_unfinished, weights_as_bytes
from lineardiff.runs.csv_log import CsvLog


class RunFolder:
    """recipe.json, train.csv, validation.csv, samples/, tensorboard/, checkpoints/; at the end model.safetensors
    & co.

    Every process reads it; `open` and what follows is for the main process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    def newest_checkpoint(self, recipe: TrainingRecipe, *, resume: bool) -> Path | None:
        """The checkpoint to go on from; None to begin.

        Raises:
            ValueError: there is one, but `resume` is False or it is of another recipe; the message names the
                fields.
        """
        saved = list_checkpoints(self.checkpoints)
        if not saved:
            return None
        if not resume:
            raise ValueError(f"{self.path} holds a run already: resume it, or choose or empty another output")
        file = self.path / "recipe.json"
        try:
            before = type(recipe).from_json(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not a recipe to resume ({error}): choose another output") from error
        changes = recipe.changes(before)
        if changes:
            told = "; ".join(f"{name} was {old!r} and is now {new!r}" for name, (new, old) in changes.items())
            raise ValueError(
                f"{file} is of another recipe: {told}. A resumed run may change only "
                f"{', '.join(sorted(recipe.may_change))}: give the old values, or choose another output"
            )
        return saved[-1]

    def open(self, recipe: TrainingRecipe, *, step: int) -> None:
        """Makes the folder ready to go on after `step` updates: what was logged past it is cut."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.checkpoints)
        write_atomically(self.path / "recipe.json", recipe.to_json())
        self.train = CsvLog(self.path / "train.csv", keep_to_step=step)
        self.validation = CsvLog(self.path / "validation.csv", keep_to_step=step)
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"), purge_step=step + 1)

    def plot(self, group: str, values: Mapping[str, float], *, step: int) -> None:
        """Adds numbers to TensorBoard's curves."""
        with explain_disk_errors(self.path / "tensorboard"):
            for name, value in values.items():
                self._tensorboard.add_scalar(f"{group}/{name}", value, step)

    def show(self, picture: Tensor, *, step: int) -> None:
        """Writes a picture, uint8 (3, H, W), to samples/step-%08d.png and to TensorBoard."""
        png = BytesIO()
        to_pil_image(picture.cpu()).save(png, "png")
        samples = self.path / "samples"
        samples.mkdir(exist_ok=True)
        write_atomically(samples / f"step-{step:08d}.png", png.getvalue())
        with explain_disk_errors(self.path / "tensorboard"):
            self._tensorboard.add_image("samples", picture, step)

    def flush(self) -> None:
        """Sends TensorBoard's curves to the disk."""
        with explain_disk_errors(self.path / "tensorboard"):
            self._tensorboard.flush()

    def close(self) -> None:
        """Ends TensorBoard's file; the tables are on the disk already."""
        with explain_disk_errors(self.path / "tensorboard"):
            self._tensorboard.close()

    def write_result(
        self, network: nn.Module, *, config: Mapping[str, Any], summary: Mapping[str, Any]
    ) -> None:
        """Writes model.safetensors, config.json and, last, summary.json."""
        write_atomically(self.path / "model.safetensors", weights_as_bytes(network))
        write_atomically(self.path / "config.json", json.dumps(config, indent=2) + "\n")
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        return json.loads((self.path / "summary.json").read_text())
