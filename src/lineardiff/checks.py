"""Checks of arguments: each raises ValueError with what was given and what was expected."""

import math
from numbers import Integral, Real

__all__ = ["as_pair", "check_bool", "check_heads", "check_integer", "check_number", "check_pair"]


def check_integer(name: str, value: object, *, minimum: int = 1) -> None:
    """Check that a value is an integer, not a bool, of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name}={value!r} must be an integer of at least {minimum}.")


def check_bool(name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")


def check_number(
    name: str, value: object, *, above: float = -math.inf, low: float = 0.0, high: float = math.inf
) -> None:
    """Check that a value is a number, not a bool or NaN, with above < value, and low <= value < high."""
    given = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not (low <= given < high and above < given):
        least = f"above {above:g}" if above >= low else f"of at least {low:g}"
        raise ValueError(f"{name}={value!r} must be a number {least} and below {high:g}.")


def check_pair(name: str, value: object) -> None:
    """Check that a value is two positive integers: (rows, columns) or (height, width)."""
    pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else (0, 0)
    if any(isinstance(i, bool) or not isinstance(i, Integral) or i < 1 for i in pair):
        raise ValueError(f"{name} must be two positive integers (rows, columns); got {value!r}.")


def as_pair(name: str, value: object) -> tuple[int, int]:
    """Return (height, width) of a size given as one side or as a pair.

    Raises:
        ValueError: The value is neither a positive integer nor two of them.
    """
    try:
        check_pair(name, (value, value) if isinstance(value, Integral) else value)
    except ValueError as error:
        raise ValueError(
            f"{name}={value!r} must be one side or (height, width), in positive integers."
        ) from error
    return (int(value), int(value)) if isinstance(value, Integral) else tuple(value)  # type: ignore[arg-type, return-value]


def check_heads(dim: int, num_heads: int, *, multiple: int = 1) -> None:
    """Check that `dim` channels divide into `num_heads` heads of a multiple of `multiple` channels."""
    check_integer("dim", dim)
    check_integer("num_heads", num_heads)
    if dim % (multiple * num_heads):
        times = "" if multiple == 1 else f"{multiple} * "
        raise ValueError(f"dim={dim} must be a multiple of {times}num_heads={num_heads}; change one of them.")
