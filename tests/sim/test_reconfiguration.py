"""Joining and leaving shards, as scripts with faults at each step (docs/protocol.md, 13).

Real servers, services and clients in virtual time; the operator repeats its requests until an
answer. After any fault, all replicas agree, no acknowledged record is lost or duplicated, and a
finalized shard never changes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sim.plan import server_name
from tests.sim.script import DELAY_NS, Call, Client, Reader, Stage, stage
from tests.sim.verdict import Monitor
from tests.simulator.kernel import MS, S
from ziplog.wire import (
    ChangeShard,
    Forward,
    Heartbeat,
    Insert,
    InsertAck,
    LeaseAnnounced,
    Refused,
    Resend,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.operator import Change

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"
NEW = ("shard-1-0", "shard-1-1")


def state(s: Stage, shard: int) -> str:
    """Return a shard's state; "": unknown shard."""
    placement = s.cluster.state.placements.get(shard)
    return placement.state if placement is not None else ""


def members(s: Stage) -> list[int]:
    """Return the members of the last lease."""
    last = s.cluster.state.last
    assert last is not None
    return [member.shard for member in last.members]


def done(s: Stage, *changes: Change) -> None:
    """Advance the time until changes have succeeded and the cluster is whole."""
    s.until(lambda: all(change.ended for change in changes) and s.cluster.is_whole())
    assert [change.refused for change in changes] == [None] * len(changes)
    s.operator.check_end()
    Monitor(s.cluster).check_end()


# --- a shard joins -------------------------------------------------------------------------------

#: Moments of the leader's death: the change is in flight, proposed, committed; the servers have
#: reported; the lease is committed; the first server has received it.
JOINING: dict[str, Callable[[Stage], object]] = {
    "asked": lambda s: any(type(one.message) is ChangeShard for one in s.sent),
    "proposed": lambda s: any(
        type(one.message) is ChangeShard and one.at + DELAY_NS < s.now for one in s.sent
    ),
    "placed": lambda s: state(s, 1) == "joining",
    "heard": lambda s: (
        state(s, 1) and all(any(heard(s, name, f"mms-{i}") for i in range(3)) for name in NEW)
    ),
    "leased": lambda s: state(s, 1) == "live",
    "announced": lambda s: any(
        one.dst == NEW[0] and type(one.message) is LeaseAnnounced and one.message.runs
        for one in s.sent
    ),
}


def heard(s: Stage, server: str, node: str) -> bool:
    """Whether a heartbeat of a server has reached a node by now."""
    return any(
        (one.src, one.dst, type(one.message)) == (server, node, Heartbeat)
        and one.at + DELAY_NS < s.now
        for one in s.sent
    )


@pytest.mark.parametrize("step", JOINING)
@pytest.mark.parametrize("seed", range(3))
def test_a_shard_joins_while_the_membership_services_leader_dies(step: str, seed: int) -> None:
    with stage(mms=3, seed=seed) as s:
        alice = Client(s, "alice", 0)
        first = alice.wait(alice.insert(b"A")).gsns
        reader = Reader(s, "reader", 1)
        change = s.operator.change("add", 1)
        s.until(lambda: JOINING[step](s))
        s.cluster.nodes[s.cluster.mms.leader].kill()
        done(s, change)
        assert members(s) == [0, 1]
        bob = Client(s, "bob", 1)
        there = bob.wait(bob.insert(b"B")).gsns
        again = alice.wait(alice.insert(b"C", after=there[0])).gsns
        assert reader.until(3) == [(first[0], b"A"), (there[0], b"B"), (again[0], b"C")]
        assert (s.settle(0), s.settle(1)) == ({first[0]: b"A", again[0]: b"C"}, {there[0]: b"B"})
        assert s.cluster.state.placements[1].view == 1


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_a_server_dies_before_its_shard_has_joined(victims: tuple[int, ...]) -> None:
    """The server is in limbo then, although it had no state to forget."""
    with stage() as s:
        rules = [s.lose(name, "mms-0", Heartbeat) for name in NEW]
        change = s.operator.change("add", 1)
        s.until(lambda: state(s, 1) == "joining")
        s.run(100 * MS)
        for index in victims:
            s.cluster.nodes[NEW[index]].kill()
        s.heal(*rules)
        done(s, change)
        bob = Client(s, "bob", 1)
        (gsn,) = bob.wait(bob.insert(b"B")).gsns
        assert s.settle(1) == {gsn: b"B"}
        assert not s.cluster.state.losses


