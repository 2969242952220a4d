from __future__ import annotations

import pytest

from shard.state.sessions import HeldUnit, Session, Sessions

CLIENT = b"c" * 16


def unit(seq: int) -> HeldUnit:
    return HeldUnit(CLIENT, seq, 1, 7, b"body")


def session_of(*seqs: int) -> Session:
    session = Session(CLIENT, 0)
    for seq in seqs:
        session.units[seq] = unit(seq)
    return session


def test_settled_units_are_forgotten_except_promises() -> None:
    session = session_of(1, 2, 3, 4)
    session.confirm(session.units[1], [1])
    session.units[2].gsns = [2]  # a backup's promise: the primary may have decided the same
    dropped = session.settle(4)
    assert [u.seq for u in dropped] == [3]
    assert sorted(session.units) == [2, 4]
    assert session.settle(4) == []
    assert session.settle(2) == []
    assert session.first_incomplete == 4


def test_settled_promise_is_forgotten_with_the_decision() -> None:
    session = session_of(1)
    session.units[1].gsns = [5]
    session.settle(2)
    session.confirm(session.units[1], [5])
    assert not session.units


def test_large_settlement_visits_only_held_units() -> None:
    session = session_of(1, 9)
    dropped = session.settle(2**62)
    assert [u.seq for u in dropped] == [1, 9]


def test_placed_units_have_slots_or_are_settled() -> None:
    session = session_of(2, 3)
    session.settle(2)
    session.units[3].gsns = [7]
    assert [session.has_slots(seq) for seq in (0, 1, 2, 3, 4)] == [True, True, False, True, False]


def test_confirmed_unit_keeps_no_body() -> None:
    session = session_of(1)
    session.confirm(session.units[1], [4])
    assert session.units[1].body == b""
    assert session.units[1].confirmed


def test_idle_sessions_are_found() -> None:
    sessions = Sessions(80)
    first = sessions.open(CLIENT, 100)
    sessions.open(b"d" * 16, 150)
    assert sessions.open(CLIENT, 120) is first
    assert sessions.idle(200) == [first]
    sessions.check()
    sessions.expire(CLIENT)
    assert sessions.idle(500) == [sessions.by_client[b"d" * 16]]


def test_forget_confirmed_keeps_undecided_units() -> None:
    session = session_of(1, 2, 3)
    session.confirm(session.units[1], [4])
    session.units[2].gsns = [5]
    session.forget_confirmed()
    assert sorted(session.units) == [2, 3]


def test_slots_of_long_held_units_are_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A unit that is settled soon is never packed."""
    monkeypatch.setattr("shard.state.sessions._RECENT_RECORDS", 6)
    sessions = Sessions()
    session = sessions.open(CLIENT, 0)
    units = [HeldUnit(CLIENT, seq, 3, 7) for seq in range(1, 6)]
    for held in units:
        session.units[held.seq] = held
        session.confirm(held, [held.seq, held.seq + 10, held.seq + 20])
        sessions.schedule_packing(held)
        sessions.check()
        if held.seq == 3:
            session.settle(3)
    assert [held.packed != b"" for held in units] == [True, False, True, False, False]
    assert [held.gsns is None for held in units] == [True, False, True, False, False]
    assert [held.slots[1] for held in units] == [11, 12, 13, 14, 15]


# --- many clients ----------------------------------------------------------------------------


def client(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """Return eight settled sessions of eight, last seen one after the other."""
    monkeypatch.setattr("shard.state.sessions.MAX_SESSIONS", 8)
    sessions = Sessions(600)
    for number in range(8):
        sessions.open(client(number), number)
    return sessions


def test_longest_idle_settled_sessions_are_evicted(
    crowded: Sessions,
) -> None:
    by_client = crowded.by_client
    assert crowded.is_full(at_primary=True)
    assert crowded.evictable(199) == []
    by_client[client(0)].units[1] = unit(1)
    by_client[client(1)].refused[1] = 1
    by_client[client(2)].successors[1] = [unit(2)]
    assert crowded.evictable(300) == [by_client[client(3)], by_client[client(4)]]
    assert crowded.evictable(203) == [by_client[client(3)]]
    crowded.expire(client(7))
    crowded.expire(client(6))
    assert crowded.evictable(300) == []


def test_expired_session_is_not_evicted_too(crowded: Sessions) -> None:
    assert not set(map(id, crowded.evictable(605))) & set(map(id, crowded.idle(605)))


def test_tombstones_of_a_refused_client_move_into_its_session(crowded: Sessions) -> None:
    assert crowded.refuse_client(client(9), 1, 1, 10) == 1
    assert crowded.refuse_client(client(9), 1, 3, 11) == 3
    assert crowded.refuse_client(client(9), 1, 2, 12) == 3
    assert crowded.refuse_client(client(9), 2, 1, 12) == 1
    assert crowded.refuse_client(client(10), 1, 0, 12) == 0
    crowded.check()
    assert crowded.open(client(9), 13).refused == {1: 3, 2: 1}
    assert not crowded.refused_clients
    crowded.check()


def test_tombstones_without_a_session_are_bounded_in_number_and_time(
    crowded: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard.state.sessions.MAX_REFUSED_UNITS", 2)
    assert [crowded.refuse_client(client(n), 1, 1, 10) for n in (20, 21, 22)] == [1, 1, 0]
    assert crowded.refuse_client(client(20), 1, 2, 100) == 2
    assert crowded.refuse_client(client(22), 1, 1, 209) == 0
    assert crowded.refuse_client(client(22), 1, 1, 210) == 1
    assert list(crowded.refused_clients) == [client(20), client(22)]


def test_tombstones_outlive_a_suspension_of_the_server(crowded: Sessions) -> None:
    """Messages sent before may still be in its sockets."""
    crowded.refuse_client(client(20), 1, 1, 10)
    crowded.reset_idle_time(500)
    crowded.refuse_client(client(21), 1, 1, 520)
    assert list(crowded.refused_clients) == [client(20), client(21)]
    crowded.check()
