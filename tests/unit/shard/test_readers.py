from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shard.recovery.peer_repair import Repair
from shard.replica import Replica
from shard.serving import readers as module
from tests.actors import Reader
from tests.checkers import check_reader
from tests.properties import examples
from tests.world import (
    CLUSTER,
    MS,
    Link,
    S,
    World,
    first_lease,
    grant,
    insert,
    placements,
    probe,
)
from tests.world import calm_world as world_of
from ziplog import wire
from ziplog.core.entries import Body, Place, encode_body
from ziplog.core.node import BatchEnd, Received, Send
from ziplog.segments.entry import BusyError, UnreadableError

if TYPE_CHECKING:
    import pytest

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def calm_world(**config: Any) -> World:
    """Return a world with epochs so long that none ends in a test."""
    config.setdefault("lease", first_lease(config.get("shards", 1), epoch_ms=10_000))
    return world_of(**config)


def replica(world: World, name: str = PRIMARY) -> Replica:
    node = world.nodes[name]
    assert isinstance(node, Replica)
    return node


def put(world: World, *messages: wire.Insert, f: int = 1) -> None:
    for message in messages:
        for server in range(f + 1):
            world.send("c", f"shard-{message.shard}-{server}", message)
    world.run(2 * MS)


def follow(world: World, server: str = PRIMARY, *, start: int = 1, grant: int = 1 << 20) -> Reader:
    count = sum(name.startswith("reader") for name in world.nodes)
    reader = Reader(f"reader-{count}", server, 0, start=start)
    reader.grant, reader.renew_at = grant, world.now
    world.add(reader.name, reader)
    world.run(2 * MS)
    return reader


def read(world: World, gsn: int, server: str = PRIMARY) -> wire.ReadReply:
    world.send("c", server, wire.Read(CLUSTER, 0, 1, 5, gsn))
    world.run(200_000)
    reply: wire.ReadReply = probe(world).of(wire.ReadReply)[-1]
    assert reply.gsn == gsn
    return reply


def subscribe(world: World, start: int, credit: int, number: int = 1) -> None:
    message = wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, number, start, credit)
    world.send("c", PRIMARY, message)
    world.run(2 * MS)


def sent(world: World) -> list[tuple[int, int, list[list[int]]]]:
    delivers = probe(world).of(wire.Deliver)
    return [(d.start, d.frontier, [unit.gsns for unit in d.units]) for d in delivers]


# --- single positions ---


def test_answers_of_a_primary() -> None:
    world = calm_world(shards=2)
    put(world, insert(1, count=2))
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 0, 9))
    world.run(2 * MS)
    record = read(world, 3)
    assert (record.answer, record.stable, record.payload) == ("record", True, b"1/1")
    assert (record.timestamp_us, record.key, record.epoch) == (1, None, 0)
    assert [read(world, gsn).answer for gsn in (2, 5, 10, 11, 1 << 40)] == [
        "wrong-shard", "no-op", "wrong-shard", "not-yet", "not-yet",
    ]  # fmt: skip


def test_each_record_of_a_unit_may_have_its_key() -> None:
    world = calm_world()
    keys = [b"k", None, b""]
    body = encode_body(Body(1, None, [b"x"] * 3, None, keys))
    put(world, msgspec.structs.replace(insert(1, count=3), body=body))
    assert [read(world, gsn).key for gsn in (1, 2, 3)] == keys


def test_unstable_no_op_is_not_reported_as_one() -> None:
    world = calm_world()
    world.paused.add(BACKUP)
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 0, 9))
    world.run(1 * MS)
    reply = read(world, 5)
    assert (reply.answer, reply.stable) == ("not-yet", False)


def test_unstable_record_is_reported_as_unstable_by_all_replicas() -> None:
    world = calm_world()
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    put(world, insert(1))
    for server in (PRIMARY, BACKUP):
        reply = read(world, 1, server)
        assert (reply.answer, reply.stable, reply.payload) == ("record", False, b"1/0")
    assert read(world, 2, BACKUP).answer == "not-yet"


