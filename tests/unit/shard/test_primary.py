from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shard.ordering import primary
from shard.ordering.forwards import LINGER_NS
from shard.ordering.reports import COUNTED_GUESSES, MAX_WRONG_GUESSES
from shard.replica import Replica
from tests.actors import Service
from tests.checkers import decided, places
from tests.world import (
    CLUSTER,
    MS,
    US,
    Link,
    S,
    World,
    address,
    calm_world,
    first_lease,
    grant,
    insert,
    placements,
    probe,
    shard_names,
)
from ziplog import wire
from ziplog.core.entries import Expire, Place, Skip
from ziplog.core.node import Received
from ziplog.core.units import NEVER
from ziplog.core.view import Lease, run_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shard.ordering.primary import Primary
    from ziplog.core.message import Message

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def primary_of(world: World) -> Primary:
    replica = world.nodes[PRIMARY]
    assert isinstance(replica, Replica)
    assert replica._primary is not None
    return replica._primary


def send(world: World, *messages: Message, to: str = PRIMARY, run: int = 1 * MS) -> None:
    for message in messages:
        world.send("c", to, message)
    world.run(run)


def placed(world: World) -> list[tuple[int, list[int]]]:
    return [(p.seq, p.gsns) for p in places(world, PRIMARY)]


def refusals(world: World) -> list[tuple[int, str]]:
    return [(refused.request, refused.code) for refused in probe(world).of(wire.Refused)]


def report(held: int, durable: int = 0, *, server: int = 1, view: int = 1) -> wire.Report:
    return wire.Report(CLUSTER, 0, view, server, 1, held, durable)


def alone(**config: Any) -> World:
    """Return a world with a probe for its backup: the tests send its messages."""
    world = calm_world(**config)
    world.paused.add(BACKUP)
    return world


# --- order ---


def test_units_get_consecutive_slots_in_order_of_arrival() -> None:
    world = calm_world(shards=2)
    send(world, insert(1, count=3), insert(2), insert(3, after=20))
    assert placed(world) == [(1, [1, 3, 5]), (2, [7]), (3, [21])]


def test_known_unit_is_acked_again_and_not_placed_again() -> None:
    world = calm_world()
    send(world, insert(1), insert(1))
    send(world, insert(1))
    assert placed(world) == [(1, [1])]
    found = probe(world).of(wire.InsertAck)
    assert [(ack.seq, ack.gsns) for ack in found] == [(1, [1])] * 3
    assert [ack.counter for ack in found] == [1, 2, 3]


def test_chain_that_arrives_backwards_is_placed_forwards() -> None:
    world = calm_world()
    chain = [insert(seq, predecessor=seq - 1) for seq in range(1, 6)]
    send(world, *reversed(chain))
    assert placed(world) == [(seq, [seq]) for seq in range(1, 6)]


def test_long_chain_with_a_late_first_unit() -> None:
    """A thousand units wait for one; nothing may recurse over them."""
    world = calm_world()
    chain = [insert(seq, predecessor=seq - 1) for seq in range(1, 1025)]
    send(world, *chain[1:])
    assert placed(world) == []
    send(world, chain[0], run=20 * MS)
    assert [seq for seq, _ in placed(world)] == list(range(1, 1025))


def test_successors_of_an_abandoned_unit_are_released() -> None:
    world = calm_world()
    send(world, insert(2, predecessor=1), insert(3, predecessor=2), insert(5, predecessor=4))
    assert placed(world) == []
    send(world, insert(4, first_incomplete=2, predecessor=1))
    assert [seq for seq, _ in placed(world)] == [2, 3, 4, 5]


def test_successor_of_a_refused_unit_is_refused_with_it() -> None:
    world = alone()
    beyond = first_lease(1).stop + 5
    send(world, insert(1, after=beyond), insert(2, predecessor=1), insert(3, predecessor=2))
    question = probe(world, "mms-0").of(wire.LeaseQuery)[0]
    never = wire.LeaseHistory(CLUSTER, question.request, [], [], 0)
    world.inject(PRIMARY, Received(b"mms-0", never))
    world.run(1 * MS)
    assert refusals(world) == [(seq, "no-such-position") for seq in (1, 2, 3)]


def test_abandoned_unit_is_not_placed_later() -> None:
    world = alone()
    send(world, insert(1, after=first_lease(1).stop), insert(2, predecessor=1))
    send(world, insert(3, first_incomplete=3))
    grant(world, first_lease(1).following(), 1)
    world.run(5 * MS)
    assert [seq for seq, _ in placed(world)] == [3]


