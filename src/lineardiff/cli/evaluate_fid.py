"""``lineardiff evaluate fid``: score generated images against real ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lineardiff.cli.arguments import parse
from lineardiff.table import format_table

LABELS = {
    "fid": ("FID", ".3f"),
    "sfid": ("sFID", ".3f"),
    "inception_score": ("Inception score", ".3f"),
    "precision": ("precision", ".4f"),
    "recall": ("recall", ".4f"),
    "fd_lite0": ("FD-Lite0", ".3f"),
    "fd_lite0_floor": ("FD-Lite0 floor", ".3f"),
    "sample_images": ("samples", ",d"),
    "reference_images": ("reference images", ",d"),
}


@dataclass
class EvaluateFid:
    """Compute FID, sFID, Inception score, precision and recall of generated images as ADM's evaluator does.

    With --features lite0, for machines without Inception's weights: the Frechet distance between the features of
    EfficientNet-Lite0 (FD-Lite0, which is not an FID), and its floor, the distance between two halves of the reference
    images.
    """

    samples: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SAMPLES")]
    """Generated images: a folder, with its subfolders, or an npz file in ADM's format (arr_0, uint8, N H W 3)."""
    reference: str
    """Real images in the same formats, "fashion" (embedded), or an npz file of statistics (ADM's, or mu and sigma)."""
    features: Literal["inception", "lite0"] = "inception"
    """The network whose features are compared."""
    inception_weights: Path | None = None
    """torch-fidelity's file of Inception's weights, for machines without internet access; None downloads it."""
    image_size: int | None = None
    """Crop and resize the images of folders to this size, as ADM prepares ImageNet; None does not resize."""
    save_statistics: Path | None = None
    """Write the statistics of the reference to this npz file, which can be passed as --reference later."""
    batch_size: int = 64
    """Images per forward pass."""
    workers: int = 2
    """Processes that load the images of a folder; 0 loads in the main process."""
    device: str | None = None
    """Device, for example cpu or cuda:0; None takes the accelerator if there is one."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of a table."""


def run(words: Sequence[str]) -> None:
    arguments = parse(EvaluateFid, words, prog="lineardiff evaluate fid")
    scores = _score(arguments)
    if arguments.as_json:
        names = {name: getattr(arguments, name) for name in ("samples", "reference", "features")}
        print(json.dumps({**names, **scores}))
        return
    rows = [
        (LABELS[name][0], "unknown" if value is None else format(value, LABELS[name][1]))
        for name, value in scores.items()
    ]
    print(format_table((f"{arguments.samples} against {arguments.reference}", ""), rows))


def _score(arguments: EvaluateFid) -> dict[str, float | int | None]:
    from lineardiff.device import choose_device
    from lineardiff.evaluate import (
        InceptionFeatures,
        Lite0Features,
        extract,
        generation_scores,
        open_batches,
        read_reference,
        save_statistics,
    )

    if arguments.save_statistics is not None and arguments.save_statistics.suffix != ".npz":
        raise ValueError(f"--save-statistics {arguments.save_statistics}: expected a name that ends in .npz.")
    device = choose_device(arguments.device)
    reading = {name: getattr(arguments, name) for name in ("batch_size", "image_size", "workers")}
    samples = open_batches(arguments.samples, **reading)
    extractor = (
        Lite0Features() if arguments.features == "lite0" else InceptionFeatures(arguments.inception_weights)
    )
    reference = read_reference(
        arguments.reference, extractor, size=samples.size, device=device, progress=True, **reading
    )
    if arguments.save_statistics is not None:
        save_statistics(arguments.save_statistics, reference.statistics)
    return generation_scores(extract(samples, extractor, device=device, progress=True), reference)
