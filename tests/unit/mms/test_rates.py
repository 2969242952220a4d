"""Rates that change end a lease early, but not too often (docs/protocol.md, section 13)."""

from itertools import pairwise

import pytest

from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, working
from ziplog.core.node import LeaderChanged, Received
from ziplog.wire import Rate


def send_rate(world: World, shard: int, per_s: int, **changes: int) -> None:
    """Report a primary's rate, now and with its heartbeats from now on."""
    primary = next(server for server in world.servers if server.shard == shard)
    primary.rate = per_s
    view = changes.get("view", 1)
    world.step(Received(primary.route, Rate(CLUSTER, shard, view, per_s)))


def weights(world: World) -> list[int]:
    return [member.weight for member in world.lease.members]


def numbers(world: World) -> list[tuple[int, int]]:
    """Return the start of each lease, past or planned, in ns, and its number."""
    return [(at, lease.number) for at, lease in world.begun]


@pytest.mark.parametrize(("rate", "expected"), [(15_000, [2, 3, 2]), (5_000, [2, 1, 2])])
def test_a_step_of_one_shards_rate_is_in_force_when_it_is_committed(
    rate: int, expected: list[int]
) -> None:
    world = working()
    assert weights(world) == [1, 1, 1]
    number = world.lease.number
    send_rate(world, 1, rate)
    assert len(world.proposed) == 1  # in the same step
    world.run(MS + 1)
    assert weights(world) == expected
    assert world.lease.number == number + 1
    for server in world.servers:
        assert server.announced[-1].starts_in_us == 0
        assert server.lease == world.lease
    world.run(5 * S)
    assert weights(world) == expected
    assert len(world.service.state.runs) <= 4


def test_simultaneous_rates_cause_one_lease_and_one_for_the_rest() -> None:
    world = working(shards=6)
    number = world.lease.number
    for shard in range(5):
        send_rate(world, shard, 15_000)
    world.run(15 * MS)
    assert weights(world) == [3, 3, 3, 3, 3, 2]
    assert world.lease.number == number + 2
    (first, _), (second, _) = numbers(world)[-2:]
    assert second - first >= 10 * MS


def test_such_leases_are_an_epoch_apart_and_ten_a_second_in_the_long_run() -> None:
    world = working()
    world.begun.clear()
    for turn in range(5000):  # five seconds: up and down every ms
        send_rate(world, 1, 15_000 if turn % 40 < 20 else 5_000)
        world.run(MS)
    began = [at for at, _ in numbers(world)]
    assert min(after - at for at, after in pairwise(began)) >= 10 * MS
    # Ten at once, ten a second, and those that would have been granted anyway.
    assert 50 <= len(began) <= 10 + 5 * 10 + 5 * 7


def test_when_no_more_may_be_early_the_next_regular_lease_has_the_weights() -> None:
    world = working()
    for turn in range(60):
        send_rate(world, 1, 15_000 if turn % 2 else 5_000)
        world.run(15 * MS)
    send_rate(world, 1, 40_000)
    world.run(200 * MS)
    assert weights(world) == [1, 4, 1]


def test_small_rate_changes_cause_no_lease() -> None:
    world = working()
    before = len(world.log)
    for rate in (10_500, 9_500, 11_000, 10_000):
        send_rate(world, 1, rate)
    assert not world.proposed
    world.run(20 * MS)
    assert len(world.log) <= before + 1


def test_heartbeats_alone_bring_other_weights_as_well() -> None:
    world = working()
    primary = world.servers[2]
    primary.rate = 20_000
    world.send_heartbeat(primary)
    assert len(world.proposed) == 1
    world.run(MS + 1)
    assert weights(world) == [1, 2, 1]


def test_reports_of_backups_do_not_count() -> None:
    world = working()
    world.servers[3].rate = 20_000
    world.send_heartbeat(world.servers[3])
    assert not world.proposed


def test_only_the_primary_says_its_rate_and_in_its_view_only() -> None:
    world = working()
    backup, unknown = world.servers[3].route, b"unknown"
    for route, shard, view in (
        (backup, 1, 1),
        (unknown, 1, 1),
        (world.servers[2].route, 0, 1),
        (world.servers[2].route, 1, 2),
        (world.servers[2].route, 9, 1),
    ):
        world.step(Received(route, Rate(CLUSTER, shard, view, 90_000)))  # fmt: skip
    assert not world.proposed
    assert len(world.complaints) == 5


def test_a_follower_proposes_no_weights() -> None:
    world = working()
    world.step(LeaderChanged("mms-1", is_self=False))
    send_rate(world, 1, 15_000)
    assert not world.proposed


def test_heartbeats_from_before_the_leadership_are_old() -> None:
    world = working()
    send_rate(world, 1, 15_000)
    world.proposed.clear()
    world.step(LeaderChanged("mms-1", is_self=False))
    send_rate(world, 2, 15_000)
    assert not world.proposed
    world.servers[2].alive = world.servers[4].alive = False
    world.lead().run(500 * MS)
    assert weights(world) == [1, 1, 1]


def test_a_new_leader_keeps_the_weights_of_the_last_lease() -> None:
    world = working()
    send_rate(world, 1, 15_000)
    world.run(S)
    for server in world.servers:
        server.alive = False
    world.start()
    for server in world.servers:
        server.alive = True
        world.heartbeat_times[server.name] = world.now + 900 * MS
    world.lead().run(800 * MS)
    assert weights(world) == [2, 3, 2]
    world.run(5 * S)
    assert weights(world) == [2, 3, 2]


def test_a_report_while_a_lease_is_under_way_is_followed_right_after() -> None:
    world = working(delay=20 * MS)
    send_rate(world, 0, 15_000)
    world.run(10 * MS)
    send_rate(world, 1, 15_000)
    assert len(world.proposed) == 1
    world.run(11 * MS)
    assert weights(world) == [3, 2, 2]
    world.run(31 * MS)
    assert weights(world) == [3, 3, 2]


def test_a_rate_that_changes_for_a_moment_costs_no_lease() -> None:
    world = working()
    send_rate(world, 1, 15_000)
    world.run(2 * MS)
    number = world.lease.number
    send_rate(world, 1, 40_000)  # another lease may begin in 9 ms
    send_rate(world, 1, 15_000)
    assert world.service._leases._has_other_weights
    world.run(50 * MS)
    assert not world.service._leases._has_other_weights
    assert (weights(world), world.lease.number) == ([2, 3, 2], number)
