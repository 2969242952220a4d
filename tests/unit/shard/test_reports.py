"""When a backup reports: at once if anything waits for the report, else within 10 ms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard.ordering import forwards as module
from shard.ordering import reports as backup_reports
from shard.ordering.reports import LINGER_AGAIN_NS, REPORT_LINGER_NS
from shard.replica import Replica
from tests.world import CLUSTER, MS, US, Link, World, calm_world, insert, probe
from ziplog import wire

if TYPE_CHECKING:
    import pytest

    from shard.ordering.primary import Primary

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"
#: A flush reports, too; none happens in these tests, unless a test is about it.
NO_FLUSH_NS = 100 * MS


def settled(f: int = 1) -> World:
    """Return a world with a stable record, whose backups have reported everything."""
    world = calm_world(f=f)
    world.send("c", PRIMARY, insert(1))
    for server in range(1, f + 1):
        world.send("c", f"shard-0-{server}", insert(1))
    world.run(50 * MS)
    world.flush_ns = NO_FLUSH_NS
    world.sent.clear()
    return world


def primary_of(world: World) -> Primary:
    replica = world.nodes[PRIMARY]
    assert isinstance(replica, Replica)
    assert replica._primary is not None
    return replica._primary


def place(world: World, seq: int = 2) -> int:
    """Insert a record at both replicas; return the time once it was forwarded."""
    world.send("c", PRIMARY, insert(seq))
    world.send("c", BACKUP, insert(seq))
    world.run(400 * US)
    return world.now


def reports(world: World) -> list[int]:
    """Return what the reports say that the backup holds."""
    return [m.replicated_up_to for _, _, m in world.sent if isinstance(m, wire.Report)]


def unstable(world: World) -> int:
    stream = primary_of(world)._state.stream
    return stream.last - stream.stable


def test_report_lingers_while_nothing_waits_for_it() -> None:
    world = settled()
    place(world)
    world.run(REPORT_LINGER_NS - 2 * MS)
    assert reports(world) == []
    assert unstable(world)
    world.run(3 * MS)
    assert len(reports(world)) == 1
    assert unstable(world) == 0


def test_report_follows_a_forward_that_a_client_waits_for() -> None:
    world = settled()
    end = primary_of(world)._state.stream.end
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 1, end))
    place(world)
    assert len(reports(world)) == 1
    assert [m.request for m in probe(world).of(wire.Frontier)] == [1]


def test_client_that_waits_for_a_lingering_report_gets_it_at_once() -> None:
    world = settled()
    place(world)
    assert reports(world) == []
    world.send("c", PRIMARY, wire.Want(CLUSTER, 0, 1, primary_of(world)._state.stream.end - 1))
    world.run(400 * US)
    assert [m.request for m in probe(world).of(wire.Frontier)] == [1]


def test_report_follows_a_flush() -> None:
    world = settled()
    world.flush_ns = 500 * US
    place(world)
    world.run(1 * MS)
    assert len(reports(world)) == 1


def test_report_follows_a_change_of_what_the_primary_may_do() -> None:
    world = settled()
    place(world)
    backup = world.nodes[BACKUP]
    assert isinstance(backup, Replica)
    assert backup._backup is not None
    backup._backup._reports._wrong_guesses = 0
    before = len(reports(world))
    place(world, 3)
    world.run(LINGER_AGAIN_NS)
    assert len(reports(world)) == before + 1


def test_watermarks_alone_need_no_report() -> None:
    world = settled()
    world.flush_ns = 500 * US
    place(world)
    world.run(40 * MS)
    assert len(reports(world)) == 1
    watermarks = [m for _, _, m in world.sent if isinstance(m, wire.Forward) and not m.decisions]
    assert watermarks


def test_backup_with_a_backlog_reports_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = settled()
    with monkeypatch.context() as patch:
        patch.setattr(backup_reports, "MAX_BACKLOG_BYTES", -1)
        place(world)
        backup = world.nodes[BACKUP]
        assert isinstance(backup, Replica)
        assert backup._backup is not None
        backup._backup._reports._wrong_guesses = 0  # Decisions may linger, which is to be reported.
        for _ in range(15):
            world.run(MS)
            due = backup._backup.next_wakeup(world.now)
            assert due is not None
            assert due > world.now, "the server would spin"
        assert reports(world) == []
    world.run(REPORT_LINGER_NS)
    assert reports(world)


def test_report_follows_forwards_of_a_primary_with_subscribers() -> None:
    world = settled()
    primary_of(world)._state.has_followers = True
    place(world)
    assert len(reports(world)) == 1


def test_report_follows_forwards_while_much_is_unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_UNSTABLE_RECORDS", "MAX_UNSTABLE_BYTES", "MAX_UNSTABLE_DECISIONS"):
        world = settled()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, 3)
            place(world)
            assert len(reports(world)) == 1, name


def test_lost_report_is_repeated() -> None:
    world = settled()
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    place(world)
    world.run(REPORT_LINGER_NS)
    assert unstable(world)
    world.links.clear()
    world.run(50 * MS)
    assert unstable(world) == 0


def test_backups_with_subscribers_report_at_once_in_a_larger_shard() -> None:
    world = settled(f=2)
    primary_of(world)._backups._subscribed[1] = world.now + 100 * MS
    world.send("c", PRIMARY, insert(2))
    world.send("c", BACKUP, insert(2))
    world.send("c", "shard-0-2", insert(2))
    world.run(400 * US)
    assert len(reports(world)) == 2
