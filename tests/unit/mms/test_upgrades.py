"""The wire version in use: it rises on request, while every node reports that it knows it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mms.commands import FinalizeShard, RaiseWire, RetireShard, decode_command, decode_refusal
from mms.state import ClusterState
from mms.upgrades import _MAX_NAMED
from mms.waiting_requests import MAX_WAITING
from tests.services import CLUSTER, MS, S
from tests.unit.mms.test_state import apply, with_leases
from tests.unit.mms.world import World, config
from ziplog.core.node import Committed, Halt, LeaderChanged, Restored, WireRecorded
from ziplog.core.wire_use import Release, WireRange
from ziplog.wire import (
    ClusterInfo,
    FinishUpgrade,
    HandlerHeartbeat,
    Hello,
    NodeInfo,
    NodeInfoQuery,
    NotLeader,
    UpgradeFinished,
)

OLD, NEW = Release("0.1"), Release("0.2", WireRange(1, 2))


def upgraded(**options: Any) -> World:
    """Return a cluster of which all storage servers and this membership node run `NEW`."""
    world = World(config(**options))
    world.release = NEW
    world.start()
    for server in world.servers:
        server.release = NEW
    return world.lead().run(5 * S)


def finish(world: World, wire: int = 2, request: int = 9) -> UpgradeFinished | None:
    world.sent.clear()
    world.send(FinishUpgrade(CLUSTER, request, wire))
    world.run(100 * MS)
    replies = world.answers(UpgradeFinished)
    assert len(replies) <= 1
    return replies[0] if replies else None


def raised(world: World) -> list[int]:
    commands = [decode_command(command) for command in world.log]
    return [command.wire for command in commands if isinstance(command, RaiseWire)]


# --- the state ---


def test_the_version_in_use_never_decreases() -> None:
    state = with_leases(1)
    assert state.wire == 1
    assert apply(state, RaiseWire(3)) == ""
    assert apply(state, RaiseWire(2)) == ""
    assert state.wire == 3
    copy = ClusterState()
    copy.restore(state.snapshot())
    assert copy.wire == 3
    assert copy.snapshot() == state.snapshot()


def test_a_snapshot_of_the_former_release_has_the_first_version() -> None:
    state = with_leases(2)
    former = msgspec.msgpack.encode(msgspec.msgpack.decode(state.snapshot())[:-1])
    copy = ClusterState()
    copy.restore(former)
    assert copy.wire == 1
    assert copy.snapshot() == state.snapshot()


def test_any_release_applies_a_version_that_it_does_not_know() -> None:
    # Otherwise two releases in one group would hold different states.
    state = with_leases(1)
    assert apply(state, RaiseWire(255)) == ""
    assert decode_refusal(state.apply(msgspec.msgpack.encode([11, 256]))) == "malformed"


# --- an operator's request ---


def test_the_version_rises_once_all_nodes_know_it() -> None:
    world = upgraded()
    assert world.status()["wire_in_use"] == 1
    reply = finish(world)
    assert reply == UpgradeFinished(CLUSTER, 9, 2)
    assert world.status()["wire_in_use"] == 2
    assert raised(world) == [2]
    # Repeated, or for a version that is in use by now, it changes nothing.
    assert finish(world) == UpgradeFinished(CLUSTER, 9, 2)
    assert finish(world, 1) == UpgradeFinished(CLUSTER, 9, 2)
    assert raised(world) == [2]


@pytest.mark.parametrize("name", ["shard-0-0", "shard-1-1"])
def test_a_server_of_the_former_release_prevents_it(name: str) -> None:
    world = upgraded()
    server = next(one for one in world.servers if one.name == name)
    server.release = OLD
    world.run(2 * S)
    reply = finish(world)
    assert reply == UpgradeFinished(CLUSTER, 9, 1, f"{name} (Ziplog 0.1) knows wire version 1")
    assert world.status()["wire_in_use"] == 1
    assert raised(world) == []


def test_a_server_that_is_down_prevents_it() -> None:
    world = upgraded()
    world.may_warn = True
    world.servers[1].alive = False
    world.run(3 * S)
    reply = finish(world)
    assert reply == UpgradeFinished(CLUSTER, 9, 1, "shard-0-1 is down")
    assert raised(world) == []


def test_a_version_that_nodes_no_longer_know_is_refused() -> None:
    world = upgraded()
    world.servers[0].release = Release("0.4", WireRange(3, 4))
    world.run(2 * S)
    reply = finish(world)
    assert reply is not None
    assert reply.obstacle == "shard-0-0 (Ziplog 0.4) knows wire version 3 to 4"


def test_a_failure_handler_prevents_it_until_it_reports_the_version() -> None:
    world = upgraded(handlers=3)
    for name in ("fh-0", "fh-1", "fh-2"):
        world.send(HandlerHeartbeat(CLUSTER, name, 5, leader=False, version="0.1"), b"handler")
    reply = finish(world)
    assert reply is not None
    known = "(Ziplog 0.1) knows wire version 1"
    assert reply.obstacle == f"fh-0 {known}, fh-1 {known}, fh-2 {known}"
    world.run(3 * S)
    reply = finish(world, request=10)
    assert reply is not None
    assert reply.obstacle == "fh-0 is down, fh-1 is down, fh-2 is down"
    for name in ("fh-0", "fh-1", "fh-2"):
        world.send(HandlerHeartbeat(CLUSTER, name, 5, leader=False, version="0.2", last_wire=2))
    assert finish(world, request=11) == UpgradeFinished(CLUSTER, 11, 2)


def info(name: str, release: Release, role: str = "membership") -> NodeInfo:
    return NodeInfo(CLUSTER, 0, role, name, "c", release.version, *release.wires, [], 1)


def test_the_leader_asks_the_other_membership_nodes_for_their_releases() -> None:
    world = upgraded(mms=3)
    reply = finish(world)
    assert reply is not None
    assert reply.obstacle == "mms-1 is down, mms-2 is down"
    world.sent.clear()
    world.run(5 * S)
    for name in (b"mms-1", b"mms-2"):
        assert 4 <= len(world.answers(NodeInfoQuery, name)) <= 6
    world.send(info("mms-1", NEW), b"mms-1")
    world.send(msgspec.structs.replace(info("mms-2", OLD), free_bytes=0), b"mms-2")
    nodes = world.status()["mms"]
    assert [node["disk"] for node in nodes] == [
        {"free_bytes": 5_000, "reserve_bytes": 0, "full": False},
        None,
        {"free_bytes": 0, "reserve_bytes": 0, "full": True},
    ]
    assert [(node["version"], node["wire_versions"]) for node in nodes] == [
        ("0.2", [1, 2]), ("0.2", [1, 2]), ("0.1", [1, 1])
    ]  # fmt: skip
    reply = finish(world, request=10)
    assert reply is not None
    assert reply.obstacle == "mms-2 (Ziplog 0.1) knows wire version 1"
    world.send(info("mms-2", NEW), b"mms-2")
    assert finish(world, request=11) == UpgradeFinished(CLUSTER, 11, 2)


def test_only_a_node_itself_reports_its_release() -> None:
    world = upgraded(mms=3)
    world.complaints.clear()
    world.send(info("mms-1", NEW), b"client")
    world.send(info("mms-1", NEW), b"mms-2")
    world.send(info("mms-2", NEW, "storage"), b"mms-2")
    assert len(world.complaints) == 3
    reply = finish(world)
    assert reply is not None
    assert reply.obstacle == "mms-1 is down, mms-2 is down"


def test_a_finalized_and_trimmed_shard_counts_no_more() -> None:
    world = upgraded()
    world.may_warn = True
    for one in (s for s in world.servers if s.shard == 1):
        one.alive = False
    for command in (RetireShard(1, 0), FinalizeShard(1)):
        encoded = command.encode()
        world.log.append(encoded)
        world.step(Committed(encoded, world.consensus.apply(encoded)))
        world.run(3 * S)
    reply = finish(world)
    assert reply is not None
    assert reply.obstacle == "shard-1-0 is down, shard-1-1 is down"
    world.is_checked = False
    limit = world.service.state.retired[1].limit
    assert limit
    world.service.state.trim = limit
    assert finish(world, request=10) == UpgradeFinished(CLUSTER, 10, 2)


@pytest.mark.parametrize("late", [0, 100 * MS])
def test_a_refused_request_raises_nothing_later(late: int) -> None:
    """Its client repeated it during a slow commit; the last copy may come after the refusal."""
    world = upgraded()
    world.servers[0].release = OLD
    world.run(2 * S)
    world.sent.clear()
    world.delay = 3 * S
    for _ in range(3):
        world.send(FinishUpgrade(CLUSTER, 9, 2))
        world.run(S)
    world.run(100 * MS)
    (refusal,) = world.answers(UpgradeFinished)
    assert refusal.obstacle == "shard-0-0 (Ziplog 0.1) knows wire version 1"
    world.servers[0].release = NEW
    world.run(2 * S)
    if late:
        world.send(FinishUpgrade(CLUSTER, 9, 2))
    world.run(10 * S)
    assert {reply.obstacle for reply in world.answers(UpgradeFinished)} == {refusal.obstacle}
    assert raised(world) == []


def test_a_request_is_not_refused_while_its_proposal_may_be_committed() -> None:
    world = upgraded()
    world.sent.clear()
    world.delay = 3 * S
    world.servers[0].release = OLD
    world.send_heartbeat(world.servers[0])
    world.send(FinishUpgrade(CLUSTER, 9, 2))  # a barrier comes first
    world.servers[0].release = NEW
    world.send_heartbeat(world.servers[0])
    world.run(500 * MS)
    world.send(FinishUpgrade(CLUSTER, 9, 2))
    world.servers[0].release = OLD
    world.run(5 * S)
    assert raised(world) == [2]
    assert [reply.obstacle for reply in world.answers(UpgradeFinished)] == [""]


def test_a_shard_of_the_file_that_was_not_added_does_not_count() -> None:
    world = upgraded()
    world.config = config(shards=3)
    world.start()
    world.lead().run(5 * S)
    assert finish(world) == UpgradeFinished(CLUSTER, 9, 2)


def test_of_many_obstacles_some_are_named() -> None:
    world = upgraded(shards=_MAX_NAMED)
    for server in world.servers:
        server.release = OLD
    world.run(2 * S)
    reply = finish(world)
    assert reply is not None
    assert reply.obstacle.count("knows wire version 1") == _MAX_NAMED
    assert reply.obstacle.endswith(f", and {_MAX_NAMED} more")


def test_a_request_waits_for_the_commit_and_moves_with_the_leader() -> None:
    world = upgraded(mms=3)
    world.is_cut_off = True
    for name in ("mms-1", "mms-2"):
        world.send(info(name, NEW), name.encode())
    assert finish(world) is None
    world.send(FinishUpgrade(CLUSTER, 9, 2))  # a repetition
    for request in range(10, 10 + MAX_WAITING):
        world.send(FinishUpgrade(CLUSTER, request, 2))
    assert world.status()["wire_in_use"] == 1
    world.sent.clear()
    world.step(LeaderChanged("mms-1", is_self=False))
    redirected = [message.request for message in world.answers(NotLeader)]
    assert redirected == list(range(10, 10 + MAX_WAITING))  # the oldest gave way


def test_a_repetition_is_not_refused_while_its_proposal_may_be_committed() -> None:
    world = upgraded()
    world.is_cut_off = True
    assert finish(world) is None
    world.servers[0].release = OLD
    world.send_heartbeat(world.servers[0])
    assert finish(world) is None, "the version may rise all the same"
    world.is_cut_off = False
    world.run(100 * MS)
    assert raised(world) == [2]
    assert set(world.answers(UpgradeFinished)) == {UpgradeFinished(CLUSTER, 9, 2)}


def test_a_new_leader_refuses_nothing_before_it_can_have_heard_all_nodes() -> None:
    world = upgraded(mms=3)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.run(5 * S)
    world.lead()
    assert finish(world) is None, "mms-1 and mms-2 may be up"
    world.run(2300 * MS)
    assert finish(world) is None
    world.run(100 * MS)
    world.send(info("mms-1", NEW), b"mms-1")
    assert finish(world) == UpgradeFinished(CLUSTER, 9, 1, "mms-2 is down")


# --- the nodes learn it ---


def test_a_node_that_uses_another_version_gets_the_one_in_use() -> None:
    world = upgraded(handlers=1)
    assert all(not server.reports for server in world.servers)
    world.send(HandlerHeartbeat(CLUSTER, "fh-0", 5, leader=False, last_wire=2), b"handler")
    assert world.answers(NodeInfo, b"handler") == []
    finish(world)
    world.run(3 * S)
    for server in world.servers:
        report = server.reports[-1]
        assert (report.cluster, report.role, report.node, report.wire) == (
            CLUSTER, "membership", "mms-0", 2
        )  # fmt: skip
        assert (report.version, report.first_wire, report.last_wire) == ("0.2", 1, 2)
        server.reports.clear()
        server.wire = 2
    world.send(HandlerHeartbeat(CLUSTER, "fh-0", 5, leader=False, last_wire=2), b"handler")
    assert [report.wire for report in world.answers(NodeInfo, b"handler")] == [2]
    world.run(3 * S)
    assert all(not server.reports for server in world.servers)
    world.send(Hello(0, 3))
    assert world.answers(ClusterInfo)[-1].wire == 2


def test_a_follower_reports_nothing() -> None:
    world = upgraded(mms=3)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.servers[0].wire = 2
    world.sent.clear()
    world.send_heartbeat(world.servers[0])
    world.send(HandlerHeartbeat(CLUSTER, "fh-0", 5, leader=False, wire=2), b"handler")
    assert world.answers(NodeInfo, world.servers[0].route) == []
    assert world.answers(NodeInfo, b"handler") == []


def test_a_membership_node_records_the_version_before_it_uses_it() -> None:
    world = upgraded()
    finish(world)
    assert world.recorded == [("mms-0", 2)]
    assert world.service.wire_use.wire == 1
    world.step(WireRecorded(2))
    assert world.service.wire_use.wire == 2


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_a_release_that_does_not_know_the_version_halts(is_snapshot: bool) -> None:
    world = upgraded()
    finish(world)
    world.release = OLD
    world.log, log = [], world.log
    world.start()
    replay = ClusterState()
    effects = []
    for command in log:
        event = Committed(command, replay.apply(command))
        effects += [] if is_snapshot else world.service.step(event, world.now)
    if is_snapshot:
        effects = world.service.step(Restored(replay.snapshot()), world.now)
    reasons = [effect.reason for effect in effects if isinstance(effect, Halt)]
    assert reasons[0] == (
        "the cluster uses wire version 2, but this release (Ziplog 0.1) knows 1: install a release"
        " that knows 2, and start this node again"
    )
