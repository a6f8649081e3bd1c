import time

import pytest
import torch
from torch import nn

from lineardiff.bench.speed import images_per_second

CALLS: list[float] = []


class Sleeper(nn.Module):
    """A classifier that takes a known time for a forward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.head = nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        CALLS.append(self.seconds)
        return self.head(images.mean((2, 3)))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_speed_is_images_over_time(mode: str) -> None:
    speeds = images_per_second(
        {"slow": Sleeper(0.02), "fast": Sleeper(0.01)},
        image_size=4,
        batch_size=6,
        mode=mode,
        rounds=3,
        seconds=0.02,
    )
    # A sleep lasts at least as long as asked: an upper bound of the rate whatever else the machine does.
    assert 30 < speeds["slow"].median <= 6 / 0.02
    assert speeds["slow"].median < speeds["fast"].median <= 6 / 0.01
    assert speeds["slow"].low <= speeds["slow"].median <= speeds["slow"].high
    assert speeds["fast"].threads == torch.get_num_threads()
    assert (speeds["fast"].mode, speeds["fast"].batch_size, speeds["fast"].rounds) == (mode, 6, 3)


def test_the_models_take_turns() -> None:
    models = {"a": Sleeper(0.001), "b": Sleeper(0.002)}
    images_per_second(models, image_size=(2, 3), batch_size=1, rounds=4, seconds=0.0)
    assert CALLS[-8:] == [0.001, 0.002, 0.002, 0.001, 0.001, 0.002, 0.002, 0.001]


def test_training_steps_leave_no_trace() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images_per_second({"m": model}, image_size=2, batch_size=4, mode="training", rounds=2, seconds=0.0)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        images_per_second({}, image_size=4, batch_size=1)
    with pytest.raises(ValueError, match="rounds is 1"):
        images_per_second({"m": nn.Linear(1, 1)}, image_size=4, batch_size=1, rounds=1)
