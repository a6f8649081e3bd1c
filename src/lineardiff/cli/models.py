"""``lineardiff models``: the models that lineardiff registers with timm."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import tyro

from lineardiff.cli.arguments import parse
from lineardiff.results import Metric, find_published
from lineardiff.suggest import suggest
from lineardiff.table import format_table


@dataclass
class Models:
    """List the models of lineardiff, by the names that timm.create_model and --model take."""

    pattern: tyro.conf.Positional[str] = "*"
    """Names to list, with the wildcards * and ?."""
    table: bool = False
    """Build each model and show its parameters and multiply-adds beside those of the paper."""


def run(words: Sequence[str]) -> None:
    arguments = parse(Models, words, prog="lineardiff models")
    names = [name for name in model_names() if fnmatch(name, arguments.pattern)]
    if not names:
        hint = suggest(arguments.pattern, model_names())
        raise ValueError(f"no model of lineardiff matches {arguments.pattern!r}; {hint}")
    if not arguments.table:
        print("\n".join(names))
        return
    published = ("parameters", "multiply-adds", "top-1")
    header = ("model", "image", "parameters", "multiply-adds", *(f"published {name}" for name in published))
    print(format_table(header, [_row(name) for name in names]))
    print(
        "\npublished: reported by the paper (arXiv 2511.00833); the other columns are counted on the built models"
    )


def model_names() -> list[str]:
    """Return the names in timm's registry whose models lineardiff defines, sorted."""
    import timm
    from timm.models import model_entrypoint

    return [
        name for name in timm.list_models() if model_entrypoint(name).__module__.startswith("lineardiff.")
    ]


def _row(name: str) -> tuple[str, ...]:
    import timm
    import torch

    from lineardiff.bench import multiply_adds, parameters

    with torch.device("meta"):
        model = timm.create_model(name)
    chans, height, width = model.pretrained_cfg["input_size"]
    cost = multiply_adds(model, (height, width), in_chans=chans)
    size = f"{height} x {width}"
    printed = (_published(name, metric) for metric in ("parameters", "multiply_adds", "top1"))
    return name, size, f"{parameters(model):,}", f"{cost:,}", *printed


def _published(name: str, metric: Metric) -> str:
    number = find_published(name, metric)
    return f"{number.value} {number.unit}" if number else "-"
