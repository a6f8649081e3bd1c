"""Speed of networks: images per second, and the rows of `lineardiff bench model` and `generator`."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

from lineardiff.bench import networks
from lineardiff.bench.networks import images_per_second, measure_networks

CALLS: list[float] = []
FAST = {"rounds": 2, "seconds": 0.0, "memory": False}
PAIR = ("vit_tiny_patch16_224", "vca_deit_tiny_patch16_224")


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


@pytest.mark.parametrize("mode", ["forward", "train"])
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
    images_per_second({"m": model}, image_size=2, batch_size=4, mode="train", rounds=2, seconds=0.0)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="got no models"):
        images_per_second({}, image_size=4, batch_size=1)
    with pytest.raises(ValueError, match="rounds is 1"):
        images_per_second({"m": nn.Linear(1, 1)}, image_size=4, batch_size=1, rounds=1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_latency_and_throughput_take_turns_on_one_thread_and_on_all(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    made: list[tuple[float, int, int]] = []

    class Network(Sleeper):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            made.append((self.seconds, len(images), torch.get_num_threads()))
            return super().forward(images)

    monkeypatch.setattr(networks, "_check", lambda *what: None)
    monkeypatch.setattr(networks, "build", lambda name, *what: Network(float(name)))
    names, batches = ("0.01", "0.001"), (1, 3)
    (rows,) = measure_networks(
        names,
        level="model",
        sizes=[8],
        batch_sizes=batches,
        threads=[1, 2],
        rounds=2,
        seconds=0.0,
        memory=False,
    )
    order = [(float(name), B, threads) for name in names for B in batches for threads in (1, 2)]
    assert made == order * 3 + order[::-1]
    assert torch.get_num_threads() == 2
    assert [(row.candidate, row.B, row.threads) for row in rows] == [(f"{s:g}", B, t) for s, B, t in order]
    by_setting = {(row.candidate, row.B, row.threads): row for row in rows}
    for (_, B, threads), row in by_setting.items():
        assert row.ratio == by_setting["0.01", B, threads].ms / row.ms
    assert by_setting["0.001", 1, 1].ratio > 1


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_classifiers_with_their_memory(mode: str) -> None:
    (rows,) = measure_networks(
        PAIR, level="model", sizes=[112], batch_sizes=[1], modes=[mode], rounds=2, seconds=0.0
    )
    assert [(row.candidate, row.mode, row.size, row.B) for row in rows] == [(n, mode, 112, 1) for n in PAIR]
    assert rows[0].ratio == 1.0
    if rows[0].peak_mib is not None:  # Linux; the gradients of 5.7 M weights take 22 MiB
        low, high = (22, 150) if mode == "train" else (0, 60)
        assert all(low < row.peak_mib < high for row in rows)


def test_generators_sample_and_train() -> None:
    pytest.importorskip("diffusers")
    names = ("sit_s_8", "vca_sit_s_8")
    options = {"level": "generator", "sizes": [16], "batch_sizes": [2], "modes": ["forward", "train"], **FAST}
    forward, train = measure_networks(names, **options)
    for mode, rows in (("forward", forward), ("train", train)):
        assert [(r.candidate, r.mode, r.size, r.N, r.B) for r in rows] == [(n, mode, 16, 4, 2) for n in names]
    assert train[0].ms > forward[0].ms  # the same network, backward and optimizer step included


def test_a_training_step_moves_the_weights() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    before = network[1].weight.clone()
    networks._call(network, (torch.rand(2, 3, 2, 2),), "train")()
    assert (network[1].weight - before).abs().max().item() == pytest.approx(
        1e-6, rel=0.2
    )  # AdamW's first step: lr


def test_compiled_networks_run_compiled_for_every_setting(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                raise AssertionError("not compiled")
            return images * self.weight

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(networks, "_check", lambda *what: None)
    monkeypatch.setattr(networks, "build", lambda *what: Network())
    batches = list(range(1, 7))  # with two numbers of threads more variants than PyTorch compiles by default
    (rows,) = measure_networks(
        "ab", level="model", sizes=[8], batch_sizes=batches, threads=[1, 2], compiled=True, **FAST
    )
    assert {row.candidate for row in rows} == {"a, compiled", "b, compiled"}
    assert len(rows) == 24


@pytest.mark.parametrize(
    ("names", "level", "size", "message"),
    [
        (("vit_tiny_patch16_224", "vca_deit_tny_patch16_224"), "model", 112, "did you mean vca_deit_tiny"),
        (("vca_sitt_s_2",), "generator", 32, "did you mean vca_sit_s_2"),
        (("swin_tiny_patch4_window7_224",), "model", 1, "does not take images of size 1"),
        (("vca_pvt_tiny",), "model", 33, "vca_pvt_tiny does not take images of size 33"),
        (("sit_s_8",), "generator", 4, "sit_s_8 does not take latents of size 4"),
    ],
)
def test_networks_and_sizes_that_do_not_fit_are_refused_before_measuring(
    names: tuple[str, ...], level: str, size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure_networks(names, level=level, sizes=[size])
