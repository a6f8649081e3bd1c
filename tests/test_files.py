from pathlib import Path

import pytest

from lineardiff.files import written_whole


def test_a_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for text in ("old", "new"):
        with written_whole(path) as file:
            assert file.suffix == ".png"  # for writers that go by it
            file.write_text(text)
            assert not path.exists() or path.read_text() == "old"
        assert path.read_text() == text
    with pytest.raises(KeyboardInterrupt):
        _interrupted(path)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def _interrupted(path: Path) -> None:
    with written_whole(path) as file:
        file.write_text("half")
        raise KeyboardInterrupt
