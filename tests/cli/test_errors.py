import errno
import os
from pathlib import Path

import pytest

from lineardiff.cli.errors import exit_code
from lineardiff.extras import missing_extra


def failing(error: BaseException) -> int:
    def work() -> None:
        raise error

    return exit_code(work)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("epochs=0:\n  give more"), "epochs=0: give more"),
        (FloatingPointError("the loss is nan"), "the loss is nan"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.csv"),
            "No such file or directory: a.csv",
        ),
        (
            OSError(errno.ENOSPC, "cannot write x; free some space"),
            "disk full: cannot write x; free some space",
        ),
        (
            RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "disk full: Error while serializing: I/O error: No space left on device (os error 28)",
        ),
        (
            ModuleNotFoundError("no", name="datasets.load"),
            str(missing_extra("train", package="datasets")),
        ),
        (
            missing_extra("generate", package="diffusers"),
            str(missing_extra("generate", package="diffusers")),
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LINEARDIFF_DEBUG", raising=False)
    assert failing(error) == 2
    assert capsys.readouterr().err == f"lineardiff: error: {line}\n"


def test_debug_shows_where_it_came_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINEARDIFF_DEBUG", "1")
    assert failing(ValueError("bad")) == 2
    *traceback, line = capsys.readouterr().err.splitlines()
    assert traceback[0].startswith("Traceback")
    assert line == "lineardiff: error: bad"


def test_a_real_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: print((tmp_path / "none.json").read_text())) == 2
    assert str(tmp_path / "none.json") in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which Linux has")
def test_a_really_full_disk_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    assert exit_code(work) == 2
    assert "disk full: No space left on device" in capsys.readouterr().err


def test_bugs_of_ours_keep_their_traceback() -> None:
    with pytest.raises(KeyError):
        failing(KeyError("x"))
    with pytest.raises(ModuleNotFoundError):
        failing(ModuleNotFoundError("no", name="lineardiff.cli.nothing"))


def test_an_interruption_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(KeyboardInterrupt("repeat the command")) == 130
    assert capsys.readouterr().err == "lineardiff: interrupted; repeat the command\n"
    assert failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "lineardiff: interrupted\n"


def test_success_and_help_are_zero() -> None:
    assert exit_code(lambda: None) == 0
    assert failing(SystemExit(0)) == 0
