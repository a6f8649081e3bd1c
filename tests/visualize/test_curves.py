import csv
import math
from pathlib import Path

import pytest

from lineardiff.visualize.curves import COLORS, plot_curves, read_curve


def write_csv(path: Path, columns: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def write_run(folder: Path, *, losses: list[float], top1: list[float]) -> Path:
    steps = len(losses)
    write_csv(folder / "train.csv", {"epoch": [(i + 1) / steps for i in range(steps)], "loss": losses})
    write_csv(folder / "validation.csv", {"epoch": list(range(1, len(top1) + 1)), "top1": top1})
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
    # The exponential average with its start corrected: 0.9-weighted means of what has been seen.
    weights = [0.81, 0.9, 1.0]
    assert smooth.get_ydata()[-1] == pytest.approx(
        sum(w * v for w, v in zip(weights, [2.0, 1.0, 0.5], strict=True)) / sum(weights)
    )
    assert constant.get_ydata().tolist() == pytest.approx([2.0] * 3)
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["MHSA", "VCA"]
    assert loss.get_ylabel() == "cross-entropy"


def test_a_dark_page_gets_its_own_colours(tmp_path: Path) -> None:
    figure = plot_curves({"x": write_run(tmp_path, losses=[1.0], top1=[1.0])}, dark=True)
    assert figure.axes[1].lines[0].get_color() == COLORS[True][0]
    assert figure.patch.get_alpha() == 0


def test_read_curve_reads_numbers_and_gaps(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss,ema_loss\n1,0.5,\n2,0.25,0.125\n")
    curve = read_curve(tmp_path / "a.csv")
    assert curve["loss"] == [0.5, 0.25]
    assert math.isnan(curve["ema_loss"][0])


def test_bad_curves_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("step,loss\n")
    with pytest.raises(ValueError, match=r"empty\.csv holds no row"):
        read_curve(tmp_path / "empty.csv")
    (tmp_path / "bad.csv").write_text("step,loss\n1,oops\n")
    with pytest.raises(ValueError, match=r"bad\.csv .*oops"):
        read_curve(tmp_path / "bad.csv")
    with pytest.raises(ValueError, match="at least one run"):
        plot_curves({})
