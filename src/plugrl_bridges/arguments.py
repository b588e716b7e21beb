"""Checks of arguments that stand in several public signatures: whole numbers, seconds, names, API keys.

Each returns what it was given, numbers as Python's own, or raises an error whose text begins with the argument's name:
`TypeError` for a wrong type, `ValueError` for a value out of range. numpy's numbers are taken, bools are no numbers.
"""

from __future__ import annotations

import math
import numbers
import operator

__all__ = ["api_key", "seconds", "seconds_or_none", "whole", "whole_or_none", "wrong_type"]


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    """Return the error for an argument that is not what was expected."""
    return TypeError(f"{name} must be {expected}, got {type(value).__name__} {value!r}")


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most``; None is no bound."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    expected = f"a whole number {bounds}"
    if isinstance(value, bool):
        raise wrong_type(name, expected, value)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what has no index is refused
    except TypeError:
        raise wrong_type(name, expected, value) from None
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number


def whole_or_none(name: str, value: object, least: int, most: int | None = None) -> int | None:
    """Return None, or a whole number from ``least`` to ``most``."""
    return None if value is None else whole(name, value, least, most)


def seconds(name: str, value: object) -> float:
    """Return a finite number of seconds above 0."""
    expected = "a finite number of seconds above 0"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong_type(name, expected, value)
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return number


def seconds_or_none(name: str, value: object) -> float | None:
    """Return None, or a finite number of seconds above 0."""
    return None if value is None else seconds(name, value)


def api_key(value: object) -> str | None:
    """Return an ``api_key`` that survives as an HTTP header, or None; errors do not show it."""
    expected = f"api_key must be printable ASCII text without spaces around it, or None (got a {type(value).__name__})"
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(expected)
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError(expected)
    return value
