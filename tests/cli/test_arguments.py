import io
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tyro

from lineardiff.cli.arguments import parse


@dataclass(frozen=True)
class Inner:
    epochs: int = 3
    """Passes over the images."""
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float | None = None
    model_args: tuple[str, ...] = ()


@dataclass
class Outer:
    """Does something."""

    inner: tyro.conf.OmitArgPrefixes[Inner] = field(default_factory=Inner)
    output: Path | None = None
    """Where to write."""
    dry_run: bool = False


def test_every_field_is_a_flag_over_the_given_defaults() -> None:
    words = ["--clip-grad", "1.0", "--output", "a/b", "--dry-run", "--model-args", "depth=2", "grid=(4,4)"]
    default = Outer(Inner(epochs=7))
    assert parse(Outer, words, prog="x", default=default) == Outer(
        Inner(epochs=7, clip_grad=1.0, model_args=("depth=2", "grid=(4,4)")), Path("a/b"), True
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "many"], "--epochs.*invalid literal.*'many'"),
        (["--epoch", "3"], "Unrecognized options: --epoch, 3; perhaps you meant --epochs"),
        (["stray"], "stray"),
        (["--betas", "0.9"], "--betas.*Expected 2 values"),
        (["--betas", "0.9", "nan"], "--betas nan: expected a finite number"),
        (["--clip-grad", "inf"], "--clip-grad inf: expected a finite number"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])  # tyro draws its box accordingly
def test_a_mistake_is_one_line_that_names_it(
    words: list[str], message: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(ValueError, match=message) as caught:
        parse(Outer, words, prog="lineardiff x")
    assert "\n" not in str(caught.value)
    assert not set("│╭╰─") & set(str(caught.value))
    assert str(caught.value).endswith("; see lineardiff x --help")


def test_help_shows_the_docstrings_and_ends_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Outer, ["--help"], prog="lineardiff x")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "Does something." in text
    assert "Passes over the images." in text
