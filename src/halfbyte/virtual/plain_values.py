"""Checks of what callers pass: integers as Python's int, anything else named in the error."""

import operator
from collections.abc import Iterable
from typing import Any

from halfbyte.errors import HalfbyteError, UsageError


def read_integer(value: Any, what: str, error: type[HalfbyteError] = UsageError) -> int:
    """Return `value` as an int: Python's, NumPy's, or another type that stands for one.

    Raises `error` that names `what` for floats, text, None, arrays.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise error(f"{what} is {show(value)}; an integer is wanted") from None


def read_integers(
    values: Any, what: str, error: type[HalfbyteError] = UsageError
) -> tuple[int, ...]:
    """Return a sequence of integers as a tuple; raises `error` that names `what`."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise error(f"{what} is {show(values)}; a sequence of integers is wanted")
    return tuple(read_integer(value, f"an item of {what}", error) for value in values)


def show(value: Any) -> str:
    """Return a short text for a value that is not what was wanted, and its type."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
