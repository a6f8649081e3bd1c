"""``lineardiff evaluate``: the accuracy of trained weights. ``lineardiff evaluate fid`` is in its own file."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lineardiff.cli.arguments import parse
from lineardiff.suggest import suggest
from lineardiff.table import format_table

if TYPE_CHECKING:
    from torch import nn

    from lineardiff.data import ImageSplit, Transform

METRICS = ("top1", "top5", "loss")


@dataclass
class Evaluate:
    """Top-1, top-5 and loss of a run, or of one of timm's models with weights from a file.

    Generated images are scored with another command: lineardiff evaluate fid --help.
    """

    run: tyro.conf.Positional[Path | None] = None
    """Folder of a finished run, one of its checkpoints, or a file of weights in either."""
    model: str | None = None
    """Instead of a run: the name of a model, with --checkpoint and --data."""
    checkpoint: Path | None = None
    """Weights of --model: a .safetensors file, or a .pth file of tensors."""
    data: str | None = None
    """Images to score on, as in a recipe; None uses those the run was trained on."""
    split: Literal["train", "validation"] = "validation"
    """Which images of the data."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """Stop at a file that cannot be decoded and name it, or skip it."""
    batch_size: int = 128
    """Images per forward pass."""
    workers: int = 2
    """Processes that load images; 0 loads in the main process."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """no (float32), or autocast to bf16 or fp16."""
    device: str | None = None
    """Such as cpu or cuda:0; None uses the accelerator if there is one."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table."""


def run(words: Sequence[str]) -> None:
    if words and words[0] == "fid":
        importlib.import_module("lineardiff.cli.evaluate_fid").run(words[1:])
        return
    arguments = parse(Evaluate, words, prog="lineardiff evaluate")

    # Imported here because it takes seconds: help and mistakes in flags do not wait for it.
    from lineardiff.device import choose_device
    from lineardiff.evaluate import accuracy

    device = choose_device(arguments.device)
    model, transform, split = (_of_name if arguments.run is None else _of_run)(arguments)
    scores = accuracy(
        model,
        split,
        transform=transform,
        batch_size=arguments.batch_size,
        device=device,
        workers=arguments.workers,
        precision=arguments.precision,
        progress=True,
    )
    if arguments.as_json:
        print(json.dumps({"data": split.source, "split": arguments.split, **scores}))
        return
    rows = [
        (name, f"{scores[name]:.4f}" if name == "loss" else f"{scores[name]:.2f}")
        for name in METRICS
        if name in scores
    ]
    header = (f"{split.source}, {arguments.split}", "")
    print(format_table(header, [*rows, ("images", f"{scores['images']:,}")]))


def _of_run(arguments: Evaluate) -> "tuple[nn.Module, Transform, ImageSplit]":
    """Return the model of a run, its transform and the images to score."""
    from lineardiff.runs import load_run

    for flag in ("model", "checkpoint"):
        if getattr(arguments, flag) is not None:
            raise ValueError(
                f"--{flag} cannot be combined with a run, which names its model. Pass one or the other."
            )
    assert arguments.run is not None
    run = load_run(arguments.run)
    if "objective" in run.config():
        raise ValueError(
            f"{run.path} trained a DiT or SiT, which has no accuracy. Sample images with lineardiff sample and score "
            "them with lineardiff evaluate fid."
        )
    has_recipe = arguments.data is None and (run.path / "recipe.json").is_file()
    split = _images(arguments, run.recipe().data if has_recipe else None)
    if run.classes != split.classes:
        raise ValueError(
            f"The model was trained on other classes ({_few(run.classes)}) than {split.source} has "
            f"({_few(split.classes)}). Pass the data it was trained on."
        )
    return run.model(), run.transform(), split


def _of_name(arguments: Evaluate) -> "tuple[nn.Module, Transform, ImageSplit]":
    """Return --model with the weights of --checkpoint, timm's transform for it and the images to score."""
    if arguments.model is None or arguments.checkpoint is None:
        raise ValueError("Pass a run folder, or --model with --checkpoint; see lineardiff evaluate --help.")
    import timm
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    from lineardiff.data import eval_transform
    from lineardiff.runs import build_model, load_weights

    known = get_pretrained_cfg(arguments.model)
    if known is None:
        raise ValueError(
            f"There is no model {arguments.model!r}; {suggest(arguments.model, timm.list_models())}"
        )
    config = resolve_data_config(pretrained_cfg=known.to_dict())
    image_size = config["input_size"][-1]
    split = _images(arguments, None)
    model = build_model(arguments.model, {}, num_classes=len(split.classes), image_size=image_size)
    load_weights(model, arguments.checkpoint)
    fields = ("mean", "std", "crop_pct", "interpolation")
    return model, eval_transform(image_size=image_size, **{name: config[name] for name in fields}), split


def _images(arguments: Evaluate, default: str | None) -> "ImageSplit":
    from lineardiff.data import open_images

    data = arguments.data or default
    if data is None:
        raise ValueError("Name the images to score with --data, for example --data fashion.")
    return open_images(data, arguments.split, bad_images=arguments.bad_images)


def _few(classes: Sequence[str]) -> str:
    return f"{len(classes)}: {', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"
