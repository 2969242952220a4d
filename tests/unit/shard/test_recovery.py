"""One shard through a recovery, step by step, with a probe instead of the failure handler."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.checkers import places, session_tables
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
    grant,
    insert,
    probe,
)
from ziplog import wire
from ziplog.core.entries import Place, Skip
from ziplog.core.node import Received, ReportBadMessage
from ziplog.core.view import KEPT_RUNS, run_of
from ziplog.segments.entry import WatermarkRecord

# --- the promise ---


@pytest.mark.parametrize("state", ["up", "frozen", "joined", "limbo"])
def test_acknowledged_trim_point_survives_a_crash(state: str) -> None:
    """The client was informed that all replicas refuse reads below."""
    world = start()
    for seq in range(1, 5):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(300 * MS)
    if state in {"frozen", "joined"}:
        frozen = promise(world, BACKUP)
        order(world, decision(frozen), *[BACKUP] * (state == "joined"))
    elif state == "limbo":
        crash(world, BACKUP)
    assert replica(world, BACKUP).state.server_state == state
    world.send("mms-0", BACKUP, wire.LeaseAnnounced(CLUSTER, [], 0, [], 3), reply=True)
    world.run(100 * MS)
    reports = [m for m in heard(world, wire.Heartbeat, "mms-0") if m.node == BACKUP]
    assert reports[-1].trim == 3
    world.restart(BACKUP, clean=False)
    for gsn in (1, 3):
        send(world, wire.Read(CLUSTER, 0, 1, gsn, gsn), BACKUP)
    answers = [(m.gsn, m.answer) for m in heard(world, wire.ReadReply, "c")]
    assert answers == [(1, "trimmed"), (3, "record")]


@pytest.mark.parametrize("state", ["up", "limbo"])
def test_trim_point_is_acknowledged_once_it_is_on_disk(state: str) -> None:
    """A server that crashes before may serve the positions, until it learns of the trim again."""
    world = start()
    for seq in range(1, 5):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(300 * MS)
    if state == "limbo":
        crash(world, BACKUP)
    world.run(10 * MS)
    world.flush_ns = 10 * MS
    world.stores[BACKUP].backlog_bytes = 1  # nothing is flushed
    world.send("mms-0", BACKUP, wire.LeaseAnnounced(CLUSTER, [], 0, [], 3), reply=True)
    world.run(5 * MS)
    send(world, wire.Read(CLUSTER, 0, 1, 1, 1), BACKUP)
    assert [m.answer for m in heard(world, wire.ReadReply, "c")] == ["trimmed"]
    replica(world, BACKUP)._heartbeat.send(world.now)
    assert [e.message.trim for e in replica(world, BACKUP).state.pop_effects()] == [0]  # type: ignore[attr-defined]
    world.stores[BACKUP].backlog_bytes = 0
    world.run(5 * MS)
    reports = [m for m in heard(world, wire.Heartbeat, "mms-0") if m.node == BACKUP]
    assert reports[-1].trim == 3


def test_survivor_rolls_forward_what_it_acked_and_nothing_more() -> None:
    """T 4.2.5: filled positions stay, the others become no-ops, up to the limit."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(100 * MS)
    world.paused.add(PRIMARY)
    send(world, insert(2), BACKUP)
    send(world, insert(3, after=40), BACKUP)
    guessed = {seq: gsns for seq, server, gsns in acks(world) if server == 1}
    frozen = promise(world, BACKUP)
    held = {place.seq: place.gsns for place in places(world, BACKUP)}
    assert held == guessed
    assert frozen.rolled_forward == 2
    assert (frozen.server, frozen.view, frozen.recovery) == (1, 1, 2)
    end = 1
    for entry in log(world, BACKUP):
        what = entry.decision
        assert not isinstance(what, WatermarkRecord)
        if isinstance(what, Skip):
            assert what.start == end
            end = what.stop
        elif isinstance(what, Place):
            assert what.gsns[0] == end
            end = what.gsns[-1] + 1
    assert end == LEASE.stop
    views = [entry.view for entry in log(world, BACKUP)]
    assert views == sorted(views)
    assert views[-1] == 2


