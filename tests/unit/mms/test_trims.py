"""Trims: wanted, committed, refused by all servers, answered."""

from mms.commands import SetTrim, decode_command
from mms.trims import _listed
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World
from ziplog.wire import (
    Frontier,
    Trim,
    TrimReply,
)


def test_a_trim_wants_commits_and_waits_until_all_refuse() -> None:
    world = World().lead().run(5500 * MS)
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(20 * MS)
    primaries = [server for server in world.servers if server.name.endswith("-0")]
    assert all(server.wants[0].gsn == 999 and server.wants[0].request for server in primaries)
    assert not any(server.wants for server in world.servers if server not in primaries)
    assert world.service.state.trim == 0  # not stable as far as is known
    for server in primaries:
        world.send(Frontier(CLUSTER, server.shard, 1, 1, server.frontier), server.route)
    world.run(5 * MS)
    assert world.service.state.trim == 1000
    assert all(server.trim == 1000 for server in world.servers)
    assert world.answers(TrimReply) == []  # no server reported it yet
    world.run(2 * S)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 1000)]


def test_a_trim_waits_for_the_last_position_that_it_deletes() -> None:
    world = World().lead().run(5500 * MS)
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(20 * MS)
    for frontier, trim in ((999, 0), (1000, 1000)):
        for server in world.servers:
            if server.name.endswith("-0"):
                world.send(Frontier(CLUSTER, server.shard, 1, 1, frontier), server.route)
        world.run(5 * MS)
        assert world.service.state.trim == trim


def test_a_trim_does_not_wait_for_a_server_that_is_down() -> None:
    world = World().lead().run(5 * S)
    world.servers[1].alive = False
    world.run(1 * S)
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(5 * S // 2)
    assert world.service.state.trim == 1000
    assert world.answers(TrimReply) == []  # it may be up, and serve trimmed records
    world.run(4 * S)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 1000)]


def test_a_paused_service_waits_for_heartbeats_that_it_could_not_receive() -> None:
    """The first heartbeat after the pause comes before the service's own timer."""
    world = World().lead().run(5 * S)
    disconnected = world.servers[1]
    disconnected.is_disconnected = (
        True  # it misses the new trim point, and still serves trimmed records
    )
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(20 * MS)
    for server in world.servers:
        if server.name.endswith("-0"):
            world.send(Frontier(CLUSTER, server.shard, 1, 1, server.frontier), server.route)
    world.run(2 * S)
    assert world.service.state.trim == 1000
    world.now += 10 * S
    for server in world.servers:
        if server is not disconnected:
            world.send_heartbeat(server)
    assert [(reply.error, reply.trim) for reply in world.answers(TrimReply)] == [
        ("not-stable", 1000)
    ]


def late_reply(world: World) -> TrimReply:
    """Return the reply to a trim that is not done."""
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(7 * S)
    assert world.answers(TrimReply) == []
    world.run(2 * S)
    (reply,) = world.answers(TrimReply)
    assert reply.error == "not-stable"
    return reply


def test_the_reply_names_the_shards_that_delay_a_trim() -> None:
    world = World().lead().run(5 * S)
    world.servers[0].alive = False
    reply = late_reply(world)
    assert reply.trim == world.service.state.trim == 0
    assert reply.obstacle == "these shards have undecided positions before it: 0"


def test_the_reply_reports_a_trim_that_is_not_committed() -> None:
    world = World().lead().run(5 * S)
    propose = world.propose

    def propose_others(name: str, command: bytes) -> None:
        if not isinstance(decode_command(command), SetTrim):
            propose(name, command)

    world.propose = propose_others  # type: ignore[method-assign]
    reply = late_reply(world)
    assert reply.trim == 0
    assert "membership service have not stored it" in reply.obstacle


def test_the_reply_names_the_servers_that_may_serve_trimmed_records() -> None:
    world = World().lead().run(5 * S)
    world.servers[1].records_trims = world.servers[2].records_trims = False
    world.servers[2].full = "no space"
    reply = late_reply(world)
    assert reply.trim == world.service.state.trim == 1000, "it is committed all the same"
    late = "shard-0-1, shard-1-0 (its disk is full)"
    assert reply.obstacle == f"these servers have not recorded it on their disks: {late}"
    world.servers[1].records_trims = world.servers[2].records_trims = True
    world.send(Trim(CLUSTER, 10, 1000))
    world.run(3 * S)
    assert world.answers(TrimReply)[1:] == [TrimReply(CLUSTER, 10, 1000)]


def test_a_reply_names_a_few_of_many_obstacles() -> None:
    assert _listed(list("abcdefgh")) == "a, b, c, d, e, f, g, h"
    assert _listed(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"


def test_a_position_without_a_lease_cannot_be_trimmed() -> None:
    world = World().lead().run(5 * S)
    world.send(Trim(CLUSTER, 9, world.lease.stop))
    world.run(100 * MS)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 0, "no-such-position")]


def test_a_trim_below_the_trim_point_is_done() -> None:
    world = World().lead().run(5 * S)
    for request, gsn in ((1, 1000), (2, 1000), (3, 5), (4, 0)):
        world.send(Trim(CLUSTER, request, gsn))
        world.run(3 * S)
    assert [(m.request, m.trim, m.error) for m in world.answers(TrimReply)] == [
        (request, 1000, "") for request in (1, 2, 3, 4)
    ]


def test_a_new_leader_waits_for_servers_without_a_heartbeat_yet() -> None:
    world = World().lead().run(5 * S)
    world.send(Trim(CLUSTER, 9, 1000))
    world.run(20 * MS)
    for server in world.service.servers:
        if server.name == "shard-1-1":
            server.heartbeat, server.last_heard_at = None, 0
    del world.service.servers._unserved["shard-1-1"]
    world.servers[3].alive = False
    assert world.servers[3].name == "shard-1-1"
    world.service.servers.forgive_silence_before(world.now)
    for server in world.servers:
        if server.name.endswith("-0"):
            world.send(Frontier(CLUSTER, server.shard, 1, 1, server.frontier), server.route)
    world.run(3 * S)
    assert world.service.state.trim == 1000
    assert world.answers(TrimReply) == []
    world.run(3 * S)
    assert world.answers(TrimReply) == [TrimReply(CLUSTER, 9, 1000)]