# --- room ---


def test_new_units_wait_in_order_while_too_much_is_unstable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shard.ordering.forwards.MAX_UNSTABLE_RECORDS", 3)
    world = alone()
    send(world, *[insert(seq, predecessor=seq - 1) for seq in range(1, 10)])
    assert [seq for seq, _ in placed(world)] == [1, 2, 3]
    send(world, report(2), run=100 * US)
    assert [seq for seq, _ in placed(world)] == [1, 2, 3, 4, 5]
    assert [held.seq for held in primary_of(world)._waiting.values()] == [6]
    for _ in range(5):
        send(world, report(900))
    gsns = [gsns[0] for _, gsns in placed(world)]
    assert [seq for seq, _ in placed(world)] == list(range(1, 10))
    assert gsns == sorted(gsns)


def test_too_much_waiting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.ordering.forwards.MAX_UNSTABLE_RECORDS", 1)
    monkeypatch.setattr(primary, "MAX_WAITING_UNITS", 3)
    world = alone()
    beyond = first_lease(1).stop + 1
    send(world, insert(1), insert(2), insert(3, after=beyond), insert(5, predecessor=4), insert(6))
    send(world, insert(7))
    assert refusals(world) == [(6, "full"), (7, "full")]
    send(world, report(1))
    send(world, insert(7))
    assert refusals(world)[2:] == []


def test_waiting_bodies_are_counted_wherever_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary, "MAX_WAITING_BYTES", 1000)
    world = alone()
    beyond = first_lease(1).stop + 1
    send(world, insert(1, after=beyond, size=600), insert(3, predecessor=2, size=600), insert(4))
    assert refusals(world) == [(4, "full")]
    assert primary_of(world)._undecided_units == 2


def test_slow_disk_makes_new_units_wait() -> None:
    world = calm_world()
    world.flush_ns = 5 * MS
    store = world.stores[PRIMARY]
    store.backlog_bytes = primary.MAX_BACKLOG_BYTES
    send(world, insert(1))
    assert placed(world) == []
    store.backlog_bytes = 0
    send(world, insert(2), run=10 * MS)
    assert [seq for seq, _ in placed(world)] == [1, 2]


def test_wants_cannot_fill_the_memory_while_the_backup_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shard.ordering.epoch_closer.MAX_UNSTABLE_DECISIONS", 10)
    world = alone()
    for gsn in range(1, 60):
        send(world, wire.Want(CLUSTER, 0, 0, gsn), run=100 * US)
    assert len(decided(world, PRIMARY)) == 10
    world.paused.clear()
    world.run(50 * MS)
    state = primary_of(world)._state
    assert state.frontier >= 60, "wanted positions are decided when there is room"


# --- leases ---


def test_position_in_a_later_epoch_is_reached_with_one_no_op() -> None:
    world = calm_world()
    lease = first_lease(1)
    after = lease.epoch_base(7) + 3
    send(world, insert(1, after=after), run=500 * US)
    decisions = [entry.decision for entry in decided(world, PRIMARY)]
    assert decisions[0] == Skip(1, after + 1)
    assert placed(world) == [(1, [after + 1])]


def test_position_beyond_the_leases_waits_for_the_service() -> None:
    world = calm_world()
    lease = first_lease(1)
    send(world, insert(1, after=lease.stop + 3), insert(2))
    assert [seq for seq, _ in placed(world)] == [2]
    assert [query.gsn for query in probe(world, "mms-0").of(wire.LeaseQuery)] == [lease.stop + 3]
    grant(world, lease.following(), 1, starts_in_us=50_000)
    world.run(1 * MS)
    assert placed(world)[-1] == (1, [lease.stop + 4])


def test_lease_query_is_repeated_and_existing_leases_are_fetched() -> None:
    world = alone()
    service = Service()
    lease = first_lease(1)
    service.runs = [run_of(lease), run_of(lease.following())]
    service.announcement = wire.LeaseAnnounced(CLUSTER, [], 0, placements(1, 1), 0)
    world.links[PRIMARY, "mms-0"] = Link(lose=lambda: True)
    world.nodes["mms-0"] = service
    send(world, insert(1, after=lease.stop + 3), run=50 * MS)
    world.links.clear()
    world.run(110 * MS)
    assert placed(world) == [(1, [lease.stop + 4])]


