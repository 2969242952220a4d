"""The measurements of `bench.py regions`, by name; see docs/benchmarks.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from metrics.setup import Progress

from region_bench import bed, delivery, failures, inserts, peers, reads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wan.network import Network

Figures = dict[str, Any]

#: Those of one cluster, which they share.
_SHARED: Final[dict[str, Callable[[bed.Bed, float], Figures]]] = {
    "W1": inserts.one_shard,
    "W2": inserts.one_shard_or_nearest,
    "W4": reads.near,
    "W6": delivery.deliveries,
    "W9": inserts.bytes_over_links,
    "W10": inserts.rates,
    "W11": peers.beside,
    # The last one: it freezes servers.
    "W5": reads.frozen,
}
#: Those with a cluster of their own.
_OWN: Final[dict[str, Callable[[Network, float], Figures]]] = {
    "W3": inserts.numbers_of_regions,
    "W6 without hints": delivery.without_hints,
    "W7": failures.of_region,
    "W8": failures.of_region,
}
MEASUREMENTS: Final = tuple(f"W{number}" for number in range(1, 12))


def measure(scale: float, only: Sequence[str] = ()) -> Figures:
    """Run all measurements, or some; `scale` 1 takes about ten minutes."""

    def chosen(measurements: dict[str, Any]) -> dict[Any, str]:
        # By function: one run has W7 and W8.
        return {
            act: name for name, act in measurements.items() if not only or name.split()[0] in only
        }

    shared, own = chosen(_SHARED), chosen(_OWN)
    steps, found = Progress("regions", len(shared) + len(own)), Figures()

    def add(figures: Figures) -> None:
        found.update({name: row | bed.load() for name, row in figures.items()})
        steps.step(", ".join(figures))

    with bed.open_network() as network:
        if shared:
            with bed.Bed(network) as running:
                for act in shared:
                    add(act(running, scale))
        for act in own:
            add(act(network, scale))
    return found