def test_damaged_entry_is_unknown_not_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    world = calm_world()
    put(world, insert(1))

    def damaged(*_args: Any) -> None:
        raise UnreadableError("bad checksum")

    monkeypatch.setattr(world.stores[PRIMARY], "find", damaged)
    monkeypatch.setattr(world.stores[PRIMARY], "scan", damaged)
    assert read(world, 1).answer == "unknown"
    subscribe(world, 1, 1000)
    assert [r.code for r in probe(world).of(wire.Refused)] == ["not-ready"]
    assert not replica(world)._readers.subscriptions


def test_refused_read_is_retried_and_not_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = calm_world()
    put(world, insert(1))
    repaired: list[int] = []

    def busy(*_args: Any) -> None:
        raise BusyError("too many open files")

    monkeypatch.setattr(Repair, "request", lambda _self, gsn, *_: repaired.append(gsn))
    with monkeypatch.context() as patched:
        for name in ("find", "scan", "last_record_below"):
            patched.setattr(world.stores[PRIMARY], name, busy)
        assert read(world, 1).answer == "unknown"
        subscribe(world, 1, 1000)
        world.send("c", PRIMARY, wire.Tail(CLUSTER, 0, 1, 6, 5))
        world.run(200_000)
        codes = [(r.request, r.code) for r in probe(world).of(wire.Refused)]
        assert codes == [(1, "not-ready"), (6, "not-ready")]
    assert read(world, 1).answer == "record"
    assert not repaired
    assert not world.halts


def test_limbo_server_reports_unknown_for_positions_it_may_have_lost() -> None:
    world = calm_world()
    put(world, insert(1))
    world.run(300 * MS)
    put(world, insert(2))
    world.restart(PRIMARY, clean=False)
    assert read(world, 1).answer == "record"
    assert read(world, 1).stable
    late = read(world, 1 << 30)
    assert (late.answer, late.stable) == ("unknown", False)


def test_tail_reports_the_last_record_and_the_last_stable_one_below() -> None:
    world = calm_world()
    put(world, insert(1, count=3))
    world.paused.add(BACKUP)
    world.send("c", PRIMARY, insert(2))
    for below in (0, 3, 1 << 40):
        world.send("c", PRIMARY, wire.Tail(CLUSTER, 0, 1, 5, below))
        world.run(1 * MS)
    replies = [(r.filled, r.frontier, r.last_below) for r in probe(world).of(wire.TailReply)]
    assert replies == [(4, 4, 0), (4, 4, 2), (4, 4, 3)]
    # Decided but unstable positions bound every reader that another replica serves.
    assert {r.end for r in probe(world).of(wire.TailReply)} == {5}


# --- subscriptions ---


def test_subscription_continues_from_old_to_new_records() -> None:
    world = calm_world()
    put(world, *[insert(seq) for seq in range(1, 6)])
    readers = [follow(world, server, start=start) for server in (PRIMARY, BACKUP)
               for start in (1, 3, 5, 40)]  # fmt: skip
    put(world, *[insert(seq, count=3) for seq in range(6, 20)])
    world.run(200 * MS)
    for reader in readers:
        check_reader(world, reader)
        assert reader.number == 1, "nothing was lost, so no subscription restarted"


def test_readers_of_a_backup_get_the_records_too() -> None:
    world = calm_world()
    reader = follow(world, BACKUP)
    put(world, insert(1))
    world.run(20 * MS)
    assert [gsn for gsn, _ in reader.delivered] == [1]


