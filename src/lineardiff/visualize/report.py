"""The report of a comparison: one HTML page, and the same numbers as text."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image

from lineardiff.table import format_table
from lineardiff.visualize.curves import COLORS


class Draw(Protocol):
    """A function that draws one figure for each kind of page."""

    def __call__(self, *, dark: bool, narrow: bool) -> Figure: ...


@dataclass(frozen=True)
class Example:
    """An image and the class that each model predicts for it."""

    image: Image.Image
    truth: str
    """Name of the true class."""
    guesses: Mapping[str, str]
    """Label of the model to the name of the predicted class."""


@dataclass(frozen=True)
class Picture:
    """A figure with its caption and alternative text."""

    draw: Draw
    caption: str
    alt: str


def report_html(
    results: Mapping[str, Any],
    *,
    curves: Draw,
    examples: Mapping[str, Sequence[Example]],
    pictures: Sequence[Picture] = (),
) -> str:
    """Return the comparison as a self-contained HTML page for light and dark mode, desktops, phones and paper.

    Args:
        results: The content of results.json, from :func:`lineardiff.visualize.compare_models`, with "command" added.
        curves: Draws the learning curves, such as `functools.partial(plot_curves, runs)`.
        examples: Title of a group to its images; empty groups are skipped.
        pictures: Further figures.

    Raises:
        ValueError: `results` holds fewer than two models.
    """
    if len(results["arms"]) < 2:
        raise ValueError(
            f"results holds {len(results['arms'])} model(s) ({', '.join(results['arms']) or 'none'}); "
            "expected at least two to compare."
        )
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("lineardiff.visualize").joinpath("report.html").read_text("utf-8")
    arms = results["arms"]
    best = ", ".join(f"{arm['top1']:.2f} % for {arm['label']}" for arm in arms.values())
    learning = Picture(
        curves,
        caption="Loss of the training batches (augmented, hence higher than on plain images) and top-1 on the "
        "validation images.",
        alt="Two line charts over the epochs, one line per model: the training loss falls, and the validation top-1 "
        f"reaches {best}.",
    )
    leading = results["comparisons"][0]
    return environment.from_string(source).render(
        results=results,
        colors=dict(zip(arms, zip(COLORS[False], COLORS[True], strict=True), strict=False)),
        sentences=[describe_comparison(results, comparison) for comparison in results["comparisons"]],
        p_value=_p_value,
        confusions={
            name: _shade(results["confusion"][name]) for name in (leading["first"], leading["second"])
        },
        learning=_inline_picture(learning),
        pictures=[_inline_picture(picture) for picture in pictures],
        groups=[
            {
                "title": title,
                "examples": [
                    {"image": _inline(_image_as_png(e.image)), "truth": e.truth, "guesses": e.guesses}
                    for e in members
                ],
            }
            for title, members in examples.items()
            if members
        ],
    )


def comparison_table(results: Mapping[str, Any], *, markdown: bool = False) -> str:
    """Return accuracy, size, cost and speed of the models as text.

    Args:
        results: The content of results.json.
        markdown: Format the table as README.md shows it, with medians only.
    """
    arms = results["arms"].values()

    def speed(arm: Mapping[str, Any], mode: str) -> str:
        quartiles = f" ({arm[mode]['low']:,.0f} to {arm[mode]['high']:,.0f})"
        return f"{arm[mode]['median']:,.0f}" + ("" if markdown else quartiles)

    header = ("", *(arm["label"] for arm in arms))
    rows = [
        ("top-1 (%)", *(f"{arm['top1']:.2f}" for arm in arms)),
        ("parameters", *(f"{arm['parameters']:,}" for arm in arms)),
        ("multiply-adds", *(f"{arm['multiply_adds']:,}" for arm in arms)),
        ("training, images/s", *(speed(arm, "train") for arm in arms)),
        ("inference, images/s", *(speed(arm, "forward") for arm in arms)),
    ]
    if not markdown:
        return format_table(header, rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def describe_comparison(results: Mapping[str, Any], comparison: Mapping[str, Any]) -> str:
    """Return one entry of `results["comparisons"]` as a sentence."""
    first, second = (results["arms"][comparison[key]]["label"] for key in ("first", "second"))
    verdict = "within noise" if comparison["within_noise"] else "more than the choice of images explains"
    return (
        f"{second} against {first}: {comparison['top1']:+.2f} points of top-1 (standard error "
        f"{comparison['standard_error']:.2f}, exact McNemar p {_p_value(comparison['p_value'])}), {verdict}."
    )


def as_png(figure: Figure) -> bytes:
    """Return a figure as the content of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.2g}"


def _shade(confusion: Sequence[Sequence[int]]) -> list[list[tuple[int, float]]]:
    """Return each count with the opacity of its cell; the square root keeps rare errors visible."""
    return [[(count, 0.6 * (count / max(sum(row), 1)) ** 0.5) for count in row] for row in confusion]


def _inline_picture(picture: Picture) -> dict[str, Any]:
    variants = {
        f"{'narrow' if narrow else 'wide'}_{'dark' if dark else 'light'}": _inline(
            as_png(picture.draw(dark=dark, narrow=narrow))
        )
        for narrow in (False, True)
        for dark in (False, True)
    }
    return {**variants, "caption": picture.caption, "alt": picture.alt}


def _image_as_png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG", optimize=True)
    return data.getvalue()


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
