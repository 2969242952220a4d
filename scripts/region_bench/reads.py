"""Reads of stable records near the reader: latencies and packets (W4), a frozen replica (W5)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from metrics.workers import Workers
from region_trial.trial import REGIONS, ROUND_TRIPS_MS

from region_bench import worker
from region_bench.bed import READER, alternate, latencies, latency, set_far

if TYPE_CHECKING:
    from region_bench.bed import Bed

Figures = dict[str, Any]

_ROUNDS: Final = 3
_SECONDS: Final = 3.0
_RECORDS: Final = 200
_SIZE: Final = 1000
#: Shard AB seen from each region, and its server there.
_READERS: Final = {"A": "primary near", "B": "backup near", "C": "none near"}
_NEAR: Final = {"A": "shard-0-0", "B": "shard-0-1"}
_NEAR_GOAL: Final = 1.2
#: Shorter than the suspicion.
_FROZEN_S: Final = 1.5
_RECOVERY_S: Final = 60.0
#: Time after which a read asks a second replica at the latest, and the way to it.
_SECOND_MS, _TO_SECOND_MS = 10.0, 40.0


def near(bed: Bed, scale: float) -> Figures:
    """W4: reads of records of shard AB from each region.

    A second reader has an address of its own beside the region, so that the router counts its
    packets alone.
    """
    rids = bed.call("A", "put", count=_RECORDS, size=_SIZE, shard=0)
    found = {}
    seconds = max(1.0, _SECONDS * scale)
    for region, where in _READERS.items():
        bed.call(region, "read", seconds=0.5, rids=rids)
        results = alternate(
            bed.network,
            lambda region=region: bed.call(region, "read", seconds=seconds, rids=rids),
            _ROUNDS,
        )
        row = latencies(results)
        row["packets_out"] = _packets_of_a_read(bed, region, rids, seconds)
        row["far_of_control"] = round(row["far"]["p50_ms"] / row["control"]["p50_ms"], 2)
        row["goal_of_control"] = _NEAR_GOAL
        found[f"{region}, {where}"] = row
    return {"W4": found}


def _packets_of_a_read(bed: Bed, region: str, rids: list[tuple[int, int]], seconds: float) -> float:
    """Return the packets of a client that leave a region for each read, beyond an idle client's."""
    network, others = bed.network, [other for other in REGIONS if other != region]
    set_far(network, is_far=True)
    network.set_round_trips(
        {
            (READER, o): ms
            for pair, ms in ROUND_TRIPS_MS.items()
            if region in pair
            for o in pair
            if o != region
        }
    )
    number = network.regions.index(READER)
    arguments = [(network.pid, number, region, bed.cluster.endpoint)]

    def leaving() -> int:
        paths = network.report()["paths"][number]
        return sum(paths[network.regions.index(other)]["packets"] for other in others)

    with Workers(worker.run, arguments) as reader:
        reader.receive()

        def during(method: str, **options: Any) -> tuple[int, Any]:
            before = leaving()
            reader.send((method, {"seconds": seconds, **options}))
            (result,) = reader.receive()
            return leaving() - before, result

        during("read", rids=rids)  # the client opens its connections
        quiet, _ = during("idle")
        busy, latencies = during("read", rids=rids)
        return round((busy - quiet) / len(latencies), 3)


def frozen(bed: Bed, scale: float) -> Figures:
    """W5: reads of records of shard AB from A and B while the server there is frozen."""
    rids = bed.call("A", "put", count=_RECORDS, size=_SIZE, shard=0)
    set_far(bed.network, is_far=True)
    found = {}
    for region, server in _NEAR.items():
        latencies: list[float] = []
        before = bed.call(region, "read", seconds=1.0, rids=rids)
        for _ in range(max(1, int(_ROUNDS * scale))):
            bed.cluster.pause(server)
            try:
                latencies += bed.call(region, "read", seconds=_FROZEN_S, rids=rids)
            finally:
                bed.cluster.resume(server)
            _await_live(bed)
        found[f"{region}, {server} frozen"] = {
            "before": latency(before),
            "frozen": latency(latencies),
            "goal_p50_ms": _SECOND_MS + _TO_SECOND_MS,
        }
    return {"W5": found}


def _await_live(bed: Bed) -> None:
    with bed.cluster.connect(timeout=_RECOVERY_S) as log:
        deadline = time.monotonic() + _RECOVERY_S
        while {shard["state"] for shard in log.cluster()["shards"]} != {"live"}:
            if time.monotonic() > deadline:
                message = f"not every shard is live after {_RECOVERY_S:g} s"
                raise TimeoutError(message)
            time.sleep(0.1)