def test_credit_is_respected_and_renewed() -> None:
    world = calm_world()
    put(world, *[insert(seq, size=1000) for seq in range(1, 10)])
    size = len(insert(1, size=1000).body) + 64
    subscribe(world, 1, 3 * size)
    assert sent(world) == [(1, 4, [[1], [2], [3]])]
    put(world, insert(10, size=1000))
    assert len(sent(world)) == 1
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, b"c" * 16, 1, 3 * size))
    world.run(1 * MS)
    assert sent(world)[1:] == [(4, 4, [])], "a renewal is answered"
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, b"c" * 16, 1, 100 * size))
    world.run(1 * MS)
    assert [units for _, _, units in sent(world)[2:]] == [[[gsn] for gsn in range(4, 11)]]


def test_reader_without_credit_is_not_sent_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CREDIT_BYTES", 5000)
    world = calm_world()
    put(world, *[insert(seq, size=1000) for seq in range(1, 30)])
    subscribe(world, 1, 2**63 - 1)
    world.run(20 * MS)
    (subscription,) = replica(world)._readers.subscriptions.values()
    assert subscription.used < 5000 + 1200
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, b"c" * 16, 1, 2**63 - 1))
    world.run(20 * MS)
    assert 8000 < subscription.used < 2 * (5000 + 1200)


def test_unit_larger_than_the_credit_is_sent_alone() -> None:
    world = calm_world()
    put(world, insert(1, size=5000), insert(2))
    subscribe(world, 1, 10)
    assert sent(world) == [(1, 2, [[1]])]


def test_many_old_records_are_sent_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DELIVER_BYTES", 3000)
    world = calm_world()
    put(world, *[insert(seq, size=1000) for seq in range(1, 20)])
    reader = follow(world)
    world.run(20 * MS)
    check_reader(world, reader)
    put(world, insert(20, size=4000))
    world.run(20 * MS)
    check_reader(world, reader)


def test_subscriptions_that_are_behind_share_the_work_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH_WORK", 4)
    world = calm_world()
    put(world, *(insert(seq) for seq in range(1, 11)))
    node = replica(world)
    for number in range(1, 4):
        message = wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, number, 1, 1 << 20)
        node.step(Received(b"reader", message), world.now)
    batches = []
    while node._readers.has_work:
        effects = node.step(BatchEnd(), world.now)
        delivers = [one.message for one in effects if isinstance(one, Send)]
        batches.append([(d.subscription, len(d.units)) for d in delivers])
    assert batches[0] == [(1, 4), (2, 0), (3, 0)], "each request is answered at once"
    assert [each for batch in batches[1:] for each in batch] == [
        (2, 4), (3, 4), (1, 4), (2, 4), (3, 4), (1, 2), (2, 2), (3, 2),
    ]  # fmt: skip


def test_repeated_subscription_does_not_restart() -> None:
    world = calm_world()
    put(world, insert(1))
    subscribe(world, 1, 1 << 20)
    subscribe(world, 1, 1 << 20)
    assert sent(world) == [(1, 2, [[1]]), (2, 2, [])]


def test_start_beyond_the_frontier_waits_for_it() -> None:
    world = calm_world()
    subscribe(world, 3, 1 << 20)
    put(world, insert(1), insert(2))
    put(world, insert(3))
    put(world, insert(4))
    units = [unit for _, _, some in sent(world) for unit in some]
    assert units == [[3], [4]]


def test_start_inside_a_unit_delivers_the_whole_unit() -> None:
    world = calm_world()
    put(world, insert(1, count=4))
    subscribe(world, 3, 1 << 20)
    assert sent(world) == [(3, 5, [[1, 2, 3, 4]])]


def test_unknown_subscription_is_refused() -> None:
    world = calm_world()
    subscribe(world, 1, 100)
    world.restart(PRIMARY)
    world.run(1 * MS)
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, b"c" * 16, 1, 100))
    world.run(1 * MS)
    assert [r.code for r in probe(world).of(wire.Refused)] == ["unknown-subscription"]


