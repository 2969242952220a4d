"""Early streams: a primary sends what it has decided (docs/protocol.md, section 18; J3, J4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.serving import early_streams as module
from shard.serving import readers
from tests.actors import EarlyReader
from tests.checkers import check_reader, places
from tests.properties import examples
from tests.unit.shard.recovery_world import begin, decision, order, promise, start
from tests.unit.shard.test_readers import BACKUP, PRIMARY, calm_world, put, replica, trim
from tests.world import CLUSTER, MS, Link, S, World, first_lease, grant, insert, probe
from ziplog import wire
from ziplog.core.node import BatchEnd, Received, Send
from ziplog.segments.entry import BusyError

CLIENT = b"c" * 16


def subscribe(
    world: World, credit: int = 1 << 20, *, start: int = 1, number: int = 1,
    server: str = PRIMARY, view: int = 1,
) -> None:  # fmt: skip
    message = wire.Subscribe(CLUSTER, 0, view, CLIENT, number, start, credit, "early")
    world.send("c", server, message)
    world.run(1 * MS)


def sent(world: World) -> list[tuple[int, int, list[list[int]]]]:
    messages = probe(world).of(wire.Early)
    return [(m.start, m.frontier, [unit.gsns for unit in m.units]) for m in messages]


def refusals(world: World) -> list[str]:
    return [refused.code for refused in probe(world).of(wire.Refused)]


def follow(world: World, *, start: int = 1, grant: int = 1 << 20) -> EarlyReader:
    count = sum(name.startswith("reader") for name in world.nodes)
    reader = EarlyReader(f"reader-{count}", PRIMARY, 0, start=start)
    reader.grant, reader.renew_at = grant, world.now
    world.add(reader.name, reader)
    world.run(2 * MS)
    return reader


def test_decided_units_are_sent_before_they_are_stable() -> None:
    world = calm_world()
    subscribe(world)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    put(world, insert(1, count=2), insert(2))
    assert replica(world).state.stream.stable == 0
    assert [unit for _, _, units in sent(world) for unit in units] == [[1, 2], [3]]
    assert sent(world)[-1][1] == 4


def test_messages_of_a_stream_continue_each_other() -> None:
    world = calm_world()
    put(world, insert(1))
    subscribe(world)
    for seq in range(2, 6):
        put(world, insert(seq))
    assert sent(world)[0] == (1, 2, [[1]]), "the first part is from the store"
    starts, stops = [s for s, _, _ in sent(world)], [stop for _, stop, _ in sent(world)]
    assert starts[1:] == stops[:-1]
    assert [unit for _, _, units in sent(world) for unit in units] == [[g] for g in range(1, 6)]


def test_short_path_sends_decisions_at_the_end_of_each_batch() -> None:
    world = calm_world()
    put(world, insert(1))
    reader = follow(world)
    world.flush_ns = 50 * MS
    counts: list[int] = []
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    for seq in range(2, 20):
        world.send("c", PRIMARY, insert(seq))
        world.run(200_000)
        counts.append(len(reader.delivered))
    assert counts == list(range(2, 20))


def test_frontier_moves_with_no_ops() -> None:
    world = calm_world(shards=2)
    subscribe(world)
    world.paused.add(BACKUP)
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 0, 9))
    world.run(1 * MS)
    assert sent(world)[-1] == (1, 11, [])


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_stream_has_the_log_with_any_replicas(replicas: int, durability: str) -> None:
    world = calm_world(f=replicas - 1, durability=durability)
    reader = follow(world)
    for seq in range(1, 30):
        put(world, insert(seq), f=replicas - 1)
    world.run(50 * MS)
    assert len(reader.delivered) == 29
    check_reader(world, reader)
    assert reader.number == 1


def test_at_level_disk_it_does_not_wait_for_the_disk() -> None:
    world = calm_world(durability="disk")
    world.flush_ns = 3 * MS
    subscribe(world)
    world.send("c", PRIMARY, insert(1))
    world.run(1 * MS)
    assert sent(world)[-1] == (1, 2, [[1]])
    assert not probe(world).of(wire.InsertAck)
    assert replica(world).state.persisted == 0


@pytest.mark.parametrize("is_backup", [False, True])
def test_only_the_primary_of_the_view_serves_it(is_backup: bool) -> None:
    world = calm_world()
    if is_backup:
        subscribe(world, server=BACKUP)
    else:
        subscribe(world, view=2)
    assert refusals(world) == ["not-ready" if is_backup else "wrong-view"]
    assert not sent(world)
    assert not replica(world, BACKUP)._readers.early.streams


def test_stream_counts_as_a_subscription() -> None:
    world = calm_world()
    state = replica(world).state
    assert (state.has_subscribers, state.has_early_streams) == (False, False)
    subscribe(world)
    assert (state.has_subscribers, state.has_early_streams) == (True, True)
    assert state.counters.subscriptions == 1
    put(world, insert(1, count=3))
    assert state.counters.delivered_records == 3
    world.send("c", PRIMARY, wire.Unsubscribe(CLUSTER, 0, CLIENT, 1))
    world.run(1 * MS)
    assert (state.has_subscribers, state.has_early_streams) == (False, False)


def test_silent_stream_is_dropped() -> None:
    world = calm_world()
    subscribe(world)
    world.run(12 * S)
    assert not replica(world).state.has_early_streams
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, 100))
    world.run(1 * MS)
    assert refusals(world) == ["unknown-subscription"]


def test_subscriptions_of_both_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_SUBSCRIPTIONS", 2)
    world = calm_world()
    for number in (1, 2, 3, 2):
        subscribe(world, number=number)
    assert refusals(world) == ["full"]


def test_credit_is_respected_and_renewed() -> None:
    world = calm_world()
    put(world, *[insert(seq, size=1000) for seq in range(1, 10)])
    size = len(insert(1, size=1000).body) + 64
    subscribe(world, 3 * size)
    put(world, insert(10, size=1000))
    assert [unit for _, _, units in sent(world) for unit in units] == [[1], [2], [3]]
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, 3 * size))
    world.run(1 * MS)
    assert sent(world)[-1] == (4, 4, []), "a renewal is answered"
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, 100 * size))
    world.run(1 * MS)
    assert [u for _, _, units in sent(world) for u in units] == [[gsn] for gsn in range(1, 11)]


def test_large_parts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DELIVER_BYTES", 3000)
    world = calm_world()
    put(world, *[insert(seq, size=1000) for seq in range(1, 10)])
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    put(world, *[insert(seq, size=1000) for seq in range(10, 20)])
    subscribe(world)
    world.run(5 * MS)
    assert [u for _, _, units in sent(world) for u in units] == [[gsn] for gsn in range(1, 20)]
    assert max(len(units) for _, _, units in sent(world)) == 2


def test_streams_that_are_behind_share_the_work_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_WORK", 4)
    world = calm_world()
    put(world, *(insert(seq) for seq in range(1, 4)))
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    put(world, *(insert(seq) for seq in range(4, 11)))
    node = replica(world)
    for number in (1, 2):
        message = wire.Subscribe(CLUSTER, 0, 1, CLIENT, number, 1, 1 << 20, "early")
        node.step(Received(b"reader", message), world.now)
    batches = []
    while node._readers.has_work:
        effects = node.step(BatchEnd(), world.now)
        messages = [one.message for one in effects if isinstance(one, Send)]
        early = [each for each in messages if isinstance(each, wire.Early)]
        batches.append([(e.subscription, len(e.units)) for e in early])
    assert batches[0][1] == (2, 0), "each request is answered at once"
    assert all(sum(count for _, count in batch) <= 4 for batch in batches)
    for number in (1, 2):
        assert sum(count for batch in batches for n, count in batch if n == number) == 10


def test_trim_ends_the_stream() -> None:
    world = calm_world()
    subscribe(world, 10)
    put(world, *[insert(seq) for seq in range(1, 6)])
    trim(world, 5)
    assert [t.first for t in probe(world).of(wire.Trimmed)] == [5]
    assert not replica(world).state.has_early_streams
    subscribe(world, number=2)
    assert [t.first for t in probe(world).of(wire.Trimmed)] == [5, 5]


def test_busy_store_refuses_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    world = calm_world()
    put(world, insert(1))

    def busy(*_: object) -> None:
        raise BusyError("too many open files")

    monkeypatch.setattr(world.stores[PRIMARY], "scan", busy)
    subscribe(world)
    assert refusals(world) == ["not-ready"]
    assert not replica(world).state.has_early_streams


def test_stream_never_passes_the_leases() -> None:
    first = first_lease(1, epochs=1, epoch_size=4)
    world = calm_world(lease=first)
    reader = follow(world)
    put(world, *[insert(seq) for seq in range(1, 8)])
    assert reader.frontier == first.stop
    grant(world, first.following(), 1)
    world.run(20 * MS)
    check_reader(world, reader)
    assert len(reader.delivered) == 7


def test_stream_ends_with_its_view() -> None:
    world = start()
    subscribe(world)
    world.send("c", PRIMARY, insert(1))
    world.send("c", BACKUP, insert(1))
    world.run(2 * MS)
    frozen = promise(world, PRIMARY)
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, 1 << 20))
    world.run(1 * MS)
    assert refusals(world) == ["not-ready"], "a frozen server sends nothing early"
    subscribe(world, number=2)
    assert refusals(world) == ["not-ready"] * 2
    order(world, decision(frozen), PRIMARY, BACKUP)
    begin(world, 2)
    subscribe(world, number=3)
    assert refusals(world)[2:] == ["wrong-view"]
    count = len(sent(world))
    subscribe(world, number=4, view=2)
    assert sent(world)[count:][0][2] == [[1]]


def test_unsettled_stream_is_closed_when_the_next_view_begins() -> None:
    world = start()
    subscribe(world)
    frozen = promise(world, PRIMARY)
    order(world, decision(frozen), PRIMARY, BACKUP)
    begin(world, 2)
    assert refusals(world) == ["not-ready"]
    assert not replica(world).state.has_early_streams


@examples(40, derandomize=True)
@given(st.data())
def test_streams_are_a_prefix_of_the_decisions_with_any_credit(data: st.DataObject) -> None:
    world = calm_world()
    streams: list[EarlyReader] = []
    seq = 0
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["put", "put", "follow", "credit", "wait", "cut"])):
            case "put":
                some = [insert(seq + i, count=data.draw(st.integers(1, 3)),
                               size=data.draw(st.sampled_from((0, 300))))
                        for i in range(1, data.draw(st.integers(2, 5)))]  # fmt: skip
                seq += len(some)
                put(world, *some)
            case "follow":
                streams.append(
                    follow(world, start=data.draw(st.integers(1, 12)),
                           grant=data.draw(st.sampled_from((0, 100, 400, 5000))))
                )  # fmt: skip
            case "credit":
                for reader in streams:
                    reader.grant = data.draw(st.sampled_from((0, 100, 400, 5000)))
            case "wait":
                world.run(data.draw(st.integers(1, 30)) * MS)
            case "cut":
                lost = data.draw(st.booleans())
                world.links[PRIMARY, BACKUP] = Link(lose=lambda lost=lost: lost)
        decided = [gsn for place in places(world, PRIMARY) for gsn in place.gsns]
        for reader in streams:
            gsns = [gsn for gsn, _ in reader.delivered]
            assert gsns == [gsn for gsn in decided if reader.start <= gsn < reader.frontier]
    world.links.clear()
    for reader in streams:
        reader.grant = 1 << 20
    world.run(100 * MS)
    for reader in streams:
        check_reader(world, reader)
