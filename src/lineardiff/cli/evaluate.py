"""``lineardiff evaluate``: accuracy of trained weights; ``lineardiff evaluate fid`` is a file of its own."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lineardiff.cli.arguments import parse
from lineardiff.recipes import ClassificationRecipe
from lineardiff.suggest import suggest
from lineardiff.table import format_table

if TYPE_CHECKING:
    pass

METRICS = ("top1", "top5", "loss")
IMAGE_FIELDS = ("mean", "std", "crop_pct", "interpolation")


@dataclass
class Evaluate:
    """Top-1, top-5 and loss of a run, or of any of timm's models with weights from a file.

    Generated images are scored by another command: lineardiff evaluate fid --help.
    """

    run: tyro.conf.Positional[Path | None] = None
    """Folder of a finished run, one of its checkpoints, or a safetensors file in one of these."""
    model: str | None = None
    """Instead of a run: the name of a model, with --checkpoint and --data."""
    checkpoint: Path | None = None
    """Weights of --model, a safetensors file."""
    data: str | None = None
    """Images to score on, as in a recipe; None takes those the run was trained on."""
    split: Literal["train", "validation"] = "validation"
    """Which images of the data."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """What a file that is no image does: stop with its name, or be left out."""
    batch_size: int = 128
    """Images of one forward pass."""
    workers: int = 2
    """Processes that load images; 0 loads in this one."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """no (float32), or autocast to bf16 or fp16."""
    device: str | None = None
    """Such as cpu or cuda:0; None takes the accelerator if there is one."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table."""


@dataclass
class Trained:
    """A model, its weights, and the images it is for."""

    architecture: str
    model_args: dict[str, Any]
    transform: dict[str, Any]
    """Arguments of `lineardiff.data.eval_transform`."""
    weights: Path
    data: str | None
    classes: tuple[str, ...] | None


def run(words: Sequence[str]) -> None:
    if words and words[0] == "fid":
        importlib.import_module("lineardiff.cli.evaluate_fid").run(words[1:])
        return
    arguments = parse(Evaluate, words, prog="lineardiff evaluate")
    trained = _named(arguments) if arguments.run is None else _found(arguments.run)
    data = arguments.data or trained.data
    if data is None:
        raise ValueError("which images? Name them with --data, for example --data fashion")
    scores = {"data": data, "split": arguments.split, **_score(trained, data, arguments)}
    if arguments.as_json:
        print(json.dumps(scores))
        return
    rows = [(name, f"{scores[name]:.4f}" if name == "loss" else f"{scores[name]:.2f}") for name in METRICS]
    print(format_table((f"{data}, {arguments.split}", ""), [*rows, ("images", f"{scores['images']:,}")]))


def _score(trained: Trained, data: str, arguments: Evaluate) -> dict[str, float]:
    # Here, because it takes seconds: help and mistakes in flags do not wait for it.
    from lineardiff.data import eval_transform, open_images
    from lineardiff.device import choose_device
    from lineardiff.evaluate import accuracy
    from lineardiff.runs.checkpoint import load_weights
    from lineardiff.train.classification import build_model

    split = open_images(data, arguments.split, bad_images=arguments.bad_images)
    if trained.classes not in (None, split.classes):
        raise ValueError(
            f"the model tells other classes apart ({_few(trained.classes)}) than {data} has "
            f"({_few(split.classes)}); give the data it was trained on"
        )
    recipe = ClassificationRecipe(
        model=trained.architecture,
        model_args=tuple(f"{name}={value!r}" for name, value in trained.model_args.items()),
        image_size=trained.transform["image_size"],
        drop_path=0.0,
    )
    model = build_model(recipe, num_classes=len(split.classes))
    load_weights(model, trained.weights)
    return accuracy(
        model,
        split,
        transform=eval_transform(**trained.transform),
        batch_size=arguments.batch_size,
        device=choose_device(arguments.device),
        workers=arguments.workers,
        precision=arguments.precision,
        progress=True,
    )


def _named(arguments: Evaluate) -> Trained:
    """The model of --model and --checkpoint; its images are prepared as timm does for it."""
    if arguments.model is None or arguments.checkpoint is None:
        raise ValueError("give a run folder, or --model with --checkpoint; see lineardiff evaluate --help")
    import timm
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    known = get_pretrained_cfg(arguments.model)
    if known is None:
        hint = suggest(arguments.model, timm.list_models())
        raise ValueError(f"there is no model {arguments.model!r}; {hint}")
    images = resolve_data_config(pretrained_cfg=known.to_dict())
    transform = {"image_size": images["input_size"][-1], **{name: images[name] for name in IMAGE_FIELDS}}
    return Trained(arguments.model, {}, transform, arguments.checkpoint, data=None, classes=None)


def _found(path: Path) -> Trained:
    """The model of a run folder, of a checkpoint, or of a safetensors file in one of these."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; expected the folder of a run, such as runs/demo")
    weights = path if path.is_file() else path / "model.safetensors"
    if not weights.exists():
        raise ValueError(
            f"{path} holds no model.safetensors: no run, or one that has not finished; "
            "give one of its checkpoints (checkpoints/step-...), or continue it with lineardiff train"
        )
    folder = weights.parent
    run_folder = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    recipe_file, config_file = run_folder / "recipe.json", folder / "config.json"
    recipe = _recipe(recipe_file) if recipe_file.exists() else None
    if config_file.exists():
        return _configured(config_file, weights, data=recipe.data if recipe else None)
    if recipe is None:
        raise ValueError(f"{folder} holds no config.json, which names the model of the weights; give --model")
    transform = {name: getattr(recipe, name) for name in ("image_size", "crop_pct", "interpolation")}
    return Trained(recipe.model, recipe.model_kwargs(), transform, weights, data=recipe.data, classes=None)


def _recipe(file: Path) -> ClassificationRecipe:
    text = file.read_text()
    if "objective" in json.loads(text):
        raise ValueError(
            f"{file.parent} holds a generator of images, which has no accuracy: draw images with lineardiff sample, "
            "score them with lineardiff evaluate fid"
        )
    return ClassificationRecipe.from_json(text)


def _configured(file: Path, weights: Path, *, data: str | None) -> Trained:
    """The model that a config.json describes, as `lineardiff train` writes it."""
    try:
        config = json.loads(file.read_text())
        model_args = {name: _frozen(value) for name, value in config["model_args"].items()}
        model_args.pop("num_classes", None)
        transform = {name: config[name] for name in ("image_size", *IMAGE_FIELDS)}
        return Trained(config["architecture"], model_args, transform, weights, data, tuple(config["classes"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a config.json of lineardiff: {error!r}") from error


def _frozen(value: Any) -> Any:
    """JSON knows lists only, models take tuples."""
    return tuple(value) if isinstance(value, list) else value


def _few(classes: Sequence[str]) -> str:
    return f"{len(classes)}: {', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"
