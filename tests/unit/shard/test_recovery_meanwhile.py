"""Answers of servers during a recovery of their shard (docs/protocol.md, section 11; D26)."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from msgspec.structs import replace

from shard.recovery.watermark_records import WATERMARK_INTERVAL_NS
from tests.checkers import decided, places, session_tables
from tests.unit.shard.recovery_world import (
    BACKUP,
    LEASE,
    PRIMARY,
    THIRD,
    acks,
    begin,
    crash,
    decision,
    freeze,
    heard,
    joined,
    log,
    order,
    promise,
    recover,
    replica,
    send,
    start,
)
from tests.world import (
    CLUSTER,
    MS,
    Link,
    MemoryStore,
    S,
    World,
    insert,
    placements,
)
from ziplog import wire
from ziplog.core.entries import Place
from ziplog.core.node import Persisted, Received
from ziplog.segments.entry import BusyError


def test_zombie_primary_neither_completes_an_insert_nor_moves_what_is_stable() -> None:
    """D26: the primary was paused and replaced; it does not know the new view."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(100 * MS)
    world.paused.add(PRIMARY)
    frozen = promise(world, BACKUP)
    order(world, decision(frozen), BACKUP)
    assert joined(world, BACKUP)
    world._queue.clear()  # it receives nothing
    world.paused.clear()
    stable = replica(world, PRIMARY).state.stream.stable
    send(world, insert(2), PRIMARY, BACKUP)
    assert {server for seq, server, _ in acks(world) if seq == 2} <= {0}
    assert replica(world, PRIMARY).state.stream.stable == stable
    world.run(300 * MS)
    assert replica(world, PRIMARY).state.server_state == "frozen", (
        "a heartbeat of the new view was received"
    )
    send(world, insert(3), PRIMARY)
    assert not [1 for seq, _, _ in acks(world) if seq == 3]
    send(world, wire.Read(CLUSTER, 0, 1, 1, acks(world)[0][2][0]), PRIMARY)
    assert [(m.answer, m.stable) for m in heard(world, wire.ReadReply, "c")] == [("record", True)]


def test_other_views_are_refused_after_a_recovery() -> None:
    """D1: a late copy of the old view is not placed."""
    world = start()
    crash(world, PRIMARY)
    recover(world, BACKUP, PRIMARY)
    send(world, insert(1), PRIMARY, BACKUP)
    assert [m.code for m in heard(world, wire.Refused, "c")] == ["wrong-view", "wrong-view"]
    assert not places(world, PRIMARY)


def test_server_after_a_long_pause_answers_nothing_before_a_fresh_message() -> None:
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(1 * S)
    world.paused.add(PRIMARY)
    world.run(6 * S)
    gsn = acks(world)[0][2][0]
    world.now += 1
    effects = replica(world, PRIMARY).step(
        Received(b"<c", wire.Read(CLUSTER, 0, 1, 1, gsn)), world.now
    )
    assert not effects
    world.paused.clear()
    world.run(600 * MS)
    send(world, wire.Read(CLUSTER, 0, 1, 2, gsn), PRIMARY)
    assert [m.request for m in heard(world, wire.ReadReply, "c")] == [2]


