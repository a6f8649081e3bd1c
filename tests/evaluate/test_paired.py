import math

import pytest
import torch
from scipy.stats import binomtest

from lineardiff.evaluate.paired import agreement, paired_difference

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