def test_frozen_server_takes_nothing_and_reports_nothing() -> None:
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(100 * MS)
    promise(world, BACKUP)
    before = log(world, BACKUP)
    sent = len(world.sent)
    send(world, insert(2), PRIMARY, BACKUP)
    world.run(100 * MS)
    assert log(world, BACKUP) == before
    assert [m.code for m in heard(world, wire.Refused, "c")] == ["not-ready"]
    assert not any(isinstance(m, wire.Report) for src, _, m in world.sent[sent:] if src == BACKUP)
    assert replica(world, PRIMARY).state.stream.stable < replica(world, PRIMARY).state.stream.last


def test_promise_is_sent_only_once_it_is_on_disk() -> None:
    world = start()
    world.flush_ns = 40 * MS
    order(world, freeze(), BACKUP)
    world.run(30 * MS)
    assert not heard(world, wire.Frozen)
    world.run(20 * MS)
    assert heard(world, wire.Frozen)


def test_promise_is_kept_for_the_newest_recovery_only() -> None:
    world = start()
    first = promise(world, BACKUP, 5)
    order(world, freeze(4), BACKUP)
    assert [m.recovery for m in heard(world, wire.Frozen)] == [5]
    again = promise(world, BACKUP, 5)
    assert (again.last, again.digest) == (first.last, first.digest)
    newer = promise(world, BACKUP, 7)
    assert (newer.last, newer.digest) == (first.last, first.digest), "it had decided all"
    order(world, decision(first), BACKUP)
    assert replica(world, BACKUP).state.server_state == "frozen", "an older recovery does not count"
    order(world, decision(newer), BACKUP)
    assert replica(world, BACKUP).state.view == 7


@pytest.mark.parametrize(
    "message",
    [
        freeze(view=2),
        replace(freeze(), cluster=CLUSTER + 1),
        replace(freeze(), shard=3),
        replace(freeze(), incarnation=999),
    ],
)
def test_promise_is_given_to_no_other_recovery(message: wire.Freeze) -> None:
    world = start()
    order(world, message, BACKUP)
    assert replica(world, BACKUP).state.server_state == "up"


def test_a_server_that_halts_on_contradictory_leases_promises_nothing() -> None:
    """It has not rolled forward what it acked, so no view may begin with its log."""
    world = start()
    send(world, insert(1), BACKUP)
    other = replace(LEASE, epochs=LEASE.epochs + 1)
    order(world, replace(freeze(), runs=[run_of(other)]), BACKUP)
    world.run(100 * MS)
    assert [name for name, _ in world.halts] == [BACKUP]
    assert not heard(world, wire.Frozen)


def test_unknown_peer_cannot_freeze_a_server() -> None:
    world = start()
    effects = replica(world, BACKUP).step(Received(b"<c", freeze()), world.now)
    assert any(isinstance(effect, ReportBadMessage) for effect in effects)
    assert replica(world, BACKUP).state.server_state == "up"


def test_clean_stop_of_a_frozen_server_ends_in_limbo() -> None:
    """D20: the promise survives, because a frozen server's checkpoint does not count."""
    world = start()
    promise(world, BACKUP)
    world.restart(BACKUP, clean=True)
    assert replica(world, BACKUP).state.server_state == "limbo"


