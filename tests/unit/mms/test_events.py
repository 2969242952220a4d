"""The record of events: what is recorded, once, over restarts and changes of the leader."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from mms import event_history
from mms.commands import (
    ClusterEvent,
    CreateCluster,
    RecordEvents,
    RemoveShard,
    RetireShard,
    decode_command,
    decode_refusal,
)
from mms.event_recorder import MAX_PENDING, EventRecorder
from mms.proposals import RETRY_NS
from mms.state import ClusterState
from tests.services import CLUSTER, S
from tests.unit.mms.world import World, config, working
from ziplog.core.node import Committed, LeaderChanged, Propose, Restored
from ziplog.core.view import Placement, Replica
from ziplog.wire import StatusQuery, StatusReply, Trim

if TYPE_CHECKING:
    import pytest


def test_a_cluster_and_its_first_views() -> None:
    events = World(config(shards=2)).lead().run(5 * S).events()
    assert events[0] == ("leader", None, "mms-0", "leads its Raft group")
    assert events[1] == ("cluster", None, None, "cluster c was created")
    assert events[2:] == [
        ("view", shard, None, "live in view 1, from lease 1 on") for shard in (0, 1)
    ]


def test_event_that_a_snapshot_has_is_recorded_once() -> None:
    """The node applied the command of the event, and skips its record for a snapshot."""
    leader = World(config(shards=2, mms=3)).lead().run(5 * S)
    node = World(config(shards=2, mms=3))
    node.now = leader.now
    node.step(LeaderChanged("mms-1", is_self=False))
    removal = RetireShard(1, 0).encode()
    for command in (*leader.log, removal):
        node.step(Committed(command, node.consensus.apply(command)))
    leader.step(Committed(removal, leader.consensus.apply(removal)))
    leader.run(5 * S)
    recorded = leader.events()
    node.now = leader.now
    node.consensus.restore(leader.consensus.snapshot())
    node.step(Restored(leader.consensus.snapshot()))
    node.lead().run(5 * S)
    leads = ("leader", None, "mms-0", "leads its Raft group")
    assert ("shard", 1, None, "removed") in recorded
    assert node.events() == [*recorded, leads]


def test_states_and_restarts_of_servers() -> None:
    world = working()
    before = len(world.events())
    server = world.servers[1]
    server.alive = False
    world.run(10 * S)
    server.alive, server.incarnation, server.state = True, 2, "limbo"
    world.run(3 * S)
    server.state = "up"
    world.run(3 * S)
    server.full = "no room"
    world.run(3 * S)
    name = server.name
    found = [one for one in world.events()[before:] if one[0] in {"node", "restart"}]
    assert found == [
        ("node", 0, name, "suspect: no heartbeat for 2.5 s"),
        ("node", 0, name, "down: no heartbeat for 5 s"),
        ("restart", 0, name, "restarted, process 99"),
        ("node", 0, name, "limbo: it restarted and waits for a recovery"),
        ("node", 0, name, "up"),
        ("node", 0, name, "full: no room"),
    ]


def test_events_have_the_times_of_a_wall_clock_that_was_corrected() -> None:
    world = working()
    before = len(world.service.state.history.events)
    world.wall_offset_ns, started = 10**9 * S, world.now
    world.servers[1].incarnation = 2
    world.run(2 * S)
    (restart,) = world.service.state.history.events[before:]
    assert 10**9 * S + started <= 1000 * restart.at_us <= 10**9 * S + world.now


def test_every_restart_is_recorded_though_the_process_has_the_same_number() -> None:
    world = working()
    before = len(world.events())
    server = world.servers[1]
    for incarnation in (2, 3, 4):
        server.incarnation = incarnation
        world.run(2 * S)
    restarts = [one for one in world.events()[before:] if one[0] == "restart"]
    assert restarts == [("restart", 0, server.name, "restarted, process 99")] * 3


def test_a_leader_repeats_no_restart_that_another_one_recorded() -> None:
    world = working()
    before = len(world.events())
    server = world.servers[1]
    world.step(LeaderChanged("mms-1", is_self=False))
    text = "restarted, process 99"
    restart = ClusterEvent(1, "restart", text, server.shard, server.name)
    command = RecordEvents(world.consensus.history.last + 1, [restart]).encode()
    world.log.append(command)
    world.step(Committed(command, world.consensus.apply(command)))
    server.incarnation = 2
    world.lead().run(2 * S)
    assert [one for one in world.events()[before:] if one[0] == "restart"] == [
        ("restart", server.shard, server.name, text)
    ]


def test_a_pause_of_the_leader_is_no_silence_of_the_nodes() -> None:
    world = working()
    before = world.events()
    world.now += 30 * S
    world.heartbeat_times = dict.fromkeys(world.heartbeat_times, world.now + S)
    world.run(10 * S)
    assert world.events() == before


def test_a_recovery_and_a_trim() -> None:
    world = working()
    before = len(world.events())
    world.log.append(RemoveShard(1, 1, 2).encode())
    world.step(Committed(world.log[-1], world.consensus.apply(world.log[-1])))
    world.run(2 * S)
    assert world.events()[before:] == [("recovery", 1, None, "recovery 2 begins in view 1")]
    for server in world.servers:
        server.frontier = 500
        world.send_heartbeat(server)
    world.send(Trim(0, 7, 100))
    world.run(2 * S)
    assert ("trim", None, None, "trimmed before 100") in world.events()


def test_the_record_survives_a_restart_and_nothing_is_recorded_twice() -> None:
    world = working()
    before = world.events()
    world.start()
    world.lead().run(10 * S)
    assert world.events() == [*before, ("leader", None, "mms-0", "leads its Raft group")]
    restored = ClusterState()
    restored.restore(world.consensus.snapshot())
    assert restored.history.events == world.consensus.history.events
    assert restored.snapshot() == world.consensus.snapshot()


def test_a_new_leader_records_what_the_former_one_did_not() -> None:
    state = ClusterState()
    recorder = EventRecorder(state, lambda: 0)
    recorder.on_applied(CreateCluster(CLUSTER, "c", [placement()]), 1)
    assert [one.kind for one in recorder._pending] == ["cluster"]  # As a follower.
    recorder.start_leading("mms-1", 2)
    (effect,) = recorder._propose(3)
    assert isinstance(effect, Propose)
    command = decode_command(effect.command)
    assert isinstance(command, RecordEvents)
    assert [one.kind for one in command.events] == ["cluster", "leader"]
    assert recorder._propose(4) == []
    assert recorder._propose(3 + RETRY_NS) != []
    # The former leader's proposal was committed after all.
    late = RecordEvents(1, [msgspec.structs.replace(command.events[0], at_us=77)])
    assert state.history.record(late) == ""
    recorder.on_applied(late, 5)
    assert [one.kind for one in recorder._pending] == ["leader"]
    assert state.history.record(command) == "out-of-turn"


def test_a_follower_replays_without_noting() -> None:
    world = working()
    follower = World(config(shards=3))
    # An earlier release recorded no events.
    follower.log = [one for one in world.log if not isinstance(decode_command(one), RecordEvents)]
    follower.start()
    assert follower.service._events._pending == []
    follower.step(LeaderChanged("mms-0", is_self=False))
    follower.service._events.note("trim", "trimmed before 9", follower.now)
    assert len(follower.service._events._pending) == 1


def test_the_number_of_events_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_history, "MAX_EVENTS", 10)
    state = ClusterState()
    assert not decode_refusal(state.apply(CreateCluster(1, "c", [placement()]).encode()))
    for first in range(1, 30, 3):
        events = [ClusterEvent(number, "trim", str(number)) for number in range(first, first + 3)]
        command = RecordEvents(first, events).encode()
        assert not decode_refusal(state.apply(command))
        assert decode_refusal(state.apply(command)) == "out-of-turn"
        state.check()
    document = json.loads(state.history.document(0))
    assert [one["number"] for one in document["events"]] == list(range(21, 31))
    assert document["last"] == 30
    assert [one["number"] for one in json.loads(state.history.document(28))["events"]] == [29, 30]
    recorder = EventRecorder(state, lambda: 0)
    for number in range(1000):
        recorder.note("trim", f"trimmed before {number}", 0)
    assert len(recorder._pending) == MAX_PENDING


def placement() -> Placement:
    return Placement(0, 1, "live", (Replica("shard-0-0", "127.0.0.1:1"),))


def epochs(world: World, start: int, stop: int) -> list[dict[str, Any]]:
    world.sent.clear()
    world.send(StatusQuery(0, 6, "epochs", start, stop))
    found: list[dict[str, Any]] = json.loads(world.answers(StatusReply)[0].document)["epochs"]
    return found


def test_epochs_have_their_lease_positions_and_shards() -> None:
    world = working()
    last = world.lease.first_epoch + world.lease.epochs
    found = epochs(world, 0, 10**9)
    assert [one["epoch"] for one in found] == list(range(min(last, 1000)))
    for one, following in pairwise(found):
        assert one["stop"] == following["start"]
        assert following["lease"] - one["lease"] in {0, 1}
    lease = world.lease
    (one,) = epochs(world, lease.first_epoch, lease.first_epoch + 1)
    assert (one["lease"], one["start"], one["milliseconds"]) == (lease.number, lease.base, 10)
    assert one["stop"] == lease.base + lease.epoch_size
    weights = [(member.shard, member.weight) for member in lease.members]
    assert [(each["shard"], each["weight"]) for each in one["shards"]] == weights
    assert {each["state"] for each in one["shards"]} == {"open"}
    for server in world.servers:
        server.frontier = one["stop"] - (server.shard == 2)
        world.send_heartbeat(server)
    (one,) = epochs(world, lease.first_epoch, lease.first_epoch + 1)
    assert [each["state"] for each in one["shards"]] == ["final", "final", "open"]
    assert epochs(world, last + 1, last + 9) == []
