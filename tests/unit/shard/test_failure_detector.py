"""Suspicion of silent peers, with a probe instead of the failure handler."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.shard.recovery_world import (
    BACKUP,
    PRIMARY,
    crash,
    heard,
    recover,
    replica,
    start,
)
from tests.world import (
    CLUSTER,
    MS,
    Probe,
    S,
    World,
    placements,
)
from ziplog import wire
from ziplog.core.node import Pressed, Received, SettingsChanged


def test_no_peer_is_suspected_while_all_are_up() -> None:
    world = start()
    world.run(10 * S)
    assert not heard(world, wire.Suspect)
    assert heard(world, wire.Heartbeat, "mms-0")


def test_silent_peer_is_suspected_after_the_timeout_until_its_next_heartbeat() -> None:
    world = start()
    world.run(6 * S)
    world.paused.add(PRIMARY)
    world.run(900 * MS)
    assert not heard(world, wire.Suspect)
    world.run(400 * MS)
    reports = heard(world, wire.Suspect)
    assert {(m.node, m.state, m.view, tuple(m.suspects)) for m in reports} == {
        (BACKUP, "up", 1, (0,))
    }
    world.paused.clear()
    world.run(500 * MS)
    count = len(heard(world, wire.Suspect))
    world.run(3 * S)
    assert len(heard(world, wire.Suspect)) == count


@pytest.mark.parametrize("phase_ms", [0, 60, 130, 190])
def test_silent_peer_is_suspected_on_time_also_between_two_heartbeats(phase_ms: int) -> None:
    world = start()
    world.run(6 * S + phase_ms * MS)
    replica(world, BACKUP)._health._beat_due += phase_ms * MS
    world.run(1 * S)
    world.paused.add(PRIMARY)
    silent_since = replica(world, BACKUP)._health._last_beat[0]
    assert world.run_until(lambda: bool(heard(world, wire.Suspect)), 2 * S)
    assert world.now - silent_since == pytest.approx(1 * S, abs=5 * MS)


def set_suspicion(world: World, suspicion_ms: int, *names: str) -> None:
    for name in names:
        replica(world, name).step(SettingsChanged(suspicion_ms), world.now)
    world.run(500 * MS)


def test_the_suspicion_timeout_of_running_servers_changes() -> None:
    world = start()
    world.run(6 * S)
    set_suspicion(world, 10_000, PRIMARY, BACKUP)
    world.paused.add(PRIMARY)
    world.run(9 * S)
    assert not heard(world, wire.Suspect)
    world.paused.clear()
    world.run(1 * S)
    set_suspicion(world, 200, PRIMARY, BACKUP)
    assert not heard(world, wire.Suspect)
    world.paused.add(PRIMARY)
    world.run(300 * MS)
    assert heard(world, wire.Suspect)


@pytest.mark.parametrize("other", [100, 20_000])
def test_servers_with_different_suspicion_timeouts_do_not_suspect_each_other(other: int) -> None:
    world = start()
    world.run(6 * S)
    set_suspicion(world, other, BACKUP)
    world.run(60 * S)
    assert not heard(world, wire.Suspect)
    # Both servers wait for the larger one of the two timeouts.
    larger = max(other, 1000) * MS
    world.paused.add(PRIMARY)
    world.run(larger * 9 // 10)
    assert not heard(world, wire.Suspect)
    world.run(larger // 2)
    assert heard(world, wire.Suspect)


def test_a_server_without_peers_suspects_none() -> None:
    world = start(f=0)
    world.run(6 * S)
    set_suspicion(world, 100, PRIMARY)
    assert not heard(world, wire.Suspect)


def test_heartbeats_follow_the_smallest_timeout_of_all_servers() -> None:
    """A peer may have missed the longer one, or ignore it: an earlier release."""
    world = start()
    world.run(6 * S)
    world.nodes[BACKUP] = Probe()
    set_suspicion(world, 20_000, PRIMARY)
    world.run(10 * S)
    beats = heard(world, wire.Beat, BACKUP)
    assert {beat.suspicion_ms for beat in beats} == {20_000}
    assert len(beats) >= 40


def test_a_peer_that_reports_no_timeout_has_the_one_of_the_start() -> None:
    world = start()
    world.run(6 * S)
    world.nodes[BACKUP] = Probe()
    set_suspicion(world, 100, PRIMARY)
    for _ in range(20):
        beat = wire.Beat(CLUSTER, 0, 1, 1, 7, "up")
        replica(world, PRIMARY).step(Received(BACKUP.encode(), beat), world.now)
        world.run(900 * MS)
    assert not heard(world, wire.Suspect)


def test_a_peer_in_a_later_view_is_not_suspected_while_it_is_heard() -> None:
    """Its log may take long to join."""
    world = start()
    world.run(6 * S)
    world.nodes[PRIMARY] = Probe()
    for _ in range(20):
        beat = wire.Beat(CLUSTER, 0, 2, 0, 7, "joined")
        replica(world, BACKUP).step(Received(PRIMARY.encode(), beat), world.now)
        world.run(500 * MS)
    reports = heard(world, wire.Suspect)
    assert {(m.node, m.state, m.view, tuple(m.suspects)) for m in reports} == {
        (BACKUP, "frozen", 1, ())
    }
    world.run(2 * S)
    assert heard(world, wire.Suspect)[-1].suspects == [0]


def test_server_with_unread_input_suspects_late() -> None:
    world = start()
    world.run(6 * S)
    replica(world, BACKUP).step(Pressed(unread=True), world.now)
    world.paused.add(PRIMARY)
    world.run(4 * S)
    assert not heard(world, wire.Suspect), "a heartbeat may be in unread input"
    world.run(1500 * MS)
    assert heard(world, wire.Suspect), "a flood does not hide a dead server for ever"


def test_silence_counts_from_when_all_input_was_read() -> None:
    world = start()
    world.run(6 * S)
    replica(world, BACKUP).step(Pressed(unread=True), world.now)
    world.paused.add(PRIMARY)
    world.run(2 * S)
    replica(world, BACKUP).step(Pressed(unread=False), world.now)
    world.run(900 * MS)
    assert not heard(world, wire.Suspect)
    world.run(400 * MS)
    assert heard(world, wire.Suspect)


def test_paused_server_suspects_no_peer() -> None:
    world = start()
    world.run(6 * S)
    world.paused |= {PRIMARY, BACKUP}
    world.run(3 * S)
    world.paused.clear()
    world.run(2 * S)
    assert not heard(world, wire.Suspect)


def test_peer_in_limbo_is_suspected_at_once() -> None:
    world = start()
    world.run(100 * MS)
    crash(world, BACKUP)
    world.run(400 * MS)
    reports = {(m.node, m.state, tuple(m.suspects)) for m in heard(world, wire.Suspect)}
    assert (PRIMARY, "up", (1,)) in reports
    assert (BACKUP, "limbo", ()) in reports


def test_healthy_server_reports_while_its_shard_is_being_recovered() -> None:
    """The reason of the recovery may be gone: without a report the handler would wait."""
    world = start()
    placed = replace(placements(1, 1)[0], state="recovering")
    message = wire.LeaseAnnounced(CLUSTER, [], 0, [placed], 0)
    world.send("mms-0", BACKUP, message, reply=True)
    world.run(500 * MS)
    assert {(m.node, m.state) for m in heard(world, wire.Suspect)} == {(BACKUP, "up")}
    world.send("mms-0", BACKUP, replace(message, placements=placements(1, 1)), reply=True)
    world.run(10 * MS)
    count = len(heard(world, wire.Suspect))
    world.run(1 * S)
    assert len(heard(world, wire.Suspect)) == count


def test_heartbeats_from_before_the_view_are_late_and_no_reason_for_the_next_recovery() -> None:
    world = start()
    world.run(6 * S)
    recover(world, PRIMARY, BACKUP)
    primary = replica(world, PRIMARY)
    before = len(heard(world, wire.Suspect))
    late = [m for _, to, m in world.sent if to == PRIMARY and isinstance(m, wire.Beat)][-1]
    late = replace(late, view=1, state="up")
    assert (primary.state.server_state, primary.state.view) == ("up", 2)
    world.inject(PRIMARY, Received(b"<" + BACKUP.encode(), late))
    world.run(200 * MS)
    assert len(heard(world, wire.Suspect)) == before
    # A minute later it is no late heartbeat any more.
    world.run(60 * S)
    world.inject(PRIMARY, Received(b"<" + BACKUP.encode(), late))
    world.run(10 * MS)
    assert len(heard(world, wire.Suspect)) == before + 1
    world.run(1 * S)
    # A process that started since may have lost the view.
    lost = replace(late, view=0, state="limbo", incarnation=late.incarnation + 1)
    world.inject(PRIMARY, Received(b"<" + BACKUP.encode(), lost))
    world.run(200 * MS)
    assert heard(world, wire.Suspect)[-1].suspects == [1]
