"""Client sessions: the table by which a server recognises duplicate inserts.

Each client has one session. It holds the client's units that may still be sent again, by seq (D9).
Units below the client's `first_incomplete` are forgotten, except promises, which only the primary's
decision breaks. Invariants: a confirmed unit has slots; a unit held below `first_incomplete` is a
promise; a placed unit is held, or below `first_incomplete`, or not above the horizon.
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

#: Most clients that have a session; further clients are refused.
MAX_SESSIONS: Final = 65_536
#: Above this part of `MAX_SESSIONS`, idle sessions without units are evicted.
_EVICTION_THRESHOLD: Final = (3, 4)
#: Longest delay of a message, as part of the session timeout: clients do not retransmit after two
#: thirds of it. An idle session may be evicted after this delay.
_MAX_DELAY: Final = (1, 3)
#: A backup is full this part earlier, so it holds no unit that the primary refuses.
_BACKUP_SLACK: Final = 64
#: Most refused units of clients without a session that are remembered.
MAX_REFUSED_UNITS: Final = 65_536
#: Number of recent records that keep their slots unpacked.
_RECENT_RECORDS: Final = 65_536
#: Greater than every seq.
END: Final = 2**63 - 1
#: Most bytes of a table beside its units, and of a unit beside its packed gsns, in a message.
_TABLE_BYTES: Final = 48
_UNIT_BYTES: Final = 40
#: The tombstone of a unit of which all copies are refused.
ALL_COPIES: Final = 2**63 - 1


class HeldUnit(msgspec.Struct, gc=False):
    """A unit that a client sent to this server, or that its primary placed."""

    client: bytes
    seq: int
    count: int
    checksum: int
    #: The records; emptied once the store has them.
    body: bytes = b""
    #: Every record is placed above this gsn.
    after: int = 0
    #: It is placed after the unit with this seq; 0: none.
    predecessor: int = 0
    #: The route to the client; empty if the client's own copy has not arrived.
    route: bytes = b""
    #: Its slots, decided or promised by a backup; None if it has none, or they are packed.
    gsns: list[int] | None = None
    #: The primary decided its slots.
    confirmed: bool = False
    #: First gsn of this backup's first guess, kept after the promise is broken; 0: none.
    guess: int = 0
    #: The epoch of promised slots, recorded when new leases arrive; -1: look it up in the leases.
    epoch: int = -1
    #: The decided gsns of several records, packed (`shard.state.slots`).
    packed: bytes = b""
    #: Number of the newest copy from the client; 0: none arrived, or copies are not numbered.
    copy: int = 0
    #: Its client waits until its last slot is sealed.
    sealed: bool = False

    @property
    def has_slots(self) -> bool:
        """Whether it has slots, decided or promised."""
        return self.confirmed or self.gsns is not None

    @property
    def slots(self) -> list[int]:
        """Its gsns."""
        gsns = self.gsns
        assert gsns is not None or self.packed, "it has no slots"
        return unpack(self.packed) if gsns is None else gsns

    def decide(self, gsns: list[int]) -> None:
        """Set its decided slots, and pack them."""
        self.gsns, self.confirmed = gsns, True
        self.pack()

    def pack(self) -> None:
        """Pack its decided slots."""
        gsns = self.gsns
        if self.confirmed and gsns is not None and len(gsns) > 1:
            self.gsns, self.packed = None, pack(gsns)

    def to_settled_unit(self) -> SettledUnit:
        """Return its entry in a session table; the unit must be decided."""
        self.pack()
        if not self.packed:
            return SettledUnit(self.seq, self.slots, self.checksum)
        first, steps = split(self.packed)
        return SettledUnit(self.seq, [first], self.checksum, steps)


class Session(msgspec.Struct):
    """One client at this shard."""

    client: bytes
    last_seen: int
    #: The client's lowest seq without a result; lower units are forgotten.
    first_incomplete: int = 1
    units: dict[int, HeldUnit] = msgspec.field(default_factory=dict)
    #: At the primary: units that wait for the one with this seq to be placed.
    successors: dict[int, list[HeldUnit]] = msgspec.field(default_factory=dict)
    #: Tombstones: by seq, the number of copies of a unit that are permanently refused in this view.
    refused: dict[int, int] = msgspec.field(default_factory=dict)
    #: The horizon (see `Sessions`) when this session began: an earlier unit of the client may have
    #: been placed in an expired session.
    horizon: int = 0
    #: No record of this session is above this position.
    last: int = 0
    #: The client's inserts are within its rate from this time on, in ns (`ordering.insert_rate`).
    paid_until: int = 0
    #: Time of the last `Leaving` message to the client, in ns.
    leaving_sent_at: int = -(2**62)

    def settle(self, first_incomplete: int) -> list[HeldUnit]:
        """Forget the units below `first_incomplete`, except promises.

        Returns the undecided units that were forgotten: their client abandoned them.
        """
        dropped: list[HeldUnit] = []
        if first_incomplete <= self.first_incomplete:
            return dropped
        units = self.units
        seqs: Iterable[int] = range(self.first_incomplete, first_incomplete)
        if first_incomplete - self.first_incomplete > len(units):
            seqs = sorted(seq for seq in units if seq < first_incomplete)
        for seq in seqs:
            unit = units.get(seq)
            if unit is None:
                continue
            if unit.confirmed:
                del units[seq]
            elif unit.gsns is None:
                del units[seq]
                dropped.append(unit)
        self.first_incomplete = first_incomplete
        if self.refused:
            self.refused = {seq: n for seq, n in self.refused.items() if seq >= first_incomplete}
        return dropped

    def confirm(self, unit: HeldUnit, gsns: list[int]) -> None:
        """Apply the primary's decision about a unit; forget the unit if its client is done."""
        unit.gsns = gsns
        unit.confirmed = True
        unit.body = b""
        self.last = gsns[-1]
        if self.refused:
            self.refused.pop(unit.seq, None)  # the primary's decision overrides a backup's refusal
        if unit.seq < self.first_incomplete:
            self.units.pop(unit.seq, None)

    def forget_confirmed(self) -> None:
        """Forget the decided units: the session expired."""
        for seq in [seq for seq, unit in self.units.items() if unit.confirmed]:
            del self.units[seq]

    def has_slots(self, seq: int) -> bool:
        """Whether the unit `seq` has slots, or is below `first_incomplete`, or is 0 (no unit)."""
        if seq < self.first_incomplete:
            return True
        unit = self.units.get(seq)
        return unit is not None and unit.has_slots

    @property
    def is_settled(self) -> bool:
        """Whether the session holds no units, tombstones or successors."""
        return not self.units and not self.refused and not self.successors

    def table(self, after: int, limit_bytes: int) -> SessionTable:
        """Return a table of decided units after seq `after`: at least one, and about the limit."""
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
    """Return the client of a table, and the last seq that the table covers."""
    return table.client, table.units[-1].seq if table.is_cut else END


