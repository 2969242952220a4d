"""A clean stop: the shard leaves the leases first, and the process ends when no reader waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shard.membership.stopping import STOP_NS, Stopping
from tests.unit.shard.draining import (
    AGAIN,
    BACKUP,
    LEASE,
    PRIMARY,
    WITHOUT,
    announce,
    last_beat,
    received,
    redirects,
    replica,
    send,
    start,
    without_positions,
)
from tests.world import CLUSTER, MS, Link, S, World, insert
from ziplog import wire
from ziplog.core import distance
from ziplog.core.node import StopRequested
from ziplog.core.view import run_of

#: The duration of the first lease.
LEASE_NS = LEASE.epochs * LEASE.epoch_ms * MS
#: Time for which the shard is out of the leases before its server stops.
NOTICE_NS = distance.stop_notice_ns(0)
SERVERS = pytest.mark.parametrize("name", [PRIMARY, BACKUP])


def request(world: World, name: str, run: int = 2 * MS) -> None:
    world.inject(name, StopRequested())
    world.run(run)


@SERVERS
def test_a_server_reports_at_once_that_it_stops(name: str) -> None:
    world = start()
    assert not last_beat(world, name).is_stopping
    request(world, name)
    assert last_beat(world, name).is_stopping


@SERVERS
def test_it_stops_once_its_shard_has_no_positions_and_all_is_stable(name: str) -> None:
    world = start()
    request(world, name)
    send(world, insert(1))
    announce(world, "parked", WITHOUT, starts_in_us=150_000, run=140 * MS)
    send(world, insert(2))
    world.run(NOTICE_NS)
    assert not world.stopped, "the shard had positions until a moment ago"
    world.run(20 * MS)
    assert world.stopped == {name}
    state = replica(world, name).state
    assert state.frontier == WITHOUT.stop
    assert state.stream.stable_end >= LEASE.stop


@SERVERS
def test_it_refuses_inserts_of_clients_that_do_not_know_yet(name: str) -> None:
    world = start()
    request(world, name)
    without_positions(world, "parked")
    world.run(NOTICE_NS // 2)
    send(world, insert(1))
    assert redirects(world) == [(1, 0), (1, 1)], "the client moves the insert"
    assert not world.stopped
    world.run(NOTICE_NS // 2)
    assert world.stopped == {name}


@SERVERS
def test_a_lease_from_before_its_report_is_no_answer(name: str) -> None:
    world = start()
    without_positions(world, "parked")
    request(world, name)
    assert not world.stopped, "the service may have decided to let the shard return"
    announce(world, "live", AGAIN)
    world.run(120 * MS)
    assert not world.stopped, "the shard has positions"
    announce(world, "parked", AGAIN.following(WITHOUT.members))
    world.run(NOTICE_NS)
    assert world.stopped == {name}


@SERVERS
def test_a_server_of_a_shard_that_joins_waits_for_no_lease(name: str) -> None:
    world = start()
    announce(world, "joining", WITHOUT)
    request(world, name)
    world.run(NOTICE_NS)
    assert world.stopped == {name}


def test_it_waits_until_the_last_positions_are_stable() -> None:
    world = start()
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    request(world, PRIMARY)
    for _ in range(5):
        without_positions(world, "parked")
        world.run(100 * MS)
    assert not world.stopped, "its last no-ops are not stable"
    world.links[PRIMARY, BACKUP] = Link()
    world.run(100 * MS + NOTICE_NS)
    assert world.stopped == {PRIMARY}


@SERVERS
def test_it_stops_at_the_latest_after_some_time(name: str) -> None:
    world, lease = start(), LEASE
    request(world, name)
    end = world.now + STOP_NS
    while world.now < end:  # The service does not leave the shard out.
        assert not world.stopped
        lease = lease.following(LEASE.members)
        announce(world, "live", lease, run=LEASE_NS - MS)
    world.run(100 * MS)
    assert world.stopped == {name}


@SERVERS
def test_it_stops_if_the_service_does_not_answer_its_heartbeats(name: str) -> None:
    world = start()
    request(world, name, 250 * MS)
    assert not world.stopped
    beats = [beat for beat in received(world, wire.Heartbeat, "mms-0") if beat.is_stopping]
    assert len(beats) == 3, "a heartbeat every 100 ms"
    world.run(100 * MS)
    assert world.stopped == {name}


@SERVERS
def test_it_stops_at_once_if_no_other_shard_would_go_on(name: str) -> None:
    world = start()
    announce(world, "live", LEASE.following(LEASE.members[:1]))
    request(world, name)
    assert world.stopped == {name}


def test_a_server_in_limbo_stops_at_once() -> None:
    world = start()
    world.kill(BACKUP)
    world.restart(BACKUP, clean=False)
    world.run(5 * MS)
    assert replica(world, BACKUP).state.server_state == "limbo"
    request(world, BACKUP)
    assert world.stopped == {BACKUP}


@SERVERS
def test_a_frozen_server_stops_at_once(name: str) -> None:
    world = start()
    freeze = wire.Freeze(CLUSTER, 0, 1, 2, 0, [run_of(LEASE)])
    world.send("fh-0", name, freeze, reply=True)
    world.run(5 * MS)
    assert replica(world, name).state.server_state == "frozen"
    request(world, name)
    assert world.stopped == {name}


def test_it_waits_although_all_positions_of_the_leases_so_far_are_decided() -> None:
    world = start()
    send(world, wire.Want(CLUSTER, 0, 0, LEASE.stop - 1), to=(PRIMARY,), run=LEASE_NS)
    assert replica(world, PRIMARY).state.frontier == LEASE.stop
    request(world, PRIMARY, 2 * NOTICE_NS)
    assert not world.stopped, "the next lease may come at any time"


def test_a_service_that_was_silent_before_the_request_may_be_there() -> None:
    world = start()
    world.run(S)
    request(world, PRIMARY)
    assert not world.stopped


def test_its_times_follow_the_round_trip() -> None:
    notice_ns = distance.stop_notice_ns(120)
    state = SimpleNamespace(config=SimpleNamespace(limits=wire.Limits(rtt_ms=120)))
    stopping = Stopping(cast("Any", state))
    assert stopping.next_wakeup() is None
    stopping.request(0)
    assert stopping.next_wakeup() == 3 * notice_ns, "the service is gone"
    stopping.on_announcement(STOP_NS)
    assert stopping.next_wakeup() == STOP_NS + notice_ns


def test_without_a_request_nothing_stops() -> None:
    world = start()
    without_positions(world, "parked")
    world.run(3 * S)
    assert not world.stopped
