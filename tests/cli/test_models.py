import pytest

from lineardiff.cli import main
from lineardiff.results import published

VCA_CLASSIFIERS = [p.model for p in published() if p.model.startswith("vca_") and p.metric == "top1"]


def test_models_lists_those_of_this_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    names = capsys.readouterr().out.split()
    assert {"vca_deit_tiny_patch16_224", "vca_deit_small_patch16_224"} <= set(names)
    assert "vit_tiny_patch16_224" not in names
    assert main(["models", "*deit_small_patch*"]) == 0
    assert capsys.readouterr().out.split() == ["vca_deit_small_patch16_224"]


def test_the_table_has_counts_beside_what_the_paper_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "vca_deit_[ts]*l_patch16_224", "--table"]) == 0
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    name, *cells = row.split("  ")
    name, _, parameters, cost, *published = [name, *(cell.strip() for cell in cells if cell.strip())]
    assert (name, parameters) == ("vca_deit_small_patch16_224", "22,556,008")
    assert published == ["22.6 M", "4.6 G", "80.7 %"]
    assert header.count("published") == len(published)
    assert round(int(cost.replace(",", "")) / 1e9, 1) == 4.6


@pytest.mark.parametrize("model", VCA_CLASSIFIERS)
def test_every_vca_model_has_the_published_size_and_cost(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", model, "--table"]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    name, size, *counted, parameters, cost, _top1 = (cell.strip() for cell in row.split("  ") if cell.strip())
    assert (name, size) == (model, "224 x 224")
    for count, printed in zip(counted, (parameters, cost), strict=True):
        number, unit = printed.split()
        digits = len(number.partition(".")[2])
        assert f"{int(count.replace(',', '')) / {'M': 1e6, 'G': 1e9}[unit]:.{digits}f}" == number


def test_no_match_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "vca_diet_tiny_patch16_224"]) == 2
    assert "did you mean vca_deit_tiny_patch16_224" in capsys.readouterr().err
