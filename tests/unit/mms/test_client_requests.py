"""The membership service's replies to clients."""

import pytest

from mms.read_barriers import BURST, INTERVAL_NS, MAX_PENDING
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, config
from ziplog.core.node import LeaderChanged
from ziplog.wire import (
    ClusterInfo,
    CursorEdit,
    Hello,
    LeaseHistory,
    LeaseQuery,
    NotLeader,
    Refused,
    StatusQuery,
    Trim,
    TrimReply,
)


def test_hello_is_answered_with_the_cluster() -> None:
    world = World(config(mms=3)).lead().run(S)
    world.send(Hello(0, 3))
    (info,) = world.answers(ClusterInfo)
    assert (info.cluster, info.request, info.name, info.durability) == (CLUSTER, 3, "c", "memory")
    assert [p.shard for p in info.placements] == [0, 1]
    assert info.leases[-1].last == world.lease
    world.step(LeaderChanged("mms-2", is_self=False))
    world.send(Hello(CLUSTER, 4))
    assert world.answers(ClusterInfo)[1].mms[0] == "127.0.0.1:7002"


def test_only_a_leader_lists_itself_first() -> None:
    """The failure handler uses the placements of no other node: they may be old."""
    world = World(config(mms=3)).lead().run(S)
    world.step(LeaderChanged("", is_self=False))
    world.send(Hello(CLUSTER, 4))
    assert world.answers(ClusterInfo)[-1].mms == [f"127.0.0.1:700{node}" for node in (1, 2, 0)]


def test_without_a_cluster_or_a_leader_the_client_gets_not_leader() -> None:
    world = World(config(mms=3))
    for message in (Hello(0, 1), LeaseQuery(0, 2, 1), Trim(0, 3, 1), StatusQuery(0, 4)):
        world.send(message)
    assert [(m.request, m.leader) for m in world.answers(NotLeader)] == [
        (1, ""), (2, ""), (3, ""), (4, "")
    ]  # fmt: skip


def test_a_follower_names_the_leader() -> None:
    world = World(config(mms=3)).lead().run(S)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.send(StatusQuery(0, 4))
    assert [m.leader for m in world.answers(NotLeader)] == ["127.0.0.1:7001"]


def test_a_lease_query_is_answered_behind_a_barrier() -> None:
    world = World().lead().run(20 * S)
    stop = world.lease.stop
    world.send(LeaseQuery(CLUSTER, 1, 5))
    world.send(LeaseQuery(CLUSTER, 2, stop))
    assert world.answers(LeaseHistory) == []
    world.run(100 * MS)
    found, nothing = world.answers(LeaseHistory)
    assert found.runs == world.service.state.runs
    assert nothing.runs == []
    assert world.commands()[-1] == "Barrier"


def test_many_requests_share_barriers_and_are_bounded() -> None:
    world = World().lead().run(S)
    before = len(world.commands())
    for request in range(MAX_PENDING + 10):
        world.send(LeaseQuery(CLUSTER, request, 5))
    assert len(world.answers(Refused)) == 10
    world.run(S)
    assert len(world.answers(LeaseHistory)) == MAX_PENDING
    barriers = world.commands()[before:].count("Barrier")
    assert BURST < barriers <= BURST + 2, "a few at once, and one for all the others"


def test_rare_requests_do_not_wait_and_continuous_ones_do() -> None:
    world = World().lead().run(S)
    asked = 0
    for turn in range(BURST):
        asked += 1
        world.send(LeaseQuery(CLUSTER, asked, 5))
        world.run(10 * MS)
        assert len(world.answers(LeaseHistory)) == turn + 1
    before = len(world.commands())
    for _ in range(1000):
        asked += 1
        world.send(LeaseQuery(CLUSTER, asked, 5))
        world.run(MS)
    barriers = world.commands()[before:].count("Barrier")
    assert barriers == pytest.approx(1000 * MS // INTERVAL_NS, abs=1)


def test_a_leader_that_lost_its_followers_answers_nothing_from_memory() -> None:
    world = World().lead().run(S)
    world.is_cut_off = True
    world.send(LeaseQuery(CLUSTER, 1, 5))
    world.run(12 * S)
    assert world.answers(LeaseHistory) == []
    assert [m.request for m in world.answers(NotLeader)] == [1]


def test_a_request_outlives_a_slow_commit() -> None:
    world = World().lead().run(S)
    world.is_cut_off = True
    world.send(LeaseQuery(CLUSTER, 1, 5))
    world.run(5 * S)
    world.is_cut_off = False
    world.run(S)
    assert world.answers(NotLeader) == []
    assert [m.request for m in world.answers(LeaseHistory)] == [1]


def test_copies_of_waiting_requests_do_not_fill_the_queue() -> None:
    """A client repeats a request once a second while a commit is slow."""
    world = World().lead().run(S)
    world.is_cut_off = True
    for _ in range(5):
        for request in range(100):
            world.send(LeaseQuery(CLUSTER, request, 5))
        world.run(S)
    world.is_cut_off = False
    world.run(S)
    assert world.answers(Refused) == []
    assert [m.request for m in world.answers(LeaseHistory)] == list(range(100))


def decided(positions: int = 10) -> World:
    """Return a service whose shards have decided these positions."""
    world = World().lead().run(S)
    for server in world.servers:
        server.frontier = positions
    world.run(2 * S)
    return world


def test_a_refused_trim_is_not_done_later() -> None:
    """Its client repeated it during a slow commit, and got the first reply."""
    world = decided()
    world.send(CursorEdit(CLUSTER, 1, "x", "create", b"1", 3, 60))
    world.run(S)
    world.delay = 3 * S
    for _ in range(3):
        world.send(Trim(CLUSTER, 2, 7))
        world.run(S)
    world.send(CursorEdit(CLUSTER, 3, "x", "delete", b"2"))
    world.run(10 * S)
    assert [(m.error, m.held_by) for m in world.answers(TrimReply)] == [("not-stable", "x")]
    assert world.service.state.trim == 0


@pytest.mark.parametrize(("deleted_at", "trim"), [(S, 7), (5 * S, 0)])
def test_a_trim_that_consensus_decides_gets_that_outcome(deleted_at: int, trim: int) -> None:
    """A cursor holds after the proposal; the trim is done if the cursor is deleted before it."""
    world = decided()
    world.delay = 3 * S
    world.send(Trim(CLUSTER, 2, 7))
    world.run(S // 2)
    world.send(CursorEdit(CLUSTER, 1, "x", "create", b"1", 3, 60))
    world.run(deleted_at)
    world.send(CursorEdit(CLUSTER, 3, "x", "delete", b"2"))
    world.run(10 * S)
    assert [(m.trim, m.held_by) for m in world.answers(TrimReply)] == [(trim, "" if trim else "x")]
    assert world.service.state.trim == trim


def test_a_leader_that_steps_down_redirects_all_requests() -> None:
    world = World(config(mms=3)).lead().run(S)
    world.is_cut_off = True
    world.send(LeaseQuery(CLUSTER, 1, 5))
    world.send(Trim(CLUSTER, 2, 5))
    world.step(LeaderChanged("mms-1", is_self=False))
    assert sorted(m.request for m in world.answers(NotLeader)) == [1, 2]
