"""Nearest names, for error messages."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["suggest"]


def suggest(name: str, known: Iterable[str], *, shown: int = 8) -> str:
    """Return a clause naming the known names closest to `name`, or the first few where none is close.

    Args:
        name: The unknown name.
        known: Valid names.
        shown: Number of names listed when none is close.
    """
    names = list(known)
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"choose one of {', '.join(names[:shown])}{', ...' if len(names) > shown else ''}"
