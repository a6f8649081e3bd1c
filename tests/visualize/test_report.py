import base64
import io
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from PIL import Image

from lineardiff.visualize.report import Example, Picture, report_html


class Page(HTMLParser):
    """Tables by id, as rows of cells, and what else the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.images: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.text = ""
        self.open_tags: list[str] = []
        self._rows: list[list[str]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.addresses += [given[name] or "" for name in ("src", "href", "srcset") if name in given]
        if tag not in ("meta", "img", "source", "br"):
            self.open_tags.append(tag)
        if tag == "table":
            self._rows = self.tables.setdefault(given["id"] or "", [])
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows is not None:
            assert tag == "td" or given.get("scope"), "a header without scope"
            self._rows[-1].append("")
        elif tag == "img":
            self.images.append(given)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag
        if tag == "table" and self._rows is not None:
            self._rows[:] = [[" ".join(cell.split()) for cell in row] for row in self._rows]
            self._rows = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._rows and self._rows[-1] and self.open_tags[-1] != "caption":
            self._rows[-1][-1] += data


def speed(median: float) -> dict:
    spread = {"median": median, "low": median - 10, "high": median + 20}
    return spread | {"rounds": 9, "mode": "inference", "batch_size": 100, "threads": 2, "device": "cpu"}


def results(**changes: object) -> dict:
    arms = {
        "mhsa": {"label": "MHSA", "top1": 87.15, "top5": 99.0, "loss": 0.4, "parameters": 208074},
        "vca": {"label": "<VCA>", "top1": 88.3, "top5": 99.5, "loss": 0.35, "parameters": 220106},
    }
    arms["mhsa"] |= {"multiply_adds": 15139968, "training": speed(1500), "inference": speed(5200)}
    arms["vca"] |= {"multiply_adds": 15086208, "training": speed(1200), "inference": speed(3900)}
    return {
        "arms": arms,
        "images": {"train": 10000, "validation": 2000},
        "difference": {"top1": 1.2, "standard_error": 0.5},
        "agreement": {"both_right": 1700, "only_first_right": 43, "only_second_right": 66, "both_wrong": 191},
        "classes": [{"name": "Shirt & tie", "images": 200, "top1": {"mhsa": 70.5, "vca": 69.0}}],
        "scaling": [
            {
                "image_size": 64,
                "patches": 256,
                "arms": {
                    "mhsa": {"multiply_adds": 85_100_000, "images_per_second": 200.0},
                    "vca": {"multiply_adds": 59_600_000, "images_per_second": 300.0},
                },
            }
        ],
        "recipe": {"image_size": 32, "epochs": 5, "betas": [0.9, 0.999], "clip_grad": None},
        "environment": {"torch": "2.14.1", "threads": "2"},
        "command": "lineardiff demo",
        **changes,
    }


def page(given: dict | None = None, **kwargs: object) -> Page:
    figure = Figure(figsize=(1, 1))
    kwargs = {"curves": figure, "curves_dark": figure, "examples": {}, **kwargs}
    return Page(report_html(results() if given is None else given, **kwargs))


def test_tables_hold_the_results() -> None:
    tables = page().tables
    assert tables["results"] == [
        ["Measure", "MHSA", "<VCA>"],
        ["Top-1 accuracy (%)", "87.15", "88.30"],
        ["Top-5 accuracy (%)", "99.00", "99.50"],
        ["Validation loss (cross-entropy)", "0.4000", "0.3500"],
        ["Parameters", "208,074", "220,106"],
        ["Multiply-adds for one image", "15,139,968", "15,086,208"],
        ["Training, images/s", "1,500 (1,490 to 1,520)", "1,200 (1,190 to 1,220)"],
        ["Inference, images/s", "5,200 (5,190 to 5,220)", "3,900 (3,890 to 3,920)"],
    ]
    assert tables["agreement"][1:] == [["MHSA right", "1,700", "43"], ["MHSA wrong", "66", "191"]]
    assert tables["classes"][1][:5] == ["Shirt & tie", "200", "70.5", "69.0", "-1.5"]
    assert tables["scaling"][2] == ["64", "256", "85.1", "59.6", "200.0", "300.0", "1.50x"]


def test_the_finding_says_what_the_numbers_say() -> None:
    text = " ".join(page().text.split())
    assert "a difference of +1.2 points" in text
    assert "trains at 0.80x and predicts at 0.75x the speed of MHSA" in text
    assert "do not tell the two apart" not in text
    unsure = results(difference={"top1": -0.4, "standard_error": 0.5})
    assert "-0.4 points, with a standard error of 0.5: these images do not tell" in page(unsure).text


def test_the_page_needs_nothing_beside_it() -> None:
    examples = {"Both right": [Example(Image.new("L", (3, 2), 7), "Bag", {"MHSA": "Bag", "VCA": "Bag"})]}
    pictures = [Picture(Figure(figsize=(1, 1)), caption="a caption", alt="an alt")]
    found = page(examples=examples, pictures=pictures)
    assert len(found.addresses) == 4  # curves twice, the example, the picture
    assert all(address.startswith("data:image/png;base64,") for address in found.addresses)
    image = Image.open(io.BytesIO(base64.b64decode(found.addresses[2].partition(",")[2])))
    assert (image.size, image.getpixel((0, 0))) == ((3, 2), 7)
    assert all(image["alt"] for image in found.images)
    assert "a caption" in found.text
    source = report_html(results(), curves=Figure(), curves_dark=Figure(), examples={})
    assert not re.search(r"https?:|url\(|@import", source)


def test_right_and_wrong_guesses_are_marked() -> None:
    example = Example(Image.new("RGB", (2, 2)), "Bag", {"MHSA": "Coat", "VCA": "Bag"})
    text = page(examples={"Only VCA right": [example], "Both wrong": []}).text
    assert "✗ MHSA: Coat" in text
    assert "✓ VCA: Bag" in text
    assert "Both wrong" not in text


def test_every_field_of_the_recipe_is_there() -> None:
    text = page().text
    for field in ("image_size", "epochs", "betas", "[0.9, 0.999]", "clip_grad", "null", "lineardiff demo"):
        assert field in text


def test_one_model_is_no_comparison() -> None:
    arms = results()["arms"]
    with pytest.raises(ValueError, match="compares two models, got mhsa"):
        page(results(arms={"mhsa": arms["mhsa"]}))
