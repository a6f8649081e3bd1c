"""A page about two trained models, for people: one HTML file that needs nothing beside it."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image


@dataclass(frozen=True)
class Example:
    """One image and what each model takes it for."""

    image: Image.Image
    truth: str
    """Name of its class."""
    guesses: Mapping[str, str]
    """Label of the model to the name of the class it predicts."""


@dataclass(frozen=True)
class Picture:
    """A figure with its caption and the words that stand for it where it cannot be seen."""

    figure: Figure
    caption: str
    alt: str


def report_html(
    results: Mapping[str, Any],
    *,
    curves: Figure,
    curves_dark: Figure,
    examples: Mapping[str, Sequence[Example]],
    pictures: Sequence[Picture] = (),
) -> str:
    """The comparison of two models as HTML: light and dark, for large and small screens, images inlined.

    Args:
        results: What `results.json` of `lineardiff demo` holds: `arms` (two models, name to numbers),
            `recipe`, `images`, `difference`, `agreement`, `classes`, `scaling`, `environment`, `command`.
        curves: Figure for a light page, from :func:`lineardiff.visualize.plot_curves`.
        curves_dark: The same for a dark page.
        examples: Title of a group to its images; empty groups are left out.
        pictures: Further figures, each in a paragraph of its own.

    Raises:
        ValueError: There are not two models in the results.
    """
    if len(results["arms"]) != 2:
        raise ValueError(f"the report compares two models, got {', '.join(results['arms']) or 'none'}")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("lineardiff.visualize").joinpath("report.html").read_text("utf-8")
    return environment.from_string(source).render(
        results=results,
        curves=_inline_figure(curves),
        curves_dark=_inline_figure(curves_dark),
        groups=[
            {
                "title": title,
                "examples": [
                    {"image": _inline(e.image), "truth": e.truth, "guesses": e.guesses} for e in members
                ],
            }
            for title, members in examples.items()
            if members
        ],
        pictures=[{"image": _inline_figure(p.figure), "caption": p.caption, "alt": p.alt} for p in pictures],
    )


def _inline(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return _data_address(data)


def _inline_figure(figure: Figure) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return _data_address(data)


def _data_address(png: io.BytesIO) -> str:
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