def test_a_shard_that_does_not_come_yet_may_leave_again() -> None:
    """One of its servers is unreachable: the shard never was a member, and never will be."""
    with stage() as s:
        s.lose(NEW[1], "mms-0", Heartbeat)
        joining = s.operator.change("add", 1)
        s.until(lambda: state(s, 1) == "joining")
        s.run(3 * S)
        assert (state(s, 1), members(s)) == ("joining", [0])
        leaving = s.operator.change("remove", 1)
        s.until(lambda: leaving.ended)
        assert state(s, 1) == "finalized"
        s.heal()
        s.until(lambda: joining.ended)
        assert "never comes back" in str(joining.refused)
        s.until(s.cluster.is_whole)
        assert members(s) == [0]
        again = s.operator.change("add", 2)
        done(s, again)


# --- a shard leaves ------------------------------------------------------------------------------


def limit(s: Stage, shard: int) -> int:
    """Return the end of a shard's last lease."""
    runs = s.cluster.state.runs
    return max(run.last.stop for run in runs if run.last.view_of(shard) is not None)


def test_a_shard_leaves_while_clients_insert() -> None:
    """Open inserts end there or at another shard, once; its records stay readable."""
    with stage(shards=2) as s:
        reader = Reader(s, "reader", 1)
        alice, bob = Client(s, "alice", None), Client(s, "bob", None)
        calls = [alice.insert(b"A%d" % i) for i in range(50)]
        change = s.operator.change("remove", 0)
        while not change.ended:
            calls.append(bob.insert(b"B%d" % len(calls)))
            s.run(1 * MS)
        late = [bob.insert(b"late"), alice.insert(b"late, too")]
        for call in (*calls, *late):
            alice.wait(call)
        done(s, change)
        assert {rid.shard for call in late for rid in call.result} == {1}
        assert {rid.shard for call in calls for rid in call.result} == {0, 1}
        rows = reader.until(len(calls) + 2)
        assert [gsn for gsn, _ in rows] == sorted({*(c.gsns[0] for c in (*calls, *late))})
        assert state(s, 0) == "finalized"
        assert alice.read(calls[0].gsns[0], 0) == b"A0"
        assert max(s.settle(0)) < limit(s, 0)


#: Moments of the operator's request for a shard with a dead primary.
RECOVERING: dict[str, Callable[[Stage], object]] = {
    "suspected": lambda s: not s.cluster.nodes[PRIMARY].is_up,
    "attempted": lambda s: s.cluster.handlers.machine.shards,  # type: ignore[attr-defined]
    "taken out": lambda s: state(s, 0) == "recovering",
    "frozen": lambda s: s.state(BACKUP).server_state == "frozen",
    "decided": lambda s: s.state(BACKUP).server_state == "joined",
    "joined": lambda s: s.cluster.state_of(PRIMARY) and s.state(PRIMARY).server_state == "joined",
    "reinserted": lambda s: state(s, 0) == "live" and s.cluster.state.placements[0].view > 1,
    "begun": lambda s: s.state(BACKUP).server_state == "up" and s.state(BACKUP).view > 1,
}


@pytest.mark.parametrize("step", RECOVERING)
def test_a_removal_races_a_recovery(step: str) -> None:
    """A recovering shard leaves: it returns as a leaving shard, not as a member."""
    with stage(shards=2) as s:
        pinned, free = Client(s, "pinned", 0), Client(s, "free", None)
        reader = Reader(s, "reader", 1)
        first = pinned.wait(pinned.insert(b"first"))
        s.lose(PRIMARY, BACKUP, Forward)
        held = pinned.wait(pinned.insert(b"held by two, heard by one"))
        s.cluster.nodes[PRIMARY].kill()
        s.heal()
        under_way = free.insert(b"under way")
        s.until(lambda: RECOVERING[step](s))
        change = s.operator.change("remove", 0)
        free.wait(under_way)
        done(s, change)
        later = free.wait(free.insert(b"later"))
        assert {rid.shard for rid in later.result} == {1}
        assert members(s) == [1]
        wanted = {first.gsns[0]: b"first", held.gsns[0]: b"held by two, heard by one"}
        wanted |= {gsn: b"under way" for gsn, at in under_way.result if at == 0}
        assert s.settle(0) == wanted
        assert len(reader.until(4)) == 4
        assert pinned.read(held.gsns[0], 0) == b"held by two, heard by one"


