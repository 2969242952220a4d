"""Shards that left: finalization, recovery, announcements to their servers, limits on requests."""

from mms.commands import RetireShard
from mms.read_barriers import MAX_PENDING
from mms.reconfiguration import FORGET_NS, MAX_CHANGES
from tests.services import CLUSTER, MS, S
from tests.unit.mms.reconfiguration import (
    HANDLER,
    answers,
    change,
    drained,
    is_sealed,
    is_settled,
    left,
    limit,
    recover,
    servers_of,
)
from tests.unit.mms.world import World, config, members, state
from ziplog.core.node import Committed, LeaderChanged, Restored, Wakeup
from ziplog.core.view import fingerprint
from ziplog.wire import (
    LeaseAnnounced,
    NotLeader,
    Refused,
    Reinsert,
    Reinserted,
    Remove,
    Removed,
    Trim,
    TrimReply,
)

# --- finalized -------------------------------------------------------------------------------


def test_a_shard_is_finalized_when_all_its_servers_are_sealed() -> None:
    world = left()
    is_settled(world, 1)
    change(world, 1, "finalize", request=8)
    world.run(S)
    first, second = servers_of(world, 1)
    first.sealed = True
    world.run(5 * S)
    assert state(world, 1) == "leaving"
    second.sealed = True
    world.send_heartbeat(second)
    assert answers(world) == [(7, 1, "")]
    world.run(3 * MS)
    assert state(world, 1) == "finalized"
    assert answers(world)[1:] == [(8, 1, "")]
    assert {first.placed, second.placed} == {"finalized"}
    assert world.commands().count("FinalizeShard") == 1


def test_old_or_foreign_reports_seal_nothing() -> None:
    world = left()
    first, second = servers_of(world, 1)
    is_settled(world, 1)
    first.sealed = True
    world.send_heartbeat(first)
    first.alive = False
    second.alive = False
    world.run(10 * S)
    second.sealed = second.alive = True
    world.send_heartbeat(second)
    world.run(3 * S)
    assert state(world, 1) == "leaving"  # the heartbeat of the first one is too old
    first.alive, first.view = True, 7
    world.run(3 * S)
    assert state(world, 1) == "leaving"  # not in this view
    first.view, first.state = 1, "limbo"
    world.run(3 * S)
    assert state(world, 1) == "leaving"
    first.state, lease, first.is_disconnected = "up", first.lease, True
    first.lease = world.service.state.lease_at(limit(world, 1) - 1)
    world.send_heartbeat(first)
    world.run(3 * S)
    assert state(world, 1) == "leaving"  # it does not know the end of its shard
    first.is_disconnected, first.lease = False, lease
    world.run(3 * S)
    assert state(world, 1) == "finalized"


def test_nothing_is_sealed_while_it_is_in_the_leases() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    change(world, 1, "finalize")
    world.run(5 * MS)
    is_sealed(world, 1)
    world.run(S)
    assert (state(world, 1), limit(world, 1)) == ("leaving", 0)
    world.run(3 * S)
    assert (state(world, 1), answers(world)) == ("finalized", [(7, 1, "")])


# --- recovery --------------------------------------------------------------------------------


def test_a_shard_that_is_recovered_while_it_leaves_is_out_and_comes_back_as_leaving() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    change(world, 1, "remove")
    world.run(5 * MS)
    stop = world.lease.stop
    world.send(Remove(CLUSTER, 9, 1, 1, 2), HANDLER)
    world.run(5 * MS)
    (removed,) = world.answers(Removed, HANDLER)
    assert (removed.limit, limit(world, 1), members(world)) == (stop, stop, [0, 2])
    recover(world, 1)
    assert len(world.answers(Reinserted, HANDLER)) == 1
    assert (state(world, 1), members(world)) == ("leaving", [0, 2])
    assert world.service.state.placements[1].view == 2
    recover(world, 1)
    assert len(world.answers(Reinserted, HANDLER)) == 2  # a repeated request
    is_settled(world, 1)
    assert answers(world) == [(7, 1, "")]


