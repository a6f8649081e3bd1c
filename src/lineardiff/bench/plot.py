"""Times of attention over the number of tokens, log-log."""

import math
from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lineardiff.bench.rows import EXTRAPOLATED, MEASURED, SDPA, Row, crossover, series

__all__ = ["plot_attention_speed"]

# The palette of Okabe and Ito without yellow, which is hard to see on white; SDPA is black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
MARKERS = "os^DvP<>X"


def plot_attention_speed(rows: Sequence[Row], *, panel_width: float = 5.5) -> Figure:
    """Draw milliseconds over N, with a panel for each level, mode, type and series of shapes with at least two N.

    Lines are medians and bands quartiles. A dashed line is extrapolated; a dotted vertical line marks the N from which
    a candidate stays faster than `scaled_dot_product_attention`.

    Args:
        rows: Rows of :func:`lineardiff.bench.measure_attention`.
        panel_width: Width of a panel in inches.

    Raises:
        ValueError: No series has two N.
    """
    panels = {key: part for key, part in series(rows).items() if len(_timed_tokens(part)) > 1}
    if not panels:
        raise ValueError("a figure over N needs times at two N or more; measure more sizes.")
    names = list(dict.fromkeys(row.candidate for row in rows))
    others = [name for name in names if name != SDPA]
    styles = {
        SDPA: ("#000000", "o"),
        **dict(zip(others, zip(cycle(COLORS), cycle(MARKERS[1:])), strict=False)),
    }
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(
        figsize=(panel_width * columns, 0.75 * panel_width * lines), layout="constrained", dpi=144
    )
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for (key, part), panel in zip(panels.items(), axes, strict=False):
        level, mode, dtype, B, heads, d, n = key
        for name in dict.fromkeys(row.candidate for row in part):
            _draw(panel, [row for row in part if row.candidate == name], name, *styles[name])
            at = crossover(part, name) if name != SDPA else None
            if at is not None and at.N is not None and at.N > at.first:
                panel.axvline(at.N, color=styles[name][0], linestyle=":", linewidth=1)
        panel.set_title(
            f"{level}, {mode}, {dtype} (B {B}, {heads} heads, d {d}, n {n})", loc="left", fontsize=9
        )
        panel.set(xscale="log", yscale="log", xlabel="tokens N", ylabel="milliseconds")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    return figure


def _draw(panel: Axes, rows: list[Row], name: str, color: str, marker: str) -> None:
    measured = [row for row in rows if row.status == MEASURED]
    if not measured:
        return
    tokens, times, low, high = _columns(measured)
    panel.plot(tokens, times, color=color, marker=marker, markersize=4, label=name)
    panel.fill_between(tokens, low, high, color=color, alpha=0.2, linewidth=0)
    extrapolated = [row for row in rows if row.status == EXTRAPOLATED]
    if extrapolated:
        tokens, times, _, _ = _columns([measured[-1], *extrapolated])
        panel.plot(tokens, times, "--", color=color, marker=marker, markersize=4, markerfacecolor="none")


def _columns(rows: Sequence[Row]) -> tuple[list[float], ...]:
    """Return N, median, first and third quartile; nan where there is none."""
    values = sorted((row.N or 0, row.ms, row.low_ms, row.high_ms) for row in rows)
    return tuple(
        [math.nan if x is None else float(x) for x in column] for column in zip(*values, strict=True)
    )


def _timed_tokens(rows: Sequence[Row]) -> set[int | None]:
    return {row.N for row in rows if row.ms is not None}
