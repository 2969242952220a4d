"""Plans with regions: their draws, their delays, their runs, and the rule `regions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.sim import regions
from tests.sim.cluster import config_of
from tests.sim.history import History
from tests.sim.mutation import busy
from tests.sim.plan import REGION_FAULTS, Fault, draw, draw_region_changes
from tests.sim.regions import REGIONS, Regions
from tests.sim.run import run
from tests.simulator.kernel import MS, US, Kernel, S
from tests.simulator.network import Conditions, Network
from ziplog.client.common.requests import InsertRequest
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from tests.sim.plan import Plan
    from ziplog.types import Durability

PLACES = Regions(
    delays_us=(5_000, 20_000, 60_000),
    shards=(("ap", "eu"), ("us", "us")),
    min_regions=1,
    is_near=True,
)


def test_one_plan_of_six_has_regions_and_all_else_of_it_stays() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert 30 < sum(plan.regions is not None for plan in drawn) < 70
    kinds = {*REGION_FAULTS, "relabel", "strand-region"}
    for plan in drawn:
        changes = draw_region_changes(plan) if plan.regions is not None else []
        others = tuple(f for f in plan.faults if f.kind not in kinds and f not in changes)
        plain = draw(plan.seed, has_regions=False)
        assert plan._replace(regions=None, faults=others) == plain
    assert draw(3, faults=2).regions is None


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_is_a_valid_cluster_file(seed: int) -> None:
    """Constructing a cluster file checks `min_regions` and `rtt_ms`."""
    plan = draw(seed, has_regions=True)
    config = config_of(plan)
    assert plan.regions is not None
    for node in config.nodes:
        assert node.region in REGIONS
    longest = max(
        (plan.regions.delay_ns(one, other) or (0, 0))[1]
        for one in plan.servers
        for other in ("writer-0", "writer-1", "writer-2")
    )
    assert 2 * longest <= config.rtt_ms * MS


def test_a_process_is_where_its_number_says() -> None:
    found = {name: PLACES.of(name) for name in ("mms-0", "fh-4", "writer-2", "shard-1-0", "host")}
    assert found == {"mms-0": "ap", "fh-4": "eu", "writer-2": "us", "shard-1-0": "us", "host": ""}


def test_a_delay_is_that_of_its_two_regions_with_a_tenth_of_jitter() -> None:
    ways = {("mms-0", "mms-1"): 5, ("mms-2", "mms-0"): 20, ("mms-1", "mms-2"): 60}
    for (one, other), ms in ways.items():
        expected = (ms * MS, ms * MS * 11 // 10)
        assert PLACES.delay_ns(one, other) == PLACES.delay_ns(other, one) == expected
    assert PLACES.delay_ns("mms-0", "shard-0-0") is None
    assert PLACES.delay_ns("mms-0", "operator") is None


def test_the_links_of_a_slow_region_to_others_are_slow_and_lossy() -> None:
    slow = ["ap"]
    assert PLACES.slowed_ns("mms-0", "mms-1", slow) == (25 * MS, 27_500_000)
    assert PLACES.loss("mms-1", "mms-0", slow) > 0
    for one, other in (("mms-0", "shard-0-0"), ("mms-1", "mms-2"), ("mms-0", "operator")):
        assert PLACES.slowed_ns(one, other, slow) == PLACES.delay_ns(one, other)
        assert PLACES.loss(one, other, slow) == 0


def test_the_network_asks_for_the_delay_of_a_link_before_the_general_one() -> None:
    kernel = Kernel(1)
    network = Network(kernel, Conditions(delay_ns=(50 * US, 50 * US)))
    network.delay_of = lambda src, _dst: (3 * MS, 3 * MS) if src == "far" else None
    arrived: list[tuple[str, int]] = []
    began = kernel.now
    for src in ("near", "far"):
        network.carry(src, "b", b"", lambda src=src: arrived.append((src, kernel.now - began)))
    kernel.run(1 * S)
    assert arrived == [("near", 50 * US), ("far", 3 * MS)]


@pytest.mark.parametrize("seed", [4, 6, 7])
def test_a_cluster_over_regions_keeps_all_guarantees(seed: int) -> None:
    assert run(draw(seed, has_regions=True)).operations > 30


def test_a_seed_of_regions_is_drawn_apart() -> None:
    assert regions.draw(7, 1, 2) == regions.draw(7, 1, 2) != regions.draw(8, 1, 2)


# --- the history's rule --------------------------------------------------------------------------

#: Shard 0 spans two regions, and one from 2,000 ns on, in the next view.
_NARROWED = [(0, 0, 1, ["eu", "us"]), (2_000, 0, 2, ["us", "us"])]


def _broken(
    min_regions: int, called: int, acked: int, placed: list[tuple[int, int, int, list[str]]]
) -> list[str]:
    """Return the rules that an insert at shard 0 breaks."""
    history = History(seed=1)
    request = InsertRequest(NEVER, [b"a"], RID_GENESIS, None, 0, min_regions=min_regions)
    number = history.call("a", called, request)
    history.returned(number, acked, [RecordId(7, 0)])
    history.placements(placed)
    return [violation.rule for violation in history.judge().violations]


@pytest.mark.parametrize(
    ("min_regions", "called", "acked", "rules"),
    [
        (2, 100, 200, []),
        (2, 1_900, 2_100, []),
        (2, 2_100, 2_200, ["regions"]),
        (1, 2_100, 2_200, []),
        (0, 2_100, 2_200, []),
        (3, 1_900, 2_100, ["regions"]),
    ],
)
def test_a_record_is_in_as_many_regions_as_its_insert_requested(
    min_regions: int, called: int, acked: int, rules: list[str]
) -> None:
    assert _broken(min_regions, called, acked, _NARROWED) == rules


def test_a_client_may_know_the_former_regions_of_a_view() -> None:
    relabelled = [(at, shard, 1, regions) for at, shard, _, regions in _NARROWED]
    assert _broken(2, 2_100, 2_200, relabelled) == []


def test_a_history_without_placements_of_a_shard_says_nothing_about_it() -> None:
    assert _broken(3, 100, 200, []) == _broken(3, 100, 200, [(0, 1, 1, ["eu"])]) == []


# --- faults and labels of regions ----------------------------------------------------------------


def ring(seed: int, *faults: Fault, **changes: Any) -> Plan:
    """Return a run of the recommended shape, which survives the loss of each region."""
    shards = (("ap", "eu"), ("eu", "us"), ("us", "ap"))
    placed = Regions((10_000, 20_000, 40_000), shards, 0, is_near=bool(seed % 2))
    plan = busy(
        seed, *faults, shards=3, mms=3, handlers=3, calls=20, think_us=20_000, span_ms=2_000,
        regions=placed,
    )  # fmt: skip
    return plan._replace(**changes)


@pytest.mark.parametrize("kind", ["cut-region", "lose-region"])
@pytest.mark.parametrize("region", REGIONS)
def test_the_log_survives_a_region_that_is_away_for_a_while(kind: str, region: str) -> None:
    seed = REGIONS.index(region)
    assert run(ring(seed, Fault(200, kind, (region,), 3_000))).faults == 1


@pytest.mark.parametrize(("kind", "count"), [("slow-region", 1), ("part-regions", 2)])
def test_the_log_survives_a_region_with_bad_links(kind: str, count: int) -> None:
    assert run(ring(1, Fault(200, kind, REGIONS[:count], 2_000), calls=10)).faults == 1


@pytest.mark.parametrize("region", REGIONS)
def test_the_log_goes_on_without_a_region_that_is_lost_for_good(region: str) -> None:
    """At its end, the run inserts and reads everything in each region that is left."""
    seed = REGIONS.index(region)
    assert run(ring(seed, Fault(200, "destroy-region", (region,)), calls=10)).faults == 1


LOST = Fault(200, "destroy-region", ("ap",))


def test_the_last_servers_of_a_shard_stay_undisturbed() -> None:
    """Nor does a change need lost machines, or leave no shard for inserts."""
    beside = (
        Fault(1_800, "kill", ("shard-0-1",)),
        Fault(1_800, "power-all"),
        Fault(1_800, "power-region", ("eu",)),
        Fault(1_800, "rebuild", amount=16),
        Fault(1_800, "destroy-region", ("eu",)),
        Fault(1_800, "add-shard", ("shard-3",)),
        Fault(1_800, "remove-shard", ("shard-1",)),
    )
    assert run(ring(1, LOST, *beside, durability="disk")).faults == 1


def test_a_reader_near_a_server_that_has_only_joined_reads_everything() -> None:
    """With f = 2, two servers of shard 0 are left, and its next view does not start."""
    shards = (REGIONS, ("eu", "us", "us"))
    placed = Regions((10_000, 20_000, 40_000), shards, 0, is_near=True)
    plan = ring(1, LOST, calls=10, shards=2, f=2, regions=placed)
    assert run(plan).faults == 1


def test_shards_without_lost_servers_come_and_go() -> None:
    """Shard 4 is like shard 1, so that one may leave."""
    added, removed = (
        Fault(1_800, "add-shard", ("shard-4",)),
        Fault(6_000, "remove-shard", ("shard-1",)),
    )
    assert run(ring(1, LOST, added, removed)).faults == 3


def test_a_shard_that_lost_a_server_leaves_and_stays_readable() -> None:
    """It stays in its recovery: only all its servers end that."""
    assert run(ring(1, LOST, Fault(1_800, "remove-shard", ("shard-0",)))).faults == 2


@pytest.mark.parametrize(("durability", "fits"), [("disk", True), ("memory", False)])
def test_the_power_of_a_region_with_a_whole_shard_may_fail_at_level_disk(
    durability: Durability, fits: bool
) -> None:
    fault = Fault(200, "power-region", ("us",))
    assert run(ring(1, fault, regions=PLACES, durability=durability)).faults == fits


PAUSED = Fault(100, "pause", ("shard-0-1",), 3_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"mms": 1},
        {"regions": PLACES},
        {"regions": None},
        {"faults": (PAUSED, Fault(200, "lose-region", ("ap",), 500))},
    ],
    ids=["the membership service", "a whole shard", "no regions", "the other server of a shard"],
)
def test_a_region_that_the_cluster_would_miss_stays(changes: dict[str, Any]) -> None:
    fault = Fault(200, "lose-region", ("us" if "regions" in changes else "ap",), 500)
    plan = ring(1, fault, **changes)
    assert run(plan).faults == len(plan.faults) - 1


def test_a_server_restarts_with_another_region() -> None:
    """At its end, the run compares the placements with the cluster file."""
    mixed = PLACES._replace(shards=(("ap", "eu"), ("us", "eu")))
    moved = Fault(200, "relabel", ("shard-0-1",), amount=2)
    assert run(ring(1, moved, shards=2, regions=mixed)).faults == 1


def test_a_region_that_makes_a_shard_too_narrow_is_refused() -> None:
    """The cluster file would be refused: it requires two regions."""
    moved = Fault(200, "relabel", ("shard-0-1",), amount=3)
    assert run(ring(1, moved)).faults == 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(301, 381, 10))
def test_many_clusters_over_regions(first: int) -> None:
    for seed in range(first, first + 10):
        run(draw(seed, has_regions=True))