def test_old_lease_history_refuses_nothing() -> None:
    """Only a query sent after the unit arrived shows that its position does not exist."""
    world = alone()
    stop = first_lease(1).stop
    send(world, insert(1, after=stop))
    old = probe(world, "mms-0").of(wire.LeaseQuery)[0].request
    send(world, insert(2, after=stop))
    answer = wire.LeaseHistory(CLUSTER, old, [], [], 0)
    world.inject(PRIMARY, Received(b"mms-0", answer))
    world.inject(PRIMARY, Received(b"mms-0", answer))
    world.run(1 * MS)
    assert refusals(world) == [(1, "no-such-position")]


def test_unit_that_waits_for_a_lease_does_not_delay_others() -> None:
    """The last position of the last lease is a valid rid; nothing comes after it yet."""
    world = calm_world()
    lease = first_lease(1)
    send(world, insert(1, after=lease.stop - 1), insert(2), insert(3))
    assert [seq for seq, _ in placed(world)] == [2, 3]
    world.run(300 * MS)
    assert not probe(world, "mms-0").of(wire.LeaseQuery), "the position exists"
    grant(world, lease.following(), 1)
    world.run(1 * MS)
    assert placed(world)[-1] == (1, [lease.stop])


def test_used_up_leases_make_new_units_wait_in_order() -> None:
    world = calm_world(lease=first_lease(1, epochs=1, epoch_size=4))
    send(world, *[insert(seq) for seq in range(1, 8)])
    assert [seq for seq, _ in placed(world)] == [1, 2, 3, 4]
    second = first_lease(1, epochs=1, epoch_size=4).following()
    grant(world, second, 1)
    world.run(1 * MS)
    assert placed(world) == [(seq, [seq]) for seq in range(1, 8)]


def test_unit_larger_than_any_epoch_is_refused() -> None:
    world = calm_world(shards=2, lease=first_lease(2, epochs=2, epoch_size=8))
    send(world, insert(1, count=5), insert(2, count=4))
    assert refusals(world) == [(1, "too-large")]
    assert [seq for seq, _ in placed(world)] == [2]


def test_unit_is_never_split_over_epochs() -> None:
    world = calm_world(lease=first_lease(1, epochs=2, epoch_size=5, epoch_ms=1000))
    send(world, insert(1, count=3), insert(2, count=3))
    assert placed(world) == [(1, [1, 2, 3]), (2, [6, 7, 8])]
    assert decided(world, PRIMARY)[1].decision == Skip(4, 6)


def ends(world: World) -> list[int]:
    return [e.decision.stop for e in decided(world, PRIMARY) if isinstance(e.decision, Skip)]


@pytest.mark.parametrize(
    ("lag_fix", "epochs"), [(True, [1, 2, 3, 4, 9, 14]), (False, range(1, 16))]
)
def test_shard_with_readers_closes_its_epochs(lag_fix: bool, epochs: Iterable[int]) -> None:
    world = calm_world(lag_fix=lag_fix)
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 1, 1, 1 << 20), insert(1))
    world.run(150 * MS)
    assert ends(world) == [first_lease(1).epoch_base(epoch) for epoch in epochs]


def test_ended_epoch_closes_at_once_if_the_last_insert_is_some_time_ago() -> None:
    world = calm_world()
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 1, 1, 1 << 20), insert(1))
    epoch_end = primary_of(world)._state.clock.next_epoch_at(world.now)
    assert epoch_end is not None
    world.run(epoch_end - 3 * MS - world.now)
    send(world, insert(2))
    assert primary_of(world).next_wakeup(world.now) == epoch_end
    world.run(epoch_end + MS - world.now)
    assert ends(world) == [first_lease(1).epoch_base(1)]
    assert decided(world, BACKUP) == decided(world, PRIMARY)


def test_shard_without_readers_closes_leases_only() -> None:
    world = calm_world(lease=first_lease(1, epochs=2))
    for seq in range(1, 40):
        send(world, insert(seq))
        world.run(1 * MS)
        if seq == 5:
            grant(world, first_lease(1, epochs=2).following(), 1, starts_in_us=15_000)
    assert ends(world) == [first_lease(1, epochs=2).stop]


def test_idle_shard_is_quiet() -> None:
    idle = calm_world()
    idle.run(3 * S)
    assert decided(idle, PRIMARY) == []


# --- the stream ---