def test_joined_survivor_keeps_its_view_over_a_clean_stop() -> None:
    """It holds the whole log and made no promise, so the next recovery needs no other server."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.kill(PRIMARY)
    send(world, insert(2), BACKUP)
    order(world, decision(promise(world, BACKUP)), BACKUP)
    was = {place.seq: place.gsns for place in places(world, BACKUP)}
    server = world.restart(BACKUP)
    assert (server.state.server_state, server.state.view) == ("joined", 2)
    crash(world, PRIMARY)
    recover(world, BACKUP, PRIMARY, view=3)
    for seq in (1, 2):
        send(world, insert(seq, view=3), PRIMARY, BACKUP)
    assert {seq: gsns for seq, _, gsns in acks(world, 3)} == was


def test_view_begins_for_a_server_that_stopped_after_it_had_joined() -> None:
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    crash(world, PRIMARY)
    order(world, decision(promise(world, BACKUP)), BACKUP, PRIMARY)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 2 * S)
    world.restart(PRIMARY)
    begin(world, 2)
    send(world, insert(2, view=2), PRIMARY, BACKUP)
    world.run(50 * MS)
    assert {(seq, server) for seq, server, _ in acks(world, 2)} == {(2, 0), (2, 1)}
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_joined_server_denies_no_record_before_its_view_is_confirmed() -> None:
    """Another recovery may go back before the view. This holds after a clean stop, too."""
    world = start(f=2)
    send(world, insert(1), PRIMARY, BACKUP, THIRD)
    order(world, decision(promise(world, BACKUP), is_confirmed=False), BACKUP)
    for _ in range(2):
        assert joined(world, BACKUP)
        send(world, wire.Locate(CLUSTER, 0, 1, b"c" * 16, 9), BACKUP)
        assert [m.verdict for m in heard(world, wire.Located, "c")] == ["pending"]
        probe(world, "c").received.clear()
        world.restart(BACKUP)


# --- the decision, and state transfer ---


def test_shard_goes_on_in_the_next_view_with_everything_it_had() -> None:
    world = start()
    for seq in range(1, 4):
        send(world, insert(seq), PRIMARY, BACKUP)
    crash(world, PRIMARY)
    send(world, insert(4), BACKUP)
    before = {place.seq: place.gsns for place in places(world, BACKUP)}
    recover(world, BACKUP, PRIMARY)
    assert log(world, PRIMARY) == log(world, BACKUP)
    assert {replica(world, n).state.server_state for n in (PRIMARY, BACKUP)} == {"up"}
    held = {place.seq: place.gsns for place in places(world, BACKUP)}
    assert held.items() >= before.items()
    send(world, insert(5, view=2), PRIMARY, BACKUP)
    world.run(50 * MS)
    (mine, other) = [gsns for seq, _, gsns in acks(world, 2) if seq == 5]
    assert mine == other
    assert mine[0] >= LEASE.stop, "the former lease is settled"


def test_retry_in_the_new_view_returns_the_position_that_the_record_has() -> None:
    """T 4.2.5, D9: the table of sessions is part of what is recovered, at every replica."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.paused.add(PRIMARY)
    send(world, insert(2), BACKUP)
    was = {seq: gsns for seq, server, gsns in acks(world) if server == 1}
    world.paused.clear()
    crash(world, PRIMARY)
    recover(world, BACKUP, PRIMARY)
    for seq in (1, 2):
        send(world, insert(seq, view=2), PRIMARY, BACKUP)
    again = acks(world, 2)
    assert {(seq, server) for seq, server, _ in again} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert all(was[seq] == gsns for seq, _, gsns in again)


