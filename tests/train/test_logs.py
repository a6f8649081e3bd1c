"""Speeds without pauses, and progress without a terminal."""

import time

import pytest

from lineardiff.train import logs
from lineardiff.train.logs import Progress, Throughput


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
