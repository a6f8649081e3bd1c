from pathlib import Path

import pytest

from lineardiff.files import check_settings, write_settings, written_whole


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


def test_settings_count_once_there_are_pieces(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    settings = {"size": (1, 2), "seed": 0}
    assert not check_settings(folder, settings, pieces="*.png")
    write_settings(folder, settings)
    assert not check_settings(folder, {"seed": 1}, pieces="*.png")
    (folder / "0.png").touch()
    assert check_settings(folder, settings, pieces="*.png")
    with pytest.raises(ValueError, match=r"size was \[1, 2\] and is now None; seed was 0 and is now 1"):
        check_settings(folder, {"seed": 1}, pieces="*.png")
    (folder / "settings.json").write_text("3")
    with pytest.raises(ValueError, match="is damaged"):
        check_settings(folder, settings, pieces="*.png")
    (folder / "settings.json").unlink()
    with pytest.raises(ValueError, match="of unknown settings"):
        check_settings(folder, settings, pieces="*.png")
    with pytest.raises(ValueError, match="is a file"):
        check_settings(folder / "0.png", settings, pieces="*.png")
