"""Shards that join, and shards that never complete it."""

import pytest

from mms.commands import PlaceShard, decode_command
from tests.services import CLUSTER, MS, S
from tests.unit.mms.reconfiguration import (
    HANDLER,
    answers,
    change,
    recover,
    servers_of,
)
from tests.unit.mms.world import World, config, members, state
from ziplog.core.view import Replica, fingerprint
from ziplog.wire import Remove, Trim, TrimReply


def test_a_shard_joins_when_all_its_servers_have_reported_and_not_before() -> None:
    world = World().lead().run(5 * S)
    replicas = world.add_servers(5)
    world.run(S)
    change(world, 5, "add", replicas=replicas)
    world.run(5 * MS)
    assert state(world, 5) == "joining"
    world.servers[-1].alive = False
    world.run(5 * S)
    assert (state(world, 5), members(world), answers(world)) == ("joining", [0, 1], [])
    number = world.lease.number
    world.servers[-1].alive = True
    world.send_heartbeat(world.servers[-1])
    assert not world.proposed, "it holds no lease yet"
    world.run(3 * MS)  # its next heartbeat, the commit of the lease, and no housekeeping
    assert (state(world, 5), members(world)) == ("live", [0, 1, 5])
    assert (world.lease.number, answers(world)) == (number + 1, [(7, 5, "")])
    placement = world.service.state.placements[5]
    assert [replica.fingerprint for replica in placement.replicas] == [
        fingerprint(server.identity) for server in servers_of(world, 5)
    ]
    announced = servers_of(world, 5)[0].announced[-1]
    assert announced.starts_in_us == 0
    assert {p.shard: p.state for p in announced.placements} == {0: "live", 1: "live", 5: "live"}
    assert {p.shard for p in world.servers[0].announced[-1].placements} == {0, 1, 5}
    assert world.service.servers.frontier(5) == 0


def test_adding_a_shard_with_a_crashed_server_waits_for_its_recovery() -> None:
    world = World().lead().run(5 * S)
    replicas = world.add_servers(2)
    world.servers[-1].alive = False
    change(world, 2, "add", replicas=replicas)
    world.run(S)
    world.send(Remove(CLUSTER, 9, 2, 1, 2), HANDLER)
    world.run(S)
    assert (state(world, 2), answers(world)) == ("recovering", [])  # it takes no records yet
    world.servers[-1].alive = True
    recover(world, 2)
    assert (state(world, 2), answers(world)) == ("live", [(7, 2, "")])


def test_a_repeated_request_gets_a_reply_each_time_and_counts_once() -> None:
    world = World(delay=30 * MS).lead().run(5 * S)
    replicas = world.add_servers(2)
    for _ in range(5):
        change(world, 2, "add", replicas=replicas)
        world.run(10 * MS)
    world.run(2 * S)
    assert answers(world) == [(7, 2, "")]
    assert world.commands().count("PlaceShard") == 1
    change(world, 2, "add", request=8, replicas=replicas)
    assert answers(world)[1:] == [(8, 2, "")]  # it is live already


@pytest.mark.parametrize(
    ("shard", "replicas", "error"),
    [
        (2, [], "wrong-size"),
        (2, [("a", "h:1")], "wrong-size"),
        (2, [("a", "h:1"), ("b", "h:2"), ("c", "h:3")], "wrong-size"),
        (2, [("a", "h:1"), ("a", "h:2")], "exists"),
        (2, [("a", "h:1"), ("b", "h:1")], "exists"),
        (2, [("shard-1-0", "h:1"), ("b", "h:2")], "exists"),
        (2, [("a", "127.0.0.1:8003"), ("b", "h:2")], "exists"),
        (2, [("mms-0", "h:1"), ("b", "h:2")], "exists"),
        (2, [("a", "h:1"), ("b", "127.0.0.1:7000")], "exists"),
        (1, [("a", "h:1"), ("b", "h:2")], "exists"),
        (1, [("shard-1-1", "127.0.0.1:8003"), ("shard-1-0", "127.0.0.1:8002")], "exists"),
        (1, [("shard-1-0", "127.0.0.1:8002"), ("shard-1-1", "127.0.0.1:8003")], ""),
    ],
)
def test_only_new_servers_make_a_shard(
    shard: int, replicas: list[tuple[str, str]], error: str
) -> None:
    world = World().lead().run(5 * S)
    change(world, shard, "add", replicas=[Replica(*one) for one in replicas])
    world.run(10 * MS)
    assert answers(world) == [(7, shard, error)]
    assert 2 not in world.service.state.placements


