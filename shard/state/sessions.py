"""Who inserted what: the table by which a server recognises a unit that it was sent before.

A session is a client's; it holds the units that the client may still ask about, by seq (D9).
What the client calls settled (`first_incomplete`) is forgotten, but for promises: only the
primary's word breaks them. Invariants: a confirmed unit has slots, and a settled one still held is
a promise; a placed unit is known, below its session's `first_incomplete`, or not above the horizon.
See docs/protocol.md, section 4, rules 8, 9 and 13.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import nsmallest
from typing import TYPE_CHECKING, Final

import msgspec

from shard.state.slots import join, pack, split, unpack
from ziplog.core.entries import Expire, Place, SessionTable, SettledUnit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.segments.entry import Entry

#: So many clients may have a session; more are refused.
MAX_SESSIONS: Final = 65_536
#: Above three quarters of that, room is made: clients go that have nothing here, and were silent
#: for a third of the time after which every silent client goes. No message is later: clients send
#: nothing again after two thirds of that time.
_EVICTION_THRESHOLD: Final = (3, 4)
_MAX_DELAY: Final = (1, 3)
#: A backup is full a little earlier: what the primary refuses, it has not taken.
_BACKUP_SLACK: Final = 64
#: Units that were refused for want of a session, and are remembered.
MAX_REFUSED_UNITS: Final = 65_536
#: The slots of so many records are kept as they were decided.
_RECENT_RECORDS: Final = 65_536
#: After every seq.
END: Final = 2**63 - 1
#: What a table takes beside its units, and a unit beside its packed gsns, in a message at most.
_TABLE_BYTES: Final = 48
_UNIT_BYTES: Final = 40
#: A tombstone of a unit that is refused however many copies come.
ALL_COPIES: Final = 2**63 - 1


class HeldUnit(msgspec.Struct, gc=False):
    """A unit that this server was sent, or that its primary placed."""

    client: bytes
    seq: int
    count: int
    checksum: int
    #: What the records hold; emptied once the store has it.
    body: bytes = b""
    #: Every record goes above this gsn.
    after: int = 0
    #: It goes after the unit with this seq.
    predecessor: int = 0
    #: The way back to the client; empty if its own copy has not come.
    route: bytes = b""
    #: Where it is: decided, or a backup's promise; None while it has no slots, or if it is packed.
    gsns: list[int] | None = None
    #: The primary decided its slots.
    confirmed: bool = False
    #: Where this backup's first guess began; 0: it made none. It outlives the promise.
    guess: int = 0
    #: The epoch of promised slots, once a lease came after them; -1: the leases held tell it.
    epoch: int = -1
    #: The decided gsns of several records (`shard.state.slots`), a while after they were decided.
    packed: bytes = b""
    #: The newest copy that came from the client; 0: none has come, or copies were not numbered.
    copy: int = 0

    @property
    def is_placed(self) -> bool:
        """Whether it has slots, decided or promised."""
        return self.confirmed or self.gsns is not None

    @property
    def slots(self) -> list[int]:
        """Its gsns."""
        gsns = self.gsns
        assert gsns is not None or self.packed, "it has no slots"
        return unpack(self.packed) if gsns is None else gsns

    def decide(self, gsns: list[int]) -> None:
        """Take its decided slots, to keep them for long."""
        self.gsns, self.confirmed = gsns, True
        self.pack()

    def pack(self) -> None:
        """Keep its decided slots in few bytes."""
        gsns = self.gsns
        if self.confirmed and gsns is not None and len(gsns) > 1:
            self.gsns, self.packed = None, pack(gsns)

    def to_settled_unit(self) -> SettledUnit:
        """Return what a table says of it, decided as it is."""
        self.pack()
        if not self.packed:
            return SettledUnit(self.seq, self.slots, self.checksum)
        first, steps = split(self.packed)
        return SettledUnit(self.seq, [first], self.checksum, steps)


class Session(msgspec.Struct):
    """One client at this shard."""

    client: bytes
    last_seen: int
    #: Everything below is settled.
    first_incomplete: int = 1
    units: dict[int, HeldUnit] = msgspec.field(default_factory=dict)
    #: At the primary: units that wait for the one with this seq to be placed.
    successors: dict[int, list[HeldUnit]] = msgspec.field(default_factory=dict)
    #: Tombstones: by seq, how many copies of a unit were refused for good in this view.
    refused: dict[int, int] = msgspec.field(default_factory=dict)
    #: The horizon (see `Sessions`) when this session began: a unit that the client made before may
    #: have been placed in a session that is forgotten.
    horizon: int = 0
    #: No record of this session is above this position.
    last: int = 0
    #: When the client was asked last to send what is new elsewhere, in ns.
    leaving_sent_at: int = -(2**62)

    def settle(self, first_incomplete: int) -> list[HeldUnit]:
        """Forget what is below `first_incomplete`, but for promises.

        Returns what was forgotten undecided: units that their client gave up.
        """
        dropped: list[HeldUnit] = []
        if first_incomplete <= self.first_incomplete:
            return dropped
        span = range(self.first_incomplete, first_incomplete)
        for seq in span if len(span) <= len(self.units) else sorted(self.units):
            unit = self.units.get(seq)
            if unit is None or seq >= first_incomplete:
                continue
            if unit.confirmed:
                del self.units[seq]
            elif unit.gsns is None:
                del self.units[seq]
                dropped.append(unit)
        self.first_incomplete = first_incomplete
        if self.refused:
            self.refused = {seq: n for seq, n in self.refused.items() if seq >= first_incomplete}
        return dropped

    def confirm(self, unit: HeldUnit, gsns: list[int]) -> None:
        """Take the primary's decision about a unit; forget it at once if it is settled."""
        unit.gsns = gsns
        unit.confirmed = True
        unit.body = b""
        self.last = gsns[-1]
        if self.refused:
            self.refused.pop(unit.seq, None)  # the primary's word is above what a backup refused
        if unit.seq < self.first_incomplete:
            self.units.pop(unit.seq, None)

    def forget_confirmed(self) -> None:
        """Forget the units whose slots are decided: the client was silent for too long."""
        for seq in [seq for seq, unit in self.units.items() if unit.confirmed]:
            del self.units[seq]

    def is_placed(self, seq: int) -> bool:
        """Whether the unit `seq` has its slots (or is settled, or is no unit at all: 0)."""
        if seq < self.first_incomplete:
            return True
        unit = self.units.get(seq)
        return unit is not None and unit.is_placed

    @property
    def is_settled(self) -> bool:
        """Whether nothing is held of the client, nor promised to it."""
        return not self.units and not self.refused and not self.successors

    def table(self, after: int, limit_bytes: int) -> SessionTable:
        """Return what is decided of the units after seq `after`: about so many bytes, or one."""
        seqs = sorted(seq for seq, unit in self.units.items() if unit.confirmed and seq > after)
        chosen: list[SettledUnit] = []
        for seq in seqs:
            if limit_bytes <= 0 and chosen:
                return self._table(chosen, after, is_cut=True)
            unit = self.units[seq]
            chosen.append(unit.to_settled_unit())
            limit_bytes -= _UNIT_BYTES + len(unit.packed)
        return self._table(chosen, after, is_cut=False)

    def _table(self, units: list[SettledUnit], after: int, *, is_cut: bool) -> SessionTable:
        return SessionTable(self.client, self.first_incomplete, units, after, is_cut, self.horizon)


