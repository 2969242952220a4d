"""Fixed scenarios of a database: its guarantees under crashes at chosen times.

Every run is checked like those of seeds; the assertions here show that the scenario took place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.sim.__main__ import main
from tests.sim.database.draws import draw
from tests.sim.fault_text import parse_fault, unknown_targets
from tests.sim.hashing import printed_under_any_hashes
from tests.sim.plan import Database, Fault, Plan
from tests.sim.rebuild import Loss
from tests.sim.run import run
from tests.sim.seeds import attempt, command
from tests.simulator.kernel import MS, US
from tests.simulator.network import Conditions

if TYPE_CHECKING:
    from tests.sim.stages import Counts, Outcome

LAN = Conditions()
SLOW = Conditions(delay_ns=(50 * US, 10 * MS))


def quiet(*faults: Fault, **changes: Any) -> Plan:
    """Return a run of one shard and two clients with two lanes each, and these faults."""
    database = Database(
        coordinators=2, checkpoint_every=20, decisions=1_000, segment_bytes=500, inline_bytes=60,
        cache_bytes=200,
    )  # fmt: skip
    plan = draw(1, faults=0)._replace(
        shards=1, f=1, durability="memory", mms=1, handlers=1, writers=2, readers=1, calls=40,
        lanes=2, think_us=20_000, conditions=LAN, naps=False, span_ms=500, is_raft_real=False,
        database=database,
    )  # fmt: skip
    return plan._replace(faults=faults, **changes)


def counted(outcome: Outcome) -> Counts:
    assert outcome.database is not None
    return outcome.database


def test_the_log_is_trimmed_after_checkpoints_under_load() -> None:
    counts = counted(run(quiet()))
    assert counts.commits > 60
    assert counts.checkpoints > 0
    assert counts.trims > 0


def test_a_coordinator_is_killed_repeatedly() -> None:
    kills = [Fault(30 + 40 * i, "kill", ("coordinator-0",)) for i in range(10)]
    plan = quiet(*kills)
    assert plan.database is not None
    outcome = run(plan._replace(database=plan.database._replace(coordinators=1)))
    assert outcome.faults > 1
    assert counted(outcome).checkpoints > 0


def test_both_coordinators_are_killed_at_once() -> None:
    kills = [Fault(200, "kill", (f"coordinator-{i}",)) for i in range(2)]
    assert run(quiet(*kills)).faults == 2


def test_a_coordinator_is_paused_while_the_log_is_trimmed() -> None:
    outcome = run(quiet(Fault(50, "pause", ("coordinator-0",), 3_000), calls=80))
    assert outcome.faults == 1
    assert counted(outcome).trims > 0


def test_a_coordinator_overtaken_by_a_trim_restarts_from_a_checkpoint() -> None:
    lines: list[str] = []
    isolated = Fault(400, "isolate", ("coordinator-0",), 3_000)
    assert run(quiet(isolated, calls=120), lines.append).faults == 1
    assert any("lost the log, starting again" in line for line in lines)


def test_the_primary_is_killed_during_commits() -> None:
    outcome = run(quiet(Fault(150, "kill", ("shard-0-0",)), conditions=SLOW))
    assert outcome.faults == 1


def test_a_power_cut_of_all_machines_loses_no_commit_at_level_disk() -> None:
    cuts = (Fault(200, "power-all"), Fault(2_500, "power-all"))
    assert run(quiet(*cuts, durability="disk", calls=80)).faults == 2


def test_a_client_is_killed_with_open_calls() -> None:
    kills = [Fault(100 + 150 * i, "kill-client", ("writer-0",)) for i in range(3)]
    outcome = run(quiet(*kills))
    assert outcome.faults == 3
    assert counted(outcome).in_doubt > 0


def test_a_client_is_partitioned_from_one_coordinator() -> None:
    links = ("writer-0", "coordinator-0", "coordinator-1", "writer-1")
    assert run(quiet(Fault(50, "cut", links, 2_000))).faults == 1


@pytest.mark.parametrize(
    "seed",
    [pytest.param(1, marks=pytest.mark.nightly), 5, pytest.param(16, marks=pytest.mark.nightly)],
)
def test_seeds(seed: int) -> None:
    result = attempt(draw(seed))
    assert not result.failure, f"{command(draw(seed))}: {result.failure}"


def test_the_same_seed_is_the_same_history_under_any_hashes() -> None:
    code = (
        "from tests.sim.database.draws import draw; from tests.sim.run import run;"
        " print(run(draw(7)._replace(calls=10)))"
    )
    assert "trace_hash" in printed_under_any_hashes(code)


def test_the_command_that_repeats_a_run_names_the_database() -> None:
    assert command(draw(5)) == "python -m tests.sim --seed 5 --logdb"
    assert command(draw(5)._replace(calls=1)) == "python -m tests.sim --seed 5 --logdb --steps 1"


@pytest.mark.parametrize("seed", range(40))
def test_a_fault_of_a_coordinator_is_parsed_from_its_text(seed: int) -> None:
    drawn = draw(seed)
    for fault in drawn.faults:
        assert parse_fault(str(fault)) == fault
        assert not unknown_targets(fault, drawn)
        alone = drawn._replace(database=None)
        assert unknown_targets(fault, alone) == [t for t in fault.targets if t.startswith("coord")]


def test_a_run_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--logdb", "--seed", "6", "--quiet", "--steps", "2"]) == 0
    assert "database=Counts(" in capsys.readouterr().out


def test_power_cuts_of_all_servers_happen_only_at_level_disk() -> None:
    plans = [draw(seed) for seed in range(400)]
    at_level = {p.durability for p in plans for fault in p.faults if fault.kind == "power-all"}
    assert at_level == {"disk"}


def test_rebuilds_that_may_lose_records_happen_only_at_level_disk() -> None:
    at_level: dict[str, set[Loss]] = {"memory": set(), "disk": set()}
    for plan in map(draw, range(2000)):
        losses = {Loss.of(fault.amount) for fault in plan.faults if fault.kind == "rebuild"}
        at_level[plan.durability] |= losses
    nothing = Loss(kills=False, handlers=False, servers=False, power=False)
    assert at_level["memory"] == {nothing, nothing._replace(servers=True)}
    assert any(loss.kills and loss.power for loss in at_level["disk"])
