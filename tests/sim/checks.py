"""Checks of the servers' state, of deliveries and of calls, over plain data.

The checks do not call production code; tests/sim/ownership computes a position's owner again.
Rule: the monitor passes new entries, or repeats old ones. Invariant: an entry that was seen as
stable, or a record that a reader received, never changes (docs/protocol.md, sections 2-5, 7 and
11). Every check raises AssertionError with the difference and its place.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.client.common.requests import FetchRequest, InsertRequest
from ziplog.core.units import NEVER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from tests.sim.history import History, Operation
    from tests.sim.ownership import Ownership


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry of a shard's log: a unit at these positions."""

    fseq: int
    view: int
    epoch: int
    client: bytes
    seq: int
    gsns: tuple[int, ...]
    #: The replica's bytes of the unit.
    body: bytes
    #: The payloads in the body, one for each gsn.
    payloads: tuple[bytes, ...]

    @property
    def start(self) -> int:
        """The first position that it decides."""
        return self.gsns[0]

    @property
    def stop(self) -> int:
        """The position after the last one that it decides."""
        return self.gsns[-1] + 1


@dataclass(frozen=True, slots=True)
class Skipped:
    """An entry of a shard's log: its positions in [start, stop) are no-ops."""

    fseq: int
    view: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Expired:
    """An entry of a shard's log: a client's session expires. It decides no position."""

    fseq: int
    view: int
    client: bytes

    start = stop = 0


Entry = Placed | Skipped | Expired


class Row(NamedTuple):
    """A record as received by a reader."""

    gsn: int
    shard: int
    payload: bytes


# --- the log of the servers ----------------------------------------------------------------------


class StableLogs:
    """All entries that were ever stable, of all shards, and their positions.

    Args:
        ownership: of the positions; it learns a lease before any entry of the lease.

    """

    def __init__(self, ownership: Ownership) -> None:
        self.ownership: Final = ownership
        #: From a position to its record; positions below a shard's frontier without one are no-ops.
        self.records: Final[dict[int, Row]] = {}
        self._shards: Final[dict[int, StableLog]] = {}

    def shard(self, shard: int) -> StableLog:
        """Return the stable log of a shard."""
        if shard not in self._shards:
            self._shards[shard] = StableLog(shard, self.ownership, self.records)
        return self._shards[shard]


