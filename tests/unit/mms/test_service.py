"""The membership service: its start, its leases, its servers."""

from dataclasses import replace

import pytest

from mms.commands import GrantLease, decode_command
from mms.lease_proposals import ACTIVE_NS, FIRST_LEASE_NS
from mms.service import MembershipService
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import FakeServer, World, config
from ziplog.config import ClusterConfig, ShardConfig
from ziplog.core.node import (
    Committed,
    Halt,
    LeaderChanged,
    LogWarning,
    Propose,
    Received,
    Restored,
)
from ziplog.core.view import Lease, fingerprint
from ziplog.wire import (
    Frontier,
    Heartbeat,
    LeaseAnnounced,
    Refused,
)

# --- the start -----------------------------------------------------------------------


def test_the_first_lease_is_granted_when_all_servers_reported() -> None:
    world = World().lead().run(100 * MS)
    assert world.commands() == ["CreateCluster", "GrantLease"]
    assert world.service.state.cluster == CLUSTER
    assert [(m.shard, m.weight) for m in world.lease.members] == [(0, 1), (1, 1)]
    assert (world.lease.base, world.lease.first_epoch) == (1, 0)
    assert all(server.lease == world.lease for server in world.servers)
    assert all(server.state == "up" for server in world.servers)


def test_the_first_lease_waits_two_seconds_for_the_last_server() -> None:
    world = World()
    world.servers[3].alive = False
    world.lead().run(FIRST_LEASE_NS - 100 * MS)
    assert world.commands() == ["CreateCluster"]
    world.run(S)
    assert [m.shard for m in world.lease.members] == [0]
    assert {p.shard: p.state for p in world.service.state.placements.values()} == {
        0: "live", 1: "joining"
    }  # fmt: skip
    world.servers[3].alive = True
    world.run(2 * S)
    assert [m.shard for m in world.lease.members] == [0, 1]


def test_nothing_is_announced_before_it_is_committed() -> None:
    world = World(delay=700 * MS).lead()
    world.run(1399 * MS)
    assert world.service.state.last is None
    assert not any(server.announced for server in world.servers)
    world.run(3 * S)
    assert all(server.announced for server in world.servers)


# --- leases --------------------------------------------------------------------------


def test_idle_leases_are_long_and_equal() -> None:
    world = World().lead().run(120 * S)
    assert world.lease.epoch_ms == 1000
    grants = world.commands().count("GrantLease")
    assert 7 <= grants <= 9
    assert len(world.log) <= 11  # far below one command a second
    assert len(world.service.state.runs) == 1


def test_work_after_idleness_starts_short_leases_at_once() -> None:
    world = World().lead().run(30 * S)
    number = world.lease.number
    world.set_active()
    world.run(5 * MS)
    assert world.lease.number == number + 1
    assert world.lease.epoch_ms == 10
    assert world.servers[0].announced[-1].starts_in_us == 0
    assert all(server.lease == world.lease for server in world.servers)


def test_at_work_one_lease_is_ahead_and_commands_are_few() -> None:
    world = World().lead().run(5 * S)
    world.set_active()
    world.run(S)
    for server in world.servers:
        server.announced.clear()
    before = len(world.log)
    world.run(10 * S)
    assert len(world.log) - before <= 100
    announced = [message for message in world.servers[0].announced if message.runs]
    assert 60 <= len(announced) <= 66
    # Half a lease, 80 ms, less the time to commit.
    assert all(70_000 <= message.starts_in_us <= 80_000 for message in announced)
    assert len(world.service.state.runs) <= 3


@pytest.mark.parametrize(("epoch_ms", "epochs"), [(1, 256), (10, 16), (500, 16)])
def test_short_epochs_mean_more_of_them_a_lease(epoch_ms: int, epochs: int) -> None:
    world = World(config(epoch_ms=epoch_ms)).lead().run(S)
    world.set_active()
    before = len(world.log)
    world.run(2 * S)
    assert len(world.log) - before <= 20
    assert (world.lease.epochs, world.lease.epoch_ms) == (epochs, epoch_ms)
    assert world.lease.epochs * world.lease.epoch_size == 2**28


def test_without_work_leases_become_long_again() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.run(S)
    world.set_active(active=False)
    world.run(ACTIVE_NS + 20 * S)
    assert world.lease.epoch_ms == 1000


def test_a_slow_commit_delays_the_next_lease_and_nothing_else() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.run(S)
    world.delay = 400 * MS
    world.run(3 * S)
    assert world.servers[0].announced[-1].starts_in_us == 0
    assert all(server.lease == world.lease for server in world.servers)


def test_a_proposal_that_got_lost_is_made_again() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.run(S)
    world.is_cut_off = True
    world.run(500 * MS)
    assert len(world.proposed) >= 1
    world.proposed.clear()
    world.is_cut_off = False
    number = world.lease.number
    world.run(3 * S)
    assert world.lease.number > number + 10