#: Moments of the primary's death in a leaving shard.
LEAVING: dict[str, Callable[[Stage], object]] = {
    "asked": lambda s: any(type(one.message) is ChangeShard for one in s.sent),
    "leaving": lambda s: state(s, 0) == "leaving",
    "out of the leases": lambda s: members(s) == [1],
    "announced": lambda s: s.state(BACKUP).has_no_positions,
    "finalized": lambda s: state(s, 0) == "finalized",
}


@pytest.mark.parametrize("victim", [PRIMARY, BACKUP])
@pytest.mark.parametrize("step", LEAVING)
def test_a_server_dies_while_its_shard_leaves(step: str, victim: str) -> None:
    """The shard is recovered as any other, and is out of the leases afterwards."""
    with stage(shards=2) as s:
        alice = Client(s, "alice", None)
        reader = Reader(s, "reader", 1)
        calls = [alice.insert(b"%d" % i) for i in range(20)]
        change = s.operator.change("remove", 0)
        s.until(lambda: LEAVING[step](s))
        calls += [alice.insert(b"%d" % i) for i in range(20, 30)]
        s.cluster.nodes[victim].kill()
        states: list[str] = []

        def is_done() -> bool:
            if not states or states[-1] != state(s, 0):
                states.append(state(s, 0))
            return bool(change.ended) and s.cluster.is_whole()

        s.until(is_done)
        done(s, change)
        for call in calls:
            alice.wait(call)
        rows = reader.until(len(calls))
        assert sorted(payload for _, payload in rows) == sorted(b"%d" % i for i in range(30))
        out = states.index("leaving") if "leaving" in states else states.index("finalized")
        assert "live" not in states[out:], states


@pytest.mark.parametrize("delay_s", [0, 5], ids=["at once", "when its next view has begun"])
@pytest.mark.parametrize("lost", [0, 1], ids=["the primary", "a backup"])
@pytest.mark.parametrize("f", [1, 2])
def test_a_shard_that_lost_a_server_for_good_leaves(f: int, lost: int, delay_s: int) -> None:
    """Its other servers hold all its positions; only the end of its recovery needs all."""
    with stage(shards=2, f=f, epoch_ms=10) as s:
        alice = Client(s, "alice", 0)
        (gsn,) = alice.wait(alice.insert(b"A")).gsns
        s.cluster.lose([server_name(0, lost)])
        s.run(delay_s * S)
        change = s.operator.change("remove", 0)
        s.until(lambda: change.ended, 10 * S)
        assert change.refused is None
        assert (members(s), state(s, 0)) == ([1], "recovering")
        assert alice.read(gsn, 0) == b"A"


def test_a_finalized_shard_loses_a_server_and_then_its_disk() -> None:
    """The shard is monitored and recovered as any other, returns unchanged, and stays readable."""
    with stage(shards=2) as s:
        alice = Client(s, "alice", 0)
        (gsn,) = alice.wait(alice.insert(b"A")).gsns
        done(s, s.operator.change("finalize", 0))
        before = s.decisions(PRIMARY)
        states: set[str] = set()

        def is_back(view: int) -> bool:
            states.add(state(s, 0))
            return s.cluster.state.placements[0].view > view and s.cluster.is_whole()

        for server, lose in (
            (PRIMARY, s.cluster.nodes[PRIMARY].kill),
            (BACKUP, s.cluster.nodes[BACKUP].kill),
            (PRIMARY, lambda: s.cluster.lose_disk(PRIMARY)),
            (BACKUP, lambda: s.cluster.lose_disk(BACKUP)),
        ):
            view = s.cluster.state.placements[0].view
            lose()
            assert alice.read(gsn, 0) == b"A"
            s.until(lambda view=view: is_back(view))
            assert s.decisions(server) == before
            assert alice.read(gsn, 0) == b"A"
        assert states == {"finalized", "recovering"}
        assert members(s) == [1]
        Monitor(s.cluster).check_end()


