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
    number = not_negative(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return number


def percent(text: str) -> float:
    """Return a number from 0 to 100."""
    number = not_negative(text)
    if number > 100:
        raise argparse.ArgumentTypeError(f"{text} is above 100")
    return number


def count(text: str) -> int:
    """Return a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def count_or_none(text: str) -> int:
    """Return a whole number of at least 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is no finite number")
    return number
