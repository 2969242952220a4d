"""Session tables are split into frames and parts, and restored equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.recovery import state_transfer
from shard.recovery.state_transfer import StateTransfer, serve
from shard.replica import ReplicaConfig
from shard.state.replica_state import ReplicaState
from shard.state.session_tables import SessionTableWriter
from shard.state.sessions import END, HeldUnit, Sessions, end_of_table
from shard.state.slots import pack, unpack
from tests.checkers import session_tables
from tests.memory_store import MemoryStore
from tests.properties import examples
from ziplog.core.entries import Expire, Place, SessionTable, SettledUnit
from ziplog.core.fields import MAX_FRAME, MAX_UNIT_RECORDS
from ziplog.core.gsn import Schedule
from ziplog.core.node import Persist, Send
from ziplog.core.view import Replica as Address
from ziplog.segments.entry import Entry, SessionTablePartRecord, SessionTableRecord
from ziplog.wire import Fetch, Fetched, Limits, ViewDecided, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.storage.segment_store import SegmentStore

MS = 1_000_000
#: What a server may hold of one client, and the largest gsns.
WINDOW = Limits().max_unsettled_units
HIGH = 2**62


def state_of(server: int = 0) -> ReplicaState:
    replicas = tuple(Address(f"shard-0-{i}", f"host:{i}") for i in range(2))
    config = ReplicaConfig(
        f"shard-0-{server}", f"host:{server}", 0, server, replicas, (), "memory", 1, Limits()
    )
    state = ReplicaState(config, MemoryStore(), 7)
    state.cluster, state.view, state.server_state = 1, 2, "joined"
    return state


def name_of(client: int) -> bytes:
    return client.to_bytes(16, "big")


def hold(sessions: Sessions, client: int, seq: int, gsns: list[int]) -> None:
    """Have the client's session hold a decided unit."""
    session = sessions.open(name_of(client), 0)
    unit = session.units[seq] = HeldUnit(session.client, seq, len(gsns), 7)
    unit.decide(gsns)


def answers(state: ReplicaState, ask: Callable[[int, bytes, int], Fetch]) -> list[Fetched]:
    """Request all sessions of a server; return its replies, passed through the codec."""
    found: list[Fetched] = []
    tables, reached = 0, (b"", 0)
    while not found or found[-1].sessions_left:
        state.effects.clear()
        assert serve(state, b"shard-0-1", ask(tables, *reached)) is None
        (effect,) = state.effects
        assert isinstance(effect, Send)
        frame = encode(effect.message)
        assert len(frame) <= MAX_FRAME
        answer = decode(frame)
        assert isinstance(answer, Fetched)
        assert answer.sessions, "a reply without progress would be requested for ever"
        found.append(answer)
        assert len(found) < 1_000, "it does not end"
        tables += len(answer.sessions)
        reached = end_of_table(answer.sessions[-1])
    return found


def ask(tables: int, client: bytes, seq: int) -> Fetch:
    return Fetch(1, 0, 2, 1, 0, 0, tables, client, seq)


def join(state: ReplicaState) -> ReplicaState:
    """Let a server adopt the sessions of another one; return its state."""
    other = state_of(1)
    other.server_state = "limbo"
    decision = ViewDecided(1, 0, 2, 0, 7, 0, bytes(16), True)
    member = StateTransfer(other, decision, 0, is_witness=False)
    for _ in range(10_000):
        member.tick(1 << 50)
        (effect,) = [e for e in other.effects if isinstance(e, Send)][-1:]
        assert isinstance(effect.message, Fetch)
        state.effects.clear()
        assert serve(state, b"shard-0-1", effect.message) is None
        (sent,) = state.effects
        assert isinstance(sent, Send)
        answer = decode(encode(sent.message))
        assert isinstance(answer, Fetched)
        member.on_fetched(b"shard-0-0", answer, 0)
        if member.try_finish(5):
            return other
    raise AssertionError("it never joins")


def known(sessions: Sessions) -> dict[bytes, Any]:
    """Return the decided units of the sessions."""
    return {
        session.client: (
            session.first_incomplete,
            {s: (u.slots, u.checksum, u.count) for s, u in session.units.items() if u.confirmed},
        )
        for session in sessions.by_client.values()
    }


# --- gsns ------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 2**50), min_size=2, max_size=300), st.integers(0, 2**53))
def test_any_gsns_survive_packing(distances: list[int], first: int) -> None:
    gsns = [first]
    for distance in distances[1:]:
        gsns.append(gsns[-1] + distance)
    if len(gsns) > 1:
        assert unpack(pack(gsns)) == gsns


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(0, 10_000),
    st.integers(2, 300),
)
def test_the_slots_of_any_schedule_survive_packing(
    weights: list[int], shard: int, slot: int, count: int
) -> None:
    schedule = Schedule(list(enumerate(weights)))
    gsns = schedule.offsets(shard % len(weights), slot, count, HIGH)
    packed = pack(gsns)
    assert unpack(packed) == gsns
    assert len(packed) <= 18 + 3 * min(count, max(weights[shard % len(weights)], 1))