def test_idle_and_closed_subscriptions_are_dropped() -> None:
    world = calm_world()
    subscribe(world, 1, 100)
    subscribe(world, 1, 100, number=2)
    world.send("c", PRIMARY, wire.Unsubscribe(CLUSTER, 0, b"c" * 16, 2))
    world.run(1 * MS)
    assert list(replica(world)._readers.subscriptions) == [(b"c" * 16, 1)]
    world.run(12 * S)
    assert not replica(world)._readers.subscriptions


def test_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUBSCRIPTIONS", 2)
    world = calm_world()
    for number in (1, 2, 3, 2):
        subscribe(world, 1, 100, number=number)
    assert [(r.request, r.code) for r in probe(world).of(wire.Refused)] == [(3, "full")]


# --- trim ---


def trim(world: World, gsn: int) -> None:
    message = wire.LeaseAnnounced(CLUSTER, [], 0, placements(1, 1), gsn)
    for name in (PRIMARY, BACKUP):
        world.inject(name, Received(b"mms-0", message))
    world.run(1 * MS)


def test_trim_under_a_reader_ends_its_stream() -> None:
    world = calm_world()
    put(world, *[insert(seq, size=1000) for seq in range(1, 10)])
    behind = follow(world, grant=2000)
    ahead = follow(world)
    assert behind.frontier < 6 < ahead.frontier
    behind.stopped = True
    trim(world, 6)
    assert behind.trimmed == 6
    assert ahead.trimmed is None
    put(world, insert(10))
    world.run(20 * MS)
    assert [gsn for gsn, _ in ahead.delivered] == list(range(1, 11))
    assert [read(world, gsn).answer for gsn in (1, 5, 6)] == ["trimmed", "trimmed", "record"]
    assert read(world, 2).first == 6


def test_subscription_below_the_trim_point_ends_at_once() -> None:
    world = calm_world()
    put(world, insert(1), insert(2))
    trim(world, 2)
    reader = follow(world)
    assert reader.trimmed == 2
    assert reader.delivered == []
    trim(world, 1)
    assert read(world, 1).answer == "trimmed", "a trim point never decreases"


# --- frontiers and leases ---


def test_frontier_moves_with_a_lease_alone() -> None:
    world = calm_world(shards=2, lease=first_lease(2, epochs=1, epoch_size=4))
    subscribe(world, 1, 1 << 20)
    put(world, insert(1), insert(2))
    assert sent(world)[-1][1] == 5, "it is at the end of the leases"
    following = first_lease(2, epochs=1, epoch_size=4).following()
    grant(world, following, 2)
    put(world, insert(3))
    assert [unit for _, _, some in sent(world) for unit in some] == [[1], [3], [5]]


def test_subscription_never_passes_the_leases_that_it_sent() -> None:
    """A backup may hold decisions in leases that it has not received."""
    first = first_lease(1, epochs=1, epoch_size=4)
    world = calm_world(lease=first)
    world.links["mms-0", BACKUP] = Link(lose=lambda: True)
    reader = follow(world, BACKUP)
    put(world, *[insert(seq) for seq in range(1, 4)])
    grant(world, first.following(), 1)
    world.run(1 * MS)
    put(world, *[insert(seq) for seq in range(4, 8)])
    world.run(20 * MS)
    assert reader.frontier == first.stop
    world.links.clear()
    grant(world, first.following(), 1)
    world.run(20 * MS)
    check_reader(world, reader)
    assert len(reader.delivered) == 7


def test_missed_lease_resumes_the_subscription_at_once() -> None:
    first = first_lease(1, epochs=1, epoch_size=4)
    world = calm_world(lease=first)
    world.links["mms-0", BACKUP] = Link(lose=lambda: True)
    grant(world, first.following(), 1)
    world.run(1 * MS)
    put(world, *[insert(seq) for seq in range(1, 4)])
    world.run(20 * MS)
    message = wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 1, 1, 1 << 20)
    world.send("c", BACKUP, message)
    world.run(1 * MS)
    world.links.clear()
    assert sent(world) == [(1, 5, [])]
    grant(world, first.following(), 1)
    world.run(1 * MS)
    assert sent(world)[1:] == [(5, 8, [[5], [6], [7]])]


