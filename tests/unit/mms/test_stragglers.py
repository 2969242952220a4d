"""Shards that hold readers back are parked for a while (docs/protocol.md, section 13)."""

import pytest

from mms.stragglers import Stragglers
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, config, members
from ziplog.core.node import LeaderChanged
from ziplog.core.view import NO_DIGEST, Lease, Member, fingerprint
from ziplog.wire import Reinsert, Remove

SIZE = 2**20


def lease(epoch_ms: int = 10, epochs: int = 64_000) -> Lease:
    """Return a lease that lasts ten minutes, by default."""
    return Lease(1, NO_DIGEST, 1, 0, epochs, SIZE, epoch_ms, (Member(0, 1, 1),))


class Watched:
    """Some shards that are checked four times a second, each with its lag in ns."""

    def __init__(self, *behind: int, epoch_ms: int = 10, rtt_ms: int = 0) -> None:
        self.behind = list(behind)
        self.epoch_ns = epoch_ms * MS
        self.stragglers = Stragglers(rtt_ms)
        self.stragglers.on_lease(lease(epoch_ms), 0)
        self.now = 100 * self.epoch_ns
        self.has_readers = True
        self.silent: set[int] = set()
        self.apart = 250 * MS

    def members(self) -> list[int]:
        shards = range(len(self.behind))
        return [s for s in shards if not self.stragglers.is_parked(s, self.now)]

    def check_all(self, times: int) -> list[int]:
        """Check all shards; return those that are parked then."""
        for _ in range(times):
            self.now += self.apart
            for shard in self.members():
                if shard not in self.silent:
                    self.check_shard(shard)
            self.stragglers.check_silent(self.members(), self.now)
            self.stragglers.park(self.now, len(self.members()))
            self.stragglers.check()
        return [s for s in range(len(self.behind)) if self.stragglers.is_parked(s, self.now)]

    def check_shard(self, shard: int) -> bool:
        epoch = (self.now - self.behind[shard]) // self.epoch_ns
        frontier = 1 + epoch * SIZE
        return self.stragglers.on_heartbeat(shard, frontier, self.now, has_readers=self.has_readers)

    def wait_for(self, shard: int) -> float:
        """Wait until the shard may come back; return how long that took, in seconds."""
        since = self.now
        while self.stragglers.is_parked(shard, self.now):
            self.now += self.apart
        return (self.now - since) / S


def test_four_late_checks_in_a_row_park_a_shard() -> None:
    watched = Watched(0, 300 * MS, 0)
    assert watched.check_all(3) == []
    assert watched.check_all(1) == [1]


def test_a_shard_far_away_is_late_by_its_round_trips_only() -> None:
    assert Watched(0, 300 * MS, 0, rtt_ms=120).check_all(4) == []
    assert Watched(0, 380 * MS, 0, rtt_ms=120).check_all(4) == [1]


def test_a_shard_becomes_a_straggler_once() -> None:
    watched = Watched(300 * MS)
    results = []
    for _ in range(10):
        watched.now += watched.apart
        results.append(watched.check_shard(0))
    assert results == [False, False, False, True] + 6 * [False]


def test_one_prompt_check_resets_three_late_ones() -> None:
    watched = Watched(0, 300 * MS, 0)
    for _ in range(5):
        watched.behind[1] = 300 * MS
        assert watched.check_all(3) == []
        watched.behind[1] = 0
        assert watched.check_all(1) == []


@pytest.mark.parametrize(
    ("epoch_ms", "behind_ms", "is_late"),
    [(10, 100, False), (10, 111, True), (1, 100, False), (1, 102, True), (50, 500, False),
     (50, 551, True), (1000, 10_000, False), (1000, 11_001, True)],
)  # fmt: skip
def test_late_is_ten_epochs_and_100_ms(epoch_ms: int, behind_ms: int, is_late: bool) -> None:
    watched = Watched(0, behind_ms * MS, 0, epoch_ms=epoch_ms)
    assert watched.check_all(8) == ([1] if is_late else [])


def test_it_comes_back_and_if_it_is_late_again_it_is_parked_for_twice_as_long() -> None:
    watched = Watched(0, 300 * MS, 0)
    waits = []
    for _ in range(6):
        assert watched.check_all(4) == [1]
        waits.append(watched.wait_for(1))
    assert waits == [5, 10, 20, 40, 60, 60]