@pytest.mark.parametrize("weights", [[1], [1, 1], [1] * 16, [2, 3], [4, 5, 7]])
def test_any_packed_unit_takes_few_bytes(weights: list[int]) -> None:
    schedule = Schedule(list(enumerate(weights)))
    for count in (256, MAX_UNIT_RECORDS):
        assert len(pack(schedule.offsets(0, 17, count, HIGH))) <= 32


# --- frames ----------------------------------------------------------------------------------


def bulk_writers(clients: int, records: int) -> ReplicaState:
    """Return a server with full windows of bulk writers."""
    state = state_of()
    schedule = Schedule([(0, 1), (1, 1)])
    for client in range(clients):
        for seq in range(1, WINDOW + 1):
            slot = (seq * clients + client) * records
            hold(state.sessions, client, seq, schedule.offsets(0, slot, records, HIGH))
    return state


def test_the_windows_of_nine_bulk_writers_are_served_in_frames() -> None:
    state = bulk_writers(9, 256)
    found = answers(state, ask)
    assert sum(len(table.units) for answer in found for table in answer.sessions) == 9 * WINDOW
    assert known(join(state).sessions) == known(state.sessions)


def test_one_session_may_be_longer_than_a_frame() -> None:
    """Its client sends the largest units, to a shard without a short period of positions."""
    state = state_of()
    uneven = [HIGH + (k * (k + 1) // 2) * 300 for k in range(MAX_UNIT_RECORDS)]
    for seq in range(1, WINDOW + 1):
        hold(state.sessions, 1, seq, [gsn + seq for gsn in uneven])
    found = answers(state, ask)
    assert len(found) > 20
    assert sum(len(encode(answer)) for answer in found) > MAX_FRAME / 2
    assert known(join(state).sessions) == known(state.sessions)


def test_an_older_server_receives_whole_sessions() -> None:
    """It requests no client, and reads a unit by all of its gsns."""
    state = bulk_writers(7, 256)
    hold(state.sessions, 3, WINDOW + 1, [5])
    found = answers(state, lambda tables, *_: Fetch(1, 0, 2, 1, 0, 0, tables))
    tables = [table for answer in found for table in answer.sessions]
    assert [table.client for table in tables] == [name_of(client) for client in range(7)]
    assert all(unit.steps is None for table in tables for unit in table.units)
    sessions = Sessions()
    sessions.install(tables, 0, 0, 0)
    assert known(sessions) == known(state.sessions)


class Held(NamedTuple):
    client: int
    seq: int
    first: int
    distances: list[int]
    is_confirmed: bool


held = st.builds(
    Held,
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, HIGH),
    st.lists(st.integers(1, 2**33), max_size=9),
    st.booleans(),
)


@examples(200)
@given(st.lists(held, max_size=60), st.lists(st.integers(0, 9), max_size=4), st.integers(1, 2_000))
def test_any_sessions_are_served_in_frames_and_adopted_equal(
    units: list[Held], settled: list[int], limit: int
) -> None:
    state = state_of()
    for unit in units:
        gsns = [unit.first]
        for distance in unit.distances:
            gsns.append(gsns[-1] + distance)
        if unit.is_confirmed:
            hold(state.sessions, unit.client, unit.seq, gsns)
        else:
            session = state.sessions.open(name_of(unit.client), 0)
            session.units[unit.seq] = HeldUnit(session.client, unit.seq, len(gsns), 7, gsns=gsns)
    for client in settled:
        state.sessions.open(name_of(client), 0).settle(5 * client)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_transfer, "_ANSWER_TABLE_BYTES", limit)
        assert known(join(state).sessions) == known(state.sessions)
    assert session_tables(state.sessions) == session_tables(join(state).sessions)


# --- on disk ---------------------------------------------------------------------------------


events = st.one_of(
    st.tuples(st.just("place"), st.integers(0, 4), st.integers(1, 5), st.integers(0, 9)),
    st.tuples(st.just("expire"), st.integers(0, 4)),
    st.tuples(st.just("settle"), st.integers(0, 4), st.integers(0, 9)),
    st.tuples(st.just("table")),
    st.tuples(st.just("part")),
    st.tuples(st.just("part")),
    st.tuples(st.just("view")),
)


