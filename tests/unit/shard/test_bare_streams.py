"""Bare streams: a server sends its frontier to a reader that wants no records."""

from __future__ import annotations

import msgspec
import pytest

from shard.ordering.reports import LINGER_AGAIN_NS
from tests.unit.shard.test_readers import BACKUP, PRIMARY, calm_world, put, replica, sent, trim
from tests.unit.shard.test_reports import NO_FLUSH_NS, reports
from tests.world import CLUSTER, MS, US, World, first_lease, grant, insert, probe
from ziplog import wire
from ziplog.core.node import BatchEnd, Received

CLIENT = b"c" * 16


def open_stream(world: World, *, credit: int, server: str = PRIMARY) -> None:
    message = wire.Subscribe(CLUSTER, 0, 1, CLIENT, 1, 1, credit, "frontier")
    world.send("c", server, message)
    world.run(2 * MS)


def raise_credit(world: World, gsn: int) -> None:
    world.send("c", PRIMARY, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, gsn))
    world.run(2 * MS)


def test_stream_has_frontiers_and_no_records() -> None:
    world = calm_world()
    open_stream(world, credit=100)
    put(world, insert(1), insert(2))
    put(world, insert(3))
    assert all(units == [] for _, _, units in sent(world))
    assert sent(world)[0][:2] == (1, 1), "the opening is answered"
    assert sent(world)[-1][1] == 4
    starts, stops = [s for s, _, _ in sent(world)], [stop for _, stop, _ in sent(world)]
    assert starts[1:] == stops[:-1], "each message continues the one before"
    assert sum(len(d.leases) for d in probe(world).of(wire.Deliver)) >= 1


def test_frontiers_end_behind_the_credit() -> None:
    world = calm_world()
    open_stream(world, credit=2)
    for seq in range(1, 8):
        put(world, insert(seq))
    assert sent(world)[-1][1] == 3, "the first frontier above the credit is the last one"
    raise_credit(world, 4)
    assert sent(world)[-1][1] == 8, "the frontier moved meanwhile: the answer comes at once"


def test_raised_credit_is_answered_when_the_frontier_moves() -> None:
    world = calm_world()
    open_stream(world, credit=0)
    answers = len(sent(world))
    raise_credit(world, 1)
    assert len(sent(world)) == answers
    raise_credit(world, 1)
    assert len(sent(world)) == answers + 1, "a repetition is a sign of life"
    put(world, insert(1))
    assert sent(world)[-1][:2] == (1, 2)


@pytest.mark.parametrize("server", [PRIMARY, BACKUP])
def test_append_gets_its_frontier_without_credit(server: str) -> None:
    world = calm_world()
    open_stream(world, credit=0, server=server)
    appended = [insert(1), msgspec.structs.replace(insert(2), sealed=True)]
    put(world, *[msgspec.structs.replace(each, client=CLIENT) for each in appended])
    world.run(20 * MS)  # the primary learns what is stable from a report
    assert sent(world)[-1][1] == 3
    put(world, msgspec.structs.replace(insert(3), client=CLIENT))
    world.run(20 * MS)
    assert sent(world)[-1][1] == 3, "a plain insert raises no credit"


def test_frontier_is_stable_and_not_only_decided() -> None:
    world = calm_world()
    open_stream(world, credit=100)
    world.kill("shard-0-1")
    put(world, insert(1))
    assert replica(world).state.stream.end == 2, "the primary has decided it"
    raise_credit(world, 200)
    raise_credit(world, 200)
    assert sent(world)[-1][1] == 1


def test_reader_counts_as_a_subscriber() -> None:
    world = calm_world()
    assert not replica(world).state.has_subscribers
    open_stream(world, credit=0)
    assert replica(world).state.has_subscribers
    world.run(11_000 * MS)
    assert not replica(world).state.has_subscribers, "it was silent"


def test_frontier_moves_with_a_lease_alone() -> None:
    first = first_lease(1, epochs=1, epoch_size=4)
    world = calm_world(lease=first)
    open_stream(world, credit=100)
    put(world, *[insert(seq) for seq in range(1, 5)])
    assert sent(world)[-1][1] == 5
    grant(world, first.following(), 1)
    put(world, insert(5))
    assert sent(world)[-1][1] == 6


def test_trim_ends_the_stream() -> None:
    world = calm_world()
    open_stream(world, credit=0)
    for seq in range(1, 6):
        put(world, insert(seq))
    trim(world, 5)
    assert [t.first for t in probe(world).of(wire.Trimmed)] == [5]
    assert not replica(world).state.has_subscribers


# --- clients that wait for nothing ---


def idle_client(server: str, shards: int = 1) -> World:
    """Return a world whose only reader waits for nothing; backups have reported everything."""
    world = calm_world(shards=shards)
    put(world, insert(1))
    world.run(50 * MS)
    world.flush_ns = NO_FLUSH_NS
    backup = replica(world, BACKUP)._backup
    assert backup is not None
    backup._reports._wrong_guesses = 0
    world.send("c", server, wire.Subscribe(CLUSTER, 0, 1, CLIENT, 1, 1, 0, "frontier"))
    world.run(50 * MS)
    world.sent.clear()
    return world


