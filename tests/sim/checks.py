"""What must hold of the servers' state, of deliveries and of calls, told over plain data.

Nothing here calls what it judges; who owns a position is computed once more (tests/sim/ownership).
Rule: whoever watches hands over what is new, or the same again, and only what is handed over costs
anything. Invariant: what was once seen to be stable, or was handed out to a reader, is never
otherwise (docs/protocol.md, sections 2-5, 7 and 11). Everything raises AssertionError with a text
that says what differs from what, and where.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.client.common.requests import NEVER, FetchRequest, InsertRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from tests.sim.history import History, Operation
    from tests.sim.ownership import Ownership


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry of a shard's log: a unit is at these positions."""

    fseq: int
    view: int
    epoch: int
    client: bytes
    seq: int
    gsns: tuple[int, ...]
    #: What the replica holds of it, byte for byte.
    body: bytes
    #: The payloads that are in the body, one for each gsn.
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
    """An entry of a shard's log: a client's session is forgotten. It decides no position."""

    fseq: int
    view: int
    client: bytes

    start = stop = 0


Entry = Placed | Skipped | Expired


class Row(NamedTuple):
    """A record as a reader gets it."""

    gsn: int
    shard: int
    payload: bytes


# --- the log of the servers ----------------------------------------------------------------------


class StableLogs:
    """All that was ever stable, of all shards, and at which positions.

    Args:
        ownership: of the positions; told of a lease before any entry in it is.

    """

    def __init__(self, ownership: Ownership) -> None:
        self.ownership: Final = ownership
        #: From a position to its record; positions below a shard's frontier without one are no-ops.
        self.records: Final[dict[int, Row]] = {}
        self._shards: Final[dict[int, StableLog]] = {}

    def shard(self, shard: int) -> StableLog:
        """Return what is known of a shard."""
        if shard not in self._shards:
            self._shards[shard] = StableLog(shard, self.ownership, self.records)
        return self._shards[shard]


class StableLog:
    """What was ever stable at a server of a shard: one log, for ever."""

    def __init__(self, shard: int, ownership: Ownership, records: dict[int, Row]) -> None:
        self.shard: Final = shard
        self._ownership: Final = ownership
        self._records: Final = records
        #: By fseq.
        self.entries: Final[dict[int, Entry]] = {}
        #: By client and seq: the fseq of its place.
        self._places: Final[dict[tuple[bytes, int], int]] = {}
        #: How far each server's log is known to be stable, in this life of the server.
        self._stable: Final[dict[str, int]] = {}
        #: All that the shard owns below is decided and stable, as some server said.
        self.closed = 0
        #: The last entry of a shard that is finalized; None: it is not.
        self.sealed: int | None = None

    def observed(self, server: str) -> int:
        """Return up to which fseq a server's stable log was handed over since it started."""
        return self._stable.get(server, 0)

    def observe(
        self, server: str, stable_fseq: int, entries: Iterable[Entry], frontier: int = 0
    ) -> None:
        """Take what a server says.

        Args:
            server: its name.
            stable_fseq: up to here (inclusive), it knows its log to be stable.
            entries: of its log, in order and up to `stable_fseq`; those after `observed(server)`
                are enough. What is above is passed over.
            frontier: the shard's, as this server has it; 0 if it said nothing.

        """
        before = self.observed(server)
        assert stable_fseq >= before, (
            f"{server} of shard {self.shard} took back that its log is stable up to {before}:"
            f" now up to {stable_fseq}"
        )
        known = [entry for entry in entries if entry.fseq <= stable_fseq]
        for entry, following in pairwise(known):
            assert entry.fseq + 1 == following.fseq, (
                f"{server} has no entry between {entry} and {following}"
            )
        self._stable[server] = stable_fseq
        for entry in known:
            self._take(server, entry)
        assert not stable_fseq or stable_fseq in self.entries, (
            f"{server} says that entry {stable_fseq} of shard {self.shard} is stable,"
            " and nobody handed it over"
        )
        if frontier:
            self._close(server, stable_fseq, frontier)

    def restarted(self, server: str) -> None:
        """A server starts again: it may know less than before, but nothing else."""
        self._stable.pop(server, None)

    def _take(self, server: str, entry: Entry) -> None:
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
        """Each entry begins where the one before it ended: upwards, and without a hole."""
        if isinstance(entry, Expired):
            return
        assert entry.start < entry.stop, f"{where} {entry} decides nothing"
        first = self._ownership.next_owned(self.shard, entry.start)
        # Nobody handed over what was trimmed before somebody looked; one that still has it may.
        assert first >= self.closed or entry.fseq < max(self.entries, default=0), (
            f"{where} {entry} is stable now, and all below {self.closed} had been decided"
        )
        after = self.entries.get(entry.fseq + 1)
        assert after is None or isinstance(after, Expired) or entry.stop <= after.start, (
            f"{where} {entry} reaches into {after}"
        )
        end = self._end_of(entry.fseq - 1)
        if end is None:
            return
        assert entry.start >= end, f"{where} {entry} goes back behind {end}"
        open_gsn = self._ownership.next_owned(self.shard, end)
        assert open_gsn >= entry.start, f"{where} {entry} leaves position {open_gsn} undecided"

    def _end_of(self, fseq: int) -> int | None:
        """Return where the log up to an entry ends; None if nobody handed over what says that."""
        while fseq and (entry := self.entries.get(fseq)) is not None:
            if not isinstance(entry, Expired):
                return entry.stop
            fseq -= 1
        return None if fseq else 0

    def _check_unit(self, where: str, entry: Placed) -> None:
        """Its positions are the shard's, nobody else's, next to each other, and only these."""
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
            f"{where} seq {entry.seq} of client {entry.client.hex()[:8]} is there twice:"
            f" {entry}, and {self.entries[twin or 0]}"
        )

    def _close(self, server: str, stable_fseq: int, frontier: int) -> None:
        """Take a frontier: it passes nothing that is not decided and stable."""
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
        """Whether all that the shard owns, by all leases so far, is decided and stable."""
        return self.closed >= self._ownership.limit(self.shard)

    def seal(self) -> None:
        """The shard is finalized, and all that it has was handed over: nothing is ever added."""
        if self.sealed is None:
            self.sealed = max(self.entries, default=0)

    def forgive(self, start: int, stop: int) -> None:
        """Forget the positions [start, stop): reported as lost, with the memory of all servers."""
        assert self.sealed is None, (
            f"[{start}, {stop}) of shard {self.shard} may be lost, and the shard was finalized"
        )
        lost = [e for e in self.entries.values() if start <= e.start < stop]
        # Nothing is in such a log behind what it lost.
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
    """Check that what is stable is the same on all replicas of a shard.

    Args:
        shard: whose.
        logs: of each server: up to which fseq its log is stable, and the entries that it keeps.

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
    """Check that no unit is at two places of a shard's log."""
    places: dict[tuple[bytes, int], Placed] = {}
    for entry in entries:
        if isinstance(entry, Placed):
            first = places.setdefault((entry.client, entry.seq), entry)
            assert first is entry, f"a unit is twice in shard {shard}: as {first}, and as {entry}"


