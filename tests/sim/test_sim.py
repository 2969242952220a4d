"""Fixed seeds, each a cluster, a workload and faults; none may fail."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from shard.ordering.plain_inserts import PlainInserts
from tests.properties import seeds
from tests.sim.hashing import printed_under_any_hashes
from tests.sim.plan import Fault, draw
from tests.sim.run import run
from tests.sim.seeds import attempt, command
from tests.sim.shrink import shrink

if TYPE_CHECKING:
    from ziplog.wire import Insert, InsertAck

#: The first seed.
FIRST = int(os.environ.get("ZIPLOG_SIM_SEED", "1"))


def clean(seed: int) -> None:
    result = attempt(draw(seed))
    assert not result.failure, f"{command(draw(seed))}: {result.failure}"


@pytest.mark.parametrize("seed", seeds(12, 24))
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    clean(FIRST + seed)


@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_loses_nothing_at_level_disk(seed: int) -> None:
    """Two power cuts of all machines under load; no loss may be reported either."""
    cuts = (Fault(150 + 20 * seed, "power-all"), Fault(2500, "power-all"))
    plan = draw(seed, is_raft_real=seed < 2)._replace(durability="disk", naps=False)
    drawn = tuple(fault for fault in plan.faults if fault.kind != "rot")[:3]
    run(plan._replace(faults=tuple(sorted(drawn + cuts))))


@pytest.mark.parametrize("seed", range(6))
def test_two_servers_of_a_shard_may_fail_with_f_2(seed: int) -> None:
    plan = draw(seed)._replace(f=2, shards=1, durability="memory", naps=False)
    kills = (Fault(200, "kill", ("shard-0-0",)), Fault(205 + 20 * seed, "power", ("shard-0-2",)))
    assert run(plan._replace(faults=kills)).faults == 2


def dense(seed: int) -> int:
    """Run a seed with few clients that insert without a pause; return how many inserts are plain.

    Few inserts of other plans take the short path: their clients pause, or all of them wait.
    """
    accepted = 0
    insert = PlainInserts.insert

    def counted(path: PlainInserts, route: bytes, message: Insert, now: int) -> InsertAck | None:
        nonlocal accepted
        ack = insert(path, route, message, now)
        accepted += ack is not None
        return ack

    plan = draw(seed)._replace(
        shards=1, f=1 + seed % 2, durability="memory", readers=seed % 2, writers=1 + seed % 3,
        lanes=1, think_us=0, calls=150, naps=False, database=None, regions=None,
    )  # fmt: skip
    with patch.object(PlainInserts, "insert", counted):
        run(plan)
    return accepted


@pytest.mark.parametrize("seed", range(4))
def test_dense_inserts_take_the_short_path_and_keep_all_guarantees(seed: int) -> None:
    assert dense(seed) > 50


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(FIRST + 10, FIRST + 110, 10))
def test_many_seeds_with_dense_inserts(first: int) -> None:
    assert sum(map(dense, range(first, first + 10))) > 500


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(FIRST + 1000, FIRST + 1160, 10))
def test_many_seeds(first: int) -> None:
    """A count, not a time, so that every machine runs the same seeds."""
    for seed in range(first, first + 10):
        clean(seed)


def test_the_same_seed_is_the_same_history() -> None:
    assert run(draw(7)) == run(draw(7))


def test_another_seed_is_another_history() -> None:
    assert run(draw(7)).trace_hash != run(draw(8)).trace_hash


def test_a_history_does_not_depend_on_the_hashes_of_strings() -> None:
    code = "from tests.sim.plan import draw; from tests.sim.run import run; print(run(draw(9)))"
    assert "trace_hash" in printed_under_any_hashes(code)


def test_a_trace_that_is_read_is_the_same_history() -> None:
    lines: list[str] = []
    assert run(draw(7), lines.append) == run(draw(7))
    assert any("Insert" in line for line in lines)


def test_a_failing_plan_is_made_smaller() -> None:
    plan = draw(1, faults=9)
    culprit = Fault(5, "kill", ("shard-0-0",))
    plan = plan._replace(faults=(*plan.faults[:4], culprit, *plan.faults[4:]), writers=4, calls=60)
    small = shrink(plan, lambda candidate: culprit in candidate.faults)
    assert small.faults == (culprit,)
    assert (small.writers, small.readers, small.calls) == (1, 1, 1)


def test_shrinking_ends_when_its_budget_is_spent() -> None:
    runs: list[int] = []
    plan = draw(1, faults=9)
    assert shrink(plan, lambda _: bool(runs.append(1)), budget=3) == plan
    assert len(runs) == 3


def test_the_command_line_of_a_run_contains_its_differences() -> None:
    plan = draw(5)
    assert command(plan) == "python -m tests.sim --seed 5"
    assert command(draw(5, has_regions=True)).startswith("python -m tests.sim --seed 5 --regions")
    changed = plan._replace(calls=1, faults=(Fault(5, "kill", ("shard-0-0",)),))
    assert command(changed) == 'python -m tests.sim --seed 5 --steps 1 --faults "5 kill shard-0-0"'
