"""Callers' numbers, of whatever type, as plain ones: messages carry only those.

Any type counts that Python itself takes for a number, as those of NumPy. A bool is no number.
"""

from __future__ import annotations

import operator
from typing import SupportsFloat, SupportsIndex


def whole(value: object) -> int | None:
    """Return a whole number as an int; None: it is none."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_in(value: object, least: int, end: int) -> int | None:
    """Return a whole number from `least` to below `end` as an int; None: it is none."""
    number = whole(value)
    return number if number is not None and least <= number < end else None


def real(value: object) -> float | None:
    """Return a number as a float, NaN too; None: it is none."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (SupportsFloat, SupportsIndex)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