def test_lost_forward_is_retransmitted_with_backoff() -> None:
    world = alone()
    world.run(400 * MS)
    world.tracing = True
    send(world, insert(1), run=3 * S)
    count = sum("Place seq=1" in line for line in world.trace)
    assert 6 <= count <= 10
    assert not any("+body" in line for line in world.trace)


def test_lost_report_is_requested() -> None:
    world = calm_world()
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    send(world, insert(1), run=10 * MS)
    state = primary_of(world)._state
    assert state.stream.stable == 0
    world.links.clear()
    world.run(60 * MS)
    assert state.stream.stable == state.stream.last


def test_lost_durable_report_is_requested() -> None:
    world = calm_world()
    world.flush_ns = 4 * MS
    world.run(400 * MS)
    send(world, wire.Want(CLUSTER, 0, 1, 5))
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    world.run(10 * MS)
    stream = primary_of(world)._state.stream
    assert stream.durable < stream.stable == stream.last
    world.links.clear()
    world.run(60 * MS)
    assert stream.durable == stream.last


def test_bodies_are_sent_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard.ordering.forwards.MAX_FORWARD_BYTES", 2500)
    world = calm_world()
    world.links["c", BACKUP] = Link(lose=lambda: True)
    send(world, *[insert(seq, size=1000) for seq in range(1, 8)], insert(8, size=9000))
    world.run(60 * MS)
    assert [p.seq for p in places(world, BACKUP)] == list(range(1, 9))
    bodies = [
        sum(len(d.body or b"") for d in message.decisions if isinstance(d, Place))
        for _, dst, message in world.sent
        if dst == BACKUP and isinstance(message, wire.Forward)
    ]
    assert max(bodies) < 10_000
    assert sum(body > 0 for body in bodies) >= 5


def test_stable_watermark_goes_to_all_backups() -> None:
    """A reply to one backup does not count as a forward to the other."""
    world = calm_world(f=2, lease=first_lease(1, epoch_ms=10_000))
    for name in (PRIMARY, BACKUP, "shard-0-2"):
        world.send("c", name, insert(1))
    world.run(1 * MS)
    world.send(BACKUP, PRIMARY, wire.Resend(CLUSTER, 0, 1, 1, 2, 0))
    world.run(20 * MS)
    for name in (BACKUP, "shard-0-2"):
        replica = world.nodes[name]
        assert isinstance(replica, Replica)
        assert replica.state.stream.stable == 1


def test_reports_of_other_views_servers_and_runs_are_ignored() -> None:
    world = alone()
    send(world, insert(1))
    send(world, report(1, view=2), report(1, server=7), report(0))
    assert primary_of(world)._state.stream.stable == 0
    send(world, report(900))
    assert primary_of(world)._state.stream.stable == primary_of(world)._state.stream.last
    send(world, insert(2))
    assert primary_of(world)._state.stream.stable == primary_of(world)._state.stream.last - 1


def test_without_backups_everything_is_stable_at_once() -> None:
    world = calm_world(f=0)
    send(world, insert(1), wire.Want(CLUSTER, 0, 3, 9), run=100 * US)
    world.run(1 * MS)
    stream = primary_of(world)._state.stream
    assert stream.stable == stream.last
    assert stream.durable == stream.last
    assert len(probe(world).of(wire.Frontier)) == 1
    assert primary_of(world).next_wakeup(world.now) is not None
    assert primary_of(world)._forwards._resend_due == NEVER


# --- sessions, restart ---


def test_expired_client_is_forgotten_with_its_waiting_units() -> None:
    world = calm_world(session_timeout_s=2)
    send(world, insert(1), insert(3, predecessor=2), to=PRIMARY)
    send(world, insert(1), to=BACKUP)
    world.run(4 * S)
    for name in (PRIMARY, BACKUP):
        replica = world.nodes[name]
        assert isinstance(replica, Replica)
        assert not replica.state.sessions.by_client
    assert primary_of(world)._undecided_units == 0
    assert isinstance(decided(world, PRIMARY)[-1].decision, Expire)


def test_restarted_primary_resumes_where_it_stopped() -> None:
    world = alone()
    stop = first_lease(1).stop
    send(world, insert(1), insert(3, predecessor=2), insert(4, after=stop), insert(5))
    old = primary_of(world)._state
    world.restart(PRIMARY)
    world.run(1 * MS)
    state = primary_of(world)._state
    assert list(state.stream.window)[:2] == list(old.stream.window)
    assert [seq for seq, _ in placed(world)] == [1, 5], "no unit was placed before its predecessor"
    world.paused.clear()
    send(world, insert(2), run=50 * MS)
    assert [seq for seq, _ in placed(world)] == [1, 5, 2, 3]
    assert decided(world, BACKUP) == decided(world, PRIMARY)
    grant(world, first_lease(1).following(), 1)
    send(world, insert(4, after=stop))
    assert placed(world)[-1] == (4, [stop + 1])
    assert probe(world).of(wire.InsertAck)[-1].seq == 4


