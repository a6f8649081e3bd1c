import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import savgol_filter

from lineardiff.visualize.curves import COLORS, plot_curves


def write_csv(path: Path, columns: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_run(folder: Path, *, losses: list[float], top1: list[float]) -> Path:
    steps = len(losses)
    numbers, epochs = list(range(1, steps + 1)), list(range(1, len(top1) + 1))
    write_csv(folder / "train.csv", {"step": numbers, "epoch": [i / steps for i in numbers], "loss": losses})
    write_csv(folder / "validation.csv", {"step": epochs, "epoch": epochs, "top1": top1})
    (folder / "recipe.json").write_text("{}")
    return folder


def test_curves_hold_the_numbers_of_the_runs(tmp_path: Path) -> None:
    runs = {
        "MHSA": write_run(tmp_path / "a", losses=[2.0, 1.0, 0.5], top1=[40.0, 60.0]),
        "VCA": write_run(tmp_path / "b", losses=[2.0, 2.0, 2.0], top1=[50.0, 70.0]),
    }
    loss, accuracy = plot_curves(runs).axes
    assert [line.get_label() for line in accuracy.lines] == ["MHSA", "VCA"]
    assert accuracy.lines[1].get_xydata().tolist() == [[1, 50], [2, 70]]
    raw, smooth, _, constant = loss.lines
    assert raw.get_ydata().tolist() == [2.0, 1.0, 0.5]
    assert len(smooth.get_ydata()) == 3
    assert constant.get_ydata().tolist() == pytest.approx([2.0] * 3)
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["MHSA", "VCA"]
    assert loss.get_ylabel() == "cross-entropy"


@pytest.mark.parametrize(("rows", "window"), [(3, 3), (8, 7), (40, 7), (200, 21)])
def test_the_smoothed_loss_is_a_centred_savgol_filter(tmp_path: Path, rows: int, window: int) -> None:
    def smoothed(losses: np.ndarray) -> np.ndarray:
        loss, _ = plot_curves({"x": write_run(tmp_path, losses=losses.tolist(), top1=[1.0])}).axes
        return loss.lines[1].get_ydata()

    losses = np.random.default_rng(0).normal(size=rows)
    np.testing.assert_allclose(smoothed(losses), savgol_filter(losses, window, polyorder=1), atol=1e-12)
    line = np.linspace(2.3, 0.7, rows)  # an average that lags would stay above a falling line
    np.testing.assert_allclose(smoothed(line), line, atol=1e-12)


def test_a_single_row_is_drawn_as_it_is(tmp_path: Path) -> None:
    loss, _ = plot_curves({"x": write_run(tmp_path, losses=[1.5], top1=[1.0])}).axes
    assert loss.lines[1].get_ydata().tolist() == [1.5]


def test_panels_are_stacked_on_a_phone(tmp_path: Path) -> None:
    runs = {"x": write_run(tmp_path, losses=[1.0], top1=[1.0])}
    wide, narrow = plot_curves(runs), plot_curves(runs, narrow=True)
    assert narrow.get_figwidth() < wide.get_figwidth() / 2
    assert [axes.get_title(loc="left") for axes in narrow.axes] == [
        axes.get_title(loc="left") for axes in wide.axes
    ]
    for figure, axis in ((wide, 0), (narrow, 1)):
        figure.draw_without_rendering()
        first, second = (axes.get_position().bounds[axis] for axes in figure.axes)
        assert abs(first - second) > 0.3


def test_a_dark_page_gets_its_own_colours(tmp_path: Path) -> None:
    figure = plot_curves({"x": write_run(tmp_path, losses=[1.0], top1=[1.0])}, dark=True)
    assert figure.axes[1].lines[0].get_color() == COLORS[True][0]
    assert figure.patch.get_alpha() == 0


def test_runs_without_curves_are_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path} has no curves yet"):
        plot_curves({"x": tmp_path})
    with pytest.raises(ValueError, match="no runs"):
        plot_curves({})
