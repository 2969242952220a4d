"""Shards that left: finalized, or recovered meanwhile; who is told, and whose questions count."""

from mms.commands import RetireShard
from mms.read_barriers import MAX_PENDING
from mms.reconfiguration import FORGET_NS, MAX_CHANGES
from tests.mms.shapes import (
    HANDLER,
    answers,
    change,
    drained,
    is_sealed,
    is_settled,
    left,
    limit,
    members,
    recover,
    servers_of,
    state,
)
from tests.mms.world import CLUSTER, MS, S, World, config
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
    world.hear(second)
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
    world.hear(first)
    first.alive = False
    second.alive = False
    world.run(10 * S)
    second.sealed = second.alive = True
    world.hear(second)
    world.run(3 * S)
    assert state(world, 1) == "leaving"  # the first one was heard too long ago
    first.alive, first.view = True, 7
    world.run(3 * S)
    assert state(world, 1) == "leaving"  # not in this view
    first.view, first.state = 1, "limbo"
    world.run(3 * S)
    assert state(world, 1) == "leaving"
    first.state, lease, first.deaf = "up", first.lease, True
    first.lease = world.service.state.lease_at(limit(world, 1) - 1)
    world.hear(first)
    world.run(3 * S)
    assert state(world, 1) == "leaving"  # it does not know where its shard ends
    first.deaf, first.lease = False, lease
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
    world.ask(Remove(CLUSTER, 9, 1, 1, 2), HANDLER)
    world.run(5 * MS)
    (removed,) = world.answers(Removed, HANDLER)
    assert (removed.limit, limit(world, 1), members(world)) == (stop, stop, [0, 2])
    recover(world, 1)
    assert len(world.answers(Reinserted, HANDLER)) == 1
    assert (state(world, 1), members(world)) == ("leaving", [0, 2])
    assert world.service.state.placements[1].view == 2
    recover(world, 1)
    assert len(world.answers(Reinserted, HANDLER)) == 2  # again is the same
    is_settled(world, 1)
    assert answers(world) == [(7, 1, "")]


def test_a_shard_that_is_removed_during_its_recovery_returns_as_leaving() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    world.ask(Remove(CLUSTER, 9, 1, 1, 2), HANDLER)
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
        world.ask(Remove(CLUSTER, 9, shard, 1, 2), HANDLER)
    world.run(5 * MS)
    prints = [[fingerprint(s.identity) for s in servers_of(world, shard)] for shard in (0, 1)]
    for server in world.servers:
        server.view = 2
    world.ask(Reinsert(CLUSTER, 8, 1, 2, prints[1], 0), HANDLER)
    world.step(Wakeup())
    due = world.service.next_wakeup()
    assert due is not None
    assert due > world.now
    world.run(5 * S)
    assert state(world, 1) == "recovering"
    world.ask(Reinsert(CLUSTER, 7, 0, 2, prints[0], 0), HANDLER)
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
    world.ask(Remove(CLUSTER, 9, 1, 1, 2), HANDLER)
    world.run(5 * MS)
    assert world.answers(Removed, HANDLER)[0].limit == end
    assert state(world, 1) == "recovering"
    # Meanwhile nobody waits for it, whatever a new leader has heard of it.
    world.start()
    world.lead()
    for server in servers_of(world, 1):
        server.alive = False
    world.ask(Trim(CLUSTER, 9, end - 5))
    world.run(10 * S)
    assert [reply.trim for reply in world.answers(TrimReply)] == [end - 5]
    recover(world, 1)
    assert (state(world, 1), limit(world, 1), members(world)) == ("finalized", end, [0, 2])


# --- who is told -----------------------------------------------------------------------------


def test_a_server_that_missed_its_placement_gets_it_again() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    first, second = servers_of(world, 1)
    first.deaf = True
    change(world, 1, "remove")
    world.run(5 * MS)
    assert (first.placed, second.placed) == ("live", "leaving")
    world.run(600 * MS)
    first.deaf = False
    world.hear(first)
    assert first.placed == "leaving"
    first.told.clear()
    world.run(400 * MS)
    first.placed = "parked"  # whatever made it believe that
    world.hear(first)
    assert first.told == []  # it was told just now
    world.run(200 * MS)
    world.hear(first)
    assert first.placed == "leaving"
    first.told.clear()
    second.told.clear()
    world.run(700 * MS)
    assert not [message for message in second.told if message.placements]


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
    world.servers[0].deaf = True
    change(world, 2, "add", replicas=replicas)
    world.run(2 * S)
    assert members(world) == [0, 1, 2]
    world.servers[0].deaf = False
    world.servers[0].told.clear()
    world.run(1100 * MS)
    told: LeaseAnnounced = world.servers[0].told[0]
    assert {placement.shard for placement in told.placements} == {0, 1, 2}