def test_a_shard_that_is_removed_during_its_recovery_returns_as_leaving() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    world.send(Remove(CLUSTER, 9, 1, 1, 2), HANDLER)
    world.run(5 * MS)
    change(world, 1, "remove")
    world.run(5 * MS)
    assert state(world, 1) == "recovering"
    assert limit(world, 1) == world.answers(Removed, HANDLER)[0].limit
    recover(world, 1)
    assert (state(world, 1), members(world)) == ("leaving", [0, 2])


def test_a_shard_that_left_returns_with_the_next_lease_without_a_busy_loop() -> None:
    world = left(shards=2)
    for shard in (0, 1):
        world.send(Remove(CLUSTER, 9, shard, 1, 2), HANDLER)
    world.run(5 * MS)
    prints = [[fingerprint(s.identity) for s in servers_of(world, shard)] for shard in (0, 1)]
    for server in world.servers:
        server.view = 2
    world.send(Reinsert(CLUSTER, 8, 1, 2, prints[1], 0), HANDLER)
    world.step(Wakeup())
    due = world.service.next_wakeup()
    assert due is not None
    assert due > world.now
    world.run(5 * S)
    assert state(world, 1) == "recovering"
    world.send(Reinsert(CLUSTER, 7, 0, 2, prints[0], 0), HANDLER)
    world.run(5 * MS)
    assert (state(world, 0), state(world, 1), members(world)) == ("live", "leaving", [0])
    assert sorted(answer.request for answer in world.answers(Reinserted, HANDLER)) == [7, 8]


def test_a_finalized_shard_is_recovered_and_comes_back_as_finalized() -> None:
    world = left()
    end = limit(world, 1)
    is_settled(world, 1)
    is_sealed(world, 1)
    world.run(5 * MS)
    assert state(world, 1) == "finalized"
    world.send(Remove(CLUSTER, 9, 1, 1, 2), HANDLER)
    world.run(5 * MS)
    assert world.answers(Removed, HANDLER)[0].limit == end
    assert state(world, 1) == "recovering"
    # Meanwhile nothing waits for it, whatever a new leader knows of it.
    world.start()
    world.lead()
    for server in servers_of(world, 1):
        server.alive = False
    world.send(Trim(CLUSTER, 9, end - 5))
    world.run(10 * S)
    assert [reply.trim for reply in world.answers(TrimReply)] == [end - 5]
    recover(world, 1)
    assert (state(world, 1), limit(world, 1), members(world)) == ("finalized", end, [0, 2])


# --- who is told -----------------------------------------------------------------------------


def test_a_server_that_missed_its_placement_gets_it_again() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    first, second = servers_of(world, 1)
    first.is_disconnected = True
    change(world, 1, "remove")
    world.run(5 * MS)
    assert (first.placed, second.placed) == ("live", "leaving")
    world.run(600 * MS)
    first.is_disconnected = False
    world.send_heartbeat(first)
    assert first.placed == "leaving"
    first.announced.clear()
    world.run(400 * MS)
    first.placed = "parked"  # for whatever reason
    world.send_heartbeat(first)
    assert first.announced == []  # it got the announcement just now
    world.run(200 * MS)
    world.send_heartbeat(first)
    assert first.placed == "leaving"
    first.announced.clear()
    second.announced.clear()
    world.run(700 * MS)
    assert not [message for message in second.announced if message.placements]


def test_a_server_of_a_shard_that_is_not_added_yet_gets_no_placement() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    before = world.service.state.snapshot()
    world.log.clear()  # a node of the service is started with a later cluster file
    world.config = config(shards=4)
    world.start()
    world.service.step(LeaderChanged("mms-0", is_self=False), world.now)
    world.consensus.restore(before)
    world.step(Restored(before))
    world.lead()
    world.add_servers(3)
    world.run(5 * S)
    assert members(world) == [0, 1, 2]
    assert servers_of(world, 3)[0].placed == ""


