"""Measurements that alternate in rounds, so a drift of the machine's speed affects all of them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def alternate(
    actions: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1
) -> dict[str, list[float]]:
    """Run all actions in each round, each time beginning with another one.

    Args:
        actions: by name; each returns its figure.
        rounds: how many of them count.
        warm: rounds before these, which do not count.

    Returns:
        The figures of each action, one a round.

    """
    names = list(actions)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            figure = actions[name]()
            if number >= warm:
                figures[name].append(figure)
    return figures


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
