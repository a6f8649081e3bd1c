import pytest
import torch
from torch import Tensor

from lineardiff.generation import guided

LABELS = torch.tensor([2, 5])
X = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.2, 0.6])


def network(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Each label, time and sample leaves its mark; twice the channels, as with a learned variance."""
    mark = (labels + 10 * t).reshape(-1, 1, 1, 1)
    return torch.cat([x * mark, x + mark], 1)


def truth(scales: list[float], channels: int) -> Tensor:
    conditional, unconditional = network(X, T, LABELS), network(X, T, torch.full((2,), 9))
    scale = torch.tensor(scales).reshape(-1, 1, 1, 1)
    mixed = unconditional + scale * (conditional - unconditional)
    return torch.cat([mixed[:, :channels], conditional[:, channels:]], 1)


@pytest.mark.parametrize("channels", [3, 1, None])
@pytest.mark.parametrize("scale", [4.0, 0.0, 1.0])
def test_guides_the_first_channels(channels: int | None, scale: float) -> None:
    answer = guided(network, LABELS, null_label=9, scale=scale, channels=channels)(X, T)
    torch.testing.assert_close(answer, truth([scale, scale], channels or 4))


@pytest.mark.parametrize(
    ("interval", "scales"),
    [((0.0, 1.0), [4, 4]), ((0.2, 0.5), [4, 1]), ((0.5, 0.6), [1, 4]), ((0.7, 0.9), [1, 1])],
)
def test_interval(interval: tuple[float, float], scales: list[float]) -> None:
    answer = guided(network, LABELS, null_label=9, scale=4.0, channels=3, interval=interval)(X, T)
    torch.testing.assert_close(answer, truth(scales, 3))


def test_one_call_of_the_network() -> None:
    sizes: list[int] = []

    def counted(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        sizes.append(len(x))
        return network(x, t, labels)

    guided(counted, LABELS, null_label=9, scale=4.0)(X, T)
    guided(counted, LABELS, null_label=9, scale=1.0)(X, T)
    guided(counted, LABELS, null_label=9, scale=4.0, interval=(0.8, 0.9))(X, T)
    assert sizes == [4, 2, 2]


def test_integer_times() -> None:
    t = torch.tensor([250, 750])
    answer = guided(network, LABELS, null_label=9, scale=3.0, interval=(500, 999))(X, t)
    torch.testing.assert_close(answer[:1], network(X, t, LABELS)[:1])
    assert not torch.allclose(answer[1:], network(X, t, LABELS)[1:])


def test_bad_arguments() -> None:
    for arguments, words in (
        ({"channels": 0}, "channels=0"),
        ({"interval": (1.0, 0.0)}, "expected \\(lowest, highest\\)"),
    ):
        with pytest.raises(ValueError, match=words):
            guided(network, LABELS, null_label=9, scale=2.0, **arguments)
    with pytest.raises(ValueError, match="one class per sample"):
        guided(network, LABELS[:, None], null_label=9, scale=2.0)
    with pytest.raises(ValueError, match="x has 4 channels"):
        guided(network, LABELS, null_label=9, scale=2.0, channels=5)(X, T)
    with pytest.raises(ValueError, match="x has 1 samples but there are 2 labels"):
        guided(network, LABELS, null_label=9, scale=2.0)(X[:1], T[:1])
