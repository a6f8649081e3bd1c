"""Parse the arguments of a command with tyro, and report mistakes in one line."""

import contextlib
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

from lineardiff import cli

__all__ = ["parse"]

Arguments = TypeVar("Arguments")


def parse(
    kind: type[Arguments], words: Sequence[str], *, prog: str, default: Arguments | None = None
) -> Arguments:
    """Fill a dataclass from the words of a command line, then complete the import of the library.

    ``--help`` prints the help and raises SystemExit(0), in a fraction of the time that importing torch takes.

    Args:
        kind: A dataclass; each field is an argument, and the docstring below it its help.
        words: Words after ``prog``.
        prog: Command, as help and error messages show it.
        default: Values of the fields that are not given; None takes those of the dataclass.

    Raises:
        ValueError: An argument is unknown, a value of the wrong type, or a number NaN.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            arguments = tyro.cli(
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
    _check_finite(arguments, prog)
    cli.import_library()
    return arguments


def _check_finite(arguments: object, prog: str) -> None:
    """Raise ValueError if a number among the arguments is NaN or infinite."""
    for name, value in vars(arguments).items():
        if dataclasses.is_dataclass(value):
            _check_finite(value, prog)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {number}: expected a finite number; see {prog} --help")


def _one_line(box: str) -> str:
    """Return the message in the box that tyro draws, and the nearest option if it offers one."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    # tyro draws its frame in dashes where stdout is not UTF-8.
    _, *rows = (re.sub("^-{5,}$", "", row.strip("│╭╮╰╯─ ")) for row in text.splitlines())
    message = "\n".join(rows).strip().split("\n\n")[0]
    for row, following in itertools.pairwise(rows):
        if row.startswith("Perhaps you meant"):
            message += f"; perhaps you meant {following.split(',')[0].split(' ')[0]}"
            break
    return " ".join(message.split()).rstrip(".")
