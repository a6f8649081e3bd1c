import logging
import math

import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from torch import Tensor, nn

from lineardiff.evaluate import accuracy, agreement, paired_difference, predict


class GreySplit:
    """Images of one grey value each; None marks an image that cannot be read."""

    source, split = "greys", "validation"

    def __init__(self, greys: list[int | None], labels: list[int], classes: int) -> None:
        self.greys, self.labels = greys, labels
        self.classes = tuple(f"class {i}" for i in range(classes))

    def __len__(self) -> int:
        return len(self.greys)

    def __getitem__(self, index: int) -> tuple[Image.Image, int] | None:
        grey = self.greys[index]
        return None if grey is None else (Image.new("RGB", (2, 2), (grey,) * 3), self.labels[index])


class Table(nn.Module):
    """Logits looked up by grey value: the model of which every prediction is known by hand."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        return self.logits[images[:, 0, 0, 0].long()]


def to_tensor(image: Image.Image) -> Tensor:
    return torch.full((3, 2, 2), float(image.getpixel((0, 0))[0]))


def rising(*, classes: int) -> Table:
    """Grey value g ranks class g first, g + 1 second, ...: class (g + r) mod classes has logit -r."""
    return Table([[-float((c - g) % classes) for c in range(classes)] for g in range(classes)])


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 100])
def test_accuracy_counts_by_hand_whatever_the_batches(batch_size: int) -> None:
    # Ranks of the labels 0, 0, 1, 4, 5, 6, 0: three of seven are first, five among the first five.
    greys, ranks = [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 4, 5, 6, 0]
    split = GreySplit(greys, [(g + r) % 7 for g, r in zip(greys, ranks, strict=True)], classes=7)
    model = rising(classes=7).train()
    scores = accuracy(model, split, transform=to_tensor, batch_size=batch_size)
    log_sum = math.log(sum(math.exp(-r) for r in range(7)))
    assert scores["top1"] == 100 * 3 / 7
    assert scores["top5"] == 100 * 5 / 7
    assert scores["loss"] == pytest.approx(sum(r + log_sum for r in ranks) / 7, rel=1e-6)
    assert scores["images"] == 7
    assert model.training


@pytest.mark.parametrize("classes", [1, 2, 5, 6])
def test_top5_is_given_only_where_it_can_miss(classes: int) -> None:
    scores = accuracy(rising(classes=classes), GreySplit([0], [0], classes), transform=to_tensor)
    assert ("top5" in scores) == (classes > 5)


def test_skipped_images_do_not_count_and_are_told(caplog: pytest.LogCaptureFixture) -> None:
    split = GreySplit([0, None, 1, None, None, 2], [0, 0, 1, 1, 1, 0], classes=3)
    with caplog.at_level(logging.WARNING, "lineardiff"):
        scores = accuracy(rising(classes=3), split, transform=to_tensor, batch_size=2)
    assert (scores["images"], scores["top1"]) == (3, 100 * 2 / 3)
    assert "3 of 6 images were skipped" in caplog.text


def test_predict_keeps_the_order_and_leaves_out_what_cannot_be_read() -> None:
    split = GreySplit([2, None, 0, 1], [2, 0, 0, 0], classes=3)
    batches = list(predict(rising(classes=3), split, transform=to_tensor, batch_size=3, workers=1))
    assert torch.cat([logits.argmax(-1) for logits, _ in batches]).tolist() == [2, 0, 1]
    assert torch.cat([labels for _, labels in batches]).tolist() == [2, 0, 0]


def test_autocast_reaches_the_model() -> None:
    class Probe(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images.flatten(1))
            assert logits.dtype == torch.bfloat16
            return logits

    logits, _ = next(predict(Probe(12, 3), GreySplit([1], [0], 3), transform=to_tensor, precision="bf16"))
    assert logits.dtype == torch.float32


def test_bad_input_is_named() -> None:
    split = GreySplit([0], [0], classes=4)
    with pytest.raises(ValueError, match="the model has 3 classes, but greys has 4"):
        accuracy(rising(classes=3), split, transform=to_tensor)
    with pytest.raises(ValueError, match="precision='bf61'"):
        accuracy(rising(classes=4), split, transform=to_tensor, precision="bf61")
    with pytest.raises(ValueError, match="none of the 1 validation images"):
        accuracy(rising(classes=4), GreySplit([None], [0], 4), transform=to_tensor)


# 5 both right, 2 only the first, 6 only the second, 3 both wrong.
FIRST = torch.tensor([1] * 5 + [1] * 2 + [0] * 6 + [0] * 3).bool()
SECOND = torch.tensor([1] * 5 + [0] * 2 + [1] * 6 + [0] * 3).bool()


def test_agreement_counts_the_four_cases() -> None:
    assert agreement(FIRST, SECOND) == {
        "both_right": 5,
        "only_first_right": 2,
        "only_second_right": 6,
        "both_wrong": 3,
    }


def test_paired_difference_is_that_of_mcnemar() -> None:
    b, c, n = 2, 6, 16  # the discordant pairs
    result = paired_difference(FIRST, SECOND)
    assert result["top1"] == pytest.approx(100 * (c - b) / n)
    assert result["standard_error"] == pytest.approx(100 * math.sqrt(b + c - (c - b) ** 2 / n) / n)


@pytest.mark.parametrize(("wins", "losses"), [(6, 2), (5, 5), (6, 5), (0, 9), (130, 90), (700, 800)])
def test_p_value_is_that_of_the_exact_mcnemar_test(wins: int, losses: int) -> None:
    first = torch.tensor([0] * wins + [1] * losses + [1] * 7).bool()
    second = torch.tensor([1] * wins + [0] * losses + [1] * 7).bool()
    truth = binomtest(wins, wins + losses).pvalue
    assert paired_difference(first, second)["p_value"] == pytest.approx(truth, rel=1e-9)


def test_models_that_agree_differ_by_nothing() -> None:
    assert paired_difference(FIRST, FIRST) == {"top1": 0.0, "standard_error": 0.0, "p_value": 1.0}
