"""Two regions that cannot reach each other, with a leader in each; both reach the third one."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Final

import pytest

from failure_handler.state import HandlerState
from tests.sim.cluster import SimCluster
from tests.sim.mutation import LAN, busy
from tests.sim.programs import ClientProgram
from tests.sim.regions import Regions
from tests.sim.simulated import simulated
from tests.simulator.consensus import OrderedLog
from tests.simulator.kernel import MS, Kernel, S
from ziplog.client.common.requests import FetchRequest, InsertRequest, SubscribeRequest
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId
from ziplog.wire import Reinsert, Remove, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.sim.plan import Plan
    from tests.simulator.raft import RaftGroup
    from ziplog.client.common.requests import Fetched

#: Shard 0 spans the regions that are parted; shard 1 is in the third one.
PLACES: Final = Regions((10_000, 20_000, 40_000), (("ap", "eu"), ("us", "us")), 1, is_near=False)
PARTED: Final = ("ap", "eu")
PLAN: Final = busy(1, shards=2, mms=3, handlers=3, conditions=LAN, regions=PLACES)
#: Time for a recovery: a suspicion, a second for repeated requests, and a restart.
_RECOVERY_NS: Final = 6 * S


@contextmanager
def led(service: str, handler: str, plan: Plan = PLAN) -> Iterator[SimCluster]:
    """Yield a whole cluster with these leaders, which stay."""
    kernel = Kernel(1)
    with simulated(kernel):
        cluster = SimCluster(kernel, plan)
        cluster.begin()
        for group, leader in ((cluster.mms, service), (cluster.handlers, handler)):
            elect(group, leader)
        kernel.run(2 * S)
        yield cluster
        assert (cluster.mms.leader, cluster.handlers.leader) == (service, handler)


def part(cluster: SimCluster) -> None:
    """Cut the two regions from each other."""
    places = cluster.plan.regions
    assert places is not None
    for one, other in permutations(cluster.nodes, 2):
        if {places.of(one), places.of(other)} == set(PARTED):
            cluster.network.cut(one, other)


def silence_supervisor(cluster: SimCluster) -> None:
    """Cut the supervisor from the failure handler, as that of a region without its leader is.

    It then restarts no server that the other regions do not reach.
    """
    for handler in cluster.handlers.names:
        cluster.network.cut("host", handler)
        cluster.network.cut(handler, "host")


def elect(group: OrderedLog | RaftGroup, leader: str) -> None:
    """Isolate leaders until a node leads."""
    assert isinstance(group, OrderedLog)
    while (found := group.leader) != leader:
        group.isolate(found)
        assert group.kernel.run_until(lambda: group.leader, 2 * S)
        group.rejoin(found)


def move_leader(cluster: SimCluster, group: OrderedLog | RaftGroup) -> None:
    """Cut leaders off until the second node, in the second parted region, leads the group."""
    first, second, _ = group.names
    while group.leader != second:
        for other in group.names:
            cluster.network.cut(group.leader or first, other)
            cluster.network.cut(other, group.leader or first)
        cluster.kernel.run(3 * S)
        cluster.network.heal_all()
        cluster.kernel.run(2 * S)


def has_begun(cluster: SimCluster) -> bool:
    """Whether the survivor of shard 0 is in the next view."""
    state = cluster.handlers.machine
    assert isinstance(state, HandlerState)
    known = state.shards.get(0)
    if known is None or known.decision is None:
        return False
    survivor = cluster.state_of(f"shard-0-{known.decision.survivor}")
    return survivor is not None and survivor.server_state == "joined"


def has_returned(cluster: SimCluster) -> bool:
    """Whether shard 1 is in the leases again, in a later view."""
    placement = cluster.state.placements[1]
    return placement.state == "live" and placement.view > 1


@pytest.mark.parametrize(("service", "handler"), [("mms-0", "fh-1"), ("mms-1", "fh-0")])
def test_a_shard_over_the_parted_regions_begins_its_next_view(service: str, handler: str) -> None:
    """The survivor enters the view, so readers that reach it continue."""
    with led(service, handler) as cluster:
        part(cluster)
        begun = cluster.kernel.run_until(lambda: has_begun(cluster), _RECOVERY_NS)
        assert begun, cluster.states()
        assert cluster.state.placements[0].state == "recovering"


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("moved", ["mms", "handlers"])
def test_it_begins_its_next_view_also_while_nodes_stand_for_election(moved: str, seed: int) -> None:
    """With real consensus, the nodes of the third region soon lead, as they reach both."""
    kernel = Kernel(seed)
    with simulated(kernel, is_raft_real=True):
        cluster = SimCluster(kernel, PLAN._replace(is_raft_real=True))
        cluster.begin()
        kernel.run(3 * S)
        move_leader(cluster, getattr(cluster, moved))
        part(cluster)
        begun = kernel.run_until(lambda: has_begun(cluster), _RECOVERY_NS)
        assert begun, cluster.states()
        kernel.run(_RECOVERY_NS)
        third = {cluster.mms.names[2], cluster.handlers.names[2]}
        assert third & {cluster.mms.leader, cluster.handlers.leader}, cluster.states()


@pytest.mark.parametrize(("service", "handler"), [("mms-0", "fh-1"), ("mms-1", "fh-0")])
def test_a_shard_of_the_third_region_is_recovered_and_returns(service: str, handler: str) -> None:
    with led(service, handler) as cluster:
        part(cluster)
        cluster.nodes["shard-1-1"].kill()

        returned = cluster.kernel.run_until(lambda: has_returned(cluster), _RECOVERY_NS)
        assert returned, cluster.states()


def test_followers_forward_nothing_while_the_leaders_reach_each_other() -> None:
    """The leader answers before a request is repeated."""
    kernel = Kernel(1)
    forwarded: list[str] = []

    def note(src: str, dst: str, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Remove | Reinsert) and src.startswith("mms"):
            forwarded.append(f"{src} to {dst}: {message}")

    with simulated(kernel):
        cluster = SimCluster(kernel, PLAN)
        cluster.begin()
        cluster.network.on_frame = note
        cluster.nodes["shard-1-1"].kill()
        assert kernel.run_until(lambda: has_returned(cluster), _RECOVERY_NS), cluster.states()
    assert forwarded == []


@pytest.mark.parametrize("places", [("ap", "eu", "eu"), ("eu", "ap", "eu"), ("eu", "eu", "ap")])
def test_a_server_that_no_other_one_reaches_begins_no_view_for_long(places: Sequence[str]) -> None:
    """The failure handler reaches it; but a view needs two servers, so that readers continue."""
    regions = Regions(PLACES.delays_us, (tuple(places), ("us", "us", "us")), 1, is_near=False)
    with led("mms-2", "fh-2", PLAN._replace(f=2, regions=regions)) as cluster:
        part(cluster)
        state = cluster.handlers.machine
        assert isinstance(state, HandlerState)

        def is_confirmed() -> bool:
            known = state.shards.get(0)
            return known is not None and known.confirmed > 1

        assert cluster.kernel.run_until(is_confirmed, _RECOVERY_NS), cluster.states()


# --- readers ---


def read_from_now_on(cluster: SimCluster, name: str = "reader-2") -> list[int]:
    """Read the log in a reader's region; return the times of the records, a list that grows."""
    process, times = cluster.client(name), list[int]()
    process.start()
    program = process.program
    assert isinstance(program, ClientProgram)

    def fetch(number: int) -> None:
        def on_fetched(fetched: Fetched) -> None:
            times.extend([cluster.kernel.now] * len(fetched.records))
            fetch(number)

        program.call(FetchRequest(NEVER, number, 100), on_fetched)

    program.call(SubscribeRequest(NEVER, RID_RECENT, follow=True), fetch)
    return times