class Shard:
    """One server's sessions, its log, and the tables that it stores between entries."""

    def __init__(self) -> None:
        self.state = state_of()
        self.state.server_state = "up"
        self.tables = SessionTableWriter(self.state)
        self.now = 1
        self.next_seq: dict[int, int] = {}

    def record(self, decision: Place | Expire) -> None:
        state = self.state
        state.record(decision)
        self.stored()
        state.sessions.replay(state.store.log[-1], 0)  # type: ignore[attr-defined]

    def stored(self) -> None:
        for effect in self.state.effects:
            assert isinstance(effect, Persist)
            self.state.store.append(effect.entry)
        self.state.effects.clear()

    def happen(self, event: Any) -> None:
        state = self.state
        match event:
            case "place", client, count, back:
                seq = self.next_seq[client] = self.next_seq.get(client, 0) + 1
                end = state.stream.end
                gsns = [end + k * k for k in range(count)]
                self.record(Place(name_of(client), seq, max(seq - back, 1), 0, gsns, 7, b"body"))
            case "expire", client:
                self.record(Expire(name_of(client)))
            case "settle", client, back:  # by a message, which is not in the log
                session = state.sessions.by_client.get(name_of(client))
                if session is not None:
                    session.settle(self.next_seq[client] + 1 - back)
            case ("table",):
                state.bytes_since_table = 1 << 40
                self.tables.start_if_due(self.now)
            case ("part",):
                self.now += 100 * MS
                self.tables.tick(self.now)
                self.stored()
            case ("view",):
                state.view += 1


def rebuilt(shard: Shard, kept: int) -> Sessions:
    """Return the sessions of a server that starts with the first entries and parts."""
    state = state_of()
    for entry in shard.state.store.history[:kept]:  # type: ignore[attr-defined]
        state.store.append(entry)
    fseq, tables = state.store.last_table()
    state.sessions.install(tables, 0, 0, 0)
    for entry in state.store.read_after(fseq, END):
        state.sessions.replay(entry, 0)
    return state.sessions


@examples(300)
@given(st.lists(events, max_size=60), st.integers(1, 400))
def test_parts_and_entries_give_the_sessions_after_a_crash_anywhere(
    happened: list[Any], part_bytes: int
) -> None:
    shard = Shard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shard.state.session_tables.PART_BYTES", part_bytes)
        for event in happened:
            shard.happen(event)
        history = shard.state.store.history  # type: ignore[attr-defined]
        for kept in range(len(history) + 1):
            plain = Sessions()
            for entry in history[:kept]:
                if entry.fseq:
                    plain.replay(entry, 0)
            found = rebuilt(shard, kept)
            assert found.by_client.keys() == plain.by_client.keys()
            for client, session in found.by_client.items():
                expected, settled = plain.by_client[client], session.first_incomplete
                assert settled >= expected.first_incomplete
                assert {s: u.slots for s, u in session.units.items()} == {
                    s: u.slots for s, u in expected.units.items() if s >= settled
                }


def test_a_table_is_stored_in_parts_with_pauses() -> None:
    """The server does other work between parts, with any number of sessions."""
    state = bulk_writers(9, 3)
    state.server_state = "up"
    tables = SessionTableWriter(state)
    tables.start_if_due(5)
    assert tables.due is None
    state.bytes_since_table = 1 << 30
    tables.start_if_due(5)
    parts: list[SessionTablePartRecord] = []
    while tables.due is not None:
        now = tables.due
        tables.tick(now - 1)
        assert not state.effects
        tables.tick(now)
        (effect,) = state.effects
        assert isinstance(effect, Persist)
        assert isinstance(effect.entry.decision, SessionTablePartRecord)
        parts.append(effect.entry.decision)
        state.effects.clear()
        assert tables.due is None or tables.due > now
    assert len(parts) > 2
    assert all(sum(len(t.units) for t in part.sessions) <= 4096 for part in parts)
    assert [part.number for part in parts] == list(range(len(parts)))
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert sum(len(t.units) for part in parts for t in part.sessions) == 9 * WINDOW


def test_tables_are_a_small_part_of_what_is_written() -> None:
    state = bulk_writers(9, 3)
    state.server_state = "up"
    tables = SessionTableWriter(state)
    tables._last_bytes = 100 << 20
    state.bytes_since_table = 300 << 20
    tables.start_if_due(5)
    assert tables.due is None
    state.bytes_since_table = 401 << 20
    tables.start_if_due(5)
    assert tables.due == 5


def test_a_cut_table_records_its_last_seq() -> None:
    state = bulk_writers(1, 2)
    session = state.sessions.by_client[name_of(0)]
    table = session.table(2, 1)
    assert [unit.seq for unit in table.units] == [3]
    assert end_of_table(table) == (name_of(0), 3)
    assert end_of_table(session.table(WINDOW - 1, 1)) == (name_of(0), END)


def test_tables_of_older_servers_are_read(opened: Callable[..., SegmentStore]) -> None:
    """A table of an older server is complete, and has all gsns of each unit."""
    store = opened()
    store.append(Entry(1, 1, Place(name_of(1), 1, 1, 0, [1], 7, b"body")))
    plain = [SettledUnit(4, [7, 9, 12], 8), SettledUnit(5, [20], 8)]
    store.append(Entry(0, 1, SessionTableRecord([SessionTable(name_of(2), 4, plain)])))
    assert store.flush()
    sessions = Sessions()
    sessions.install(store.last_table()[1], 0, 0, 0)
    assert known(sessions) == {name_of(2): (4, {4: ([7, 9, 12], 8, 3), 5: ([20], 8, 1)})}
