import pytest

from lineardiff.suggest import suggest


@pytest.mark.parametrize(
    ("name", "known", "clause"),
    [
        ("dem", ["demo", "imagenet_deit"], "did you mean demo?"),
        ("xyz", ["demo", "imagenet_deit"], "choose one of demo, imagenet_deit"),
        ("xyz", map(str, range(100)), "choose one of 0, 1, 2, 3, 4, 5, 6, 7, ..."),
    ],
)
def test_nearest_names_or_the_first_ones(name, known, clause):
    assert suggest(name, known) == clause
