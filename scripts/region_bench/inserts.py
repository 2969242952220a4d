"""Inserts: latencies (W1, W2, W3), bytes over each link (W9), and rates (W10)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from metrics.rounds import ratio
from region_trial.trial import REGIONS

from region_bench.bed import Bed, alternate, latencies, round_trips_ms, with_goal

if TYPE_CHECKING:
    from wan.network import Network

Figures = dict[str, Any]

_ROUNDS: Final = 3
_SECONDS: Final = 4.0
#: The way to the backup of the shard whose primary is in the region.
_TO_BACKUP: Final = {"A": "A-B", "B": "B-C", "C": "A-C"}
#: From A to the farthest server of the shards A, AB and ABC; "": it is in A.
_TO_FARTHEST: Final = {1: "", 2: "A-B", 3: "A-C"}
_CLIENTS: Final = 8
_LARGE: Final = 4096
_LINK_GOAL: Final = 1.15


def one_shard(bed: Bed, scale: float) -> Figures:
    """W1: inserts of clients in A at the shard AB."""
    found, trips = {}, round_trips_ms(bed.network)
    for clients in (1, _CLIENTS):
        bed.call("A", "insert", seconds=0.5, clients=clients, shard=0)
        results = alternate(
            bed.network,
            lambda clients=clients: bed.call(
                "A", "insert", seconds=_SECONDS * scale, clients=clients, shard=0
            ),
            _ROUNDS,
        )
        found[f"clients {clients}"] = with_goal(latencies(results), trips[_TO_BACKUP["A"]])
    return {"W1": found}


def one_shard_or_nearest(bed: Bed, scale: float) -> Figures:
    """W2: clients in all regions, all at the shard AB, beside the nearest shards."""
    found: Figures = {}
    trips = round_trips_ms(bed.network)
    for name, shard in (("one shard", 0), ("nearest", None)):
        results = alternate(
            bed.network,
            lambda shard=shard: bed.call_all("insert", seconds=_SECONDS * scale, shard=shard),
            _ROUNDS,
        )
        for region in REGIONS:
            of_region = {k: [one[region] for one in rounds] for k, rounds in results.items()}
            row = latencies(of_region)
            if shard is None:
                row = with_goal(row, trips[_TO_BACKUP[region]])
            found.setdefault(name, {})[region] = row
    return {"W2": found}


def numbers_of_regions(network: Network, scale: float) -> Figures:
    """W3: inserts of a client in A at shards that are in one, two and three regions."""
    found = {}
    trips = round_trips_ms(network) | {"": 0.0}
    with Bed(network, ["AAA", "AAB", "ABC"], f=2, min_regions=1) as bed:
        for required, way in _TO_FARTHEST.items():
            shard = required - 1
            results = alternate(
                network,
                lambda required=required, shard=shard: bed.call(
                    "A",
                    "insert",
                    seconds=_SECONDS * scale,
                    shard=shard,
                    min_regions=required,
                ),
                _ROUNDS,
            )
            found[f"min_regions {required}"] = with_goal(latencies(results), trips[way])
    return {"W3": found}


def bytes_over_links(bed: Bed, scale: float) -> Figures:
    """W9: bytes of each path while A inserts records of 4 KB at the shard AB, beside no inserts."""
    seconds = 4 * _SECONDS * scale

    def during(method: str, **options: Any) -> tuple[dict[str, float], Any]:
        before, began = bed.carried(), time.monotonic()
        result = bed.call("A", method, seconds=seconds, **options)
        passed = time.monotonic() - began
        after = bed.carried()
        return {p: (after[p]["bytes"] - before[p]["bytes"]) / passed for p in after}, result

    alternate(bed.network, lambda: None, 1)
    bed.call("A", "insert", seconds=1.0, size=_LARGE, shard=0)
    quiet, _ = during("idle")
    busy, result = during("insert", clients=_CLIENTS, size=_LARGE, shard=0)
    payload_per_s = len(result) * _LARGE / seconds
    added = {path: round((busy[path] - quiet[path]) / payload_per_s, 3) for path in busy}
    return {
        "W9": {
            "records": len(result),
            "bytes_of_payload": added,
            "needed_link": added["A-B"],
            "all_links": round(sum(added.values()), 3),
            "goal": _LINK_GOAL,
        }
    }


def rates(bed: Bed, scale: float) -> Figures:
    """W10: records a second of eight clients in A with `insert_many`."""
    found = {}
    for size, batch in ((100, 200), (_LARGE, 25)):
        results = alternate(
            bed.network,
            lambda size=size, batch=batch: bed.call(
                "A", "many", seconds=_SECONDS * scale, clients=_CLIENTS, size=size, batch=batch
            ),
            _ROUNDS,
        )
        per_s = {
            name: [one["records"] / one["seconds"] for one in rounds]
            for name, rounds in results.items()
        }
        found[f"{size} B"] = {
            "batch": batch,
            **{f"{name}_per_s": round(sorted(v)[len(v) // 2], 1) for name, v in per_s.items()},
            "ratio": round(ratio(per_s["far"], per_s["control"]), 3),
        }
    return {"W10": found}
