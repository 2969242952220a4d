"""What all streams to subscribers have in common: their state, limits, and the stored units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from shard.state.decision_log import end_of
from ziplog.core.entries import Place, Unit
from ziplog.core.units import NS_PER_S
from ziplog.core.view import NO_DIGEST
from ziplog.wire import Trimmed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.state.replica_state import ReplicaState
    from ziplog.core.view import LeaseRun
    from ziplog.segments.entry import Entry

#: Bytes that a unit counts beside its body.
UNIT_OVERHEAD_BYTES: Final = 64
#: Most bytes of one message, except that it carries at least one unit.
MAX_DELIVER_BYTES: Final = 512 * 1024
#: Limit of the work of one batch for all stable streams that are behind, and for all early ones: 1
#: for each entry, and 1 for each KiB. The last part may exceed it. Inserts wait for about 10 ms.
BATCH_WORK: Final = 1024
#: Time without a message after which a subscription is dropped.
SILENCE_NS: Final = 10 * NS_PER_S
#: Most subscriptions of one server, early streams included.
MAX_SUBSCRIPTIONS: Final = 4096
#: Most credit of a subscription: its reader may have stopped reading.
MAX_CREDIT_BYTES: Final = 32 * 1024 * 1024

#: A subscription's key: its client, and its number there.
Key = tuple[bytes, int]


class Subscription(msgspec.Struct, gc=False):
    """A reader that subscribes to this shard."""

    route: bytes
    id: int
    #: Everything before this gsn was sent.
    sent: int
    #: Total bytes granted by the reader; `used`: total bytes sent.
    credit: int
    last_seen: int
    used: int = 0
    #: The last lease that was sent to the reader, and its digest.
    lease: int = 0
    digest: bytes = NO_DIGEST
    #: It gets frontiers only, as far as its client waits for positions (`ReplicaState.awaited`).
    is_bare: bool = False
    #: Its reader's last message is not answered yet.
    is_asked: bool = False

    def add_credit(self, credit: int, max_ahead: int) -> None:
        """Raise the credit to a total, at most `max_ahead` bytes above what was sent."""
        self.credit = max(self.credit, min(credit, self.used + max_ahead))

    def advance(self, state: ReplicaState, stop: int) -> tuple[int, list[LeaseRun]]:
        """Note that everything below `stop` is sent; return the former end and the new leases."""
        start, self.sent = self.sent, stop
        leases = [
            run for run in state.clock.runs_after(self.lease, self.digest) if run.last.stop > start
        ]
        # A message that does not advance the frontier may be lost unnoticed: repeat its leases.
        if leases and stop > start:
            last = leases[-1].last
            self.lease, self.digest = last.number, last.digest
        return start, leases

    def notify_if_trimmed(self, state: ReplicaState) -> bool:
        """Notify the reader if the position was trimmed; return whether it was."""
        if self.sent >= state.trim:
            return False
        state.send(self.route, Trimmed(state.cluster, state.shard, state.view, self.id, state.trim))
        return True


def units_of(entries: Iterable[Entry]) -> tuple[list[Unit], int]:
    """Return the units of entries, and their size."""
    units: list[Unit] = []
    size = 0
    for entry in entries:
        place = entry.decision
        if type(place) is Place:
            body = place.body or b""
            units.append(Unit(place.epoch, place.gsns, body))
            size += len(body) + UNIT_OVERHEAD_BYTES
    return units, size


class Part(NamedTuple):
    """Units that follow what was sent to a stream."""

    units: list[Unit]
    #: The gsn where they end, and their size in bytes.
    stop: int
    size: int
    #: Number of entries that were read.
    entries: int

    @property
    def work(self) -> int:
        """Its share of `BATCH_WORK`."""
        return self.entries + self.size // 1024


def stable_part(state: ReplicaState, start: int, limit: int, max_entries: int) -> Part:
    """Return stable units from `start` on, at least one if there is any.

    Args:
        state: of the replica.
        start: the first gsn.
        limit: maximum size in bytes, with `UNIT_OVERHEAD_BYTES` for each unit.
        max_entries: maximum number of entries to read, at least 1.

    """
    stable, frontier = state.stream.stable, state.frontier
    entries = state.store.scan(start, limit, max_entries)
    units: list[Unit] = []
    reached, size = start, 0
    for entry in entries:
        added, more = units_of([entry])
        if entry.fseq > stable or (added and added[0].gsns[0] >= frontier):
            return Part(units, frontier, size, len(entries))
        if units and size + more > limit:
            return Part(units, reached, size, len(entries))
        units += added
        size += more
        reached = min(end_of(entry, reached), frontier)
    # The store may have more entries, unless the last one is the last stable entry.
    is_all = not entries or entries[-1].fseq == stable
    return Part(units, frontier if is_all else reached, size, len(entries))
