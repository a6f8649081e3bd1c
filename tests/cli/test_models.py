import pytest

from lineardiff.cli import main


def test_models_lists_those_of_this_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    names = capsys.readouterr().out.split()
    assert {"vca_deit_tiny_patch16_224", "vca_deit_small_patch16_224"} <= set(names)
    assert "vit_tiny_patch16_224" not in names
    assert main(["models", "*small_patch*"]) == 0
    assert capsys.readouterr().out.split() == ["vca_deit_small_patch16_224"]


def test_the_table_has_counts_beside_what_the_paper_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "vca_deit_[ts]*l_patch16_224", "--table"]) == 0
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    name, *cells = row.split("  ")
    name, _, parameters, cost, *published = [name, *(cell.strip() for cell in cells if cell.strip())]
    assert (name, parameters) == ("vca_deit_small_patch16_224", "22,556,008")
    assert published == ["22.6 M", "4.6 G", "80.7"]
    assert header.count("published") == len(published)
    assert round(int(cost.replace(",", "")) / 1e9, 1) == 4.6


def test_no_match_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "vca_diet_tiny_patch16_224"]) == 2
    assert "did you mean vca_deit_tiny_patch16_224" in capsys.readouterr().err
