"""A run that is stopped anywhere and repeated is the run that was not stopped, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from toy import HARD, TOY, ToyTask, fingerprint

from lineardiff.recipes import ClassificationRecipe
from lineardiff.runs import checkpoint
from lineardiff.train import ClassificationTask, TrainingInterrupted, train


class Interrupted(ToyTask):
    """Someone presses Ctrl-C, or a cluster sends SIGTERM, during update `at` of this process."""

    def __init__(self, at: int, number: signal.Signals, *, times: int = 1) -> None:
        super().__init__()
        self.at, self.number, self.times = at, number, times

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        for _ in range(self.times if len(self.seen) == self.at else 0):
            signal.raise_signal(self.number)
        return loss


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_update_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    recipe = replace(TOY, log_every=4, ema_decay=0.9)
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(TrainingInterrupted, match=rf"stopped after step 7 of 15; repeat .* {tmp_path}"):
        train(recipe, Interrupted(7, number), output=tmp_path / "run")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert (tmp_path / "run/checkpoints/step-00000007").is_dir()
    assert not (tmp_path / "run/summary.json").exists()
    with pytest.raises(TrainingInterrupted, match="step 8 of 15"):
        train(recipe, Interrupted(1, number), output=tmp_path / "run")
    train(recipe, ToyTask(), output=tmp_path / "run")
    train(recipe, ToyTask(), output=tmp_path / "whole")
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [4, 8, 12, 15]


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        train(TOY, Interrupted(7, signal.SIGINT, times=2), output=tmp_path)
    assert not isinstance(raised.value, TrainingInterrupted)
    assert not (tmp_path / "checkpoints/step-00000007").exists()


def test_workers_do_not_change_the_run(tmp_path: Path) -> None:
    for workers in (0, 2):
        recipe = replace(HARD, workers=workers)
        train(recipe, ClassificationTask(recipe), output=tmp_path / str(workers))
    assert fingerprint(tmp_path / "0") == fingerprint(tmp_path / "2")


# Killed for good, in processes of their own.


def run(output: Path, recipe: ClassificationRecipe = HARD) -> None:
    train(recipe, ClassificationTask(recipe), output=output)


def in_child(work: Callable[[], None], *, kill_after: float | None = None) -> int:
    """Runs `work` in a forked process and returns how it ended; SIGKILL after so many seconds, if given."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_while_writing(output: Path, write: int) -> None:
    """Dies in the middle of its `write`-th file."""
    whole_ones = iter(range(write - 1))

    def half(path: Path, data: bytes) -> None:
        if next(whole_ones, None) is None:
            path.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(path, data)

    whole, checkpoint._write = checkpoint._write, half
    run(output)


def main(folder: Path) -> None:
    """Kills runs, finishes them, and leaves them in `folder`. Forks, so nothing here may use autograd before."""
    start = time.monotonic()
    assert in_child(partial(run, folder / "whole")) == 0
    seconds = time.monotonic() - start
    for write in (1, 4, 5, 8, 9):
        assert in_child(partial(killed_while_writing, folder / "writing", write)) == -signal.SIGKILL
    assert in_child(partial(run, folder / "writing")) == 0
    moments = random.Random(0)
    kills = finished = 0
    while kills < 6:
        work = partial(run, folder / f"anywhere{finished}", replace(HARD, workers=kills % 3))
        if in_child(work, kill_after=seconds * moments.random()) == -signal.SIGKILL:
            kills += 1
        else:
            finished += 1
            seconds *= 0.8  # or every kill comes too late, where other programs slowed down the first run
    assert in_child(partial(run, folder / f"anywhere{finished}")) == 0


def test_killed_at_any_moment_and_repeated(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    runs = sorted(path.name for path in tmp_path.iterdir())
    assert {"anywhere0", "whole", "writing"} <= set(runs)
    expected = fingerprint(tmp_path / "whole")
    assert {name: fingerprint(tmp_path / name) for name in runs} == dict.fromkeys(runs, expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