def test_entry_of_the_dead_server_alone_is_placed_again() -> None:
    world = start()
    world.paused.add(BACKUP)
    send(world, insert(1), PRIMARY)
    (was,) = [gsns for _, _, gsns in acks(world)]
    world.paused.clear()
    crash(world, PRIMARY)
    replica(world, BACKUP).state.sessions.by_client.clear()
    frozen = promise(world, BACKUP)
    assert frozen.rolled_forward == 0
    order(world, decision(frozen), BACKUP, PRIMARY)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 1 * S)
    begin(world, 2)
    send(world, insert(1, view=2), PRIMARY, BACKUP)
    world.run(50 * MS)
    now = {tuple(gsns) for _, _, gsns in acks(world, 2)}
    assert len(now) == 1
    assert tuple(was) not in now
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_log_that_was_not_chosen_is_cut_off() -> None:
    """The primary decided more than the survivor has: both cannot have acked any of it."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(50 * MS)
    world.paused.add(BACKUP)
    for seq in range(2, 6):
        send(world, insert(seq), PRIMARY)
    ahead = [place.seq for place in places(world, PRIMARY)]
    assert ahead == [1, 2, 3, 4, 5]
    world._queue.clear()
    world.paused.clear()
    crash(world, PRIMARY)
    recover(world, BACKUP, PRIMARY)
    assert log(world, PRIMARY) == log(world, BACKUP)
    assert [p.decision.seq for p in log(world, PRIMARY) if isinstance(p.decision, Place)] == [1]


def test_lost_data_directory_is_filled_again() -> None:
    world = start()
    for seq in range(1, 30):
        send(world, insert(seq, size=3000, first_incomplete=max(seq - 5, 1)), PRIMARY, BACKUP)
    world.stores[BACKUP] = MemoryStore()
    crash(world, BACKUP)
    recover(world, PRIMARY, BACKUP)
    assert log(world, BACKUP) == log(world, PRIMARY)
    states = [replica(world, name).state for name in (PRIMARY, BACKUP)]
    assert session_tables(states[0].sessions) == session_tables(states[1].sessions)
    assert states[1].stream.stable == states[1].stream.last


def test_a_slow_answer_of_the_survivor_is_requested_a_few_times_only() -> None:
    world = start()
    for seq in range(1, 30):
        send(world, insert(seq, size=600_000, first_incomplete=max(seq - 5, 1)), PRIMARY, BACKUP)
    world.stores[BACKUP] = MemoryStore()
    crash(world, BACKUP)
    free = 0

    def delay() -> int:
        """Return when the way has carried this message, too: a second for each."""
        nonlocal free
        free = max(free, world.now) + 1 * S
        return free - world.now

    frozen = promise(world, PRIMARY)
    replica(world, PRIMARY)._health._beat_due = world.now + 1000 * S  # only answers take that way
    world.links[PRIMARY, BACKUP] = Link(delay)
    order(world, decision(frozen), PRIMARY, BACKUP)
    replica(world, PRIMARY)._health._beat_due = world.now + 1000 * S
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 60 * S)
    requests = [m for _, to, m in world.sent if to == PRIMARY and isinstance(m, wire.Fetch)]
    parts = {(m.after, m.client) for m in requests}
    assert len(parts) > 8
    assert len(requests) < 2 * len(parts)


def test_lost_data_directory_is_filled_from_the_trim_point_on() -> None:
    world = start()
    for seq in range(1, 30):
        send(world, insert(seq), PRIMARY, BACKUP)
    gsns = [place.gsns[0] for place in places(world, PRIMARY)]
    grant(world, LEASE, 1, trim=gsns[20])
    world.run(5 * MS)
    world.stores[BACKUP] = MemoryStore()
    crash(world, BACKUP)
    recover(world, PRIMARY, BACKUP)
    send(world, wire.Read(CLUSTER, 0, 2, 1, gsns[3]), BACKUP)
    send(world, wire.Read(CLUSTER, 0, 2, 2, gsns[25]), BACKUP)
    answers = [(m.request, m.answer) for m in heard(world, wire.ReadReply, "c")]
    assert answers == [(1, "trimmed"), (2, "record")]


def test_server_that_would_have_to_drop_stable_entries_stops() -> None:
    """Stable entries stay: two decided histories are worse than a stopped server."""
    world = start()
    for seq in range(1, 5):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(300 * MS)
    forged = wire.ViewDecided(CLUSTER, 0, 2, 0, 1, 1, b"x" * 16)
    order(world, forged, BACKUP)
    transfer = replica(world, BACKUP)._recovery.transfer
    assert transfer is not None
    last = transfer._after
    answer = wire.Fetched(CLUSTER, 0, 2, 0, last, 0, 1, 1, [], [], 0, 0, 0, transfer._after_view)
    world.inject(BACKUP, Received(PRIMARY.encode(), answer))
    assert [name for name, _ in world.halts] == [BACKUP]
    assert world.stores[BACKUP].last_fseq == last


def test_stable_entries_that_the_survivor_has_trimmed_are_no_contradiction() -> None:
    """The survivor has no entry of the former view any more, so it cannot name the common part."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(300 * MS)
    world.paused.add(BACKUP)
    for seq in range(2, 6):
        send(world, insert(seq), PRIMARY)
    world._queue.clear()
    world.paused.clear()
    crash(world, PRIMARY)
    frozen = promise(world, BACKUP)
    order(world, decision(frozen), BACKUP)
    survivor = replica(world, BACKUP).state
    assert world.run_until(lambda: joined(world, BACKUP), 1 * S)
    survivor.trim = LEASE.stop
    survivor.store.trim(LEASE.stop)
    assert (replica(world, PRIMARY).state.stream.stable, survivor.store.last_of(1)) == (1, 0)
    order(world, decision(frozen), PRIMARY)
    assert world.run_until(lambda: joined(world, PRIMARY), 2 * S)
    assert not world.halts
    assert world.stores[PRIMARY].last_fseq == survivor.store.last_fseq


def test_other_log_than_the_decided_one_stops_the_server() -> None:
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    crash(world, PRIMARY)
    frozen = promise(world, BACKUP)
    order(world, decision(replace(frozen, digest=b"y" * 16)), PRIMARY)
    order(world, decision(frozen), BACKUP)
    world.run(1 * S)
    assert [name for name, _ in world.halts] == [PRIMARY]


