"""From an insert in A to its delivery in each region (W6)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from region_trial.trial import REGIONS

from region_bench.bed import Bed, alternate, latencies

if TYPE_CHECKING:
    from wan.network import Network

Figures = dict[str, Any]

_ROUNDS: Final = 2
_SECONDS: Final = 5.0
#: Time in which all readers begin, and servers measure the new round trips, which shift their
#: leases by at most 1/128 each.
_BEGIN_S: Final = 12.0
#: How much longer than the writer readers follow.
_END_S: Final = 3.0
#: One round trip from A to its neighbour, and two epochs of 20 ms.
_GOAL_MS: Final = 40.0 + 2 * 20.0


def deliveries(bed: Bed, scale: float) -> Figures:
    """W6: from an insert in A to its delivery, with schedules and hints."""
    return {"W6": _measure(bed, scale)}


def without_hints(network: Network, scale: float) -> Figures:
    """W6 without hints: the same in a cluster whose shards get no hints."""
    with Bed(network, lag_fix=False) as bed:
        return {"W6 without hints": _measure(bed, scale)}


def _measure(bed: Bed, scale: float) -> Figures:
    """Return the latencies of a writer in A, and of the deliveries in each region."""
    seconds = max(2.0, _SECONDS * scale)

    def act() -> dict[str, list[float]]:
        for region in REGIONS[1:]:
            bed.start(region, "follow", seconds=_BEGIN_S + seconds + _END_S)
        time.sleep(_BEGIN_S)
        inserted, near = bed.call("A", "pace_and_follow", seconds=seconds)
        return {
            "insert": inserted,
            "A": near,
            **{region: bed.finish(region) for region in REGIONS[1:]},
        }

    results = alternate(bed.network, act, _ROUNDS)
    rows = {}
    for name in ("insert", *REGIONS):
        rows[name] = latencies({k: [one[name] for one in rounds] for k, rounds in results.items()})
        rows[name]["goal_p50_ms"] = _GOAL_MS
    return rows
