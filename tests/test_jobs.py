from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lineardiff.jobs import Job

SETTINGS = {"size": (1, 2), "seed": 0}


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Make this process the one of a rank, where nobody waits for the others."""

    def join(rank: int, world_size: int) -> None:
        state = SimpleNamespace(
            process_index=rank,
            num_processes=world_size,
            is_main_process=rank == 0,
            wait_for_everyone=lambda: None,
        )
        monkeypatch.setattr("lineardiff.jobs.join_processes", lambda device: (state, torch.device("cpu")))

    return join


def job(folder: Path, settings: dict[str, Any] = SETTINGS) -> Job:
    return Job(folder, name="%03d.txt", count=5, settings=settings)


def written(job: Job) -> list[int]:
    """Do the work, two units a file, and return the indices that were written."""
    done: list[int] = []

    def work(indices: list[int], progress: Callable[[int], None]) -> None:
        for index in indices:
            (job.folder / f"{index:03d}.txt").touch()
            done.append(index)
            progress(2)

    job.run(work, verb="counting", unit="thing", size=lambda index: 2)
    return done


def test_processes_share_the_files_and_a_rerun_writes_the_missing_ones(
    tmp_path: Path, join: Callable[[int, int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [(join(rank, 2), written(job(tmp_path)))[1] for rank in (0, 1)] == [[0, 2, 4], [1, 3]]
    error = capsys.readouterr().err
    assert "counting (1 of 2 processes)" in error
    assert "6/6" in error
    assert "4/4" not in error  # only the main process draws
    join(0, 1)
    assert written(job(tmp_path)) == []
    assert "10/10" in capsys.readouterr().err
    (tmp_path / "003.txt").rename(tmp_path / "003.unfinished.txt")
    assert written(job(tmp_path)) == [3]


def test_the_settings_must_match_once_there_are_files(
    tmp_path: Path, join: Callable[[int, int], None]
) -> None:
    join(0, 1)
    job(tmp_path, {"seed": 1})
    written(job(tmp_path))
    job(tmp_path)
    file = tmp_path / "settings.json"
    before = file.read_text()
    with pytest.raises(ValueError, match=r"size was \[1, 2\] and is now None; seed was 0 and is now 1"):
        job(tmp_path, {"seed": 1})
    assert file.read_text() == before
    file.write_text("3")
    with pytest.raises(ValueError, match="is damaged"):
        job(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"but no settings\.json"):
        job(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        job(tmp_path / "000.txt")


def test_an_interruption_says_how_to_resume(tmp_path: Path, join: Callable[[int, int], None]) -> None:
    def work(indices: list[int], progress: Callable[[int], None]) -> None:
        raise KeyboardInterrupt

    join(0, 1)
    with pytest.raises(KeyboardInterrupt, match=f"rerun the command to resume in {tmp_path}"):
        job(tmp_path).run(work, verb="counting")