def test_second_recovery_starts_from_the_first_ones_view() -> None:
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    crash(world, PRIMARY)
    recover(world, BACKUP, PRIMARY)
    send(world, insert(2, view=2), PRIMARY, BACKUP)
    world.run(50 * MS)
    crash(world, BACKUP)
    frozen = promise(world, PRIMARY, 9, 2)
    order(world, decision(frozen), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 1 * S)
    assert log(world, PRIMARY) == log(world, BACKUP)
    assert [p.seq for p in places(world, PRIMARY)] == [1, 2]
    assert {e.view for e in log(world, PRIMARY)} <= {1, 2, 9}


def test_attempt_that_was_not_decided_is_cut_off_by_the_one_that_was() -> None:
    world = start(f=2)
    send(world, insert(1), PRIMARY, BACKUP, THIRD)
    world.run(50 * MS)
    world.paused.add(PRIMARY)
    send(world, insert(2), BACKUP)
    abandoned = promise(world, BACKUP, 2)
    assert abandoned.rolled_forward == 1
    frozen = promise(world, THIRD, 3)
    world.paused.clear()
    crash(world, PRIMARY, f=2)
    order(world, decision(frozen), PRIMARY, BACKUP, THIRD)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP, THIRD), 2 * S)
    begin(world, 3, f=2)
    assert log(world, PRIMARY) == log(world, BACKUP) == log(world, THIRD)
    assert [e.decision.seq for e in log(world, THIRD) if isinstance(e.decision, Place)] == [1]


def test_all_in_limbo_the_longest_log_is_taken_up() -> None:
    """D17: the state, with its sessions, is read from the disk."""
    world = start(durability="disk")
    for seq in range(1, 8):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(100 * MS)
    was = {place.seq: place.gsns for place in places(world, PRIMARY)}
    for name in (PRIMARY, BACKUP):
        crash(world, name)
    world.run(50 * MS)
    recover(world, PRIMARY, BACKUP)
    for seq in range(1, 8):
        send(world, insert(seq, view=2), PRIMARY, BACKUP)
    world.run(50 * MS)
    assert {(seq, tuple(gsns)) for seq, _, gsns in acks(world, 2)} == {
        (seq, tuple(gsns)) for seq, gsns in was.items()
    }


def test_entries_of_an_attempt_that_failed_were_not_decided() -> None:
    """Or the loss of what was acknowledged after them would not be reported."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.run(100 * MS)
    for name in (PRIMARY, BACKUP):
        crash(world, name)
    world.run(50 * MS)
    first = promise(world, PRIMARY)
    assert first.decided_end < LEASE.stop
    crash(world, PRIMARY)  # its log goes up to the limit
    world.run(50 * MS)
    again = promise(world, PRIMARY, recovery=3)
    assert (again.last, again.decided_end) == (first.last, first.decided_end)


def test_a_server_joins_no_view_below_its_promise() -> None:
    world = start()
    older = promise(world, PRIMARY, recovery=3)
    promise(world, BACKUP, recovery=7)
    order(world, decision(older), PRIMARY, BACKUP)
    world.run(1 * S)
    backup = replica(world, BACKUP)
    assert (backup.state.server_state, backup.state.view, backup._recovery.number) == (
        "frozen",
        1,
        7,
    )


def test_a_server_in_limbo_leads_no_recovery_from_before_its_view() -> None:
    world = start()
    recover(world, PRIMARY, BACKUP)
    replica(world, BACKUP)._recovery.leave(5)
    assert replica(world, BACKUP).state.view == 2
    order(world, freeze(6), BACKUP)
    assert replica(world, BACKUP).state.server_state == "limbo"
    order(world, freeze(6, view=2), BACKUP)
    assert replica(world, BACKUP).state.server_state == "frozen"


def test_a_promise_outlives_its_lease_among_those_that_a_server_keeps() -> None:
    world = start()
    world.paused.add(PRIMARY)
    send(world, insert(1), BACKUP)
    last, runs = LEASE, []
    for _ in range(KEPT_RUNS + 9):
        last = last.following(epoch_ms=21 - last.epoch_ms)
        runs.append(run_of(last))
    for run in runs:
        announced = wire.LeaseAnnounced(CLUSTER, [run], 0, [], 0)
        world.send("mms-0", BACKUP, announced, reply=True)
        world.run(1 * MS)
    assert replica(world, BACKUP).state.clock.lease_of(1) is None
    order(world, replace(freeze(limit=last.stop), runs=runs[-3:]), BACKUP)
    world.run(20 * MS)
    (frozen,) = heard(world, wire.Frozen)
    assert frozen.rolled_forward == 1
    assert [(p.seq, p.gsns, p.epoch) for p in places(world, BACKUP)] == [(1, [1], 0)]


@pytest.mark.parametrize("is_witness", [False, True])
def test_an_entry_that_the_survivor_has_trimmed_is_not_taken_for_its_own(is_witness: bool) -> None:
    """A failed attempt wrote another entry there, and the survivor's log begins right after it."""
    world = start(2)
    send(world, insert(1), PRIMARY, BACKUP, THIRD)
    world.run(300 * MS)
    send(world, insert(2), BACKUP)  # at a later position, so a no-op comes before it
    promise(world, THIRD, 2)
    frozen = promise(world, BACKUP, 3)
    order(world, decision(frozen), BACKUP, PRIMARY)
    assert world.run_until(lambda: joined(world, BACKUP, PRIMARY), 2 * S)
    if not is_witness:
        crash(world, THIRD, 2)
    survivor = replica(world, BACKUP).state
    place = log(world, BACKUP)[2].decision
    assert isinstance(place, Place)
    survivor.trim = place.gsns[0]
    survivor.store.trim(survivor.trim)
    assert survivor.store.first_fseq == world.stores[THIRD].last_fseq + 1
    assert world.stores[THIRD].view_at(2) == 2
    order(world, decision(frozen), THIRD)
    assert world.run_until(lambda: joined(world, THIRD), 2 * S)
    assert not world.halts
    assert log(world, THIRD) == log(world, BACKUP)