def test_messages_queued_during_a_pause_prove_nothing() -> None:
    """The messages were sent before the shard continued without the server."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(1 * S)
    gsn = acks(world)[0][2][0]
    world.now += 6 * S
    read = Received(b"<c", wire.Read(CLUSTER, 0, 1, 1, gsn))
    beat = Received(BACKUP.encode(), wire.Beat(CLUSTER, 0, 1, 1, 7, "up"))
    lease = Received(b"mms-0", wire.LeaseAnnounced(CLUSTER, [], 0, [], 0))
    node = replica(world, PRIMARY)
    for waiting in (beat, lease):
        node.step(waiting, world.now)
        assert not node.step(read, world.now)
    assert not node.step(read, world.now + 250 * MS)
    node.step(beat, world.now + 250 * MS)
    assert node.step(read, world.now + 250 * MS)


def test_lone_survivor_serves_its_log_once_it_is_decided() -> None:
    world = start()
    world.paused.add(PRIMARY)
    send(world, insert(1), BACKUP)
    gsn = acks(world)[0][2][0]
    frozen = promise(world, BACKUP)
    send(world, wire.Read(CLUSTER, 0, 1, 1, gsn), BACKUP)
    order(world, decision(frozen), BACKUP)
    send(world, wire.Read(CLUSTER, 0, 1, 2, gsn), BACKUP)
    answers = [(m.request, m.answer, m.stable) for m in heard(world, wire.ReadReply, "c")]
    assert answers == [(1, "unknown", False), (2, "record", True)]


def test_survivor_serves_nothing_new_before_its_view_is_confirmed() -> None:
    """With f = 2, the second failure may lose entries that one of two survivors holds alone."""
    world = start(f=2)
    world.paused.add(PRIMARY)
    send(world, insert(1), BACKUP)
    (gsn,) = acks(world)[0][2]
    frozen = promise(world, BACKUP)
    order(world, decision(frozen, is_confirmed=False), BACKUP)
    stream = replica(world, BACKUP).state.stream
    assert stream.stable < stream.last
    send(world, wire.Read(CLUSTER, 0, 1, 1, gsn), BACKUP)
    send(world, wire.Locate(CLUSTER, 0, 1, b"c" * 16, 1), BACKUP)
    send(world, wire.Tail(CLUSTER, 0, 1, 3, 0), BACKUP)
    assert not heard(world, wire.TailReply, "c"), "an insert may complete without this server"
    order(world, decision(frozen), BACKUP)
    send(world, wire.Tail(CLUSTER, 0, 1, 3, 0), BACKUP)
    send(world, wire.Read(CLUSTER, 0, 1, 2, gsn), BACKUP)
    send(world, wire.Locate(CLUSTER, 0, 1, b"c" * 16, 1), BACKUP)
    assert [m.stable for m in heard(world, wire.ReadReply, "c")] == [False, True]
    assert [m.verdict for m in heard(world, wire.Located, "c")] == ["pending", "present"]
    assert [m.filled for m in heard(world, wire.TailReply, "c")] == [gsn]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_joined_server_serves_what_its_view_begins_with_once_that_is_confirmed(
    is_restarted: bool,
) -> None:
    """A reader near it may have no other server, and the third one may never return."""
    world = start(f=2)
    world.paused.add(PRIMARY)
    send(world, insert(1), BACKUP)
    (gsn,) = acks(world)[0][2]
    frozen = promise(world, BACKUP)
    order(world, decision(frozen, is_confirmed=False), BACKUP, THIRD)
    assert world.run_until(lambda: joined(world, BACKUP, THIRD), 2 * S)
    send(world, wire.Read(CLUSTER, 0, 1, 1, gsn), THIRD)
    if is_restarted:
        world.restart(THIRD)
    order(world, decision(frozen), THIRD)
    send(world, wire.Read(CLUSTER, 0, 1, 2, gsn), THIRD)
    assert [m.stable for m in heard(world, wire.ReadReply, "c")] == [False, True]


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_joined_server_that_crashes_still_serves_what_was_confirmed(is_confirmed: bool) -> None:
    """It may be the only one that is left, and readers got these records from it."""
    world = start(f=2)
    world.paused.update({PRIMARY, THIRD})
    send(world, insert(1), BACKUP)
    (gsn,) = acks(world)[0][2]
    order(world, decision(promise(world, BACKUP), is_confirmed=is_confirmed), BACKUP)
    world.run(2 * WATERMARK_INTERVAL_NS)
    crash(world, BACKUP, f=2)
    assert replica(world, BACKUP).state.server_state == "limbo"
    send(world, wire.Read(CLUSTER, 0, 1, 1, gsn), BACKUP)
    assert [m.stable for m in heard(world, wire.ReadReply, "c")] == [is_confirmed]


def test_witness_remembers_its_view_until_it_has_all_of_the_next_one() -> None:
    """The survivor of three dies before a server has joined: the third server's acks count."""
    world = start(f=2)
    world.paused.add(PRIMARY)
    send(world, insert(1), BACKUP, THIRD)
    acked = {server: gsns for _, server, gsns in acks(world)}
    assert acked[1] == acked[2]
    frozen = promise(world, BACKUP)
    world.kill(BACKUP)
    order(world, decision(frozen, is_confirmed=False), THIRD)
    world.run(1 * S)
    assert replica(world, THIRD).state.server_state == "frozen"
    second = promise(world, THIRD, 3, 1)
    assert second.rolled_forward == 1
    order(world, decision(second), THIRD)
    crash(world, BACKUP, f=2)
    world.paused.clear()
    crash(world, PRIMARY, f=2)
    order(world, decision(second), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP, THIRD), 2 * S)
    begin(world, 3, f=2)
    assert log(world, PRIMARY) == log(world, BACKUP) == log(world, THIRD)
    (place,) = [e.decision for e in log(world, THIRD) if isinstance(e.decision, Place)]
    assert place.gsns == acked[2]