# --- questions -------------------------------------------------------------------------------


def test_requests_are_bounded_and_forgotten_when_they_are_not_repeated() -> None:
    world = World().lead().run(5 * S)
    replicas = world.add_servers(2)
    for server in servers_of(world, 2):
        server.alive = False
    for request in range(MAX_CHANGES + 5):
        change(world, 2, "add", request=request, replicas=replicas)
    assert len(world.answers(Refused)) == 5
    assert MAX_CHANGES < MAX_PENDING
    world.run(FORGET_NS - S)
    change(world, 2, "add", request=3, replicas=replicas)  # this one is repeated
    assert len(world.answers(Refused)) == 5
    world.run(2 * S)
    for server in servers_of(world, 2):
        server.alive = True
    world.run(3 * S)
    assert answers(world) == [(3, 2, "")]


def test_a_repeated_request_gets_the_same_reply_and_changes_nothing() -> None:
    world = World().lead().run(5 * S)
    replicas = world.add_servers(2)
    change(world, 2, "remove", request=1)
    world.run(5 * MS)
    assert answers(world) == [(1, 2, "no-such-shard")]
    change(world, 2, "add", request=2, replicas=replicas)
    world.run(5 * S)
    change(world, 2, "remove", request=1)
    world.run(5 * S)
    assert answers(world) == [(1, 2, "no-such-shard"), (2, 2, ""), (1, 2, "no-such-shard")]
    assert state(world, 2) == "live"
    assert world.commands().count("RetireShard") == 1
    for request in range(3, 5 * MAX_CHANGES):
        change(world, 9, "remove", request=request)
        world.run(5 * MS)
    change(world, 2, "remove", request=1)  # it is forgotten
    world.run(5 * S)
    assert state(world, 2) == "leaving"


def test_only_the_leader_takes_requests_and_redirects_all_when_it_steps_down() -> None:
    world = World(config(mms=3)).lead().run(5 * S)
    change(world, 1, "remove", request=1)
    world.step(LeaderChanged("mms-1", is_self=False))
    change(world, 1, "remove", request=2)
    assert [(m.request, m.leader) for m in world.answers(NotLeader)] == [
        (1, "127.0.0.1:7001"), (2, "127.0.0.1:7001")
    ]  # fmt: skip
    world.run(S)
    assert answers(world) == []


def test_a_command_that_got_lost_is_proposed_again() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    change(world, 1, "remove")
    world.proposed.clear()
    world.run(3 * S)
    assert world.commands().count("RetireShard") == 1
    assert state(world, 1) == "leaving"


def test_a_follower_keeps_up_and_announces_nothing() -> None:
    world = left()
    world.step(LeaderChanged("mms-1", is_self=False))
    world.sent.clear()
    command = RetireShard(2).encode()
    world.log.append(command)
    is_sealed(world, 1)
    world.step(Committed(command, world.consensus.apply(command)))
    drained(world, 2)
    assert (world.sent, world.proposed) == ([], [])
    assert state(world, 2) == "leaving"


# --- announcements -----------------------------------------------------------------------------


def test_announcements_say_all_placements_with_a_lease_that_changes_some() -> None:
    world = World(config(shards=2)).lead().run(5 * S)
    replicas = world.add_servers(2)
    world.servers[0].is_disconnected = True
    change(world, 2, "add", replicas=replicas)
    world.run(2 * S)
    assert members(world) == [0, 1, 2]
    world.servers[0].is_disconnected = False
    world.servers[0].announced.clear()
    world.run(1100 * MS)
    announced: LeaseAnnounced = world.servers[0].announced[0]
    assert {placement.shard for placement in announced.placements} == {0, 1, 2}
