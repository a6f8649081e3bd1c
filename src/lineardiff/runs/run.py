"""The folder of a run: what is written where, by the loop that trains and by whoever uses the result.

recipe.json                    the recipe, rewritten when a run is resumed
data.json                      what the training data were, see `lineardiff.train.task.Task.data_record`
config.json                    the model, its classes and its images; with model.safetensors, timm reads it
train.csv, validation.csv      loss and metrics
checkpoints/step-00000100/     see `lineardiff.runs.checkpoint`
samples/, tensorboard/         pictures and curves
model.safetensors, pipeline/   the result, and
summary.json                   written last
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lineardiff.files import explain_disk_errors, write_atomically
from lineardiff.models import create_dit
from lineardiff.recipes import ClassificationRecipe, GenerationRecipe, TrainingRecipe
from lineardiff.runs.checkpoint import (
    check_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    remove_unfinished,
    save_checkpoint,
)
from lineardiff.runs.csv_log import CsvLog, read_table
from lineardiff.runs.lock import locked
from lineardiff.runs.model import build_model
from lineardiff.runs.weights import load_weights, weights_as_bytes

if TYPE_CHECKING:
    from lineardiff.data import Transform
    from lineardiff.pipelines.pipeline import LinearDiffPipeline

__all__ = ["Curves", "Run", "RunWriter", "load_run"]

_CHECKPOINTS, _RECIPE, _CONFIG, _DATA = "checkpoints", "recipe.json", "config.json", "data.json"
_WEIGHTS, _SUMMARY, _PIPELINE = "model.safetensors", "summary.json", "pipeline"


@dataclass(frozen=True)
class Curves:
    """The rows of train.csv and validation.csv, as dictionaries of floats."""

    train: list[dict[str, float]]
    validation: list[dict[str, float]]


def load_run(path: str | Path) -> "Run":
    """Open a run for reading: `load_run("runs/demo").model()`.

    Args:
        path: The folder of a run, one of its checkpoints, or a file of weights in either.

    Raises:
        ValueError: There is no run.
    """
    return Run(path)


class Run:
    """A run on disk, or one of its checkpoints.

    Args:
        path: As :func:`load_run` takes it.

    Attributes:
        path: The folder of the run.

    Raises:
        ValueError: There is no run at `path`.
    """

    def __init__(self, path: str | Path) -> None:
        given = Path(path).expanduser()
        if not given.exists():
            raise ValueError(f"{given} does not exist; expected the folder of a run, such as runs/demo.")
        self._file = given if given.is_file() else None
        folder = given.parent if given.is_file() else given
        at_checkpoint = folder.absolute().parent.name == _CHECKPOINTS
        self._checkpoint = folder if at_checkpoint else None
        self.path = folder.absolute().parent.parent if at_checkpoint else folder
        if not any((self.path / name).is_file() for name in (_RECIPE, _CONFIG)):
            raise ValueError(
                f"{given} is not a run: {self.path} holds neither {_RECIPE} nor {_CONFIG}. Pass the folder of a run, "
                "such as runs/demo, or one of its checkpoints."
            )

    def recipe(self) -> ClassificationRecipe | GenerationRecipe:
        """Return the recipe the run was trained with.

        Raises:
            ValueError: recipe.json is missing or damaged.
        """
        file = self.path / _RECIPE
        values = _read_object(file)
        kind = GenerationRecipe if "objective" in values else ClassificationRecipe
        try:
            return kind.from_json(json.dumps(values))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def config(self) -> dict[str, Any]:
        """Return config.json, which describes the model and what it was trained on, with tuples for lists.

        Raises:
            ValueError: config.json is missing or damaged, or a value has the wrong type; the message names it.
        """
        file = self.path / _CONFIG
        config = _tuples(_read_object(file))
        for name, (is_right, expected) in (_FIELDS | (_FLOW if "objective" in config else _IMAGES)).items():
            if name not in config:
                raise ValueError(f"{file} does not say {name}; expected {expected}. Restore it from a copy.")
            if not is_right(config[name]):
                raise ValueError(
                    f"{file}: {name}={config[name]!r}; expected {expected}. Restore it from a copy."
                )
        return config

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; a label is an index into them."""
        return self.config()["classes"]

    @property
    def finished(self) -> bool:
        """Whether the run was trained to its end."""
        return (self.path / _SUMMARY).is_file()

    def model(self) -> nn.Module:
        """Return the network with the trained weights, in eval mode, on the CPU.

        They are the averaged weights where the recipe asks for an EMA, of a checkpoint too; to choose, open the file
        itself, such as `load_run("runs/demo/checkpoints/step-00000100/ema.safetensors")`.

        Raises:
            ValueError: The run has not finished, or a file is missing or damaged.
        """
        config, file = self.config(), self._weights()
        arguments = dict(config["model_args"])
        if "objective" in config:
            network: nn.Module = create_dit(config["architecture"], **arguments)
        else:
            arguments.pop("num_classes", None)
            network = build_model(
                config["architecture"],
                arguments,
                num_classes=len(config["classes"]),
                image_size=config["image_size"],
            )
        load_weights(network, file)
        return network.eval()

    def transform(self) -> "Transform":
        """Return the function from a PIL image to what the classifier takes, as at validation.

        Raises:
            ValueError: The run trained no classifier.
        """
        from lineardiff.data import eval_transform

        config = self.config()
        if "objective" in config:
            raise ValueError(f"{self.path} trained a DiT or SiT, which takes no images.")
        return eval_transform(**{name: config[name] for name in ("image_size", *_IMAGES)})

    def pipeline(self, *, vae: str | None = None) -> "LinearDiffPipeline":
        """Return the pipeline that samples images from the trained DiT or SiT, also of a checkpoint.

        Args:
            vae: Folder or hub name of another autoencoder than the recipe's.

        Raises:
            ValueError: The run trained a classifier, has not finished, or a file is missing or damaged.
            ImportError: diffusers is not installed.
        """
        from lineardiff.pipelines.pipeline import LinearDiffPipeline
        from lineardiff.pipelines.pretrained import load_pipeline, load_vae

        config = self.config()
        if "objective" not in config:
            raise ValueError(f"{self.path} trained a classifier, which samples no images.")
        if self._exported is not None:
            return load_pipeline(self._exported, vae=vae)
        vae = vae or (self.recipe().vae if (self.path / _RECIPE).is_file() else None)  # type: ignore[union-attr]
        return LinearDiffPipeline(
            transformer=self.model(),
            vae=load_vae(vae) if vae is not None else None,
            objective=config["objective"],
            path=config["path"],
            prediction=config["prediction"],
            class_names=list(config["classes"]),
        )

    @property
    def pipeline_source(self) -> Path:
        """The folder or the file that :meth:`pipeline` reads the weights from."""
        return self._exported or self._weights()

    @property
    def _exported(self) -> Path | None:
        """The saved pipeline of a finished run; a checkpoint has none."""
        folder = self.path / _PIPELINE
        return folder if self._checkpoint is None and self._file is None and folder.is_dir() else None

    def curves(self) -> Curves:
        """Return the rows of train.csv and validation.csv; a file that does not exist yet has none.

        Raises:
            ValueError: A file is damaged.
        """
        files = (self.path / "train.csv", self.path / "validation.csv")
        return Curves(*(read_table(file) if file.is_file() else [] for file in files))

    def checkpoints(self) -> list[Path]:
        """Return the folders of the complete checkpoints, oldest first."""
        return list_checkpoints(self.path / _CHECKPOINTS)

    def summary(self) -> dict[str, Any]:
        """Return summary.json: the final metrics, the speed and the machine.

        Raises:
            ValueError: The run has not finished, or the file is damaged.
        """
        if not self.finished:
            raise ValueError(f"{self.path} has no {_SUMMARY}: {_UNFINISHED}")
        return _read_object(self.path / _SUMMARY)

    def _weights(self) -> Path:
        if self._checkpoint is not None:
            check_checkpoint(self._checkpoint)
            return self._file or self._checkpoint / f"{self.config()['weights']}.safetensors"
        if self._file is not None:
            return self._file
        file = self.path / _WEIGHTS
        if not file.is_file():
            raise ValueError(f"{self.path} has no {_WEIGHTS}: {_UNFINISHED}")
        return file