def test_witness_takes_over_the_survivors_log_in_the_place_of_its_own() -> None:
    world = start(f=2)
    send(world, insert(1), PRIMARY, BACKUP, THIRD)
    world.run(50 * MS)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    for seq in range(2, 5):
        send(world, insert(seq), PRIMARY, THIRD)
    send(world, insert(9), BACKUP)
    assert world.stores[THIRD].last_fseq > world.stores[BACKUP].last_fseq
    world.paused.add(PRIMARY)
    frozen = promise(world, BACKUP)
    order(world, decision(frozen), BACKUP, THIRD)
    assert world.run_until(lambda: joined(world, BACKUP, THIRD), 1 * S)
    assert log(world, THIRD) == log(world, BACKUP)
    tables = [session_tables(replica(world, name).state.sessions) for name in (BACKUP, THIRD)]
    assert tables[0] == tables[1]


def test_answer_that_comes_again_is_not_taken_for_one_about_another_view() -> None:
    """The survivor's last entry has the number of the witness's own, which is dropped."""
    world = start(f=2)
    send(world, insert(1), PRIMARY, BACKUP, THIRD)
    world.run(50 * MS)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    send(world, insert(2), PRIMARY, THIRD)
    send(world, insert(3), PRIMARY, THIRD)
    send(world, insert(9), BACKUP)
    world.paused.add(PRIMARY)
    frozen = promise(world, BACKUP)
    assert world.stores[THIRD].last_fseq == frozen.last
    assert world.stores[THIRD].last_view < frozen.recovery
    world.links[BACKUP, THIRD] = Link(lambda: 20 * MS)
    order(world, decision(frozen), BACKUP, THIRD)
    recovery = replica(world, THIRD)._recovery
    assert world.run_until(lambda: recovery.transfer and recovery.transfer._staged, 1 * S)
    answers = [m for _, to, m in world.sent if to == THIRD and isinstance(m, wire.Fetched)]
    assert answers[0].keep < answers[0].after == frozen.last  # the point where the logs part
    world.inject(THIRD, Received(BACKUP.encode(), answers[0]))
    assert world.run_until(lambda: joined(world, BACKUP, THIRD), 1 * S)
    assert log(world, THIRD) == log(world, BACKUP)


def test_witness_that_is_far_behind_gives_way() -> None:
    """The entries after its last one were trimmed meanwhile, so they were stable."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(200 * MS)
    world.paused.add(PRIMARY)
    frozen = promise(world, BACKUP)
    order(world, decision(frozen), BACKUP)
    world.stores[BACKUP].trim(LEASE.stop)
    assert world.stores[BACKUP].first_fseq > world.stores[PRIMARY].last_fseq + 1 or not log(
        world, BACKUP
    )
    world.paused.clear()
    order(world, decision(frozen), PRIMARY)
    world.run(1 * S)
    assert not world.halts
    assert joined(world, PRIMARY, BACKUP)


def test_clients_learn_the_outcome_of_their_inserts() -> None:
    """D13: only a later view reports a record as absent."""
    world = start()
    world.paused.add(PRIMARY)
    send(world, insert(1), BACKUP)
    (gsns,) = [gsns for _, _, gsns in acks(world)]
    one, two = (wire.Locate(CLUSTER, 0, 1, b"c" * 16, seq) for seq in (1, 2))
    send(world, one, BACKUP)
    send(world, two, BACKUP)
    assert {m.verdict for m in heard(world, wire.Located, "c")} == {"pending"}
    frozen = promise(world, BACKUP)
    send(world, one, BACKUP)
    assert len(heard(world, wire.Located, "c")) == 2, "a frozen server gives no final answer"
    order(world, decision(frozen), BACKUP)
    send(world, one, BACKUP)
    send(world, two, BACKUP)
    late = heard(world, wire.Located, "c")[2:]
    assert [(m.seq, m.view, m.verdict, m.gsns) for m in late] == [
        (1, 2, "present", gsns),
        (2, 2, "absent", []),
    ]
    send(world, replace(two, view=2), BACKUP)
    assert heard(world, wire.Located, "c")[-1].verdict == "pending", "a copy may be in flight"


def test_sync_is_answered_when_all_replicas_have_it_on_disk() -> None:
    world = start()
    world.flush_ns = 30 * MS
    send(world, insert(1), PRIMARY, BACKUP)
    gsn = acks(world)[0][2][0]
    send(world, wire.Sync(CLUSTER, 0, 1, 7, gsn), PRIMARY)
    assert not heard(world, wire.Synced, "c")
    assert world.run_until(lambda: bool(heard(world, wire.Synced, "c")), 1 * S)
    (synced,) = heard(world, wire.Synced, "c")
    assert synced.durable > gsn
    assert replica(world, BACKUP).state.persisted >= 1
    send(world, wire.Sync(CLUSTER, 0, 2, 8, gsn), PRIMARY)
    assert [m.code for m in heard(world, wire.Refused, "c")] == ["wrong-view"]


def test_sync_is_not_confirmed_while_the_record_cannot_be_read() -> None:
    """The system refuses to open the file: it is unknown whether the record was lost."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    gsn = acks(world)[0][2][0]
    world.run(100 * MS)

    def busy(_: int) -> None:
        raise BusyError("too many open files")

    with patch.object(replica(world, PRIMARY).state.store, "find", busy):
        send(world, wire.Sync(CLUSTER, 0, 1, 7, gsn), PRIMARY)
    assert [m.code for m in heard(world, wire.Refused, "c")] == ["not-ready"]
    assert not heard(world, wire.Synced, "c")
    send(world, wire.Sync(CLUSTER, 0, 1, 8, gsn), PRIMARY)
    assert [m.request for m in heard(world, wire.Synced, "c")] == [8]