def test_a_new_leader_proposes_the_next_lease_at_once() -> None:
    world = World().lead().run(30 * S)
    last = world.lease
    world.start()
    for server in world.servers:
        server.announced.clear()
    world.lead().run(S)
    assert world.lease.number == last.number + 1
    assert world.lease.predecessor == last.digest
    assert world.lease.members == last.members
    assert all(server.announced[0].starts_in_us == 0 for server in world.servers)
    assert all(server.lease == world.lease for server in world.servers)


def test_commands_name_the_term_that_the_node_leads_in() -> None:
    """In another term, Raft drops them: they may rest on an old state."""
    service = World().lead().run(5 * S).service
    for term in (7, 9):  # The node leads again before it could notice that it did not.
        effects = service.step(LeaderChanged("mms-0", is_self=True, term=term), 10 * S)
        assert {effect.term for effect in effects if isinstance(effect, Propose)} == {term}


def test_a_follower_learns_and_is_silent() -> None:
    world = World().lead().run(5 * S)
    follower = MembershipService(world.config, "mms-0", pid=1, cluster=9, incarnation=1, now=0)
    follower.step(LeaderChanged("mms-1", is_self=False), world.now)
    follower.step(Restored(world.consensus.snapshot()), world.now)
    for server in world.servers:
        assert follower.step(Received(server.route, server.heartbeat()), world.now) == []
    assert follower.next_wakeup() is None
    assert follower.state.snapshot() == world.service.state.snapshot()
    follower.check()


def test_another_result_than_consensus_gave_halts() -> None:
    world = World().lead().run(S)
    effects = world.service.step(Committed(b"\x91\x05", b"\xa0"), world.now)
    assert [type(effect) for effect in effects] == [Halt]


def with_servers(shard: int, *names: str) -> ClusterConfig:
    """Return a cluster file of one shard with servers of these names."""
    (first,) = config(1).shards
    nodes = (replace(node, name=name) for node, name in zip(first.replicas, names, strict=True))
    return replace(config(1), shards=(ShardConfig(shard, tuple(nodes)),))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (replace(config(), name="C"), "this is the log of cluster 'c', but the cluster file says"),
        (config(id="9" * 32), f"this is the log of cluster {CLUSTER:032x}, but the cluster file"),
        (with_servers(0, "shard-0-0", "shard-0-9"), "shard 0 has the servers shard-0-0, shard-0-1"),
        (with_servers(1, "shard-0-0", "shard-0-1"), "shard 0 has the servers shard-0-0, shard-0-1"),
        (with_servers(9, "shard-1-0", "shard-1-1"), "puts shard-1-0, shard-1-1 at shard 9"),
    ],
)
def test_a_cluster_file_that_contradicts_the_log_halts(changed: ClusterConfig, why: str) -> None:
    world = World().lead().run(S)
    service = MembershipService(changed, "mms-0", pid=1, cluster=9, incarnation=1, now=0)
    effects = service.step(Restored(world.consensus.snapshot()), world.now)
    (halt,) = [effect for effect in effects if isinstance(effect, Halt)]
    assert why in halt.reason


def test_a_cluster_file_with_other_endpoints_is_warned_of() -> None:
    world = World().lead().run(S)
    first, *rest = world.config.shards
    moved_nodes = replace(first, replicas=(replace(first.replicas[0], port=9), first.replicas[1]))
    changed = replace(world.config, shards=(moved_nodes, *rest))
    service = MembershipService(changed, "mms-0", pid=1, cluster=9, incarnation=1, now=0)
    effects = service.step(Restored(world.consensus.snapshot()), world.now)
    (warning,) = [effect for effect in effects if isinstance(effect, LogWarning)]
    assert "shard-0-0 is known at 127.0.0.1:8000" in warning.text
    assert not [effect for effect in effects if isinstance(effect, Halt)]


def test_a_cluster_file_may_have_shards_that_are_not_added_yet() -> None:
    world = World().lead().run(S)
    service = MembershipService(config(3), "mms-0", pid=1, cluster=9, incarnation=1, now=0)
    effects = service.step(Restored(world.consensus.snapshot()), world.now)
    assert not [effect for effect in effects if isinstance(effect, (Halt, LogWarning))]


# --- servers -------------------------------------------------------------------------


def test_a_disconnected_server_gets_all_leases_when_it_reconnects() -> None:
    world = World().lead().run(S)
    world.set_active()
    world.servers[1].is_disconnected = True
    world.run(2 * S)
    assert world.servers[1].lease != world.lease
    world.servers[1].is_disconnected = False
    world.run(1100 * MS)
    assert world.servers[1].lease == world.lease


def test_a_silent_shard_is_parked_and_comes_back() -> None:
    world = World().lead().run(5 * S)
    world.servers[2].alive = False
    world.run(5 * S)
    assert [m.shard for m in world.lease.members] == [0]
    assert world.status()["shards"][1]["state"] == "parked"
    world.servers[2].alive = True
    world.run(3 * S)
    assert [m.shard for m in world.lease.members] == [0, 1]
    assert world.status()["shards"][1]["state"] == "live"