def test_of_two_requests_to_add_one_number_only_one_succeeds() -> None:
    world = World(delay=20 * MS).lead().run(5 * S)
    mine, other = world.add_servers(2), world.add_servers(3)
    change(world, 2, "add", replicas=mine, src=b"a")
    change(world, 2, "add", replicas=other, src=b"b")
    world.run(2 * S)
    assert (answers(world, b"a"), answers(world, b"b")) == ([(7, 2, "")], [(7, 2, "exists")])


def test_two_requests_to_add_one_number_do_not_take_turns() -> None:
    """Consensus drops other commands, as leases, while too many are pending."""
    world = World(delay=20 * MS).lead().run(5 * S)
    mine, other = world.add_servers(2), world.add_servers(3)
    world.is_cut_off = True
    for _ in range(5):
        change(world, 2, "add", replicas=mine, src=b"a")
        change(world, 2, "add", replicas=other, src=b"b")
        world.run(S)
    placed = [one for _, one in world.proposed if isinstance(decode_command(one), PlaceShard)]
    assert len(set(placed)) == 1
    assert len(placed) <= 6, "one a second"


def test_the_second_request_to_add_a_number_follows_the_refusal_of_the_first() -> None:
    world = World(delay=20 * MS).lead().run(5 * S)
    mine = world.add_servers(2)
    change(world, 2, "add", replicas=[*mine, Replica("c", "h:1")], src=b"a")
    change(world, 2, "add", replicas=mine, src=b"b")
    world.run(2 * S)
    assert answers(world, b"a") == [(7, 2, "wrong-size")]
    assert answers(world, b"b") == [(7, 2, "")]


def test_an_addition_is_answered_once_every_server_of_the_shard_holds_a_lease() -> None:
    """Before, the shard takes no records. A shard of the first lease is live before that."""
    world = World(config(shards=2)).lead()
    servers = servers_of(world, 1)
    for server in world.servers:
        server.is_disconnected = True
    world.run(5 * S)
    assert (state(world, 1), members(world)) == ("live", [0, 1])
    placement = world.service.state.placements[1]
    replicas = [Replica(one.name, one.endpoint) for one in placement.replicas]
    for server in servers:
        assert answers(world) == []
        change(world, 1, "add", replicas=replicas)
        server.is_disconnected = False
        world.run(2 * S)
    assert answers(world) == [(7, 1, "")]


def test_a_shard_that_never_joined_is_finalized_at_once_and_does_not_come_back() -> None:
    world = World(delay=20 * MS).lead().run(5 * S)
    replicas = world.add_servers(2)
    world.servers[-1].alive = False
    change(world, 2, "add", replicas=replicas)
    world.run(2 * S)
    world.send_heartbeat(world.servers[-1])  # a lease with it is on its way
    change(world, 2, "remove", request=8)
    world.proposed.reverse()  # and comes second
    world.servers[-1].alive = True
    world.run(3 * S)
    assert (state(world, 2), members(world)) == ("finalized", [0, 1])
    assert sorted(answers(world)) == [(7, 2, "retired"), (8, 2, "")]
    change(world, 2, "add", request=9, replicas=replicas)
    change(world, 2, "finalize", request=10)
    assert answers(world)[2:] == [(9, 2, "retired"), (10, 2, "")]


def test_trims_and_epochs_do_not_wait_for_a_shard_that_crashed_before_it_joined() -> None:
    world = World(config(shards=2)).lead().run(5 * S)
    change(world, 2, "add", replicas=world.add_servers(2))
    for server in servers_of(world, 2):
        server.alive = False
    world.run(S)
    world.send(Remove(CLUSTER, 9, 2, 1, 2), HANDLER)
    world.run(S)
    assert state(world, 2) == "recovering"
    for server in world.servers:
        server.frontier = 10 if server.shard < 2 else server.frontier
        world.send_heartbeat(server)
    world.send(Trim(CLUSTER, 9, 5))
    world.run(10 * S)
    assert [reply.trim for reply in world.answers(TrimReply)] == [5]
    assert world.service.state.finalized == -1
    for server in world.servers:
        server.frontier = world.lease.base if server.shard < 2 else server.frontier
        server.active = server.shard < 2
        world.send_heartbeat(server)
    world.run(2 * S)
    assert world.service.state.finalized >= 0
    # Nor does its removal.
    change(world, 2, "remove", request=8)
    world.run(S)
    assert answers(world) == [(7, 2, "retired"), (8, 2, "")]
