"""The classification task: what it shows the model, what it minimises, what it refuses."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from toy import TINY

from lineardiff.train import ClassificationTask


class Fixed(nn.Module):
    """Returns given logits and keeps the images it receives."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        self.images = images
        return self.logits[: len(images)]


def test_loss_without_mixing_is_smoothed_cross_entropy() -> None:
    task = ClassificationTask(replace(TINY, label_smoothing=0.1))
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([3, 1, 4, 1])
    loss = task.loss(Fixed(logits), (torch.zeros(4, 3, 16, 16), labels))
    target = torch.full((4, 10), 0.01)
    target[range(4), labels] = 0.91
    expected = -(target * logits.double().log_softmax(1)).sum(1).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_mixing_blends_images_and_targets_alike() -> None:
    """Images that hold their label as a number reveal the share with which the targets must be mixed."""
    task = ClassificationTask(replace(TINY, mixup=0.8, cutmix=1.0, label_smoothing=0.0))
    labels = torch.tensor([0, 1, 2, 3])
    images = labels.float().view(4, 1, 1, 1).expand(4, 3, 16, 16)
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    shares = set()
    for _ in range(8):
        model = Fixed(logits)
        loss = task.loss(model, (images.clone(), labels))
        # Pairs (0, 3) and (1, 2): the mean of the first image is 3 times the share of its partner.
        partner = model.images[0].mean().item() / 3
        assert model.images[1].mean().item() == pytest.approx(1 + partner, rel=1e-4)
        log = logits.double().log_softmax(1)
        rows = torch.arange(4)
        expected = -((1 - partner) * log[rows, labels] + partner * log[rows, labels.flip(0)]).mean()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        shares.add(round(partner, 6))
    assert len(shares) > 4
    with pytest.raises(ValueError, match="batch_size=16: Mixup mixes in pairs, but a process gets 3 images"):
        task.loss(model, (images[:3].clone(), labels[:3]))


def test_validation_counts_every_image_once() -> None:
    task = ClassificationTask(TINY)
    labels = [task.validation[i][1] for i in range(len(task.validation))]
    assert len(labels) == 32

    class Always(nn.Module):
        """Class 7, with probability e / (e + 9)."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, images: Tensor) -> Tensor:
            return torch.eye(10)[7].expand(len(images), 10)

    share = labels.count(7) / 32
    metrics = task.validate(Always())
    assert metrics["top1"] == pytest.approx(100 * share)
    expected = share * -math.log(math.e / (math.e + 9)) + (1 - share) * math.log(math.e + 9)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert set(metrics) == {"loss", "top1", "top5"}


def test_the_seed_decides_weights_and_images_and_leaves_the_generators() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a, b, c = (ClassificationTask(replace(TINY, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.model.head.weight, b.model.head.weight)
    assert not torch.equal(a.model.head.weight, c.model.head.weight)
    places = [[task.train_data.split.locate(i) for i in range(96)] for task in (a, b, c)]
    assert places[0] == places[1] != places[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "vit_tiny_patch16_225"},
            r"'vit_tiny_patch16_225'.*did you mean vit_tiny_patch16_224",
        ),
        ({"model_args": ("img_sice=16",)}, r"img_sice"),
        ({"image_size": 24}, r"24 x 24.*img_size=24"),
        ({"data": "nowhere"}, r"nowhere"),
        ({"train_limit": 10**6}, r"1000000"),
        ({"auto_augment": "rand-q9"}, r"rand-q9"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassificationTask(replace(TINY, **changes))


def test_one_class_is_nothing_to_classify(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / split / "cat" / "0.png")
    with pytest.raises(ValueError, match=r"one class, cat; expected at least two"):
        ClassificationTask(replace(TINY, data=str(tmp_path)))
