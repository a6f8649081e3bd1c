"""The published numbers: well-formed, and in agreement with what the abstract says of them."""

import re
from collections import Counter

import pytest

from lineardiff.results import Published, find_published, published

UNITS = {"parameters": "M", "multiply_adds": "G", "top1": "%", "fid": "-"}
ABSTRACT_FID_GAINS = (2.1, 5.2)


def gain(vca: Published) -> float:
    baselines = [
        p
        for p in published()
        if p.metric == vca.metric and (p.table, p.row) == (vca.table, vca.row.removesuffix(" +VCA"))
    ]
    assert len(baselines) == 1, vca
    return round(float(vca.value) - float(baselines[0].value), 1)


def test_every_row_is_one_number_with_its_unit_and_place() -> None:
    for number in published():
        assert re.fullmatch(r"\d+\.\d", number.value), number
        assert number.unit == UNITS[number.metric], number
        assert number.source == "arXiv 2511.00833"
        assert number.row.endswith(" +VCA") == number.model.startswith("vca_"), number
    assert set(Counter((p.model, p.metric) for p in published()).values()) == {1}


def test_gains_are_those_of_the_abstract() -> None:
    top1 = {p.model: gain(p) for p in published() if p.metric == "top1" and p.model.startswith("vca_")}
    assert top1["vca_deit_tiny_patch16_224"] == 3.4
    assert max(value for model, value in top1.items() if "deit" not in model) == 3.1
    fid = [-gain(p) for p in published() if p.metric == "fid" and p.model.startswith("vca_")]
    low, high = ABSTRACT_FID_GAINS
    assert max(fid) == high
    assert all(value >= low for value in fid)


def test_a_number_is_found_by_model_and_metric() -> None:
    found = find_published("vca_deit_tiny_patch16_224", "parameters")
    assert found == Published(
        model="vca_deit_tiny_patch16_224",
        metric="parameters",
        value="6.0",
        unit="M",
        source="arXiv 2511.00833",
        table="1",
        row="DeiT-Tiny +VCA",
    )
    assert find_published("vca_deit_tiny_patch16_224", "fid") is None
    assert find_published("vca_deit_huge", "top1") is None


@pytest.mark.parametrize("metric", sorted(UNITS))
def test_no_metric_is_empty(metric: str) -> None:
    assert {p.model.startswith("vca_") for p in published() if p.metric == metric} == {True, False}