def test_five_prompt_seconds_end_the_probation() -> None:
    watched = Watched(0, 300 * MS, 0)
    watched.check_all(4)
    assert watched.wait_for(1) == 5
    watched.behind[1] = 0
    assert watched.check_all(20) == []
    watched.behind[1] = 300 * MS
    assert watched.check_all(4) == [1]
    assert watched.wait_for(1) == 5


def test_probation_starts_with_the_first_check_after_the_return() -> None:
    watched = Watched(0, 300 * MS, 0)
    watched.check_all(4)
    watched.wait_for(1)
    watched.now += 60 * S  # no leader took it back
    watched.check_all(4)
    assert watched.wait_for(1) == 10


def test_if_all_shards_are_late_none_is_parked() -> None:
    watched = Watched(300 * MS, 300 * MS, 300 * MS)
    assert watched.check_all(20) == []
    # Nor if more than half are late; but their counts matter once the others are prompt.
    watched.behind[0] = 0
    assert watched.check_all(20) == []
    watched.behind[1] = 0
    assert watched.check_all(1) == [2]


def test_a_shard_without_readers_is_not_parked() -> None:
    watched = Watched(0, 300 * MS, 0)
    assert watched.check_all(3) == []
    watched.has_readers = False
    assert watched.check_all(20) == []
    watched.has_readers = True
    assert watched.check_all(3) == []


def test_half_of_the_members_are_never_parked() -> None:
    watched = Watched(*[0] * 5)
    parked = []
    for shard in range(5):
        watched.behind[shard] = 300 * MS
        parked = watched.check_all(4)
    assert parked == [0, 1]


def test_the_only_shard_stays_live() -> None:
    assert Watched(300 * MS).check_all(20) == []


def test_silence_is_a_late_check_every_half_second() -> None:
    watched = Watched(0, 0, 0)
    watched.check_all(4)
    watched.silent = {1}
    assert watched.check_all(7) == []
    assert watched.check_all(1) == [1]


def test_silence_of_a_shard_without_readers_does_not_count() -> None:
    watched = Watched(0, 0, 0)
    watched.has_readers = False
    watched.check_all(4)
    watched.silent = {1}
    assert watched.check_all(40) == []


def test_many_shards_send_heartbeats_more_slowly() -> None:
    stragglers = Stragglers()
    stragglers.on_lease(lease(), 0)
    members = range(4000)
    for shard in members:
        stragglers.on_heartbeat(shard, SIZE * 10_000, S, has_readers=True)
    stragglers.check_silent(members, 3 * S - 1)
    stragglers.check()
    assert not any(checks.late_in_a_row for checks in stragglers._checks.values())
    stragglers.check_silent(members, 3 * S)
    assert all(checks.late_in_a_row for checks in stragglers._checks.values())


def test_queued_heartbeats_count_as_one_check() -> None:
    watched = Watched(0, 300 * MS, 0)
    watched.check_all(1)
    for _ in range(10):
        assert not watched.check_shard(1)
    assert watched.check_all(2) == []
    assert watched.check_all(1) == [1]


def test_counting_restarts_after_a_pause_of_the_service() -> None:
    watched = Watched(0, 300 * MS, 0)
    watched.check_all(3)
    watched.stragglers.forget_checks()
    assert watched.check_all(3) == []
    assert watched.check_all(1) == [1]
    watched.stragglers.forget_checks()
    assert watched.check_all(1) == [1]


def test_a_removed_shard_has_no_straggler_history_when_it_returns() -> None:
    watched = Watched(0, 300 * MS, 0)
    assert watched.check_all(4) == [1]
    watched.stragglers.on_removed(1)
    assert watched.check_all(3) == []
    assert watched.check_all(1) == [1]
    assert watched.wait_for(1) == 5


