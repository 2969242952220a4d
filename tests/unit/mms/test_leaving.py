"""Shards that leave the leases, and the conditions for that."""

from typing import Any

import msgspec

from mms.commands import RetireShard
from mms.reconfiguration import LEAVE_NS
from tests.services import CLUSTER, MS, S
from tests.unit.mms.reconfiguration import (
    HANDLER,
    answers,
    change,
    drained,
    is_settled,
    left,
    limit,
    servers_of,
)
from tests.unit.mms.world import World, config, members, state
from ziplog.core.node import LeaderChanged
from ziplog.core.view import Lease, fingerprint
from ziplog.wire import Rate, Reinsert, Remove, Trim, TrimReply, Want


def test_a_shard_leaves_once_nothing_waits_there() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    change(world, 1, "remove")
    assert state(world, 1) == "live"  # nothing is committed yet
    world.run(5 * MS)
    assert (state(world, 1), limit(world, 1)) == ("leaving", 0)
    assert {server.placed for server in servers_of(world, 1)} == {"leaving"}  # at once
    world.run(500 * MS)
    assert members(world) == [0, 1, 2]
    stop = world.lease.stop
    drained(world, 1)
    world.run(3 * MS)
    assert (members(world), limit(world, 1)) == ([0, 2], stop)
    assert world.lease.base == stop
    assert world.servers[0].announced[-1].starts_in_us == 0
    assert answers(world) == []  # what it owns is not decided yet
    is_settled(world, 1)
    assert answers(world) == [(7, 1, "")]
    world.run(60 * S)
    assert (members(world), state(world, 1)) == ([0, 2], "leaving")  # and does not come back


def test_it_is_not_waited_for_longer_than_two_seconds() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    change(world, 1, "remove")
    world.run(LEAVE_NS - 100 * MS)
    assert members(world) == [0, 1, 2]
    world.run(500 * MS)
    assert members(world) == [0, 2]
    # A new leader does not know for how long it has been leaving.
    change(world, 2, "remove", request=8)
    world.run(S)
    world.start()
    world.lead().run(LEAVE_NS - 100 * MS)
    assert members(world) == [0, 2]
    world.run(500 * MS)
    assert members(world) == [0]


def test_a_new_leader_gives_leaving_shards_their_full_time() -> None:
    world = World(config(shards=3, mms=3)).lead().run(5 * S)
    change(world, 1, "remove")
    world.run(5 * MS)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.run(60 * S)
    world.lead().run(LEAVE_NS - 100 * MS)
    assert members(world) == [0, 1, 2]
    drained(world, 1)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.proposed.clear()
    world.lead().run(LEAVE_NS - 100 * MS)
    assert members(world) == [0, 1, 2]


def test_a_lease_without_it_is_proposed_once() -> None:
    world = World(config(shards=3), delay=50 * MS).lead().run(5 * S)
    change(world, 1, "remove")
    world.run(55 * MS)
    before = world.commands().count("GrantLease")
    for _ in range(5):
        drained(world, 1)
        world.run(5 * MS)
    world.run(200 * MS)
    assert members(world) == [0, 2]
    assert world.commands().count("GrantLease") == before + 1


def test_a_shard_that_leaves_just_after_another_one_does_not_wait_for_it() -> None:
    world = World(config(shards=4)).lead().run(20 * S)  # without work, leases are long
    for shard, left_over in ((1, [0, 2, 3]), (2, [0, 3])):
        change(world, shard, "remove", request=shard)
        world.run(5 * MS)
        drained(world, shard)
        world.run(5 * MS)
        assert members(world) == left_over


def test_only_its_primary_in_its_view_says_that_nothing_waits() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    drained(world, 1)  # before the removal, it only means that nothing comes
    change(world, 1, "remove")
    world.run(5 * MS)
    drained(world, 1, view=2)
    drained(world, 1, route=servers_of(world, 1)[1].route)
    drained(world, 1, route=b"anybody")
    world.send(Rate(CLUSTER, 1, 1, 5), servers_of(world, 1)[0].route)
    drained(world, 0)
    drained(world, 77, route=b"anybody")
    world.run(100 * MS)
    assert members(world) == [0, 1, 2]


def test_the_lease_without_it_begins_at_once_even_if_another_one_was_under_way() -> None:
    world = World(config(shards=3, epoch_ms=500), delay=30 * MS).lead().run(5 * S)
    change(world, 1, "remove")
    world.run(35 * MS)
    lease = world.lease.following()
    drained(world, 1)
    # The proposal of a former leader comes first.
    world.proposed.insert(0, (world.now + MS, msgspec.msgpack.encode(_grant(lease))))
    world.run(200 * MS)
    assert members(world) == [0, 2]
    assert limit(world, 1) == lease.stop
    assert world.servers[0].announced[-1].starts_in_us == 0


def _grant(lease: Lease) -> Any:
    return (2, lease, [])


def test_a_removed_shard_gets_a_want_for_its_last_positions() -> None:
    world = left()
    primary, backup = servers_of(world, 1)
    assert [want.gsn for want in primary.wants] == [limit(world, 1) - 1]
    assert backup.wants == []
    world.sent.clear()
    world.run(600 * MS)  # no heartbeat: the reply was lost, and the request may have been
    assert 1 <= len(world.answers(Want, primary.route)) <= 3
    change(world, 1, "finalize", request=8)
    is_settled(world, 1)
    world.sent.clear()
    world.run(S)  # the request waits for another condition
    assert world.answers(Want, primary.route) == []