def test_routes_are_not_kept_over_a_restart() -> None:
    """A route may belong to another client after a restart, and acks name no client."""
    world = alone()
    send(world, insert(2, predecessor=1))
    world.restart(PRIMARY)
    world.run(1 * MS)
    send(world, insert(1))
    assert [seq for seq, _ in placed(world)] == [1, 2]
    assert [ack.seq for ack in probe(world).of(wire.InsertAck)] == [1]


def test_addresses_of_the_test_world_differ() -> None:
    names = [f"shard-{s}-{i}" for s in range(3) for i in range(3)] + ["mms-0"]
    assert len({address(name).endpoint for name in names}) == len(names)


def test_lease_of_another_shape_is_used_from_its_base() -> None:
    first = first_lease(1, epochs=2, epoch_size=4)
    world = calm_world(lease=first)
    send(world, insert(1))
    second: Lease = first.following(epoch_size=16)
    grant(world, second, 1)
    send(world, insert(2))
    assert placed(world)[-1][1] == [second.base]


# --- batched shards ---


def forwards(world: World) -> list[wire.Forward]:
    sent = [message for src, _, message in world.sent if src == PRIMARY]
    return [m for m in sent if isinstance(m, wire.Forward) and m.decisions]


def insert_everywhere(world: World, seq: int, pause: int) -> None:
    for server in shard_names(0, 1):
        world.send("c", server, insert(seq))
    world.run(pause)


def become_calm(world: World) -> int:
    for seq in range(1, COUNTED_GUESSES + 2):
        insert_everywhere(world, seq, 200 * US)
    world.run(5 * MS)
    return COUNTED_GUESSES + 2


def test_batched_shard_forwards_several_decisions_at_once() -> None:
    world = calm_world(lease=first_lease(1, epoch_ms=1000))
    first = become_calm(world)
    world.sent.clear()
    for seq in range(first, first + 100):
        insert_everywhere(world, seq, 100 * US)
    world.run(5 * MS)
    assert len(forwards(world)) <= 25
    assert sum(len(message.decisions) for message in forwards(world)) == 100


def test_reader_ends_batching() -> None:
    world = calm_world(lease=first_lease(1, epoch_ms=1000))
    first = become_calm(world)
    send(world, wire.Subscribe(CLUSTER, 0, 1, b"r" * 16, 1, 1, 1 << 20))
    world.sent.clear()
    for seq in range(first, first + 10):
        insert_everywhere(world, seq, 300 * US)
    assert len(forwards(world)) == 10


def test_many_wrong_guesses_end_batching_and_a_few_do_not() -> None:
    world = calm_world(lease=first_lease(1, epoch_ms=1000))
    seq = become_calm(world)
    for wrong in range(1, MAX_WRONG_GUESSES + 2):
        # An insert that reaches the backup through the primary only counts as a wrong guess.
        send(world, insert(seq), run=20 * MS)
        seq += 1
        world.sent.clear()
        for _ in range(10):
            insert_everywhere(world, seq, 300 * US)
            seq += 1
        world.run(5 * MS)
        assert (len(forwards(world)) == 10) == (wrong > MAX_WRONG_GUESSES)


def test_copy_that_arrives_after_the_decision_counts_as_no_wrong_guess() -> None:
    world = calm_world(lease=first_lease(1, epoch_ms=1000))
    first = become_calm(world)
    primary, backup = shard_names(0, 1)
    world.sent.clear()
    for seq in range(first, first + 2 * MAX_WRONG_GUESSES):
        world.send("c", primary, insert(seq))
        world.run(LINGER_NS + 500 * US)
        world.send("c", backup, insert(seq))
        world.run(200 * US)
    sent = [message for src, _, message in world.sent if src == backup]
    acks = [message for message in sent if isinstance(message, wire.InsertAck)]
    assert len(acks) == 2 * MAX_WRONG_GUESSES
    assert all(ack.confirmed and not ack.waited for ack in acks)
    assert not any(m.forward_immediately for m in sent if isinstance(m, wire.Report))
