from __future__ import annotations

from shard.sessions import HeldUnit, Session, Sessions

CLIENT = b"c" * 16


def unit(seq: int) -> HeldUnit:
    return HeldUnit(CLIENT, seq, 1, 7, b"body")


def session_of(*seqs: int) -> Session:
    session = Session(CLIENT, 0)
    for seq in seqs:
        session.units[seq] = unit(seq)
    return session


def test_settled_units_are_forgotten_but_for_promises() -> None:
    session = session_of(1, 2, 3, 4)
    session.confirm(session.units[1], [1])
    session.units[2].gsns = [2]  # a backup's promise: the primary may have decided the same
    dropped = session.settle(4)
    assert [u.seq for u in dropped] == [3]
    assert sorted(session.units) == [2, 4]
    assert session.settle(4) == []
    assert session.settle(2) == []
    assert session.done_below == 4


def test_settled_promise_is_forgotten_with_the_decision() -> None:
    session = session_of(1)
    session.units[1].gsns = [5]
    session.settle(2)
    session.confirm(session.units[1], [5])
    assert not session.units


def test_far_settlement_looks_only_at_what_is_there() -> None:
    session = session_of(1, 9)
    dropped = session.settle(2**62)
    assert [u.seq for u in dropped] == [1, 9]


def test_placed_is_what_has_slots_or_is_settled() -> None:
    session = session_of(2, 3)
    session.settle(2)
    session.units[3].gsns = [7]
    assert [session.is_placed(seq) for seq in (0, 1, 2, 3, 4)] == [True, True, False, True, False]


def test_confirmed_unit_keeps_no_body() -> None:
    session = session_of(1)
    session.confirm(session.units[1], [4])
    assert session.units[1].body == b""
    assert session.units[1].confirmed


def test_silent_clients_are_found() -> None:
    sessions = Sessions()
    first = sessions.open(CLIENT, 100)
    sessions.open(b"d" * 16, 150)
    assert sessions.open(CLIENT, 120) is first
    assert sessions.silent(200, 80) == [first]
    sessions.check()
    sessions.expire(CLIENT)
    assert sessions.silent(500, 80) == [sessions.by_client[b"d" * 16]]


def test_forget_confirmed_leaves_what_is_undecided() -> None:
    session = session_of(1, 2, 3)
    session.confirm(session.units[1], [4])
    session.units[2].gsns = [5]
    session.forget_confirmed()
    assert sorted(session.units) == [2, 3]