@pytest.mark.parametrize("is_witness", [False, True])
def test_a_log_is_cut_to_the_entry_before_which_it_was_trimmed(is_witness: bool) -> None:
    """The server no longer knows that entry's view, and the survivor still has the entry."""
    world = start(2)
    send(world, insert(1), PRIMARY, BACKUP, THIRD)
    world.run(300 * MS)
    send(world, insert(2), BACKUP)
    promise(world, THIRD, 2)
    frozen = promise(world, BACKUP, 3)
    order(world, decision(frozen), BACKUP, PRIMARY)
    assert world.run_until(lambda: joined(world, BACKUP, PRIMARY), 2 * S)
    trimmed = world.stores[THIRD]
    trimmed.trim(2)
    assert (trimmed.first_fseq, trimmed.last_fseq, trimmed.view_at(2)) == (2, 2, 2)
    if not is_witness:
        crash(world, THIRD, 2)
    order(world, decision(frozen), THIRD)
    assert world.run_until(lambda: joined(world, THIRD), 2 * S)
    assert not world.halts
    assert log(world, THIRD) == log(world, BACKUP)[1:]


def test_a_server_in_limbo_deletes_no_entry_that_may_not_be_stable() -> None:
    """It may have to drop the entry, and then needs the ones before it."""
    world = start()
    for seq in range(1, 5):
        send(world, insert(seq), PRIMARY, BACKUP)
    crash(world, BACKUP)
    store = world.stores[BACKUP]
    assert store.mark is not None
    assert (store.mark.stable, store.first_fseq) == (0, 1)
    trim = places(world, PRIMARY)[3].gsns[0]
    world.send("mms-0", BACKUP, wire.LeaseAnnounced(CLUSTER, [], 0, [], trim), reply=True)
    world.run(100 * MS)
    assert store.first_fseq == 1
    recover(world, PRIMARY, BACKUP)
    assert world.run_until(lambda: store.first_fseq > 1, 2 * S)


def test_a_trimmed_log_that_could_not_be_read_at_the_start_is_replaced() -> None:
    """Its server knows no stable entry, although what it has trimmed was stable."""
    world = start()
    for seq in range(1, 5):
        send(world, insert(seq), PRIMARY, BACKUP)
    store = world.stores[BACKUP]
    store.trim(places(world, PRIMARY)[2].gsns[0])
    store.damaged = {store.first_fseq}
    crash(world, BACKUP)
    assert replica(world, BACKUP).state.stream.stable == 0 < store.first_fseq - 1
    survivor = replica(world, PRIMARY).state
    frozen = promise(world, PRIMARY)
    survivor.trim = LEASE.stop
    survivor.store.trim(LEASE.stop)
    order(world, decision(frozen), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 2 * S)
    assert not world.halts