class StableLog:
    """All entries that were ever stable at a server of a shard: one log."""

    def __init__(self, shard: int, ownership: Ownership, records: dict[int, Row]) -> None:
        self.shard: Final = shard
        self._ownership: Final = ownership
        self._records: Final = records
        #: By fseq.
        self.entries: Final[dict[int, Entry]] = {}
        #: By client and seq: the fseq of its place.
        self._places: Final[dict[tuple[bytes, int], int]] = {}
        #: Per server: the last stable entry of its log, in this incarnation.
        self._stable: Final[dict[str, int]] = {}
        #: The highest frontier: all positions of the shard below are decided and stable.
        self.closed = 0
        #: The last entry of a shard that is finalized; None: it is not.
        self.sealed: int | None = None

    def observed(self, server: str) -> int:
        """Return the last fseq of a server's stable log that was passed since its start."""
        return self._stable.get(server, 0)

    def observe(
        self, server: str, stable_fseq: int, entries: Iterable[Entry], frontier: int = 0
    ) -> None:
        """Check a server's state against all earlier ones.

        Args:
            server: its name.
            stable_fseq: the last entry that it knows to be stable.
            entries: of its log, in order and up to `stable_fseq`; those after `observed(server)`
                are enough. Later entries are ignored.
            frontier: its frontier of the shard; 0 if unknown.

        """
        before = self.observed(server)
        assert stable_fseq >= before, (
            f"{server} of shard {self.shard}: the end of its stable log went back from {before}"
            f" to {stable_fseq}"
        )
        known = [entry for entry in entries if entry.fseq <= stable_fseq]
        for entry, following in pairwise(known):
            assert entry.fseq + 1 == following.fseq, (
                f"{server} has no entry between {entry} and {following}"
            )
        self._stable[server] = stable_fseq
        for entry in known:
            self._add(server, entry)
        assert not stable_fseq or stable_fseq in self.entries, (
            f"{server} reports entry {stable_fseq} of shard {self.shard} as stable,"
            " but the entry was not passed"
        )
        if frontier:
            self._close(server, stable_fseq, frontier)

    def restarted(self, server: str) -> None:
        """Record a server's restart: it may know less than before, but nothing different."""
        self._stable.pop(server, None)

    def _add(self, server: str, entry: Entry) -> None:
        known = self.entries.get(entry.fseq)
        if known is not None:
            assert known == entry, (
                f"entry {entry.fseq} of shard {self.shard} was stable as {known},"
                f" and {server} has {entry}"
            )
            return
        where = f"entry {entry.fseq} of shard {self.shard}, at {server}:"
        assert self.sealed is None or entry.fseq <= self.sealed, (
            f"{where} {entry} is new, and the shard was finalized with {self.sealed} entries"
        )
        self._check_place_in_log(where, entry)
        if isinstance(entry, Placed):
            self._check_unit(where, entry)
            for gsn, payload in zip(entry.gsns, entry.payloads, strict=True):
                self._records[gsn] = Row(gsn, self.shard, payload)
            self._places[entry.client, entry.seq] = entry.fseq
        self.entries[entry.fseq] = entry

    def _check_place_in_log(self, where: str, entry: Entry) -> None:
        """Check that each entry begins at the end of the one before it, without a hole."""
        if isinstance(entry, Expired):
            return
        assert entry.start < entry.stop, f"{where} {entry} decides nothing"
        first = self._ownership.next_owned(self.shard, entry.start)
        # Entries trimmed before the first check are unknown here; a replica may keep them.
        assert first >= self.closed or entry.fseq < max(self.entries, default=0), (
            f"{where} {entry} is stable now, but all positions below {self.closed} were decided"
        )
        after = self.entries.get(entry.fseq + 1)
        assert after is None or isinstance(after, Expired) or entry.stop <= after.start, (
            f"{where} {entry} reaches into {after}"
        )
        end = self._end_of(entry.fseq - 1)
        if end is None:
            return
        assert entry.start >= end, f"{where} {entry} begins before {end}"
        open_gsn = self._ownership.next_owned(self.shard, end)
        assert open_gsn >= entry.start, f"{where} {entry} leaves position {open_gsn} undecided"

    def _end_of(self, fseq: int) -> int | None:
        """Return the end of the log up to an entry; None if it is unknown."""
        while fseq and (entry := self.entries.get(fseq)) is not None:
            if not isinstance(entry, Expired):
                return entry.stop
            fseq -= 1
        return None if fseq else 0

    def _check_unit(self, where: str, entry: Placed) -> None:
        """Check that a unit has consecutive positions of its shard, and no other ones."""
        ownership = self._ownership
        for gsn in entry.gsns:
            owner = ownership.owner(gsn)
            assert owner == self.shard, f"{where} position {gsn} belongs to shard {owner}"
            assert ownership.epoch(gsn) == entry.epoch, (
                f"{where} position {gsn} is of epoch {ownership.epoch(gsn)}, not {entry.epoch}"
            )
            held = self._records.get(gsn)
            assert held is None, f"{where} position {gsn} holds {held}, and gets {entry}"
        follows = [ownership.next_owned(self.shard, gsn + 1) for gsn in entry.gsns[:-1]]
        assert follows == list(entry.gsns[1:]), f"{where} {entry.gsns} are not next to each other"
        twin = self._places.get((entry.client, entry.seq))
        assert twin is None, (
            f"{where} seq {entry.seq} of client {entry.client.hex()[:8]} is placed twice:"
            f" {entry}, and {self.entries[twin or 0]}"
        )

    def _close(self, server: str, stable_fseq: int, frontier: int) -> None:
        """Check that all positions below a frontier are decided and stable."""
        end = self._end_of(stable_fseq)
        if end is not None:
            open_gsn = self._ownership.next_owned(self.shard, end)
            assert frontier <= open_gsn, (
                f"{server} has a frontier of {frontier}, and position {open_gsn} of shard"
                f" {self.shard} is not decided by its stable log, up to {stable_fseq}"
            )
        self.closed = max(self.closed, frontier)

    @property
    def was_member(self) -> bool:
        """Whether any lease gave the shard positions."""
        return self._ownership.limit(self.shard) > 0

    @property
    def is_complete(self) -> bool:
        """Whether all positions of the shard, by all leases so far, are decided and stable."""
        return self.closed >= self._ownership.limit(self.shard)

    def seal(self) -> None:
        """Record that the shard is finalized: no entry may be added afterwards."""
        if self.sealed is None:
            self.sealed = max(self.entries, default=0)

    def allow_loss(self, start: int, stop: int) -> None:
        """Allow the loss of positions [start, stop), which the service reported as lost."""
        assert self.sealed is None, (
            f"[{start}, {stop}) of shard {self.shard} may be lost, and the shard was finalized"
        )
        lost = [e for e in self.entries.values() if start <= e.start < stop]
        # Such a log has no entry after its loss.
        first = min((entry.fseq for entry in lost), default=max(self.entries, default=0) + 1)
        for fseq in [fseq for fseq in self.entries if fseq >= first]:
            entry = self.entries.pop(fseq)
            if isinstance(entry, Placed):
                del self._places[entry.client, entry.seq]
                for gsn in entry.gsns:
                    del self._records[gsn]
        self.closed = min(self.closed, start)
        self._stable.clear()