def test_a_parked_shard_leaves_with_the_end_that_it_has() -> None:
    world = World(config(shards=3)).lead().run(5 * S)
    world.servers[2].alive = False
    stop = world.lease.stop
    while state(world, 1) != "parked":
        stop = world.lease.stop
        world.run(100 * MS)
    world.run(60 * S)
    change(world, 1, "remove")
    world.run(5 * MS)
    assert (state(world, 1), limit(world, 1)) == ("leaving", stop)
    assert world.lease.base > stop
    world.servers[2].alive = True
    world.run(5 * S)
    assert members(world) == [0, 2]


def test_the_last_live_shard_stays() -> None:
    world = World(config(shards=2)).lead().run(5 * S)
    change(world, 1, "remove", request=1)
    change(world, 0, "remove", request=2)
    world.run(10 * MS)
    assert answers(world) == [(2, 0, "last-shard")]
    change(world, 0, "finalize", request=3)
    change(world, 9, "remove", request=4)
    change(world, 9, "finalize", request=5)
    world.run(10 * MS)
    assert answers(world)[1:] == [
        (3, 0, "last-shard"),
        (4, 9, "no-such-shard"),
        (5, 9, "no-such-shard"),
    ]


def test_a_refusal_holds_for_the_proposal_of_a_former_leader() -> None:
    world = World(config(shards=2)).lead().run(5 * S)
    late = RetireShard(0, world.service.state.retirements).encode()
    change(world, 1, "remove", request=1)
    world.run(10 * MS)
    change(world, 0, "remove", request=2)
    world.run(10 * MS)
    assert answers(world) == [(2, 0, "last-shard")]
    change(world, 2, "add", request=3, replicas=world.add_servers(2))
    world.run(5 * S)
    assert state(world, 2) == "live"
    world.proposed.append((world.now, late))
    world.run(10 * MS)
    assert state(world, 0) == "live"
    change(world, 0, "remove", request=4)
    world.run(10 * MS)
    assert state(world, 0) == "leaving"


def test_a_leaving_shard_stays_in_the_leases_while_no_other_shard_takes_records() -> None:
    world = World(config(shards=2)).lead().run(5 * S)
    change(world, 1, "remove")
    world.run(5 * MS)
    world.send(Remove(CLUSTER, 9, 0, 1, 2), HANDLER)
    world.run(5 * MS)
    before = len(world.log)
    drained(world, 1)
    world.run(20 * S)
    assert limit(world, 1) == 0
    assert len(world.log) - before <= 3
    prints = [fingerprint(server.identity) for server in servers_of(world, 0)]
    for server in servers_of(world, 0):
        server.view = 2
    world.send(Reinsert(CLUSTER, 8, 0, 2, prints, 0), HANDLER)
    world.run(5 * MS)
    assert members(world) == [0]
    assert limit(world, 1)


def test_the_limit_of_a_shard_is_announced_to_its_own_servers() -> None:
    """Both shards are recovered at once, and the last lease still has the one that leaves."""
    world = World(config(shards=2)).lead().run(5 * S)
    change(world, 0, "remove")
    world.run(5 * MS)
    for shard in (1, 0):
        world.send(Remove(CLUSTER, 9, shard, 1, 2), HANDLER)
        world.run(5 * MS)
    assert (members(world), limit(world, 0)) == ([0, 1], world.lease.stop)
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(2 * S)
    assert world.service.state.trim == 1000
    assert {one.limit for server in servers_of(world, 1) for one in server.announced} == {0}
    assert {server.announced[-1].limit for server in servers_of(world, 0)} == {limit(world, 0)}


def test_a_trim_waits_for_a_shard_that_left_until_all_it_owns_is_decided() -> None:
    world = left()
    for server in world.servers:
        server.is_disconnected = server.shard == 1
    world.run(2 * S)
    world.send(Trim(CLUSTER, 9, limit(world, 1) - 5))
    world.run(3 * S)
    assert world.answers(TrimReply) == []
    for server in servers_of(world, 1):
        server.is_disconnected = False
    is_settled(world, 1)
    world.run(3 * S)
    assert [reply.trim for reply in world.answers(TrimReply)] == [limit(world, 1) - 5]
    # It ignores positions after its limit: its frontier stays.
    gsn = world.lease.base + 5
    assert gsn > limit(world, 1)
    world.send(Trim(CLUSTER, 10, gsn))
    world.run(3 * S)
    assert [reply.trim for reply in world.answers(TrimReply)][1:] == [gsn]


def test_finalized_epochs_do_not_wait_for_a_shard_that_is_past_its_end() -> None:
    world = left()
    world.set_active()
    world.run(10 * S)
    assert world.status()["finalized_epoch"] == -1
    lease, end = world.lease, limit(world, 1)
    for server in world.servers:
        server.frontier = end if server.shard == 1 else lease.base
    world.run(2 * S)
    assert world.status()["finalized_epoch"] == lease.first_epoch - 1
    assert lease.base > end
