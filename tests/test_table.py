from lineardiff.table import format_table


def test_columns_are_aligned() -> None:
    text = format_table(("name", "n", "note"), [("a", "1,000", "x"), ("long name", "2", "")], left=1)
    assert text.splitlines() == [
        "name           n  note",
        "---------  -----  ----",
        "a          1,000     x",
        "long name      2",
    ]