def test_a_server_in_limbo_parks_its_shard() -> None:
    world = World().lead().run(5 * S)
    world.servers[3].state = "limbo"
    world.run(3 * S)
    assert [m.shard for m in world.lease.members] == [0]
    assert world.status()["shards"][1]["replicas"][1]["state"] == "limbo"


def test_the_last_shard_is_never_parked() -> None:
    world = World().lead().run(5 * S)
    for server in world.servers:
        server.alive = False
    world.run(60 * S)
    assert [m.shard for m in world.lease.members] == [0, 1]


def test_a_paused_service_parks_no_shard() -> None:
    world = World().lead().run(5 * S)
    members = world.lease.members
    world.now += 60 * S
    world.heartbeat_times = dict.fromkeys(world.heartbeat_times, world.now + 500 * MS)
    for server in world.servers[:2]:  # those of the other shard are on their way
        world.send_heartbeat(server)
    before = len(world.log)
    world.run(5 * S)
    assert world.lease.members == members
    grants = [decode_command(command) for command in world.log[before:]]
    assert not any(isinstance(grant, GrantLease) and grant.placements for grant in grants)


def test_weights_follow_rates() -> None:
    world = World().lead().run(S)
    for server in world.servers:
        server.rate = 4000 if server.shard else 1000
    world.set_active()
    world.run(6 * S)
    assert [(m.shard, m.weight) for m in world.lease.members] == [(0, 1), (1, 4)]


def test_a_server_with_an_uncommitted_lease_gets_the_committed_one() -> None:
    world = World().lead().run(5 * S)
    liar = world.servers[0]
    assert liar.lease is not None
    liar.lease = Lease(
        liar.lease.number, liar.lease.predecessor, liar.lease.base, 0, 1, 1, 77, liar.lease.members
    )
    world.run(2 * S)
    assert liar.halted


def test_a_restarted_server_is_answered_at_once() -> None:
    world = World().lead().run(5 * S)
    server = world.servers[0]
    server.announced.clear()
    server.incarnation = 2
    world.send_heartbeat(server)
    assert server.announced[0].placements == list(world.service.state.placements.values())


def test_a_heartbeat_of_another_cluster_is_refused() -> None:
    world = World().lead().run(S)
    beat = world.servers[0].heartbeat()
    other = Heartbeat(CLUSTER + 1, *(getattr(beat, name) for name in beat.__struct_fields__[1:]))
    world.send(other)
    assert [refused.code for refused in world.answers(Refused)] == ["wrong-cluster"]


def test_an_unknown_server_is_ignored() -> None:
    world = World().lead().run(S)
    world.sent.clear()
    for node, shard in (("shard-9-0", 9), ("shard-0-0", 1)):
        server = FakeServer(node, shard)
        world.send(server.heartbeat())
    assert world.sent == []
    assert len(world.complaints) == 2


def test_a_server_that_lost_its_directory_is_in_limbo_for_ever() -> None:
    world = World().lead().run(5 * S)
    server = world.servers[2]
    frontier = server.frontier
    # It returns with an empty directory: only its identity differs.
    server.alive, server.state, server.lease, server.frontier = False, "starting", None, 10**9
    server.incarnation, server.identity = 2, "another directory"
    world.run(10 * S)
    server.alive = True
    world.send_heartbeat(server)
    assert server.announced[-1].placements[1].replicas[0].fingerprint == fingerprint(
        "directory of shard-1-0"
    )
    # Whatever it reports then.
    for state in ("starting", "up"):
        server.state = state
        world.run(5 * S)
        shard = world.status()["shards"][1]
        assert (shard["state"], shard["replicas"][0]["state"]) == ("parked", "limbo")
        assert [member.shard for member in world.lease.members] == [0]
    assert world.service.servers.frontier(1) == frontier
    # Nor is it forgotten by the service.
    world.start()
    world.lead().run(5 * S)
    assert world.status()["shards"][1]["replicas"][0]["state"] == "limbo"
    # With its directory, it is itself again.
    server.identity, server.incarnation = "directory of shard-1-0", 3
    world.run(5 * S)
    assert world.status()["shards"][1]["state"] == "live"


def test_a_server_needs_more_than_a_known_name() -> None:
    world = World().lead().run(5 * S)
    unknown = FakeServer("shard-0-0", 0)
    unknown.identity, unknown.route, unknown.state = "stranger", b"unknown", "limbo"
    unknown.frontier = 2**63 - 1
    world.run(S)
    for _ in range(10):
        world.send(unknown.heartbeat(), b"unknown")
        world.send(Frontier(CLUSTER, 0, 1, 1, 2**63 - 1), b"unknown")
        world.run(S)
    assert len(world.complaints) == 20
    assert world.answers(LeaseAnnounced, b"unknown") == []
    shard = world.status()["shards"][0]
    assert (shard["state"], shard["replicas"][0]["state"]) == ("live", "up")
    assert world.service.servers.frontier(0) < 2**63 - 1