class RefusedClient(msgspec.Struct):
    """A client that was refused a session for lack of room."""

    last_seen: int
    #: By seq, the number of copies of a unit that are permanently refused in this view.
    refused: dict[int, int] = msgspec.field(default_factory=dict)


def _last_seen(session: Session) -> int:
    return session.last_seen


class Sessions:
    """The sessions of all clients at one server."""

    def __init__(self, timeout_ns: int = 900_000_000_000) -> None:
        """Create an empty table; sessions expire after `timeout_ns` without a message."""
        self.by_client: dict[bytes, Session] = {}
        #: No record of a forgotten session is above this position.
        self.horizon = 0
        self._timeout_ns: Final = timeout_ns
        #: Clients that were refused a session, in order of their last message.
        self.refused_clients: Final[dict[bytes, RefusedClient]] = {}
        self._refused_units = 0
        #: The units of several records that were decided last, and the number of their records.
        self._recent: Final[deque[HeldUnit]] = deque()
        self._recent_records = 0

    def open(self, client: bytes, now: int) -> Session:
        """Return the client's session; create one if it has none."""
        session = self.by_client.get(client)
        if session is None:
            session = self.by_client[client] = Session(client, now, horizon=self.horizon)
            if self.refused_clients:
                session.refused = self._forget_refusals(client)
        else:
            session.last_seen = now
        return session

    def schedule_packing(self, unit: HeldUnit) -> None:
        """Pack a unit of several records, which was just decided, after many more decisions.

        Most units are forgotten before that.
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
        """Return the sessions that have exceeded the session timeout."""
        return [s for s in self.by_client.values() if now - s.last_seen >= self._timeout_ns]

    # --- limits ---

    def is_full(self, *, at_primary: bool) -> bool:
        """Whether another session would exceed the limit."""
        slack = 0 if at_primary else MAX_SESSIONS // _BACKUP_SLACK
        return len(self.by_client) >= MAX_SESSIONS - slack

    @property
    def _max_delay_ns(self) -> int:
        """Longest delay of a client's message, in ns."""
        part, whole = _MAX_DELAY
        return self._timeout_ns * part // whole

    def evictable(self, now: int) -> list[Session]:
        """Return the sessions to evict, if there are many: the longest idle ones without units.

        Their clients retransmit no placed unit, and no message of theirs is still on its way.
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
        """Record that a unit of a client without a session is refused for lack of room.

        Returns the number of its copies that are refused permanently; 0: this is no promise.
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
        """Remove a refused client; return its tombstones."""
        refused_client = self.refused_clients.pop(client, None)
        if refused_client is None:
            return {}
        self._refused_units -= len(refused_client.refused)
        return refused_client.refused

    def _forget_old_refusals(self, now: int) -> None:
        """Forget tombstones of copies that can no longer arrive."""
        since = now - self._max_delay_ns
        while self.refused_clients:
            client, refused_client = next(iter(self.refused_clients.items()))
            if refused_client.last_seen > since:
                return
            self._forget_refusals(client)

    def restore_refused_client(self, client: bytes, refused: dict[int, int], now: int) -> None:
        """Restore, after a restart, the tombstones of a refused client."""
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
        """Count idle time from `now`: this server could not receive messages before."""
        for session in self.by_client.values():
            session.last_seen = now
        for refused_client in self.refused_clients.values():
            refused_client.last_seen = now

    def expire(self, client: bytes, horizon: int = 0) -> None:
        """Forget a client, with the horizon that the primary decided; 0: the horizon is not known.

        After a recovery, servers know different upper bounds of `Session.last`. A backup with a
        lower horizon would promise slots to units that the primary refuses permanently.
        """
        self.horizon = max(self.horizon, horizon)
        session = self.by_client.pop(client, None)
        if session is not None:
            self.raise_horizon(session)

    def raise_horizon(self, session: Session) -> None:
        """Raise the horizon: some of a session's placed units are forgotten."""
        self.horizon = session.horizon = max(self.horizon, session.last)

    def may_have_forgotten(self, client: bytes, since: int) -> bool:
        """Whether an unknown unit may have been placed in a session that is forgotten.

        The client created the unit when all positions below `since` were decided; 0: unknown.
        """
        session = self.by_client.get(client)
        return 0 < since <= (self.horizon if session is None else session.horizon)

    # --- changes of the view (docs/protocol.md, section 11) ---

    def drop_undecided(self) -> None:
        """Forget the units without decided slots: their clients retransmit them."""
        self.refused_clients.clear()
        self._refused_units = 0
        for session in self.by_client.values():
            session.successors.clear()
            session.refused.clear()  # tombstones hold within one view
            for seq in [seq for seq, unit in session.units.items() if not unit.confirmed]:
                del session.units[seq]
            for unit in session.units.values():
                unit.route = b""

    def part(
        self, after: tuple[bytes, int], limit_bytes: int, clients: Sequence[bytes] | None = None
    ) -> tuple[list[SessionTable], bool]:
        """Return tables of decided units after a client and seq, in that order.

        Returns about `limit_bytes`, but at least one unit; and whether there is more. `clients`:
        only these clients, in order; None: all.
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
        """Replace all sessions by tables; `last` is the last decided position of their log."""
        self.clear()
        self.horizon = max(self.horizon, horizon)
        self.add_tables(tables, now, last)

    def adopt(self, other: Sessions, now: int, last: int) -> None:
        """Replace all sessions by those of another server; its log ends at position `last`."""
        self.clear()
        self.by_client = other.by_client
        self.horizon = max(self.horizon, other.horizon)
        for session in self.by_client.values():
            session.last_seen, session.last = now, last

    def add_tables(self, tables: Iterable[SessionTable], now: int, last: int = 0) -> None:
        """Add the sessions and units of the tables."""
        for table in tables:
            session = self.open(table.client, now)
            session.settle(table.first_incomplete)
            session.horizon, session.last = table.horizon, max(session.last, last)
            for unit in table.units:
                session.units[unit.seq] = _held(table.client, unit)

    def replay(self, entry: Entry, now: int) -> None:
        """Apply an entry that was decided after the current state."""
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
        assert not self.refused_clients.keys() & self.by_client.keys(), "a session was refused"
        assert self._refused_units == sum(len(s.refused) for s in self.refused_clients.values())
        for client, session in self.by_client.items():
            assert client == session.client
            first, refused = session.first_incomplete, session.refused
            if refused:
                assert min(refused) >= first
                held = refused.keys() & session.units.keys()
                assert not held, "a permanently refused unit is held"
            for seq, unit in session.units.items():
                assert seq == unit.seq
                if unit.confirmed:
                    assert unit.gsns is not None or unit.packed
                    assert seq >= first
                else:
                    assert not unit.packed
                    assert seq >= first or unit.gsns is not None


def _held(client: bytes, unit: SettledUnit) -> HeldUnit:
    gsns, steps = unit.gsns, unit.steps
    count = len(gsns) if steps is None else steps.count
    held = HeldUnit(client, unit.seq, count, unit.checksum)
    if steps is None:
        held.decide(gsns)
    else:
        held.confirmed, held.packed = True, join(gsns[0], steps)
    return held
