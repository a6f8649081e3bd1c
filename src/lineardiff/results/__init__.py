"""Published numbers, kept apart from measured ones. Standard library only.

`paper.csv` holds one row per known number of the paper (arXiv 2511.00833). The paper's own tables were not available to
us; the numbers come from

- the abstract: top-1 of DeiT-Tiny, 72.2 and 75.6;
- a note on the paper (papernotes.org, NeurIPS 2025, image generation): everything in `paper.csv`, including the row
  labels, which are therefore the note's and not the paper's;
- a second note, by others (Visual-Contrast Attention, in Chinese): the numbers of the tables, 1 for
  classification and 2 for generation, and again DeiT-Tiny (72.2, 75.6, 5.7 and 6.0 M), VCA-DiT-S/2 (62.3),
  SiT-S/2 (57.3, 53.0) and SiT-B/2 (35.3, 32.7).

Missing, because no source has them: VCA-PVT, VCA-Swin and VCA-CSwin beyond the tiny size, and the other
patch sizes of DiT and SiT. The baseline CSwin-Tiny is entered as depths 2-4-18-1 because its 20.5 M parameters
rule out 1-2-21-1, which has 22.3 M. Two parameter counts differ from the baseline as built, for an
unknown reason: Swin-Tiny (28.9 M, built 28.3 M) and CSwin-Tiny (20.5 M, built 20.4 M).
"""

import csv
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

__all__ = ["Metric", "Published", "find_published", "published"]

Metric = Literal["parameters", "multiply_adds", "top1", "fid"]


class Published(NamedTuple):
    """One published number."""

    model: str
    """Name of the model: in timm's registry for classifiers, such as vca_pvt_tiny; dit_s_2 for DiT."""
    metric: Metric
    """parameters, multiply_adds (of one 224 x 224 image), top1 (ImageNet-1k) or fid (50K images, 256 x 256)."""
    value: str
    """The number with its printed digits."""
    unit: str
    """M (millions), G (billions), % or -."""
    source: str
    """The publication."""
    table: str
    """Number of its table; empty where unknown."""
    row: str
    """Label of the table's row; empty where unknown."""


@cache
def published() -> tuple[Published, ...]:
    """Return every number of `paper.csv`, in order."""
    text = files(__name__).joinpath("paper.csv").read_text(encoding="utf-8")
    rows: Iterable[Any] = csv.DictReader(text.splitlines())
    return tuple(Published(**row) for row in rows)


def find_published(model: str, metric: Metric) -> Published | None:
    """Return the published number of `model` for `metric`, or None if it is unknown."""
    return next((p for p in published() if (p.model, p.metric) == (model, metric)), None)
