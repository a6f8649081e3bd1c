"""Reading the arguments of a command with tyro, its mistakes reported in one line."""

import contextlib
import io
import itertools
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

Arguments = TypeVar("Arguments")


def parse(
    kind: type[Arguments], words: Sequence[str], *, prog: str, default: Arguments | None = None
) -> Arguments:
    """Fill a dataclass from the words of a command line.

    ``--help`` prints the help and raises SystemExit(0).

    Args:
        kind: A dataclass; each field is an argument, the docstring below it the help.
        words: The words after ``prog``.
        prog: The command, as help and error messages show it.
        default: Values of the fields that are not given; None takes those of the dataclass.

    Raises:
        ValueError: On an unknown argument or a value of the wrong kind.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                prog=prog,
                args=words,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as exit:
        if not exit.code:
            raise
        raise ValueError(f"{_one_line(complaint.getvalue())}; see {prog} --help") from None


def _one_line(box: str) -> str:
    """The message in the box that tyro draws, and the nearest option where it offers one."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    # Frame and rules are drawn in dashes where stdout is not UTF-8.
    _, *rows = (re.sub("^-{5,}$", "", row.strip("│╭╮╰╯─ ")) for row in text.splitlines())
    message = "\n".join(rows).strip().split("\n\n")[0]
    for row, following in itertools.pairwise(rows):
        if row.startswith("Perhaps you meant"):
            message += f"; perhaps you meant {following.split(',')[0].split(' ')[0]}"
            break
    return " ".join(message.split()).rstrip(".")
