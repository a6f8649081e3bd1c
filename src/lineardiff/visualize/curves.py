"""Learning curves of training runs."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lineardiff.runs import Run

# From the palette of Okabe and Ito, which is safe for colour-blind readers; by `dark`.
COLORS = {
    False: ("#0072b2", "#00805d", "#d55e00", "#cc79a7"),
    True: ("#56b4e9", "#2ec4a0", "#e69f00", "#e6a3c9"),
}
INK = {False: "#333333", True: "#d0d0d0"}


def plot_curves(runs: Mapping[str, Path], *, dark: bool = False, narrow: bool = False) -> Figure:
    """Plot the training loss and the validation top-1 of runs over the epochs.

    Args:
        runs: Label to run folder, which holds train.csv and validation.csv.
        dark: Use light lines and text on a transparent background, for a dark page.
        narrow: Stack the panels, for the width of a phone, instead of placing them side by side.

    Returns:
        A figure with two panels.

    Raises:
        ValueError: `runs` is empty, a folder is not that of a run, or a run has no curves yet.
    """
    if not runs:
        raise ValueError("plot_curves got no runs; expected at least one label and folder.")
    size, panels = ((4.2, 5.6), (2, 1)) if narrow else ((10.0, 3.6), (1, 2))
    figure = Figure(figsize=size, layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    figure.patch.set_alpha(0.0 if dark else 1.0)
    loss, accuracy = figure.subplots(*panels)
    for (label, folder), color in zip(runs.items(), cycle(COLORS[dark]), strict=False):
        curves = Run(folder).curves()
        if not curves.train or not curves.validation:
            raise ValueError(f"{folder} has no curves yet; wait until the run has been validated once.")
        train = {name: [row[name] for row in curves.train] for name in ("epoch", "loss")}
        validation = {name: [row[name] for row in curves.validation] for name in ("epoch", "top1")}
        loss.plot(train["epoch"], train["loss"], color=color, alpha=0.25, linewidth=1)
        loss.plot(train["epoch"], _smooth(train["loss"]), color=color, linewidth=2, label=label)
        accuracy.plot(
            validation["epoch"], validation["top1"], color=color, linewidth=2, marker="o", label=label
        )
    _style(loss, "Training loss (bold: smoothed)", "cross-entropy", ink=INK[dark])
    _style(accuracy, "Validation accuracy", "top-1 (%)", ink=INK[dark])
    loss.legend(frameon=False, labelcolor=INK[dark])
    return figure


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Return a centred moving average, which does not lag; the ends are read off a line fitted to the last window.

    This is a Savitzky-Golay filter of order 1.
    """
    y = np.asarray(values)
    radius = min(max(3, len(y) // 20), (len(y) - 1) // 2)
    if radius == 0:
        return y
    x = np.arange(2 * radius + 1)
    head, tail = (np.polyval(np.polyfit(x, part, 1), x) for part in (y[: len(x)], y[-len(x) :]))
    middle = np.convolve(y, np.full(len(x), 1 / len(x)), "valid")
    return np.concatenate([head[:radius], middle, tail[-radius:]])


def _style(axes: Axes, title: str, unit: str, *, ink: str) -> None:
    axes.set_title(title, color=ink, loc="left")
    axes.set_xlabel("epochs", color=ink)
    axes.set_ylabel(unit, color=ink)
    axes.set_facecolor("none")
    axes.tick_params(colors=ink)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(ink)