def check_replicas_agree(shard: int, logs: Mapping[str, tuple[int, Sequence[Entry]]]) -> None:
    """Check that all replicas of a shard have the same stable entries.

    Args:
        shard: its number.
        logs: per server: the last stable fseq, and the kept entries.

    """
    truth: dict[int, tuple[str, Entry]] = {}
    for server, (stable_fseq, entries) in sorted(logs.items()):
        for entry in entries:
            if entry.fseq <= stable_fseq:
                other, known = truth.setdefault(entry.fseq, (server, entry))
                assert known == entry, (
                    f"replicas of shard {shard} differ at {entry.fseq}: {other} has {known},"
                    f" {server} has {entry}"
                )


def check_exactly_once(shard: int, entries: Iterable[Entry]) -> None:
    """Check that no unit is placed twice in a shard's log."""
    places: dict[tuple[bytes, int], Placed] = {}
    for entry in entries:
        if isinstance(entry, Placed):
            first = places.setdefault((entry.client, entry.seq), entry)
            assert first is entry, f"a unit is twice in shard {shard}: as {first}, and as {entry}"


# --- readers and writers -------------------------------------------------------------------------


class Deliveries:
    """All records that readers received: parts of one sequence."""

    def __init__(self) -> None:
        #: By gsn: the received record, and the first reader that received it.
        self.rows: Final[dict[int, tuple[Row, str]]] = {}
        self._gsns: Final[list[int]] = []
        #: Disjoint ranges [start, stop) that a reader passed completely, in order: of all shards
        #: (None), and of each shard by the readers of some shards.
        self._passed: Final[dict[int | None, list[tuple[int, int]]]] = {}
        self._positions: Final[dict[str, int]] = {}
        #: (shard, start, stop): positions that may be lost; they are not checked.
        self._lost: Final[list[tuple[int, int, int]]] = []

    def add(
        self,
        reader: str,
        start: int | None,
        rows: Sequence[Row],
        shards: Collection[int] | None = None,
    ) -> None:
        """Add the next records of a reader.

        Args:
            reader: the subscription's name. A new start position needs a new name.
            start: its start position; None: its first record (RID_RECENT).
            rows: the records, in the order of delivery.
            shards: the shards that it reads; None: all.

        """
        if not rows:
            return
        begin = self._positions.get(reader, rows[0].gsn if start is None else start)
        position = begin
        for row in rows:
            assert row.gsn >= position, f"{reader} is at {position}, and received {row}"
            assert shards is None or row.shard in shards, f"{reader} reads {shards}, received {row}"
            position = row.gsn + 1
        known = self._gsns[bisect_left(self._gsns, begin) : bisect_left(self._gsns, position)]
        if shards is not None:
            known = [gsn for gsn in known if self.rows[gsn][0].shard in shards]
        missing = set(known).difference(row.gsn for row in rows)
        if missing:
            row, other = self.rows[min(missing)]
            raise AssertionError(f"{reader} passed {row}, which {other} received")
        for row in rows:
            if not self._is_lost(row):
                self._add(reader, row)
        self._positions[reader] = position
        for shard in [None] if shards is None else shards:
            self._pass(shard, begin, position)

    def _add(self, reader: str, row: Row) -> None:
        if row.gsn in self.rows:
            known, other = self.rows[row.gsn]
            assert known == row, f"{other} received {known}, and {reader} {row}"
            return
        for spans in (self._passed.get(None, []), self._passed.get(row.shard, [])):
            index = bisect_right(spans, row.gsn, key=lambda span: span[0]) - 1
            assert index < 0 or row.gsn >= spans[index][1], (
                f"{reader} received {row}, which another reader passed before without it"
            )
        self.rows[row.gsn] = (row, reader)
        insort(self._gsns, row.gsn)

    def _pass(self, shard: int | None, start: int, stop: int) -> None:
        """Record that a reader passed [start, stop) of a shard (None: of all) completely."""
        spans = self._passed.setdefault(shard, [])
        low = bisect_left(spans, start, key=lambda span: span[1])
        high = bisect_right(spans, stop, key=lambda span: span[0])
        touched = spans[low:high]
        starts, stops = [start, *(a for a, _ in touched)], [stop, *(b for _, b in touched)]
        spans[low:high] = [(min(starts), max(stops))]

    def allow_loss(self, shard: int, start: int, stop: int) -> None:
        """Ignore a shard's positions [start, stop), which may be lost.

        The rules of `tests/history` check whether a missing record reappears.
        """
        self._lost.append((shard, start, stop))
        first, last = bisect_left(self._gsns, start), bisect_left(self._gsns, stop)
        for gsn in self._gsns[first:last]:
            if self.rows[gsn][0].shard == shard:
                del self.rows[gsn]
        self._gsns[first:last] = [gsn for gsn in self._gsns[first:last] if gsn in self.rows]

    def _is_lost(self, row: Row) -> bool:
        return any(shard == row.shard and a <= row.gsn < b for shard, a, b in self._lost)

    def check_against(self, records: Mapping[int, Row]) -> None:
        """Check that readers received all stable records (`StableLogs.records`), and no others."""
        for row, reader in self.rows.values():
            held = records.get(row.gsn)
            assert held == row, f"{reader} received {row}, and the log holds {held}"
        gsns = sorted(records)
        for shard, spans in self._passed.items():
            for start, stop in spans:
                for gsn in gsns[bisect_left(gsns, start) : bisect_left(gsns, stop)]:
                    row = records[gsn]
                    assert (
                        gsn in self.rows or self._is_lost(row) or shard not in {None, row.shard}
                    ), f"{row} was passed, but no reader received it"