class RunWriter:
    """The folder of a run, for the training loop; only the main process uses it.

    Args:
        path: May not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoints = path / _CHECKPOINTS

    def lock(self) -> AbstractContextManager[None]:
        """Keep other trainings out of the folder, see :func:`lineardiff.runs.lock.locked`."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; expected a folder for the run.")
        return locked(self.path / "train.lock")

    def resume_point(
        self, recipe: TrainingRecipe, data: Mapping[str, Any], *, resume: bool, accept_changed_data: bool
    ) -> Path | None:
        """Return the newest intact checkpoint, or None to start.

        Raises:
            ValueError: There is a checkpoint, but `resume` is False, it is of another recipe or of other data, or all
                checkpoints are damaged; the message names what differs.
        """
        if not list_checkpoints(self._checkpoints):
            return None
        if not resume:
            raise ValueError(f"{self.path} already holds a run. Resume it, or choose another output folder.")
        file = self.path / _RECIPE
        try:
            before = type(recipe).from_json(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file} is not a recipe that can be resumed ({error}). Restore it from a copy, or choose another "
                "output folder."
            ) from error
        changes = recipe.changes(before)
        if changes:
            listed = "; ".join(
                f"{name} was {old!r} and is now {new!r}" for name, (new, old) in changes.items()
            )
            raise ValueError(
                f"{file} is of another recipe: {listed}. A resumed run may change only "
                f"{', '.join(sorted(recipe.may_change))}. Pass the old values, or choose another output folder."
            )
        changed = "" if accept_changed_data else _changed_data(_read_object(self.path / _DATA), data)
        if changed:
            raise ValueError(
                f"The data have changed since {self.path} was trained: {changed}. Restore them, choose another output "
                "folder, or resume nevertheless with --accept-changed-data (accept_changed_data=True)."
            )
        return newest_checkpoint(self._checkpoints)

    def open(
        self, recipe: TrainingRecipe, *, config: Mapping[str, Any], data: Mapping[str, Any], step: int
    ) -> None:
        """Prepare the folder to continue after `step` updates; rows past it are removed."""
        from torch.utils.tensorboard import SummaryWriter

        remove_unfinished(self._checkpoints)
        self.train = CsvLog(self.path / "train.csv", keep_to_step=step)
        self.validation = CsvLog(self.path / "validation.csv", keep_to_step=step)
        for name, content in ((_RECIPE, recipe.to_json()), (_DATA, _json(data)), (_CONFIG, _json(config))):
            write_atomically(self.path / name, content)
        self._tensorboard = SummaryWriter(str(self.path / "tensorboard"), purge_step=step + 1)

    def plot(self, group: str, values: Mapping[str, float], *, step: int) -> None:
        """Add numbers to TensorBoard's curves."""
        with explain_disk_errors(self.path / "tensorboard"):
            for name, value in values.items():
                self._tensorboard.add_scalar(f"{group}/{name}", value, step)

    def show(self, picture: Tensor, *, step: int) -> None:
        """Write a picture, uint8 (3, H, W), to samples/step-%08d.png and to TensorBoard."""
        from torchvision.transforms.functional import to_pil_image

        png = BytesIO()
        to_pil_image(picture.cpu()).save(png, "png")
        samples = self.path / "samples"
        samples.mkdir(exist_ok=True)
        write_atomically(samples / f"step-{step:08d}.png", png.getvalue())
        with explain_disk_errors(self.path / "tensorboard"):
            self._tensorboard.add_image("samples", picture, step)

    def save_checkpoint(
        self, step: int, *, weights: Mapping[str, nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint, see :func:`lineardiff.runs.checkpoint.save_checkpoint`."""
        with explain_disk_errors(self.path / "tensorboard"):
            self._tensorboard.flush()
        save_checkpoint(self._checkpoints, step, weights=weights, state=state)

    def close(self) -> None:
        """Close TensorBoard's file; the tables are on disk already."""
        with explain_disk_errors(self.path / "tensorboard"):
            self._tensorboard.close()

    def write_result(
        self, network: nn.Module, *, export: Callable[[nn.Module, Path], None], summary: Mapping[str, Any]
    ) -> None:
        """Write what the task exports, model.safetensors and, last, summary.json."""
        export(network, self.path)
        write_atomically(self.path / _WEIGHTS, weights_as_bytes(network))
        write_atomically(self.path / _SUMMARY, _json(summary))


_UNFINISHED = (
    "the run has not finished. Rerun lineardiff train to resume it, or pass one of its checkpoints "
    "(checkpoints/step-...)."
)

_Check = tuple[Callable[[Any], bool], str]


def _one_of(*choices: str) -> _Check:
    return lambda value: value in choices, " or ".join(choices)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_three(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and all(map(_is_number, value))


_FIELDS: dict[str, _Check] = {
    "architecture": (lambda v: isinstance(v, str), "the name of a model"),
    "model_args": (lambda v: isinstance(v, dict), "an object of arguments"),
    "classes": (
        lambda v: isinstance(v, tuple) and all(isinstance(c, str) for c in v) and v != (),
        "a list of names",
    ),
    "image_size": (
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
        "a whole number of pixels",
    ),
    "weights": _one_of("model", "ema"),
}
_IMAGES: dict[str, _Check] = {
    "mean": (_are_three, "three finite numbers, one for each channel"),
    "std": (lambda v: _are_three(v) and min(v) > 0, "three finite numbers above 0, one for each channel"),
    "crop_pct": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
    "interpolation": _one_of("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"),
}
_FLOW: dict[str, _Check] = {
    "objective": _one_of("flow", "diffusion"),
    "path": _one_of("linear", "gvp", "vp"),
    "prediction": _one_of("velocity", "score", "noise"),
    "space": _one_of("latents", "rgb", "grey"),
}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(
            f"{file} does not exist. Restore it from a copy, or pass the folder of a run of lineardiff train."
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}). Restore it from a copy.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds {value!r:.40}; expected a JSON object. Restore it from a copy.")
    return value


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _tuples(value: Any) -> Any:
    """Return JSON data with tuples for lists, which is what models take."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _changed_data(before: Mapping[str, Any], now: Mapping[str, Any], *, shown: int = 3) -> str:
    """Return the differences of two records in words, or "" if there are none."""
    now = json.loads(json.dumps(now))
    differences = []
    for split in sorted({*before, *now}):
        old, new = before.get(split) or {}, now.get(split) or {}
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                differences.append(_change(split, name, old.get(name), new.get(name)))
    more = len(differences) - shown
    return "; ".join(differences[:shown]) + (f"; and {more} more" if more > 0 else "")


def _change(split: str, name: str, old: Any, new: Any) -> str:
    if old is None or new is None:
        return f"{split}: {name} is {'new' if old is None else 'gone'}"
    if old["label"] != new["label"]:
        return f"{split}: {name} was class {old['label']} and is class {new['label']}"
    if old["images"] != new["images"]:
        return f"{split}: {name} had {old['images']} images and has {new['images']}"
    return f"{split}: {name} has other images (names or sizes)"
