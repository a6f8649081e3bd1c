"""A run that is stopped anywhere and repeated is the run that was not stopped, bit for bit."""

import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kill import in_child, killed, kills, run_module
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from toy import HARD, TOY, ToyTask, fingerprint

from lineardiff.recipes import ClassificationRecipe, TrainingRecipe
from lineardiff.train import ClassificationTask, TrainingInterrupted, train

TOY_KILLED = replace(
    TOY, epochs=2, log_every=4, ema_decay=0.9
)  # 10 updates, 3 rows, 2 validations, 3 checkpoints


class Interrupted(ToyTask):
    """Someone presses Ctrl-C, or a cluster sends SIGTERM, during update `at` of this process."""

    def __init__(
        self, at: int, number: signal.Signals, recipe: TrainingRecipe = TOY, *, times: int = 1
    ) -> None:
        super().__init__(recipe)
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
    with pytest.raises(TrainingInterrupted, match=rf"stopped after step 7 of 15; rerun .* {tmp_path}"):
        train(Interrupted(7, number, recipe), output=tmp_path / "run")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert (tmp_path / "run/checkpoints/step-00000007").is_dir()
    assert not (tmp_path / "run/summary.json").exists()
    with pytest.raises(TrainingInterrupted, match="step 8 of 15"):
        train(Interrupted(1, number, recipe), output=tmp_path / "run")
    train(ToyTask(recipe), output=tmp_path / "run")
    train(ToyTask(recipe), output=tmp_path / "whole")
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    # File by file: TensorBoard orders files by name, and a counter of this process is part of it.
    files = (tmp_path / "run/tensorboard").iterdir()
    events = [event for file in files for event in EventAccumulator(str(file)).Reload().Scalars("train/loss")]
    assert sorted(event.step for event in events) == [4, 8, 12, 15]


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        train(Interrupted(7, signal.SIGINT, times=2), output=tmp_path)
    assert not isinstance(raised.value, TrainingInterrupted)
    assert not (tmp_path / "checkpoints/step-00000007").exists()


def test_workers_do_not_change_the_run(tmp_path: Path) -> None:
    for workers in (0, 2):
        recipe = replace(HARD, workers=workers)
        train(ClassificationTask(recipe), output=tmp_path / str(workers))
    assert fingerprint(tmp_path / "0") == fingerprint(tmp_path / "2")


# The rest runs in forked processes: this module as a program kills runs, resumes them and leaves their folders.


def run(recipe: ClassificationRecipe, output: Path) -> None:
    train(ClassificationTask(recipe), output=output)


def main(folder: Path) -> None:
    """Nothing here may use autograd before a fork."""

    def toy(output: Path) -> None:
        train(ToyTask(TOY_KILLED), output=output)

    assert in_child(lambda: toy(folder / "toy")) == 0
    changes = kills(toy, folder / "toys")
    assert changes > 40, changes
    hard = partial(run, HARD)
    assert in_child(lambda: hard(folder / "hard")) == 0
    # Each kill is of the run that the previous one left, so the moments spread over all of it.
    for change in (9, 14, 19, 24, 16, 12):
        assert killed(lambda: hard(folder / "hards/0"), folder=folder, change=change)
    assert in_child(lambda: hard(folder / "hards/0")) == 0


def test_killed_before_every_change_and_resumed(tmp_path: Path) -> None:
    run_module(__file__, tmp_path)
    for name in ("toy", "hard"):
        expected = fingerprint(tmp_path / name)
        runs = sorted((tmp_path / f"{name}s").iterdir())
        assert {path.name: fingerprint(path) for path in runs} == {path.name: expected for path in runs}
        assert not list(tmp_path.glob(f"{name}s/*/checkpoints/*unfinished*"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