def place(world: World, seq: int, *, sealed: bool = False) -> None:
    """Insert a record, and run until its frontier would be there if nothing lingered."""
    message = msgspec.structs.replace(insert(seq), sealed=sealed)
    for name in (PRIMARY, BACKUP):
        world.send("c", name, message)
    world.run(500 * US)


def forwards(world: World) -> int:
    """Return the number of decisions that were forwarded."""
    return sum(len(m.decisions) for _, _, m in world.sent if isinstance(m, wire.Forward))


@pytest.mark.parametrize("server", [PRIMARY, BACKUP])
def test_inserts_beside_a_client_that_waits_for_nothing_linger(server: str) -> None:
    world = idle_client(server)
    place(world, 2)
    assert (forwards(world), reports(world)) == (0, [])
    world.run(4 * MS)
    assert (forwards(world), reports(world)) == (1, [])


@pytest.mark.parametrize("server", [PRIMARY, BACKUP])
def test_an_append_of_such_a_client_gets_its_frontier_at_once(server: str) -> None:
    world = idle_client(server)
    place(world, 2)
    place(world, 3, sealed=True)
    assert forwards(world) == 2
    assert sent(world)[-1][1] == 4
    before = forwards(world)
    place(world, 4)
    assert forwards(world) == before, "it waits for nothing again"


@pytest.mark.parametrize(("server", "delays"), [(PRIMARY, 4), (BACKUP, 3)])
@pytest.mark.parametrize("pause", [0, 4 * MS])
def test_a_client_that_begins_to_wait_gets_the_frontier_at_once(
    server: str, delays: int, pause: int
) -> None:
    """The decision may linger at the primary, or the report of it at the backup."""
    world = idle_client(server)
    place(world, 2)
    world.run(pause)
    assert forwards(world) == (1 if pause else 0)
    end = replica(world).state.stream.end
    world.send("c", server, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, end - 1))
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 0, end - 1))
    world.run(delays * 50 * US + 10 * US)
    assert sent(world)[-1][1] == end


@pytest.mark.parametrize("server", [PRIMARY, BACKUP])
def test_other_shards_get_hints_of_appends_only(server: str) -> None:
    world = idle_client(server, shards=2)
    place(world, 2)
    world.run(10 * MS)
    assert forwards(world) == 1
    assert not any(isinstance(m, wire.Ahead) for _, _, m in world.sent)
    place(world, 3, sealed=True)
    assert hints(world) == 2 * [replica(world).state.stream.last_record]


def test_primary_forwards_at_once_until_no_append_follows() -> None:
    world = idle_client(BACKUP)
    demands: list[bool] = []
    for seq in range(2, 6):
        end = replica(world).state.stream.end
        world.send("c", BACKUP, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, end))
        world.run(100 * US)
        place(world, seq)
        demands = [m.forward_immediately for _, _, m in world.sent if isinstance(m, wire.Report)]
        assert set(demands) == {True}
    world.run(LINGER_AGAIN_NS)
    answers = [m.forward_immediately for _, _, m in world.sent if isinstance(m, wire.Report)]
    assert answers[len(demands) :] == [False]


def test_report_for_another_reason_keeps_the_demand() -> None:
    world = idle_client(BACKUP)
    world.send("e", PRIMARY, wire.Subscribe(CLUSTER, 0, 1, b"e" * 16, 7, 1, 0, "frontier"))
    world.run(2 * MS)
    world.sent.clear()
    end = replica(world).state.stream.end
    world.send("e", PRIMARY, wire.Credit(CLUSTER, 0, 1, b"e" * 16, 7, end))
    world.send("c", BACKUP, wire.Credit(CLUSTER, 0, 1, CLIENT, 1, end))
    world.run(100 * US)
    place(world, 2)
    world.run(300 * US)
    sent_reports = [m for _, _, m in world.sent if isinstance(m, wire.Report)]
    assert len(sent_reports) > 1
    assert all(report.forward_immediately for report in sent_reports)


def hints(world: World) -> list[int]:
    return [m.gsn for _, _, m in world.sent if isinstance(m, wire.Ahead)]


def test_wrong_guesses_alone_cause_no_hints() -> None:
    world = idle_client(BACKUP, shards=2)
    backup = replica(world, BACKUP)._backup
    assert backup is not None
    backup._reports._wrong_guesses = 2**20 - 1
    world.inject(BACKUP, BatchEnd())
    world.run(1 * MS)
    place(world, 2)
    assert (forwards(world), hints(world)) == (1, []), "no reader waits for the decision"
    world.send("c", BACKUP, wire.Subscribe(CLUSTER, 0, 1, CLIENT, 2, 1, 2**20))
    world.run(1 * MS)
    world.sent.clear()
    place(world, 3)
    assert hints(world) == 2 * [replica(world).state.stream.last_record]


def test_a_backup_of_an_earlier_release_may_have_followers() -> None:
    world = idle_client(BACKUP, shards=2)
    report = wire.Report(CLUSTER, 0, 1, 1, 1, 1, 1, True, True)
    world.inject(PRIMARY, Received(b"shard-0-1", report))
    world.sent.clear()
    place(world, 2)
    assert hints(world) == 2 * [replica(world).state.stream.last_record]
