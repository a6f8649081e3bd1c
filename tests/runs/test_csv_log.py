"""Tables that are cut exactly and read back exactly."""

import math
from pathlib import Path

import pytest

from lineardiff.runs.csv_log import CsvLog, read_table


def test_numbers_read_back_exactly(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "t.csv", keep_to_step=0)
    values = [0.1 + 0.2, 1e-300, float("inf"), 2.0]
    for step, value in enumerate(values, start=1):
        log.append({"step": step, "value": value})
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[0] == "step,value"
    assert [float(line.split(",")[1]) for line in lines[1:]] == values


@pytest.mark.parametrize("tail", ["", "4", "4,0.", "4,0.4", "4,0.4\n5,0.5\n"])
def test_rows_past_the_step_are_cut(tmp_path: Path, tail: str) -> None:
    file = tmp_path / "t.csv"
    kept = "step,value\n1,0.1\n3,0.30000000000000004\n"
    file.write_text(kept + tail)
    log = CsvLog(file, keep_to_step=3)
    assert file.read_text() == kept
    assert [row["step"] for row in log.rows] == [1, 3]
    log.append({"step": 4, "value": 0.4})
    assert file.read_text() == kept + "4,0.4\n"


@pytest.mark.parametrize("text", ["", "step,value\n", "step,value\n1,0.1\n"])
def test_a_table_that_begins_anew_gets_its_head_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    CsvLog(file, keep_to_step=0).append({"step": 1, "value": 0.2})
    assert file.read_text() == "step,value\n1,0.2\n"


def test_an_empty_cell_is_nan_and_an_incomplete_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("step,loss,ema_loss\n1,0.5,\n2,0.25,0.125\n3,0.")
    first, second = read_table(tmp_path / "t.csv")
    assert (first["loss"], math.isnan(first["ema_loss"])) == (0.5, True)
    assert second == {"step": 2.0, "loss": 0.25, "ema_loss": 0.125}


@pytest.mark.parametrize(
    "junk",
    [
        b"st\n",
        b"\xff\xfe\x00\n",
        b"step,loss\n1,oops\n",
        b"step,loss\nx,0.5\n",
        b"step,loss\n1\n",
        b"step,loss\n1,2,3\n",
        b'{"step": 1}\n1\n',
        b"step,loss\nnan,0.5\n",
        b"step,loss\n,0.5\n",
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, junk: bytes) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(junk)
    for read in (read_table, lambda path: CsvLog(path, keep_to_step=5)):
        with pytest.raises(ValueError, match=r"t\.csv is damaged") as raised:
            read(file)
        assert "\n" not in str(raised.value)
    assert file.read_bytes() == junk