def size_of(table: SessionTable) -> int:
    """Return how many bytes a table takes at most."""
    units = sum(
        _UNIT_BYTES + (9 * len(unit.steps.distances) if unit.steps else 9 * len(unit.gsns))
        for unit in table.units
    )
    return _TABLE_BYTES + units


def end_of_table(table: SessionTable) -> tuple[bytes, int]:
    """Return the client of a table, and the seq up to which it holds the client's units."""
    return table.client, table.units[-1].seq if table.is_cut else END


class RefusedClient(msgspec.Struct):
    """A client without a session, for which there was no room."""

    last_seen: int
    #: By seq, how many copies of a unit were refused for good in this view.
    refused: dict[int, int] = msgspec.field(default_factory=dict)


def _last_seen(session: Session) -> int:
    return session.last_seen


class Sessions:
    """All sessions of a shard at one server."""

    def __init__(self, timeout_ns: int = 900_000_000_000) -> None:
        """Silent clients are forgotten after `timeout_ns`."""
        self.by_client: dict[bytes, Session] = {}
        #: No record of a session that was forgotten here is above this position.
        self.horizon = 0
        self._timeout_ns: Final = timeout_ns
        #: Clients that were refused for want of room, the one that was last heard at the end.
        self.refused_clients: Final[dict[bytes, RefusedClient]] = {}
        self._refused_units = 0
        #: Units of several records that were decided last, and their records.
        self._recent: Final[deque[HeldUnit]] = deque()
        self._recent_records = 0

    def open(self, client: bytes, now: int) -> Session:
        """Return the client's session, a new one if it has none."""
        session = self.by_client.get(client)
        if session is None:
            session = self.by_client[client] = Session(client, now, horizon=self.horizon)
            if self.refused_clients:
                session.refused = self._forget_refusals(client)
        else:
            session.last_seen = now
        return session

    def schedule_packing(self, unit: HeldUnit) -> None:
        """Take note of a unit of several records that was just decided.

        Most are settled soon. What is still held when many more were decided is packed.
        """
        self._recent.append(unit)
        self._recent_records += unit.count
        while self._recent_records > _RECENT_RECORDS:
            older = self._recent.popleft()
            self._recent_records -= older.count
            session = self.by_client.get(older.client)
            if session is not None and session.units.get(older.seq) is older:
                older.pack()

    def idle(self, now: int) -> list[Session]:
        """Return the sessions of clients that were silent for too long."""
        return [s for s in self.by_client.values() if now - s.last_seen >= self._timeout_ns]

    # --- when there are many ---

    def is_full(self, *, at_primary: bool) -> bool:
        """Whether there is no room for another session."""
        slack = 0 if at_primary else MAX_SESSIONS // _BACKUP_SLACK
        return len(self.by_client) >= MAX_SESSIONS - slack

    @property
    def _max_delay_ns(self) -> int:
        """No message of a client comes later than so long after it was sent."""
        part, whole = _MAX_DELAY
        return self._timeout_ns * part // whole

    def evictable(self, now: int) -> list[Session]:
        """Return sessions that make room, if there are many: the longest silent ones, all settled.

        Their clients send nothing again that was placed, and what they sent has come or never will.
        """
        part, whole = _EVICTION_THRESHOLD
        excess = len(self.by_client) - MAX_SESSIONS * part // whole
        if excess <= 0:
            return []
        first, last = now - self._timeout_ns, now - self._max_delay_ns
        sessions = self.by_client.values()
        idle = (s for s in sessions if first < s.last_seen <= last and s.is_settled)
        return nsmallest(excess, idle, key=_last_seen)

    def refuse_client(self, client: bytes, seq: int, copy: int, now: int) -> int:
        """Remember that a unit of a client without a session is refused for want of room.

        Returns how many of its copies this server will never take; 0: it promises nothing.
        """
        self._forget_old_refusals(now)
        refused_client = self.refused_clients.pop(client, None) or RefusedClient(now)
        promised = refused_client.refused.get(seq, 0)
        if copy > promised and (promised or self._refused_units < MAX_REFUSED_UNITS):
            self._refused_units += not promised
            promised = refused_client.refused[seq] = copy
        refused_client.last_seen = now
        if refused_client.refused:
            self.refused_clients[client] = refused_client
        return promised

    def _forget_refusals(self, client: bytes) -> dict[int, int]:
        """Return what was promised to a client that gets a session now."""
        refused_client = self.refused_clients.pop(client, None)
        if refused_client is None:
            return {}
        self._refused_units -= len(refused_client.refused)
        return refused_client.refused

    def _forget_old_refusals(self, now: int) -> None:
        """Forget promises about copies that would have come by now."""
        since = now - self._max_delay_ns
        while self.refused_clients:
            client, refused_client = next(iter(self.refused_clients.items()))
            if refused_client.last_seen > since:
                return
            self._forget_refusals(client)

    def restore_refused_client(self, client: bytes, refused: dict[int, int], now: int) -> None:
        """Remember, after a restart, what a client was promised."""
        self.refused_clients[client] = RefusedClient(now, refused)
        self._refused_units += len(refused)

    def clear(self) -> None:
        """Forget everything."""
        self.by_client.clear()
        self.refused_clients.clear()
        self._refused_units = 0
        self._recent.clear()
        self._recent_records = 0

    def reset_idle_time(self, now: int) -> None:
        """Count no silence before `now`: this server could not hear any client."""
        for session in self.by_client.values():
            session.last_seen = now
        for refused_client in self.refused_clients.values():
            refused_client.last_seen = now

    def expire(self, client: bytes, horizon: int = 0) -> None:
        """Forget a client, with the horizon that the primary decided for that; 0: it is not known.

        Servers know different upper bounds of `Session.last` after a recovery. A backup with a
        lower horizon would promise slots to what the primary refuses for ever.
        """
        self.horizon = max(self.horizon, horizon)
        session = self.by_client.pop(client, None)
        if session is not None:
            self.raise_horizon(session)

    def raise_horizon(self, session: Session) -> None:
        """Note that some of a session's placed units are forgotten."""
        self.horizon = session.horizon = max(self.horizon, session.last)

    def may_have_forgotten(self, client: bytes, since: int) -> bool:
        """Whether a unit that is not known may have been placed in a session that is forgotten.

        The client made the unit when all positions below `since` were decided; 0: it does not say.
        """
        session = self.by_client.get(client)
        return 0 < since <= (self.horizon if session is None else session.horizon)

    # --- what survives a view (docs/protocol.md, section 11) ---

    def drop_undecided(self) -> None:
        """Forget the units that have no decided slots: their clients send them again."""
        self.refused_clients.clear()
        self._refused_units = 0
        for session in self.by_client.values():
            session.successors.clear()
            session.refused.clear()  # that was of the view that is over
            for seq in [seq for seq, unit in session.units.items() if not unit.confirmed]:
                del session.units[seq]
            for unit in session.units.values():
                unit.route = b""

    def tables(self) -> list[SessionTable]:
        """Return what is decided, in the order of clients."""
        return self.part((b"", 0), END)[0]

    def part(
        self, after: tuple[bytes, int], limit_bytes: int, clients: Sequence[bytes] | None = None
    ) -> tuple[list[SessionTable], bool]:
        """Return what is decided, after a unit of a client, in the order of clients and seqs.

        About so many bytes, but one unit at least; and whether there is more. `clients`: those to
        look at, in order; all if None.
        """
        clients = sorted(self.by_client) if clients is None else clients
        chosen: list[SessionTable] = []
        for client in clients[bisect_left(clients, after[0]) :]:
            session = self.by_client.get(client)
            start = after[1] if client == after[0] else 0
            if session is None or start == END:
                continue
            if limit_bytes <= 0:
                return chosen, True
            table = session.table(start, limit_bytes - _TABLE_BYTES)
            if start and not table.units:
                continue
            chosen.append(table)
            if table.is_cut:
                return chosen, True
            limit_bytes -= size_of(table)
        return chosen, False

    def install(self, tables: Iterable[SessionTable], now: int, last: int, horizon: int) -> None:
        """Know just what the tables say, of a log whose last decided position is `last`."""
        self.clear()
        self.horizon = max(self.horizon, horizon)
        self.add_tables(tables, now, last)

    def adopt(self, other: Sessions, now: int, last: int) -> None:
        """Know just what another server does, of a log whose last decided position is `last`."""
        self.clear()
        self.by_client = other.by_client
        self.horizon = max(self.horizon, other.horizon)
        for session in self.by_client.values():
            session.last_seen, session.last = now, last

    def add_tables(self, tables: Iterable[SessionTable], now: int, last: int = 0) -> None:
        """Know what the tables say, too."""
        for table in tables:
            session = self.open(table.client, now)
            session.settle(table.first_incomplete)
            session.horizon, session.last = table.horizon, max(session.last, last)
            for unit in table.units:
                session.units[unit.seq] = _held(table.client, unit)

    def replay(self, entry: Entry, now: int) -> None:
        """Take an entry that was decided after what is known here."""
        decision = entry.decision
        if type(decision) is Place:
            session = self.open(decision.client, now)
            session.last = decision.gsns[-1]
            session.settle(decision.first_incomplete)
            if decision.seq >= session.first_incomplete:
                gsns = decision.gsns
                unit = HeldUnit(decision.client, decision.seq, len(gsns), decision.checksum)
                unit.decide(gsns)
                session.units[decision.seq] = unit
        elif type(decision) is Expire:
            self.expire(decision.client, decision.horizon)

    def check(self) -> None:
        """Assert the invariant."""
        assert not self.refused_clients.keys() & self.by_client.keys(), "a promise was left behind"
        assert self._refused_units == sum(len(s.refused) for s in self.refused_clients.values())
        for client, session in self.by_client.items():
            assert client == session.client
            assert all(seq >= session.first_incomplete for seq in session.refused)
            for seq, unit in session.units.items():
                assert seq == unit.seq
                assert unit.gsns is not None or unit.packed or not unit.confirmed
                assert unit.confirmed or not unit.packed
                assert seq not in session.refused, "a unit is held that was refused for good"
                assert seq >= session.first_incomplete or (
                    unit.gsns is not None and not unit.confirmed
                )


def _held(client: bytes, unit: SettledUnit) -> HeldUnit:
    gsns, steps = unit.gsns, unit.steps
    count = len(gsns) if steps is None else steps.count
    held = HeldUnit(client, unit.seq, count, unit.checksum)
    if steps is None:
        held.decide(gsns)
    else:
        held.confirmed, held.packed = True, join(gsns[0], steps)
    return held
