from pathlib import Path

import pytest
from bench_support import bench_row
from matplotlib.figure import Figure

from lineardiff.bench.plot import plot_attention_speed
from lineardiff.bench.rows import EXTRAPOLATED, MEASURED, Row


def row(candidate: str, N: int, ms: float, status: str = MEASURED, mode: str = "forward") -> Row:
    spread = {} if status == EXTRAPOLATED else {"low_ms": 0.9 * ms, "high_ms": 1.2 * ms}
    return bench_row(candidate, N, ms, status, mode=mode, **spread)


ROWS = [
    *(row("sdpa", N, N**2 / 1e4) for N in (100, 1000)),
    row("sdpa", 10000, 1e4, EXTRAPOLATED),
    *(row("x", N, 0.05 * N) for N in (100, 1000, 10000)),
]


def test_lines_bands_and_the_crossover(tmp_path: Path) -> None:
    figure = plot_attention_speed([*ROWS, row("sdpa", 100, 1.0, mode="train")])
    assert isinstance(figure, Figure)
    (panel,) = figure.axes  # a single N makes no panel
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    lines = [(line.get_linestyle(), list(map(float, line.get_xdata()))) for line in panel.lines]
    assert lines == [
        ("-", [100.0, 1000.0]),
        ("--", [1000.0, 10000.0]),  # from the last measured
        ("-", [100.0, 1000.0, 10000.0]),
        (":", [pytest.approx(500.0), pytest.approx(500.0)]),  # 0.05 N = N^2 / 1e4
    ]
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["sdpa", "x"]
    figure.savefig(tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_a_single_size_makes_no_plot() -> None:
    with pytest.raises(ValueError, match="needs times at two N or more"):
        plot_attention_speed([row("sdpa", 100, 1.0)])