# --- what readers and writers got ----------------------------------------------------------------


class Deliveries:
    """What was handed out to anybody: parts of one sequence."""

    def __init__(self) -> None:
        #: From a gsn to what was handed out, and to whom first.
        self.rows: Final[dict[int, tuple[Row, str]]] = {}
        self._gsns: Final[list[int]] = []
        #: Ranges [start, stop) that somebody was handed out as a whole, in order and apart.
        self._passed: Final[list[tuple[int, int]]] = []
        self._positions: Final[dict[str, int]] = {}
        #: (shard, start, stop): nobody is blamed for what he got, or did not get, of these.
        self._lost: Final[list[tuple[int, int, int]]] = []

    def take(self, reader: str, start: int | None, rows: Sequence[Row]) -> None:
        """Take what a reader was handed out, after what it had been handed out before.

        Args:
            reader: the subscription's name. One that begins elsewhere has another name.
            start: where it began; None: with its first record (RID_RECENT).
            rows: the records, in the order in which it got them.

        """
        if not rows:
            return
        begin = self._positions.get(reader, rows[0].gsn if start is None else start)
        position = begin
        for row in rows:
            assert row.gsn >= position, f"{reader} is at {position}, and got {row}"
            position = row.gsn + 1
        known = self._gsns[bisect_left(self._gsns, begin) : bisect_left(self._gsns, position)]
        missing = set(known).difference(row.gsn for row in rows)
        if missing:
            row, other = self.rows[min(missing)]
            raise AssertionError(f"{reader} passed {row}, which {other} was handed out")
        for row in rows:
            if not self._is_lost(row):
                self._take(reader, row)
        self._positions[reader] = position
        self._pass(begin, position)

    def _take(self, reader: str, row: Row) -> None:
        if row.gsn in self.rows:
            known, other = self.rows[row.gsn]
            assert known == row, f"{other} was handed out {known}, and {reader} {row}"
            return
        index = bisect_right(self._passed, row.gsn, key=lambda span: span[0]) - 1
        assert index < 0 or row.gsn >= self._passed[index][1], (
            f"{reader} was handed out {row}, which somebody passed before without getting it"
        )
        self.rows[row.gsn] = (row, reader)
        insort(self._gsns, row.gsn)

    def _pass(self, start: int, stop: int) -> None:
        """Note that [start, stop) was handed out as a whole."""
        spans = self._passed
        low = bisect_left(spans, start, key=lambda span: span[1])
        high = bisect_right(spans, stop, key=lambda span: span[0])
        touched = spans[low:high]
        starts, stops = [start, *(a for a, _ in touched)], [stop, *(b for _, b in touched)]
        spans[low:high] = [(min(starts), max(stops))]

    def forgive(self, shard: int, start: int, stop: int) -> None:
        """Forget what was and will be handed out of a shard's [start, stop), which may be lost.

        Whether it comes back once it was missing is for the rules of `scripts/history`.
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
        """Check that readers got what is stable (`StableLogs.records`), and all of it."""
        for row, reader in self.rows.values():
            held = records.get(row.gsn)
            assert held == row, f"{reader} was handed out {row}, and the log holds {held}"
        gsns = sorted(records)
        for start, stop in self._passed:
            for gsn in gsns[bisect_left(gsns, start) : bisect_left(gsns, stop)]:
                assert gsn in self.rows or self._is_lost(records[gsn]), (
                    f"{records[gsn]} was passed, and handed out to nobody"
                )


def check_insert_order(operations: Iterable[Operation], rows: Iterable[Row]) -> None:
    """Check where inserts put what: after what they name, in order, at one shard.

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
    """Return the operations that took longer than they may once nothing is in their way.

    Args:
        history: of all clients.
        now: virtual time, nanoseconds.
        bound: how long an operation may take, nanoseconds.
        healed: when the last fault was over: before that, nothing has to end.
        dead: clients that were killed: what they had under way never ends.

    Returns:
        Those that ended too late, and those that have not ended and should have. A fetch without a
        deadline waits for a record, and may do so for ever.

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