def test_a_lease_that_never_started_makes_no_shard_late() -> None:
    first = lease(epochs=16)
    second = first.following()
    third = second.following()
    stragglers = Stragglers()
    stragglers.on_lease(first, 0)
    stragglers.on_lease(second, 160 * MS)
    stragglers.on_lease(third, 40 * MS)  # the first is over, the second never begins
    late = {}
    # What ran 100 ms ago: epoch 3 of the first, epochs 0 and 13 of the third.
    for at in (130, 145, 270):
        for frontier in (first.base + 3 * SIZE, third.base, third.base + 13 * SIZE):
            other = Stragglers()
            other._leases = stragglers._leases
            other.on_heartbeat(0, frontier, at * MS, has_readers=True)
            late[at, frontier] = other._checks[0].late_in_a_row
    assert list(late.values()) == [0, 0, 0, 1, 0, 0, 1, 1, 0]


# --- in the service ------------------------------------------------------------------


def watched_world(shards: int = 3, rtt_ms: int = 0) -> World:
    world = World(config(shards=shards, rtt_ms=rtt_ms)).lead().run(2 * S)
    world.set_active()
    for server in world.servers:
        server.has_readers = True
    return world.run(3 * S)


def states(world: World) -> dict[int, str]:
    return {shard: p.state for shard, p in world.service.state.placements.items()}


def test_prompt_shards_stay() -> None:
    world = watched_world().run(20 * S)
    assert members(world) == [0, 1, 2]


def test_a_straggler_is_parked_and_its_servers_are_left_alone() -> None:
    world = watched_world()
    world.servers[2].behind = 400 * MS
    world.run(1600 * MS)
    assert members(world) == [0, 2]
    assert states(world) == {0: "live", 1: "parked", 2: "live"}
    assert world.service.state.placements[1].view == 1
    assert [replica["state"] for replica in world.status()["shards"][1]["replicas"]] == ["up", "up"]
    world.servers[2].behind = 0
    world.run(7 * S)
    assert members(world) == [0, 1, 2]


@pytest.mark.parametrize(("rtt_ms", "left"), [(0, [0, 2]), (100, [0, 1, 2])])
def test_a_lag_of_two_round_trips_of_the_cluster_file_is_no_reason_to_park(
    rtt_ms: int, left: list[int]
) -> None:
    world = watched_world(rtt_ms=rtt_ms)
    world.servers[2].behind = 250 * MS
    world.run(5 * S)
    assert members(world) == left


def test_no_shard_is_parked_without_readers() -> None:
    world = watched_world()
    for server in world.servers:
        server.has_readers = False
    world.servers[2].behind = 400 * MS
    world.run(20 * S)
    assert members(world) == [0, 1, 2]


def test_a_new_leader_forgets_earlier_stragglers() -> None:
    world = watched_world()
    world.servers[2].behind = 400 * MS
    world.run(2 * S)
    assert members(world) == [0, 2]
    world.step(LeaderChanged("mms-1", is_self=False))
    world.lead().run(100 * MS)
    assert members(world) == [0, 1, 2]


def test_three_late_checks_before_a_pause_of_the_service_do_not_count_after_it() -> None:
    world = watched_world()
    late = world.servers[2]
    late.behind = 400 * MS
    world.run(700 * MS)
    assert world.service._leases._stragglers._checks[1].late_in_a_row == 3
    late.alive = False  # its heartbeats are on their way
    world.now += 2 * S
    world.run(100 * MS)
    assert members(world) == [0, 1, 2]


def test_a_straggler_that_fails_is_recovered_and_back() -> None:
    world = watched_world()
    world.servers[2].behind = 400 * MS
    world.run(2 * S)
    assert states(world)[1] == "parked"
    world.send(Remove(CLUSTER, 9, 1, 1, 2))
    world.run(10 * MS)
    assert states(world)[1] == "recovering"
    prints = [fingerprint(f"directory of shard-1-{index}") for index in range(2)]
    world.send(Reinsert(CLUSTER, 8, 1, 2, prints, 0))
    world.run(10 * MS)
    assert members(world) == [0, 1, 2]
    world.servers[2].behind = 0
    world.run(S)
    assert states(world) == {0: "live", 1: "live", 2: "live"}


def test_a_straggler_returns_at_once_when_no_other_shard_is_fit() -> None:
    world = watched_world(shards=2)
    world.servers[2].behind = 400 * MS
    world.run(1600 * MS)
    assert members(world) == [0]
    world.servers[0].alive = False
    world.servers[2].behind = 0
    world.run(3600 * MS)  # the other one is missed after 3 s; it would be back after 5 s
    assert members(world) == [1]