def check_insert_order(operations: Iterable[Operation], rows: Iterable[Row]) -> None:
    """Check the positions of inserts: after the named record, in order, at one shard.

    Args:
        operations: of a history.
        rows: the log.

    """
    at: dict[bytes, Row] = {}
    for row in rows:
        other = at.setdefault(row.payload, row)
        assert other is row, f"{row.payload!r} is in the log twice: at {other}, and at {row}"
    for operation in operations:
        request = operation.request
        if not isinstance(request, InsertRequest):
            continue
        before: Row | None = None
        for row in (at[payload] for payload in request.payloads if payload in at):
            assert row.gsn > request.after.gsn, f"{row} is not after {request.after}: {operation}"
            if before is not None:
                assert row.gsn > before.gsn, f"{row} is not after {before}: {operation}"
                assert row.shard == before.shard, f"{row} is not with {before}: {operation}"
            before = row


def unfinished(
    history: History,
    now: int,
    bound: int,
    *,
    healed: int = 0,
    dead: Collection[str] = (),
) -> list[Operation]:
    """Return the operations that exceeded their time after the last fault.

    Args:
        history: of all clients.
        now: virtual time, nanoseconds.
        bound: maximum duration of an operation, nanoseconds.
        healed: the end of the last fault; earlier, operations need not end.
        dead: killed clients; their open operations never end.

    Returns:
        Operations that ended too late or should have ended. A fetch without a deadline may wait
        for a record without limit.

    """
    late = []
    for operation in history.operations:
        end = now if operation.returned is None else operation.returned
        if end - max(operation.called, healed) <= bound or operation.client in dead:
            continue
        request = operation.request
        if not (isinstance(request, FetchRequest) and request.deadline == NEVER):
            late.append(operation)
    return late
