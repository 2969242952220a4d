"""Epochs of the log for operators: their leases and positions, and which shards have decided them.

Only epochs from the trim point on are known. See docs/protocol.md, section 3.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mms.servers import Servers
    from mms.state import ClusterState
    from ziplog.core.view import Lease, LeaseRun

#: Maximum number of epochs, and of shards in all of them, in one document.
MAX_EPOCHS: Final = 1000
_MAX_ROWS: Final = 20_000


def document(state: ClusterState, servers: Servers, start: int, stop: int) -> bytes:
    """Return the known epochs of [start, stop), from the first on, as JSON."""
    found: list[dict[str, Any]] = []
    rows = 0
    for epoch, lease in _leases(state, start, min(stop, start + MAX_EPOCHS)):
        base = lease.epoch_base(epoch)
        end = base + lease.epoch_size
        if end <= state.trim:
            continue
        shards = [
            {
                "shard": member.shard,
                "view": member.view,
                "weight": member.weight,
                "state": "final" if servers.frontier(member.shard) >= end else "open",
            }
            for member in lease.members
        ]
        rows += len(shards)
        if found and rows > _MAX_ROWS:
            break
        found.append(
            {
                "epoch": epoch,
                "lease": lease.number,
                "milliseconds": lease.epoch_ms,
                "start": base,
                "stop": end,
                "shards": shards,
            }
        )
    return msgspec.json.encode({"epochs": found})


def _leases(state: ClusterState, start: int, stop: int) -> Iterator[tuple[int, Lease]]:
    """Yield the known epochs of [start, stop), each with its lease."""
    runs = state.runs
    index = bisect_left(runs, start + 1, key=_stop_epoch)
    epoch = start
    while epoch < stop and index < len(runs):
        run = runs[index]
        epoch = max(epoch, run.first.first_epoch)
        while epoch < min(stop, _stop_epoch(run)):
            yield epoch, run.lease_of_epoch(epoch)
            epoch += 1
        index += 1


def _stop_epoch(run: LeaseRun) -> int:
    return run.last.stop_epoch
