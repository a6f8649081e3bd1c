import base64
import io
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from PIL import Image

from lineardiff.visualize.report import (
    Example,
    Picture,
    comparison_table,
    describe_comparison,
    report_html,
)


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
    return spread | {"rounds": 9, "mode": "forward", "batch_size": 100, "threads": 2, "device": "cpu"}


def comparison(first: str, second: str, top1: float, p_value: float) -> dict:
    counts = {"both_right": 1700, "only_first_right": 43, "only_second_right": 66, "both_wrong": 191}
    difference = {"top1": top1, "standard_error": 0.5, "p_value": p_value, "within_noise": p_value >= 0.05}
    return {"first": first, "second": second, **difference, "agreement": counts}


def results(**changes: object) -> dict:
    arms = {
        "mhsa": {"label": "MHSA", "top1": 77.15, "top5": 99.0, "loss": 0.4, "parameters": 208074},
        "mhsa_conv": {"label": "MHSA & conv", "top1": 87.1, "top5": 99.2, "loss": 0.38, "parameters": 210634},
        "vca": {"label": "<VCA>", "top1": 88.3, "top5": 99.5, "loss": 0.35, "parameters": 220106},
    }
    arms["mhsa"] |= {"multiply_adds": 15139968, "train": speed(1500), "forward": speed(5200)}
    arms["mhsa_conv"] |= {"multiply_adds": 15287424, "train": speed(1600), "forward": speed(5000)}
    arms["vca"] |= {"multiply_adds": 15086208, "train": speed(1200), "forward": speed(3900)}
    costs = {"mhsa": (85_100_000, 200.0), "mhsa_conv": (85_700_000, 150.0), "vca": (59_600_000, 300.0)}
    scaled = {
        arm: {"multiply_adds": cost, "images_per_second": speed} for arm, (cost, speed) in costs.items()
    }
    return {
        "arms": arms,
        "comparisons": [
            comparison("mhsa_conv", "vca", 1.2, 0.0357),
            comparison("mhsa", "vca", 11.2, 1e-20),
            comparison("mhsa", "mhsa_conv", -0.4, 0.4),
        ],
        "images": {"train": 10000, "validation": 2000},
        "classes": ["Shirt & tie", "Bag"],
        "class_scores": [
            {"name": "Shirt & tie", "images": 200, "top1": {"mhsa": 60.0, "mhsa_conv": 70.5, "vca": 69.0}}
        ],
        "confusion": {
            "mhsa": [[5, 6], [7, 8]],
            "mhsa_conv": [[141, 59], [0, 1800]],
            "vca": [[138, 62], [0, 1800]],
        },
        "scaling": [{"image_size": 64, "patches": 256, "arms": scaled}],
        "recipe": {"image_size": 32, "epochs": 5, "betas": [0.9, 0.999], "clip_grad": None},
        "environment": {
            "threads": 2,
            "accelerators": [],
            "memory_gib": None,
            "versions": {"torch": "2.14.1"},
        },
        "command": "lineardiff demo",
        **changes,
    }


def blank(*, dark: bool, narrow: bool) -> Figure:
    return Figure(figsize=(1, 1 + narrow), facecolor="black" if dark else "white")


def page(given: dict | None = None, **kwargs: object) -> Page:
    kwargs = {"curves": blank, "examples": {}, **kwargs}
    return Page(report_html(results() if given is None else given, **kwargs))


def test_tables_hold_the_results() -> None:
    tables = page().tables
    assert tables["results"] == [
        ["Measure", "MHSA", "MHSA & conv", "<VCA>"],
        ["Top-1 accuracy (%)", "77.15", "87.10", "88.30"],
        ["Top-5 accuracy (%)", "99.00", "99.20", "99.50"],
        ["Validation loss (cross-entropy)", "0.4000", "0.3800", "0.3500"],
        ["Parameters", "208,074", "210,634", "220,106"],
        ["Multiply-adds per image", "15,139,968", "15,287,424", "15,086,208"],
        [
            "Training, images/s",
            "1,500 (1,490 to 1,520)",
            "1,600 (1,590 to 1,620)",
            "1,200 (1,190 to 1,220)",
        ],
        [
            "Inference, images/s",
            "5,200 (5,190 to 5,220)",
            "5,000 (4,990 to 5,020)",
            "3,900 (3,890 to 3,920)",
        ],
    ]
    assert tables["comparisons"][1:] == [
        ["<VCA> against MHSA & conv", "+1.20 ± 0.50", "0.036", "66", "43", "differ"],
        ["<VCA> against MHSA", "+11.20 ± 0.50", "< 0.001", "66", "43", "differ"],
        ["MHSA & conv against MHSA", "-0.40 ± 0.50", "0.4", "66", "43", "noise"],
    ]
    assert tables["agreement"][1:] == [
        ["MHSA & conv right", "1,700", "43"],
        ["MHSA & conv wrong", "66", "191"],
    ]
    assert tables["classes"][1][:6] == ["Shirt & tie", "200", "60.0", "70.5", "69.0", "-1.5"]
    scaled = ["64", "256", "200.0 (85.1 M)", "150.0 (85.7 M)", "300.0 (59.6 M)", "2.00x"]
    assert tables["scaling"][1] == scaled