def test_a_leaving_shards_primary_is_cut_off_from_the_service() -> None:
    """It continues by its leases; the shard is out once the primary receives the announcement."""
    with stage(shards=2) as s:
        alice, bob = Client(s, "alice", None), Client(s, "bob", 0)
        reader = Reader(s, "reader", 1)
        first = alice.wait(alice.insert(b"first"))
        s.network.cut(PRIMARY, "mms-0")
        s.network.cut("mms-0", PRIMARY)
        change = s.operator.change("remove", 0)
        s.until(lambda: state(s, 0) == "leaving")
        calls = [alice.insert(b"%d" % i) for i in range(10)]
        there = bob.insert(b"pinned")
        s.until(lambda: members(s) == [1])
        s.run(3 * S)
        calls += [alice.insert(b"%d" % i) for i in range(10, 20)]
        s.run(1 * S)
        assert not change.ended, "the primary's records are unknown"
        assert all(call.ended for call in calls), "records that may move to another shard do"
        s.network.heal_all()
        done(s, change)
        for call in calls:
            alice.wait(call)
        placed = [there] if there.ended else []
        assert first.result[0].shard == 0
        rows = reader.until(len(calls) + len(placed) + 1)
        assert len({payload for _, payload in rows}) == len(calls) + len(placed) + 1


# --- redirects -----------------------------------------------------------------------------------


def out(s: Stage, client: Client, payload: bytes) -> tuple[Change, Call]:
    """Remove a shard with a record at its backup alone; the primary receives it too late.

    Return the change and the client's insert: the backup has promised it a slot.
    """
    s.fresh_epoch()
    s.lose(client.name, PRIMARY, Insert)
    call = client.insert(payload)
    s.until(lambda: s.guesses(BACKUP))
    return s.operator.change("remove", 0), call


def is_out(s: Stage, server: str) -> bool:
    """Whether a server knows that its shard has no more positions."""
    return s.state(server).has_no_positions


def refusals(s: Stage, server: str, client: Client) -> list[str]:
    """Return a server's refusals to a client."""
    return [refused.code for refused in s.messages(server, client.name, Refused)]


def test_a_promised_slot_is_taken_away_before_the_backup_refuses() -> None:
    """The primary lacks the record, and refuses; the backup refuses once its slot is a no-op."""
    with stage(shards=2) as s:
        alice = Client(s, "alice", None)
        change, call = out(s, alice, b"A")
        hold = s.lose(PRIMARY, BACKUP, Forward)
        s.until(lambda: is_out(s, PRIMARY) and is_out(s, BACKUP))
        s.heal()
        hold = s.lose(PRIMARY, BACKUP, Forward)
        s.until(lambda: "redirect" in refusals(s, PRIMARY, alice))
        s.run(300 * MS)
        assert s.guesses(BACKUP) != {}
        assert "redirect" not in refusals(s, BACKUP, alice), "it holds a promise"
        assert not call.ended
        s.heal(hold)
        alice.wait(call)
        assert call.result[0].shard == 1
        assert "redirect" in refusals(s, BACKUP, alice)
        done(s, change)
        assert (s.settle(0), s.settle(1)) == ({}, {call.gsns[0]: b"A"})


@pytest.mark.parametrize("lost", [(), (PRIMARY,), (BACKUP,), (PRIMARY, BACKUP)])
def test_lost_refusals_are_sent_again(lost: tuple[str, ...]) -> None:
    """Copies of a refused unit are refused; the client moves after both refusals."""
    with stage(shards=2) as s:
        alice = Client(s, "alice", None)
        change, call = out(s, alice, b"A")
        rules = [s.lose(server, "alice", Refused) for server in lost]
        s.until(lambda: is_out(s, PRIMARY) and is_out(s, BACKUP))
        s.heal(*[rule for rule in s._rules if rule not in rules])
        s.until(lambda: {"redirect"} <= set(refusals(s, PRIMARY, alice)))
        s.until(lambda: {"redirect"} <= set(refusals(s, BACKUP, alice)))
        if lost:
            s.run(200 * MS)
            assert not call.ended, "a silent server may have it"
        s.heal()
        alice.wait(call)
        assert call.result[0].shard == 1
        done(s, change)
        assert (s.settle(0), s.settle(1)) == ({}, {call.gsns[0]: b"A"})


