"""Tables that are cut exactly, speeds that leave pauses out, and progress without a terminal."""

import time
from pathlib import Path

import pytest

from lineardiff.runs.csv_log import CsvLog
from lineardiff.train import logs
from lineardiff.train.logs import Progress, Throughput


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
    assert [row["step"] for row in log.rows] == ["1", "3"]
    log.append({"step": 4, "value": 0.4})
    assert file.read_text() == kept + "4,0.4\n"


@pytest.mark.parametrize("text", ["", "st", "step,value\n", "step,value\n1,0.1\n"])
def test_a_table_that_begins_anew_gets_its_head_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    CsvLog(file, keep_to_step=0).append({"step": 1, "value": 0.2})
    assert file.read_text() == "step,value\n1,0.2\n"


def test_pauses_and_the_first_lap_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    throughput = Throughput()
    assert throughput.median() is None
    now[0] = 10.0
    throughput.lap(100)
    assert throughput.median() == 10.0
    with throughput.pause():
        now[0] = 50.0
    now[0] = 51.0
    throughput.lap(100)
    assert throughput.median() == 100.0
    assert Throughput(throughput.laps).median() == 100.0


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(step=10, total_steps=20, shown=True, name="toy")
    for _ in range(10):
        now[0] += logs.LINE_EVERY / 4
        progress.update()
        progress.report(loss=0.5, images_per_second=1234.0)
    progress.say("epoch 1")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "toy: step 15/20, loss 0.5000, 1,234 images/s, 00:37 left",
        "toy: step 20/20, loss 0.5000, 1,234 images/s, 00:00 left",
        "epoch 1",
    ]


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(step=0, total_steps=1, shown=False, name="toy")
    progress.update()
    progress.report(loss=0.5, images_per_second=1.0)
    progress.say("epoch 1")
    progress.close()
    assert capsys.readouterr().err == ""