def test_confusion_matrices_are_those_of_the_leading_two() -> None:
    tables = page().tables
    assert "confusion-mhsa" not in tables
    assert tables["confusion-mhsa_conv"][1][1:] == ["141", "59"]
    assert tables["confusion-vca"] == [
        ["", "Shirt & tie", "Bag"],
        ["Shirt & tie", "138", "62"],
        ["Bag", "0", "1800"],
    ]


@pytest.mark.parametrize(("p_value", "noise"), [(0.0499, False), (0.05, True), (0.9, True)])
def test_the_finding_says_whether_the_leading_two_differ(p_value: float, noise: bool) -> None:
    given = results(comparisons=[comparison("mhsa_conv", "vca", -0.4, p_value)])
    text = " ".join(page(given).text.split())
    assert "<VCA> against MHSA & conv: -0.40 points" in text
    assert ("within noise. These images do not separate the two." in text) == noise
    assert "One seed per model" in text
    assert "trains at 0.75x and predicts at 0.78x the speed of MHSA & conv" in text
    assert describe_comparison(given, given["comparisons"][0]) in text


def test_the_page_needs_nothing_beside_it() -> None:
    examples = {"Both right": [Example(Image.new("L", (3, 2), 7), "Bag", {"MHSA": "Bag", "VCA": "Bag"})]}
    pictures = [Picture(blank, caption="a caption", alt="an alt")]
    found = page(examples=examples, pictures=pictures)
    assert len(found.addresses) == 9  # two figures for light and dark, wide and narrow; the example
    assert all(address.startswith("data:image/png;base64,") for address in found.addresses)
    images = [
        Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) for address in found.addresses
    ]
    seen = [(image.height > image.width, image.convert("L").getpixel((0, 0))) for image in images[:4]]
    assert seen == [(True, 0), (True, 255), (False, 0), (False, 255)]
    assert (images[4].size, images[4].getpixel((0, 0))) == ((3, 2), 7)
    assert all(image["alt"] for image in found.images)
    assert "a caption" in found.text
    source = report_html(results(), curves=blank, examples={})
    assert not re.search(r"https?:|url\(|@import", source)


def test_right_and_wrong_guesses_are_marked() -> None:
    example = Example(Image.new("RGB", (2, 2)), "Bag", {"MHSA": "Coat", "VCA": "Bag"})
    text = page(examples={"Only VCA right": [example], "Both wrong": []}).text
    assert "✗ MHSA: Coat" in text
    assert "✓ VCA: Bag" in text
    assert "Both wrong" not in text


def test_every_field_of_the_recipe_and_the_environment_is_there() -> None:
    text = page().text
    for field in ("image_size", "epochs", "betas", "[0.9, 0.999]", "clip_grad", "null", "lineardiff demo"):
        assert field in text
    assert "torch\n2.14.1" in text.replace(" ", "") or "torch2.14.1" in text
    assert "memory (GiB)unknown" in text
    assert "acceleratorsnone" in text


def test_the_text_table_holds_every_number_and_its_markdown_the_medians() -> None:
    rows = {line.split("  ")[0]: line for line in comparison_table(results()).splitlines()}
    header, rule, *lines = comparison_table(results(), markdown=True).splitlines()
    assert header == "|  | MHSA | MHSA & conv | <VCA> |"
    assert rule.count("---") == 4
    cells = {line.split(" | ")[0].strip("| "): line for line in lines}
    for arm in results()["arms"].values():
        for table in (rows, cells):
            assert f"{arm['top1']:.2f}" in table["top-1 (%)"]
            assert f"{arm['parameters']:,}" in table["parameters"]
            assert f"{arm['multiply_adds']:,}" in table["multiply-adds"]
        for name, mode in (("training, images/s", "train"), ("inference, images/s", "forward")):
            assert f" {arm[mode]['median']:,.0f} (" in rows[name]
            assert f"| {arm[mode]['median']:,.0f} |" in cells[name]


def test_one_model_is_no_comparison() -> None:
    with pytest.raises(ValueError, match=r"1 model.*mhsa"):
        page(results(arms={"mhsa": results()["arms"]["mhsa"]}))
