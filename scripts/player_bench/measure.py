"""The measurements of `bench.py player`, by name; see docs/benchmarks.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from metrics.setup import Progress

from player_bench import copies, ownership

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Figures = dict[str, Any]

MEASUREMENTS: Final[dict[str, Callable[[float], Figures]]] = {
    "L6": copies.sql,
    "L7": copies.files,
    "L9": ownership.failover,
    "L10": ownership.service,
    "L11": ownership.idle,
}


def measure(scale: float, only: Sequence[str] = ()) -> Figures:
    """Run all measurements, or some; `scale` 1 takes about ten minutes."""
    names = [name for name in MEASUREMENTS if not only or name in only]
    steps, found = Progress("player", len(names)), {}
    for name in names:
        found[name] = MEASUREMENTS[name](scale)
        steps.step(name)
    return found
