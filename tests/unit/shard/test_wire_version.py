"""The wire version in use at a storage server (docs/protocol.md, section 15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shard.replica import Replica
from tests.world import CLUSTER, S, World, calm_world, probe
from ziplog import wire
from ziplog.core.node import Halt, LogWarning, Received, RecordWire, ReportBadMessage, WireRecorded
from ziplog.core.wire_use import Release, WireRange

if TYPE_CHECKING:
    from ziplog.core.node import Effect

SERVER, SERVICE = "shard-0-0", b"mms-0"
NEW = Release("0.2", WireRange(1, 2))


def started(release: Release = NEW, wire: int = 1) -> World:
    return calm_world(release=release, wire=wire)


def report(world: World, wire_in_use: int, src: bytes = SERVICE) -> list[Effect]:
    info = wire.NodeInfo(CLUSTER, 0, "membership", "mms-0", "c", "0.2", 1, 2, [], wire_in_use)
    return world.nodes[SERVER].step(Received(src, info), world.now)


def last_heartbeat(world: World) -> wire.Heartbeat:
    world.run(2 * S)
    heartbeats: list[wire.Heartbeat] = probe(world, "mms-0").of(wire.Heartbeat)
    return next(one for one in reversed(heartbeats) if one.node == SERVER)


def test_a_heartbeat_has_the_versions_of_the_release_and_the_one_in_use() -> None:
    beat = last_heartbeat(started())
    assert (beat.version, beat.first_wire, beat.last_wire, beat.wire) == ("0.2", 1, 2, 1)
    assert last_heartbeat(started(wire=2)).wire == 2


def test_the_version_in_use_counts_once_it_is_recorded() -> None:
    world = started()
    assert report(world, 2) == [RecordWire(2)]
    assert last_heartbeat(world).wire == 1
    world.inject(SERVER, WireRecorded(2))
    assert last_heartbeat(world).wire == 2
    assert report(world, 2) == []


@pytest.mark.parametrize("src", [b"\0client", b"shard-0-1"])
def test_only_the_membership_service_reports_the_version(src: bytes) -> None:
    world = started()
    [effect] = report(world, 2, src)
    assert isinstance(effect, ReportBadMessage)


def test_a_server_warns_once_of_a_membership_node_of_another_cluster() -> None:
    world = started()
    refusal = wire.Refused(CLUSTER + 1, 0, 0, 0, 1, "wrong-cluster")
    node = world.nodes[SERVER]
    [effect] = node.step(Received(SERVICE, refusal), world.now)
    assert isinstance(effect, LogWarning)
    ids = f"has the data of cluster {CLUSTER:032x}, but mms-0 belongs to cluster {CLUSTER + 1:032x}"
    assert f"{SERVER} {ids}. Stop the server, and restore" in effect.text
    assert node.step(Received(SERVICE, refusal), world.now) == []
    [effect] = node.step(Received(b"shard-0-1", refusal), world.now)
    assert isinstance(effect, ReportBadMessage)


def test_a_server_of_a_release_that_does_not_know_the_version_halts() -> None:
    world = started(Release("0.1"))
    [effect] = report(world, 2)
    assert isinstance(effect, Halt)
    assert "wire version 2, but this release (Ziplog 0.1) knows 1" in effect.reason
    # A membership node of an earlier release does not report it.
    assert report(world, 0) == []


def test_the_version_is_read_from_the_directory() -> None:
    node = started(wire=2).nodes[SERVER]
    assert isinstance(node, Replica)
    assert node.wire_use.wire == 2