def test_both_copies_of_everything_are_harmless() -> None:
    """Every message of a recovery arrives twice, and late ones again at the end."""
    world = start()
    world.link.repeat = lambda: True
    send(world, insert(1), PRIMARY, BACKUP)
    crash(world, PRIMARY)
    frozen = recover(world, BACKUP, PRIMARY)
    before = [log(world, name) for name in (PRIMARY, BACKUP)]
    order(world, freeze(), PRIMARY, BACKUP)
    order(world, decision(frozen), PRIMARY, BACKUP)
    world.run(1 * S)
    assert {replica(world, n).state.server_state for n in (PRIMARY, BACKUP)} == {"up"}
    assert [log(world, name) for name in (PRIMARY, BACKUP)] == before
    assert decided(world, PRIMARY)


def test_flush_report_from_before_a_cut_does_not_cover_later_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flusher reported it before the cut; the event arrives afterwards."""
    world = start()
    monkeypatch.setattr(MemoryStore, "flushed_fseq", property(lambda _: 3))
    world.inject(BACKUP, Persisted(100))
    assert replica(world, BACKUP).state.persisted == 3


# --- readers of a server that is left out ---


def renewals_refused(world: World, count: int = 8) -> list[str]:
    """Renew a subscription at the backup, four times a second; return its refusals until then."""
    for _ in range(count):
        send(world, wire.Credit(CLUSTER, 0, 1, b"c" * 16, 5, 1 << 20), BACKUP)
        world.run(250 * MS)
    return [refused.code for refused in heard(world, wire.Refused, "c") if refused.request == 5]


@pytest.mark.parametrize("is_asked", [False, True])
def test_readers_leave_a_server_that_a_recovery_does_not_ask(is_asked: bool) -> None:
    """The failure handler may not reach it; a server that has promised may be the survivor."""
    world = start()
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, 1, 1 << 20), BACKUP)
    world.paused.add(PRIMARY)
    placed = replace(placements(1, 1)[0], state="recovering")
    world.send("mms-0", BACKUP, wire.LeaseAnnounced(CLUSTER, [], 0, [placed], 0), reply=True)
    world.run(1 * MS)
    if is_asked:
        promise(world, BACKUP)
    refusals = renewals_refused(world)
    assert refusals[:2] == ([] if is_asked else ["not-ready", "unknown-subscription"])


def test_readers_leave_a_server_that_copies_the_log_of_another() -> None:
    world = start(2)
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, 1, 1 << 20), BACKUP)
    world.paused.add(PRIMARY)
    world.paused.add(THIRD)
    copied = wire.ViewDecided(CLUSTER, 0, 2, 2, 77, 0, b"d" * 16, True)
    world.send("fh-0", BACKUP, copied, reply=True)
    world.run(1 * MS)
    assert renewals_refused(world)[:1] == ["not-ready"]


def test_readers_leave_a_server_that_a_peer_left_behind_in_its_view() -> None:
    """It hears that peer, but neither the survivor nor the failure handler."""
    world = start(2)
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, 1, 1 << 20), BACKUP)
    world.paused.add(PRIMARY)
    world.paused.add(THIRD)
    send(world, wire.Beat(CLUSTER, 0, 2, 2, 77, "joined"), BACKUP)
    assert renewals_refused(world)[:1] == ["not-ready"]


def test_readers_are_refused_at_once_and_not_at_their_next_renewal() -> None:
    world = start(2)
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, 1, 1 << 20), BACKUP)
    send(world, wire.Beat(CLUSTER, 0, 2, 2, 77, "joined"), BACKUP)
    world.run(100 * MS)
    assert renewals_refused(world, 0) == ["not-ready"]


def test_a_server_that_has_promised_a_later_recovery_serves_readers() -> None:
    """It may be the survivor: a peer joined a view that was not confirmed."""
    world = start(2)
    world.paused.add(PRIMARY)
    world.paused.add(THIRD)
    send(world, wire.Beat(CLUSTER, 0, 2, 2, 77, "joined"), BACKUP)
    promise(world, BACKUP, recovery=3)
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, LEASE.stop, 1 << 20), BACKUP)
    assert renewals_refused(world) == []


@pytest.mark.parametrize("is_heard", [False, True])
def test_readers_leave_a_server_that_reaches_no_peer_and_no_service(is_heard: bool) -> None:
    """Others may have recovered the shard; the service would announce that."""
    world = start()
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, 1, 1 << 20), BACKUP)
    world.paused.add(PRIMARY)
    refusals: list[str] = []
    for _ in range(8):
        refusals = renewals_refused(world, 2)
        if is_heard:
            announced = wire.LeaseAnnounced(CLUSTER, [], 0, placements(1, 1), 0)
            world.send("mms-0", BACKUP, announced, reply=True)
    assert refusals[:2] == ([] if is_heard else ["not-ready", "unknown-subscription"])


def test_readers_stay_at_a_server_that_hears_its_peer_again() -> None:
    world = start()
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, 1, 1 << 20), BACKUP)
    world.paused.add(PRIMARY)
    assert renewals_refused(world, 6) == []
    world.paused.remove(PRIMARY)
    assert renewals_refused(world) == []


def test_readers_stay_at_a_server_without_a_failure_handler() -> None:
    """Nothing recovers its shard; it hears no heartbeats."""
    world = start(handlers=())
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 5, 1, 1 << 20), BACKUP)
    assert renewals_refused(world, 32) == []


# --- what a server promised in a former view ---


@pytest.mark.parametrize("is_known", [False, True])
def test_a_guess_of_a_former_view_is_no_promise_of_the_view_that_a_server_joined(
    *, is_known: bool
) -> None:
    """A peer's beat of a later view freezes the server before it is up in this one.

    `is_known`: the survivor has another unit of the client.
    """
    world = start()
    if is_known:
        send(world, insert(1), PRIMARY, BACKUP)
        world.run(100 * MS)
    send(world, insert(1 + is_known), BACKUP)
    assert acks(world)[-1][:2] == (1 + is_known, 1), "it is a guess"
    order(world, decision(promise(world, PRIMARY)), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 2 * S)
    send(world, wire.Beat(CLUSTER, 0, 3, 0, 77, "joined"), BACKUP)
    assert replica(world, BACKUP).state.server_state == "frozen"
    assert promise(world, BACKUP, recovery=4, view=2).rolled_forward == 0


@pytest.mark.parametrize("has_insert", [False, True])
def test_a_server_that_crashed_does_not_join_a_view_that_has_started(has_insert: bool) -> None:
    """A new leader of the handler may not know yet that the view has started.

    The server acked a record in that view, which it forgot: it must not be in service there.
    """
    world = start()
    frozen = recover(world, PRIMARY, BACKUP)
    names = (PRIMARY, BACKUP) if has_insert else (BACKUP,)
    send(world, replace(insert(1), view=2), *names)
    assert 1 in [server for _, server, _ in acks(world, 2)]
    world.run(300 * MS)
    crash(world, BACKUP)
    order(world, decision(frozen), BACKUP)
    world.run(1 * S)
    begin(world, 2)
    assert not world.halts
    assert replica(world, BACKUP).state.server_state == "limbo"
    recover(world, PRIMARY, BACKUP, view=3)
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_missing_bodies_are_requested_less_often_while_answers_are_slow() -> None:
    world = start()
    world.links[PRIMARY, BACKUP] = Link(lambda: 500 * MS)
    send(world, insert(1, size=100_000), PRIMARY)
    world.run(2 * S)
    assert world.stores[PRIMARY].last_fseq == world.stores[BACKUP].last_fseq
    requests = [m for _, _, m in world.sent if isinstance(m, wire.Resend) and m.bodies]
    assert 1 <= len(requests) <= 10
