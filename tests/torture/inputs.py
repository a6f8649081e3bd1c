"""Bad values for every flag of every command, and for the arguments of the Python interface."""

import random
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import lineardiff
from tests.torture.harness import Section, in_child
from tests.torture.runs import CLASSIFIER, GENERATOR, command, trained

NUMBERS = ("nan", "inf", "-inf", "1e400", "three", "")  # refused by every flag that is a number
DOUBTFUL = ("-1", "0", "1e30", "99999999999999999999")  # refused, or harmless


def run(section: Section, folder: Path, seconds: float, rng: random.Random) -> None:
    end = time.monotonic() + seconds
    classifier = trained(folder / "classifier", CLASSIFIER)
    generative = trained(folder / "generative", GENERATOR)
    images = _images(folder)
    cases = [(what, partial(_python, call), True) for what, call in _calls(classifier, generative)]
    for words, refused in _lines(folder, classifier, generative, images):
        cases.append((" ".join(words), partial(command, *words), refused))
    rng.shuffle(cases)
    for what, work, refused in cases:
        if time.monotonic() > end:
            section.counts["not reached"] += 1
            continue
        judge = section.must_be_refused if refused else section.must_not_crash
        judge(what, in_child(work))


def _images(folder: Path) -> Path:
    """Two classes of three images each, a file that is no image, and hidden files."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog", ".ipynb_checkpoints"):
            (folder / "images" / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / split / name / f"{i}.png")
    broken = folder / "broken"
    for split in ("train", "val"):
        (broken / split / "cat").mkdir(parents=True)
        (broken / split / "cat" / "0.png").write_bytes(b"not an image")
    return folder / "images"


def _lines(
    folder: Path, classifier: Path, generative: Path, images: Path
) -> Iterator[tuple[list[str], bool]]:
    """Command lines, and whether they must be refused."""
    from lineardiff.cli import evaluate, evaluate_fid, latents, sample
    from lineardiff.recipes import ClassificationRecipe, GenerationRecipe

    quick = ["--dry-run"]
    commands: list[tuple[list[str], type, list[str]]] = [
        (list(CLASSIFIER), ClassificationRecipe, quick),
        (list(GENERATOR), GenerationRecipe, quick),
        (["evaluate", str(classifier), "--workers", "0"], evaluate.Evaluate, []),
        (
            [
                "sample",
                str(generative),
                "--output",
                str(folder / "samples"),
                "--num-images",
                "1",
                "--steps",
                "1",
            ],
            sample.Sample,
            [],
        ),
        (
            [
                "evaluate",
                "fid",
                str(images / "train"),
                "--reference",
                str(images / "val"),
                "--features",
                "lite0",
            ],
            evaluate_fid.EvaluateFid,
            [],
        ),
        (
            ["latents", str(images), "--vae", str(folder / "nothing"), "--output", str(folder / "latents")],
            latents.WriteLatents,
            [],
        ),
    ]
    for base, options, tail in commands:
        hints = typing.get_type_hints(options)
        for field in fields(options):
            flag = "--" + field.name.removeprefix("as_").replace("_", "-")
            if not _is_number(hints[field.name]):
                continue
            count = 2 if "tuple" in str(hints[field.name]) else 1
            for value in NUMBERS:
                yield [*base, flag, *[value] * count, *tail], True
            for value in DOUBTFUL:
                yield [*base, flag, *[value] * count, *tail], False
    for args in (
        "patch_size=0",
        "patch_size=-4",
        "depth=0",
        "depth=nan",
        "num_heads=0",
        "num_heads=5",
        "embed_dim=0",
        "img_size=0",
        "weight_init=unknown",
        "contrast_grid=(0,0)",
        "contrast_grid=(9,9)",
        "no_such=1",
        "softmax=both",
        "tokens=none",
        "attention=mystery",
        "num_heads='2'",
        "depth=None",
        "embed_dim=[32]",
    ):
        yield [*CLASSIFIER, *quick, "--model-args", "img_size=16", args], True
    for args in (
        "patch_size=0",
        "depth=0",
        "dim=0",
        "num_heads=0",
        "num_heads=5",
        "dim=33",
        "mlp_ratio=nan",
        "attention=mystery",
        "depth=None",
        "patch_size='7'",
    ):
        yield [*GENERATOR, *quick, "--model-args", args], True
    device = ["--device", "meta"]
    broken = str(folder / "broken")
    for words in (
        ["evaluate", str(classifier), *device],
        ["evaluate", str(classifier), "--device", "cuda:99"],
        ["evaluate", str(classifier), "--model", "resnet18"],
        ["evaluate", str(classifier), "--data", broken, "--workers", "1"],
        ["evaluate", str(folder / "nothing")],
        ["evaluate", str(images)],
        ["evaluate", "--model", "resnet18", "--checkpoint", str(folder / "nothing.pth"), "--data", "fashion"],
        ["sample", str(generative), "--output", str(folder / "samples"), "--num-images", "1", *device],
        ["sample", str(classifier), "--output", str(folder / "samples")],
        ["sample", str(generative), "--output", str(folder / "s"), "--labels", "no such class"],
        ["sample", str(generative), "--output", str(folder / "s"), "--method", "ddpm"],
        ["train", "demo", "--data", broken, "--workers", "1", "--output", str(folder / "b1")],
        ["train", "demo", "--data", broken, "--workers", "0", "--output", str(folder / "b0")],
        ["train", "demo", "--data", "nobody/no-such-dataset", "--output", str(folder / "hub")],
        ["train", "demo", "--data", str(folder / "nothing"), "--output", str(folder / "n")],
        ["train", "demo", "--model", "no_such_model", "--output", str(folder / "m")],
        [
            "train",
            "demo",
            "--grad-checkpointing",
            "--model",
            "resnet10t",
            "--model-args",
            "in_chans=3",
            "--output",
            str(folder / "g"),
        ],
        ["train", "no_such_recipe"],
        ["train", "--epochs", "3"],
        ["bench", "--sizes", "0"],
        ["bench", "--sizes", "nan"],
        ["bench", "--heads", "0"],
        ["bench", *device],
        ["bench", "--seconds", "nan"],
        ["bench", "--threads", "0"],
        ["bench", "--backends", "magic"],
        ["models", "--no-such-flag"],
        ["info", "x"],
        ["demo", "--output", "/proc/nothing"],
        ["no-such-command"],
    ):
        yield words, True


def _is_number(hint: Any) -> bool:
    parts = typing.get_args(hint) or (hint,)
    return any(part in (int, float) or _is_number(part) for part in parts if part is not hint)


def _python(call: Callable[[], object]) -> int:
    """Turn a ValueError or TypeError into the command line's ending, so that both are judged alike."""
    import sys

    try:
        call()
    except (ValueError, TypeError, ImportError) as error:
        print(f"lineardiff: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _calls(classifier: Path, generative: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of the Python interface that must raise ValueError (or TypeError for a wrong type)."""
    layer = lineardiff.VisualContrastAttention
    for name in ("dim", "num_heads", "depth"):
        for value in (float("nan"), -1, 1.5, "4", None):
            arguments = {"dim": 8, "num_heads": 2, name: value}
            yield f"layer {name}={value!r}", partial(layer, **arguments)
    for name in ("contrast_grid", "grid_size"):
        for value in ((0, 2), (2, -1), (2,), "ab", 1.5, (float("nan"), 2)):
            yield f"layer {name}={value!r}", partial(layer, 8, 2, **{name: value})
    for name in ("tokens", "softmax", "global_contrast", "patchwise", "pool"):
        for value in ("unknown", 3, None):
            yield f"layer {name}={value!r}", partial(layer, 8, 2, **{name: value})
    small = layer(8, 2, contrast_grid=(2, 2))
    for what, x, size in (
        ("two axes", torch.zeros(4, 8), (2, 2)),
        ("wrong width", torch.zeros(1, 4, 9), (2, 2)),
        ("too few tokens", torch.zeros(1, 3, 8), (2, 2)),
        ("grid too small", torch.zeros(1, 4, 8), (1, 4)),
        ("no grid", torch.zeros(1, 4, 8), None),
        ("negative grid", torch.zeros(1, 4, 8), (-2, -2)),
        ("grid of floats", torch.zeros(1, 4, 8), (2.0, 2.5)),
    ):
        yield f"layer called with {what}", partial(small, x, size)

    tensors = [torch.zeros(1, 2, 4, 8) for _ in range(5)]
    scalars: dict[str, Any] = {
        "lambdas": (torch.tensor(0.3), torch.tensor(0.3)),
        "gains": (torch.ones(8), torch.ones(8)),
        "lambda_inits": (0.2, 0.2),
    }
    op = lineardiff.visual_contrast_attention
    for name, value in (
        ("eps", -1.0),
        ("eps", float("nan")),
        ("eps", float("inf")),
        ("softmax", "both"),
        ("backend", "magic"),
        ("pool", (2, 2, 2)),
        ("pool", (0, 0, 0, 0)),
        ("lambda_inits", (float("nan"), 0.2)),
        ("gains", (None, None)),
        ("lambdas", (torch.ones(2), torch.ones(2))),
        ("global_contrast", "half"),
        ("patchwise", None),
    ):
        yield f"op {name}={value!r}", partial(op, *tensors, **{**scalars, name: value})
    for index, name in enumerate(("q", "k", "v", "pos", "neg")):
        for what, bad in (
            ("three axes", torch.zeros(2, 4, 8)),
            ("other d", torch.zeros(1, 2, 4, 6)),
            ("integers", torch.zeros(1, 2, 4, 8, dtype=torch.long)),
            ("float64", tensors[0].double()),
        ):
            yield f"op {name} {what}", partial(op, *tensors[:index], bad, *tensors[index + 1 :], **scalars)

    for value in ("magic", 3, None, ""):
        yield f"set_backend({value!r})", partial(lineardiff.set_backend, value)

    for name in ("patch_size", "depth", "dim", "num_heads", "sample_size", "num_classes", "in_channels"):
        for value in (0, -1, float("nan"), "32", None, [2]):
            yield (
                f"DiT {name}={value!r}",
                partial(lineardiff.create_dit, "sit_s_2", **{"depth": 1, "sample_size": 8, name: value}),
            )
    yield "create_dit('sit_m_2')", partial(lineardiff.create_dit, "sit_m_2")
    yield "load_run of nothing", lambda: lineardiff.load_run(generative.parent / "nothing").model()

    def pipeline(**options: Any) -> Callable[[], object]:
        def call() -> object:
            loaded = lineardiff.load_run(generative).pipeline()
            return loaded(options.pop("class_labels", [0]), **{"num_inference_steps": 1, **options})

        return call

    for name, values in {
        "class_labels": (3, None, torch.tensor(3), [], [99], [-1], ["x"], [0.5], [True]),
        "guidance_scale": (float("nan"), float("inf"), "2", None),
        "guidance_interval": (0.5, (1.0, 0.0), (float("nan"), 1.0), ("a", "b"), (0.1,)),
        "guidance_channels": (0, -1, 99, 1.5),
        "generator": (3, "x", [], [3]),
        "num_inference_steps": (0, -1, 1.5, float("nan"), "2"),
        "method": ("ddpm", "magic", 3),
        "latents": (torch.zeros(1, 1, 3, 3), "x", torch.full((1, 1, 28, 28), float("nan"))),
        "output_type": ("jpg", None),
    }.items():
        for value in values:
            yield f"pipeline {name}={value!r}"[:120], pipeline(**{name: value})