def test_leases_are_repeated_until_the_frontier_advances() -> None:
    """A message that does not advance the frontier may be lost unnoticed."""
    world = calm_world()
    subscribe(world, 1, 1 << 20)
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, b"c" * 16, 1, 1 << 20))
    world.run(1 * MS)
    put(world, insert(1))
    put(world, insert(2))
    assert [len(d.leases) for d in probe(world).of(wire.Deliver)] == [1, 1, 1, 0]


def test_frontier_does_not_decrease_when_leases_are_dropped() -> None:
    world = calm_world(shards=2)
    put(world, insert(1))
    world.run(300 * MS)  # an idle shard makes no more decisions
    state = replica(world).state
    assert state.frontier == 3
    lease = first_lease(2, epoch_ms=10_000)
    for index in range(80):
        lease = lease.following(epoch_ms=10 + index)  # each one a run of its own
        grant(world, lease, 2)
        world.run(1 * MS)
    assert state.clock.lease_of(2) is None
    assert state.stream.stable_end == 2
    assert state.frontier == 3


@examples(60, derandomize=True)
@given(st.data())
def test_subscriptions_are_contiguous_with_any_credit(data: st.DataObject) -> None:
    world = calm_world()
    readers: list[Reader] = []
    seq = 0
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["put", "put", "follow", "credit", "wait"])):
            case "put":
                some = [insert(seq + i, count=data.draw(st.integers(1, 3)),
                               size=data.draw(st.sampled_from((0, 300))))
                        for i in range(1, data.draw(st.integers(2, 5)))]  # fmt: skip
                seq += len(some)
                put(world, *some)
            case "follow":
                server = data.draw(st.sampled_from((PRIMARY, BACKUP)))
                reader = follow(world, server, start=data.draw(st.integers(1, 12)),
                                grant=data.draw(st.sampled_from((0, 100, 400, 5000))))  # fmt: skip
                readers.append(reader)
            case "credit":
                for reader in readers:
                    reader.grant = data.draw(st.sampled_from((0, 100, 400, 5000)))
            case "wait":
                world.run(data.draw(st.integers(1, 30)) * MS)
        for reader in readers:
            gsns = [gsn for gsn, _ in reader.delivered]
            expected = [g for unit in world.stores[PRIMARY].entries
                        if isinstance(unit.decision, Place) for g in unit.decision.gsns
                        if reader.start <= g < reader.frontier]  # fmt: skip
            assert gsns == expected
    for reader in readers:
        reader.grant = 1 << 20
    world.run(100 * MS)
    for reader in readers:
        check_reader(world, reader)


# --- a server that was paused ---


def test_paused_server_sends_nothing_to_readers_that_are_behind_before_it_hears_a_peer() -> None:
    """It may have missed a trim that did not wait for it (docs/protocol.md, sections 8 and 11)."""
    world = calm_world()
    put(world, insert(1), insert(2))
    node, now = replica(world), world.now
    opening = wire.Subscribe(CLUSTER, 0, 1, b"c" * 16, 1, 1, 1000)
    node.step(Received(b"c", opening), now)
    resumed = now + 6 * S
    delivers = [
        effect
        for at in (resumed, resumed + 300 * MS)
        for effect in node.step(BatchEnd(), at)
        if isinstance(effect, Send) and isinstance(effect.message, wire.Deliver)
    ]
    assert delivers == []
    beat = wire.Beat(CLUSTER, 0, 1, 1, 7, "up", 1000, "", 2, 2)
    node.step(Received(BACKUP.encode(), beat), resumed + 300 * MS)
    effects = node.step(BatchEnd(), resumed + 300 * MS)
    assert [
        e.message.frontier
        for e in effects
        if isinstance(e, Send)
        if isinstance(e.message, wire.Deliver)
    ] == [3]
