"""Who inserted what: the table by which a server recognises a unit that it was sent before.

A session is a client's; it holds the units that the client may still ask about, by seq (D9).
What the client calls settled (`done_below`) is forgotten, but for promises: only the primary's
word breaks them. Invariant: a confirmed unit has slots, and a settled one still held is a promise.
See docs/protocol.md, section 4, rules 8 and 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.wire import Expire, Place, SessionTable, SettledUnit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ziplog.segments.entry import Entry

#: So many clients may have a session; more are refused.
MAX_SESSIONS: Final = 65_536
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
    follows: int = 0
    #: The way back to the client; empty if its own copy has not come.
    route: bytes = b""
    #: Where it is: decided, or a backup's promise; None while it has no slots.
    gsns: list[int] | None = None
    #: The primary decided its slots.
    confirmed: bool = False
    #: Where this backup's first guess began; 0: it made none. It outlives the promise.
    guess: int = 0


class Session(msgspec.Struct):
    """One client at this shard."""

    client: bytes
    last_seen: int
    #: Everything below is settled.
    done_below: int = 1
    units: dict[int, HeldUnit] = msgspec.field(default_factory=dict)
    #: At the primary: units that wait for the one with this seq to be placed.
    followers: dict[int, list[HeldUnit]] = msgspec.field(default_factory=dict)
    #: Tombstones: by seq, how many copies of a unit were refused for good in this view.
    refused: dict[int, int] = msgspec.field(default_factory=dict)
    #: When the client was asked last to send what is new elsewhere, in ns.
    told_leaving: int = -(2**62)

    def settle(self, done_below: int) -> list[HeldUnit]:
        """Forget what is below `done_below`, but for promises.

        Returns what was forgotten undecided: units that their client gave up.
        """
        dropped: list[HeldUnit] = []
        if done_below <= self.done_below:
            return dropped
        span = range(self.done_below, done_below)
        for seq in span if len(span) <= len(self.units) else sorted(self.units):
            unit = self.units.get(seq)
            if unit is None or seq >= done_below:
                continue
            if unit.confirmed:
                del self.units[seq]
            elif unit.gsns is None:
                del self.units[seq]
                dropped.append(unit)
        self.done_below = done_below
        if self.refused:
            self.refused = {seq: n for seq, n in self.refused.items() if seq >= done_below}
        return dropped

    def confirm(self, unit: HeldUnit, gsns: list[int]) -> None:
        """Take the primary's decision about a unit; forget it at once if it is settled."""
        unit.gsns = gsns
        unit.confirmed = True
        unit.body = b""
        if self.refused:
            self.refused.pop(unit.seq, None)  # the primary's word is above what a backup refused
        if unit.seq < self.done_below:
            self.units.pop(unit.seq, None)

    def forget_confirmed(self) -> None:
        """Forget the units whose slots are decided: the client was silent for too long."""
        for seq in [seq for seq, unit in self.units.items() if unit.confirmed]:
            del self.units[seq]

    def is_placed(self, seq: int) -> bool:
        """Whether the unit `seq` has its slots (or is settled, or is no unit at all: 0)."""
        if seq < self.done_below:
            return True
        unit = self.units.get(seq)
        return unit is not None and unit.gsns is not None


class Sessions:
    """All sessions of a shard at one server."""

    def __init__(self) -> None:
        self.by_client: dict[bytes, Session] = {}

    def open(self, client: bytes, now: int) -> Session:
        """Return the client's session, a new one if it has none."""
        session = self.by_client.get(client)
        if session is None:
            session = self.by_client[client] = Session(client, now)
        else:
            session.last_seen = now
        return session

    def silent(self, now: int, timeout_ns: int) -> list[Session]:
        """Return the sessions of clients that were silent for too long."""
        return [s for s in self.by_client.values() if now - s.last_seen >= timeout_ns]

    def expire(self, client: bytes) -> None:
        """Forget a client."""
        self.by_client.pop(client, None)

    # --- what survives a view (docs/protocol.md, section 11) ---

    def drop_undecided(self) -> None:
        """Forget the units that have no decided slots: their clients send them again."""
        for session in self.by_client.values():
            session.followers.clear()
            session.refused.clear()  # that was of the view that is over
            for seq in [seq for seq, unit in session.units.items() if not unit.confirmed]:
                del session.units[seq]
            for unit in session.units.values():
                unit.route = b""

    def tables(self) -> list[SessionTable]:
        """Return what is decided, in the order of clients."""
        return [
            SessionTable(
                client,
                session.done_below,
                [
                    SettledUnit(unit.seq, unit.gsns, unit.checksum)
                    for unit in session.units.values()
                    if unit.confirmed and unit.gsns is not None
                ],
            )
            for client, session in sorted(self.by_client.items())
        ]

    def install(self, tables: Iterable[SessionTable], now: int) -> None:
        """Know just what the tables say."""
        self.by_client.clear()
        for table in tables:
            session = self.open(table.client, now)
            session.done_below = table.done_below
            for unit in table.units:
                session.units[unit.seq] = _held(table.client, unit)

    def replay(self, entry: Entry, now: int) -> None:
        """Take an entry that was decided after what is known here."""
        decision = entry.decision
        if type(decision) is Place:
            session = self.open(decision.client, now)
            session.settle(decision.done_below)
            if decision.seq >= session.done_below:
                unit = SettledUnit(decision.seq, decision.gsns, decision.checksum)
                session.units[decision.seq] = _held(decision.client, unit)
        elif type(decision) is Expire:
            self.expire(decision.client)

    def check(self) -> None:
        """Assert the invariant."""
        for client, session in self.by_client.items():
            assert client == session.client
            assert all(seq >= session.done_below for seq in session.refused)
            for seq, unit in session.units.items():
                assert seq == unit.seq
                assert unit.gsns is not None or not unit.confirmed
                assert seq not in session.refused, "a unit is held that was refused for good"
                assert seq >= session.done_below or (unit.gsns is not None and not unit.confirmed)


def _held(client: bytes, unit: SettledUnit) -> HeldUnit:
    return HeldUnit(client, unit.seq, len(unit.gsns), unit.checksum, gsns=unit.gsns, confirmed=True)
