"""No-ops: the number that a shard stored, and the number under the thesis' timeouts (T 4.2.3).

In the thesis a shard of rate r expects its j-th record of an epoch at j/r after the start of the
epoch. If the record has not arrived one timeout later, the shard stores a no-op at its position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ziplog.segments.entry_codec import HEADER_BYTES, PLACE, SKIP, walk
from ziplog.segments.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ziplog.core.view import Lease


class Stored(NamedTuple):
    """An entry of a log: its kind, its positions [first, last], and its bytes on disk."""

    kind: int
    first: int
    last: int
    size: int


def stored(folder: Path) -> list[Stored]:
    """Return the entries in the segments of a stopped server's data directory."""
    found = []
    for path in sorted((folder / "segments").glob("*.seg")):
        segment = Segment.named(path.name)
        assert segment is not None, f"{path} has no segment's name"
        for entry in walk(path.read_bytes(), segment.salt):
            assert entry.is_whole, f"{path} is damaged at byte {entry.start}"
            size = entry.stop - entry.start + HEADER_BYTES
            found.append(Stored(entry.kind, entry.first, entry.last, size))
    return found


def cost(
    entries: Iterable[Stored], shard: int, lease_at: Callable[[int], Lease | None]
) -> dict[str, Any]:
    """Return the cost of no-ops at one replica.

    Args:
        entries: its stored entries.
        shard: its shard.
        lease_at: returns the lease of a position.

    Returns:
        `records`; `within`: no-op entries that end before their epoch, and the number of their
        `positions`; `ends`: no-op entries up to the end of an epoch or further; `bytes` of both
        kinds of no-ops, and `all_bytes` of all entries.

    """
    result = dict.fromkeys(("records", "within", "positions", "ends", "bytes", "all_bytes"), 0)
    for entry in entries:
        result["all_bytes"] += entry.size
        if entry.kind == PLACE:
            result["records"] += 1
        if entry.kind != SKIP:
            continue
        result["bytes"] += entry.size
        lease, stop = lease_at(entry.first), entry.last + 1
        if lease is None or stop >= lease.epoch_base(lease.epoch_at(entry.first) + 1):
            result["ends"] += 1
        else:
            result["within"] += 1
            result["positions"] += lease.slot(shard, stop) - lease.slot(shard, entry.first)
    return result


def after_timeouts(
    arrivals: Iterable[float], stop: float, per_s: float, epoch_s: float, timeout_s: float
) -> int:
    """Return how many no-ops the thesis' rule makes of one shard's load.

    Args:
        arrivals: when its records came, in order, in seconds from 0.
        stop: when the load ends.
        per_s: the rate that the shard is expected to have.
        epoch_s: how long an epoch is; the first begins at 0.
        timeout_s: how long an expected record is waited for.

    """
    made = 0
    epoch, slot = 0, 1
    for time in (*arrivals, stop):
        while True:
            ends = (epoch + 1) * epoch_s
            due = epoch * epoch_s + slot / per_s + timeout_s
            if due < min(ends, time):
                made += 1
                slot += 1
            elif ends <= time:
                epoch, slot = epoch + 1, 1
            else:
                break
        slot += 1
    return made
