"""The measurements of `bench.py player`, by name; see docs/benchmarks.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from metrics.setup import Progress

from player_bench import copies, delays, ownership, peers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Figures = dict[str, Any]

#: Each returns its figures under its name; one returns those of two.
MEASUREMENTS: Final[dict[str, Callable[[float], Figures]]] = {
    "L1": delays.over_targets,
    "L2": delays.over_sizes,
    "L3": delays.over_targets,
    "L4": peers.second_log,
    "L5": peers.beside_systems,
    "L6": copies.sql,
    "L7": copies.files,
    "L8": delays.one_down,
    "L9": ownership.failover,
    "L10": ownership.service,
    "L11": ownership.idle,
}


def measure(scale: float, only: Sequence[str] = ()) -> Figures:
    """Run all measurements, or some; `scale` 1 takes about ten minutes."""
    chosen = dict.fromkeys(act for name, act in MEASUREMENTS.items() if not only or name in only)
    steps, found = Progress("player", len(chosen)), {}
    for act in chosen:
        figures = act(scale)
        found |= figures
        steps.step(", ".join(figures))
    return found