@pytest.mark.parametrize(
    ("service", "handler", "places"),
    [
        ("mms-0", "fh-2", ("ap", "eu")),
        ("mms-0", "fh-0", ("ap", "eu")),
        ("mms-1", "fh-1", ("eu", "ap")),
        ("mms-1", "fh-0", ("ap", "eu", "us")),
        ("mms-2", "fh-0", ("ap", "eu", "us")),
    ],
)
def test_a_reader_leaves_the_server_that_is_left_out(
    service: str, handler: str, places: tuple[str, ...]
) -> None:
    """The reader reaches all servers of the shard, of which two do not reach each other.

    The server that is left out reaches the leaders, or some of them, or none.
    """
    regions = PLACES._replace(shards=(places, ("us",) * len(places)))
    with led(service, handler, PLAN._replace(f=len(places) - 1, regions=regions)) as cluster:
        times = read_from_now_on(cluster)
        insert_from_now_on(cluster, 1000)
        cluster.kernel.run(1 * S)
        part(cluster)
        silence_supervisor(cluster)
        start = cluster.kernel.now
        cluster.kernel.run(2 * _RECOVERY_NS)
        late = [at for at in times if at > start + _RECOVERY_NS]
        assert late, cluster.states()
        cluster.network.heal_all()


# --- inserts in flight ---------------------------------------------------------------------------

#: Shard 0 has a server in each region, shard 1 all of them in the third one.
WIDE: Final = PLAN._replace(
    f=2,
    regions=Regions(PLACES.delays_us, (("ap", "eu", "us"), ("us", "us", "us")), 1, is_near=False),
)
INSERTS: Final = 40


def insert_from_now_on(
    cluster: SimCluster, count: int = INSERTS, name: str = "writer-2"
) -> list[list[RecordId]]:
    """Insert 20 records a second in a writer's region; return the results, a list that grows."""
    process, results = cluster.client(name), list[list[RecordId]]()
    process.start()
    program = process.program
    assert isinstance(program, ClientProgram)
    for number in range(count):
        request = InsertRequest(NEVER, [b"%d" % number], RID_GENESIS, None, 0)
        cluster.kernel.after(number * 50 * MS, partial(program.call, request, results.append))
    return results


@pytest.mark.parametrize(("service", "handler"), [("mms-0", "fh-1"), ("mms-2", "fh-2")])
def test_inserts_at_a_shard_over_parted_regions_end_elsewhere(service: str, handler: str) -> None:
    """Its survivor reports which of them it has; the client inserts the others at shard 1."""
    with led(service, handler, WIDE) as cluster:
        results = insert_from_now_on(cluster)
        cluster.kernel.run(1 * S)
        part(cluster)
        ended = cluster.kernel.run_until(lambda: len(results) == INSERTS, _RECOVERY_NS)
        assert ended, f"{INSERTS - len(results)} inserts are open: {cluster.states()}"
        assert len({rid.gsn for (rid,) in results}) == INSERTS
        assert {rid.shard for (rid,) in results} == {0, 1}


def test_without_another_shard_inserts_wait_for_the_link() -> None:
    """Every insert needs all servers of its shard, also while only two of them cannot meet."""
    with led("mms-2", "fh-2", WIDE._replace(shards=1)) as cluster:
        results = insert_from_now_on(cluster)
        cluster.kernel.run(1 * S)
        part(cluster)
        cluster.kernel.run(2 * _RECOVERY_NS)
        assert 0 < len(results) < INSERTS
        cluster.network.heal_all()
        assert cluster.kernel.run_until(lambda: len(results) == INSERTS, _RECOVERY_NS)
        assert len({rid.gsn for (rid,) in results}) == INSERTS
