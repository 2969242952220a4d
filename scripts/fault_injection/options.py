"""Types of numbers in options, for argparse: nonsense is bad usage, and no empty trial."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> float:
    """Return a finite number above 0."""
    number = _finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def not_negative(text: str) -> float:
    """Return a finite number of at least 0."""
    number = _finite(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def share(text: str) -> float:
    """Return a number from 0 to 1."""
    return _at_most(1, text)


def percent(text: str) -> float:
    """Return a number from 0 to 100."""
    return _at_most(100, text)


def count(text: str) -> int:
    """Return a whole number above 0."""
    return _whole(1, text)


def count_or_zero(text: str) -> int:
    """Return a whole number of at least 0."""
    return _whole(0, text)


def _at_most(limit: float, text: str) -> float:
    number = not_negative(text)
    if number > limit:
        raise argparse.ArgumentTypeError(f"{text} is above {limit}")
    return number


def _whole(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return number