def test_a_recovery_rolls_forward_what_one_server_alone_has_refused() -> None:
    """The primary refuses, and dies before its no-ops reach the backup: the promise counts.

    The client holds a refusal and an ack, so it neither completes nor moves. The recovery's
    survivor has the record, and acks it.
    """
    with stage(shards=2) as s:
        alice = Client(s, "alice", None)
        reader = Reader(s, "reader", 1)
        change, call = out(s, alice, b"A")
        (slot,) = s.guesses(BACKUP)[b"A"]
        s.lose(PRIMARY, BACKUP, Forward)
        s.lose(BACKUP, PRIMARY, Resend)
        s.until(lambda: is_out(s, PRIMARY) and is_out(s, BACKUP))
        s.heal()
        hold = s.lose(PRIMARY, BACKUP, Forward)
        s.until(lambda: "redirect" in refusals(s, PRIMARY, alice))
        s.run(20 * MS)
        assert s.messages(BACKUP, "alice", InsertAck)
        assert s.guesses(BACKUP) == {b"A": [slot]}
        assert not call.ended
        s.cluster.nodes[PRIMARY].kill()
        s.heal(hold)
        alice.wait(call)
        assert (call.gsns, call.result[0].shard) == ([slot], 0)
        done(s, change)
        assert (s.settle(0), s.settle(1)) == ({slot: b"A"}, {})
        assert reader.until(1) == [(slot, b"A")]


def test_a_refusal_outlives_a_restart_and_a_late_copy() -> None:
    """A copy that arrives after the client moved is refused by every server that promised that.

    Both servers are cleanly restarted in between.
    """
    with stage(shards=2) as s:
        alice = Client(s, "alice", None)
        change, call = out(s, alice, b"A")
        (insert, *_) = s.messages("alice", BACKUP, Insert)
        s.until(lambda: is_out(s, PRIMARY) and is_out(s, BACKUP))
        s.heal()
        alice.wait(call)
        done(s, change)
        for server in (PRIMARY, BACKUP):
            running = s.cluster.server(server)
            assert running is not None
            s.cluster.nodes[server].from_inside(running.stop)
            s.cluster.nodes[server].kill()
            s.until(s.cluster.is_whole)
            refused = len(refusals(s, server, alice))
            alice.send_again(insert, server, view=s.state(server).view)
            s.until(
                lambda refused=refused, server=server: len(refusals(s, server, alice)) > refused
            )
        assert (s.settle(0), s.settle(1)) == ({}, {call.gsns[0]: b"A"})


def test_a_late_copy_of_a_refused_unit_is_refused_when_a_parked_shard_is_back() -> None:
    """The client moved after both refusals; the first copy arrives seconds later.

    The shard is parked because its backup receives nothing, and readers wait for it.
    """
    with stage(shards=2, epoch_ms=10) as s:
        alice, reader = Client(s, "alice", None), Reader(s, "reader", 1)
        first = alice.wait(alice.insert(b"first"))
        hold = s.lose(PRIMARY, BACKUP, Forward)
        s.until(lambda: state(s, 0) == "parked" and s.state(PRIMARY).has_no_positions)
        s.heal(hold)
        s.hold("alice", PRIMARY, Insert, until=s.now + 8 * S, count=1)
        call = alice.wait(alice.insert(b"moved"))
        assert [rid.shard for rid in (*first.result, *call.result)] == [0, 1]
        assert {"redirect"} == {*refusals(s, PRIMARY, alice), *refusals(s, BACKUP, alice)}
        refused = len(refusals(s, PRIMARY, alice))
        s.until(lambda: state(s, 0) == "live")
        assert len(refusals(s, PRIMARY, alice)) == refused
        s.until(lambda: len(refusals(s, PRIMARY, alice)) > refused)
        bob = Client(s, "bob", None)
        again = bob.wait(bob.insert(b"again", after=call.gsns[0]))
        assert again.result[0].shard == 0, "new records are accepted"
        rows = [(c.gsns[0], payload) for c, payload in
                ((first, b"first"), (call, b"moved"), (again, b"again"))]  # fmt: skip
        assert reader.until(3) == rows
        assert s.settle(0) == dict((rows[0], rows[2]))
        assert s.settle(1) == dict([rows[1]])
