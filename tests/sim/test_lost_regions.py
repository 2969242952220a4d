"""Two of three regions are lost, and an operator gives them up (section 20, rule 11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.sim.cluster import SimCluster
from tests.sim.history import History
from tests.sim.mutation import LAN, busy
from tests.sim.operator import Operator
from tests.sim.plan import Fault, draw, draw_stranded
from tests.sim.programs import ClientProgram
from tests.sim.region_faults import Alone
from tests.sim.regions import REGIONS, Regions
from tests.sim.run import run
from tests.sim.simulated import simulated
from tests.sim.test_parted_regions import insert_from_now_on
from tests.simulator.kernel import Kernel, S
from ziplog.client.common.requests import FetchRequest, SubscribeRequest
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from tests.sim.plan import Plan
    from ziplog.client.common.requests import Fetched

#: Shard 0 has a server in each region; shard 1, both services and the clients are in ap.
PLACES: Final = Regions((10_000, 20_000, 30_000), (REGIONS, ("ap",) * 3), 1, is_near=False)
PLAN: Final = busy(1, shards=2, f=2, conditions=LAN, regions=PLACES)
GONE: Final = ("shard-0-1", "shard-0-2")
#: 20 inserts a second, until after the regions are back.
INSERTS: Final = 700


def follow(cluster: SimCluster, name: str) -> dict[RecordId, bytes]:
    """Read the log from its beginning on; return the records, a table that grows."""
    process, records = cluster.client(name), dict[RecordId, bytes]()
    process.start()
    program = process.program
    assert isinstance(program, ClientProgram)

    def fetch(number: int) -> None:
        def on_fetched(fetched: Fetched) -> None:
            records.update((record.rid, record.payload) for record in fetched.records)
            fetch(number)

        program.call(FetchRequest(NEVER, number, 100), on_fetched)

    program.call(SubscribeRequest(NEVER, RID_GENESIS, follow=True), fetch)
    return records


def part(cluster: SimCluster, *, is_killed: bool) -> None:
    """Lose the other regions: they are cut off, or their processes die."""
    if is_killed:
        cluster.lose(GONE)
        return
    rest = [*cluster.nodes, "reader-0", "writer-0", "operator", "host"]
    for name in GONE:
        for other in rest:
            if other not in GONE:
                cluster.network.cut(name, other)
                cluster.network.cut(other, name)


def bring_back(cluster: SimCluster, *, is_killed: bool) -> None:
    """End that."""
    cluster.network.heal_all()
    if is_killed:
        cluster.lost.clear()
        for name in GONE:
            cluster.nodes[name].start()


def is_back(cluster: SimCluster) -> bool:
    """Whether the cluster is whole, and no region is given up."""
    return cluster.is_whole() and not cluster.state.lost_regions


@pytest.mark.parametrize(
    "is_killed",
    [pytest.param(False, id="cut", marks=pytest.mark.nightly), pytest.param(True, id="killed")],
)
def test_readers_continue_without_the_regions_that_an_operator_gave_up(is_killed: bool) -> None:
    """The survivor loses its disk after all have joined again: nothing is lost with it."""
    kernel = Kernel(1)
    with simulated(kernel):
        cluster = SimCluster(kernel, PLAN)
        operator = Operator(cluster, History(seed=1))
        cluster.begin()
        delivered = follow(cluster, "reader-0")
        acknowledged = insert_from_now_on(cluster, INSERTS, "writer-0")
        kernel.run(1 * S)
        part(cluster, is_killed=is_killed)
        kernel.run(8 * S)
        waiting = len(delivered)
        kernel.run(4 * S)
        assert len(delivered) == waiting, "readers wait for a second server of shard 0"
        for region in ("eu", "us"):
            operator.give_up(region, lambda: False)
        assert kernel.run_until(lambda: len(delivered) > waiting + 40, 5 * S), cluster.states()
        assert cluster.state.lost_regions == ["eu", "us"]
        early = dict(delivered)

        bring_back(cluster, is_killed=is_killed)
        assert kernel.run_until(lambda: is_back(cluster), 20 * S), cluster.states()
        cluster.lose_disk("shard-0-0")
        kernel.run(2 * S)
        everything = follow(cluster, "reader-3")
        assert kernel.run_until(
            lambda: len(acknowledged) == INSERTS and is_back(cluster), 60 * S
        ), cluster.states()
        assert kernel.run_until(lambda: len(everything) == INSERTS, 5 * S), len(everything)
        assert early.items() <= everything.items()
        assert {rid for (rid,) in acknowledged} == everything.keys()


def test_readers_continue_after_a_crash_of_the_only_server_that_is_left() -> None:
    """It starts in limbo, and knows on its disk what was confirmed with it."""
    kernel = Kernel(1)
    with simulated(kernel):
        cluster = SimCluster(kernel, PLAN)
        operator = Operator(cluster, History(seed=1))
        cluster.begin()
        acknowledged = insert_from_now_on(cluster, INSERTS, "writer-0")
        kernel.run(1 * S)
        part(cluster, is_killed=True)
        kernel.run(12 * S)
        for region in ("eu", "us"):
            operator.give_up(region, lambda: False)
        kernel.run(5 * S)
        cluster.nodes["shard-0-0"].kill()
        delivered = follow(cluster, "reader-0")
        assert kernel.run_until(lambda: len(delivered) == INSERTS, 60 * S), cluster.states()
        assert {rid for (rid,) in acknowledged} == delivered.keys()
        state = cluster.state_of("shard-0-0")
        assert state is not None
        assert state.server_state == "limbo"


def test_a_shard_is_removed_once_its_lost_regions_are_given_up() -> None:
    kernel = Kernel(1)
    with simulated(kernel):
        cluster = SimCluster(kernel, PLAN)
        operator = Operator(cluster, History(seed=1))
        cluster.begin()
        insert_from_now_on(cluster, 40, "writer-0")
        kernel.run(1 * S)
        part(cluster, is_killed=True)
        kernel.run(12 * S)
        change = operator.change("remove", 0)
        kernel.run(10 * S)
        assert not change.ended
        for region in ("eu", "us"):
            operator.give_up(region, lambda: False)
        assert kernel.run_until(lambda: change.ended, 5 * S), cluster.states()
        assert change.refused is None


def alone(how: Alone, *faults: Fault, seed: int = 1, for_ms: int = 15_000) -> Plan:
    """Return a run in which region ap goes on alone for a while."""
    fault = Fault(200, "strand-region", ("ap",), for_ms, int(how))
    return PLAN._replace(seed=seed, calls=20, faults=(fault, *faults))


@pytest.mark.parametrize("how", [Alone.GIVEN_UP, Alone.GIVEN_UP | Alone.KILLED])
def test_a_region_goes_on_alone_and_loses_nothing(how: Alone) -> None:
    """The survivor dies when the others return, or later, when all have joined again."""
    later = Fault(25_000, "power", ("shard-0-0",))
    assert run(alone(how, later)).faults == 2


def test_without_the_word_of_the_operator_a_disk_may_be_lost_too() -> None:
    """The others hold every record that was acknowledged or delivered."""
    assert run(alone(Alone.LOSES_DISK, for_ms=4_000)).faults == 1


def test_a_region_without_both_services_does_not_go_on_alone() -> None:
    for changes in ({"mms": 3}, {"handlers": 3}, {"regions": None}):
        assert run(alone(Alone.NOTHING, for_ms=100)._replace(**changes)).faults == 0


def test_some_plans_have_a_region_that_goes_on_alone() -> None:
    drawn = [plan for seed in range(600) if (plan := draw(seed, has_regions=True)).faults]
    found = [fault for plan in drawn for fault in draw_stranded(plan)]
    assert 30 < len(found) < 120
    kinds = {fault.kind for plan in drawn for fault in plan.faults}
    assert {fault.kind for fault in found} == {"strand-region"} <= kinds
