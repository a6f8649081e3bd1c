"""Curves of training runs: loss of the training batches and accuracy on the validation images."""

import csv
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Of the palette of Okabe and Ito, which people with any kind of colour vision tell apart; by `dark`.
COLORS = {
    False: ("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    True: ("#56b4e9", "#e69f00", "#2ec4a0", "#e6a3c9"),
}
INK = {False: "#333333", True: "#d0d0d0"}


def read_curve(path: Path) -> dict[str, list[float]]:
    """The columns of a run's train.csv or validation.csv, by name; an empty cell reads as nan.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It holds no row, or a cell that is no number.
    """
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no row; the run has not got so far yet")
    try:
        return {name: [float(row[name] or "nan") for row in rows] for name in rows[0]}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds a cell that is no number ({error}); was it edited?") from None


def plot_curves(runs: Mapping[str, Path], *, dark: bool = False, width: float = 10.0) -> Figure:
    """Draw the loss of the training batches and the validation top-1 over the epochs.

    Args:
        runs: Label to run folder, which holds train.csv and validation.csv.
        dark: Light lines and letters on a transparent ground, for a dark page; otherwise dark ones on white.
        width: Inches.

    Returns:
        A figure of two panels; ``figure.savefig(path)`` writes it.
    """
    if not runs:
        raise ValueError("plot_curves needs at least one run, got an empty mapping")
    figure = Figure(figsize=(width, 0.36 * width), layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0.0 if dark else 1.0)
    loss, accuracy = figure.subplots(1, 2)
    for (label, folder), color in zip(runs.items(), cycle(COLORS[dark]), strict=False):
        train = read_curve(folder / "train.csv")
        validation = read_curve(folder / "validation.csv")
        loss.plot(train["epoch"], train["loss"], color=color, alpha=0.25, linewidth=1)
        loss.plot(train["epoch"], _smooth(train["loss"]), color=color, linewidth=2, label=label)
        accuracy.plot(
            validation["epoch"], validation["top1"], color=color, linewidth=2, marker="o", label=label
        )
    _dress(loss, "Training loss (line: smoothed)", "cross-entropy", ink=INK[dark])
    _dress(accuracy, "Validation accuracy", "top-1 (%)", ink=INK[dark])
    return figure


def _smooth(values: list[float], *, decay: float = 0.9) -> list[float]:
    """Exponential average, corrected for its start at zero."""
    smoothed, average, weight = [], 0.0, 0.0
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smoothed.append(average / weight)
    return smoothed


def _dress(axes: Axes, title: str, unit: str, *, ink: str) -> None:
    axes.set_title(title, color=ink, loc="left")
    axes.set_xlabel("epochs", color=ink)
    axes.set_ylabel(unit, color=ink)
    axes.set_facecolor("none")
    axes.tick_params(colors=ink)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(ink)
    axes.legend(frameon=False, labelcolor=ink)
