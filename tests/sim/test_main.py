"""The command line: options, and one-line error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.command_line import refusal
from tests.sim import faults, plan
from tests.sim.__main__ import main
from tests.sim.fault_text import KINDS, parse_fault, unknown_targets
from tests.sim.mutants import MUTANTS
from tests.sim.plan import draw, draw_age, draw_changes, draw_rot

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", range(40))
def test_a_fault_is_what_its_text_says(seed: int) -> None:
    drawn = draw(seed, faults=9)
    rotting = draw_rot(drawn._replace(is_raft_real=True))
    beside = [*draw_changes(drawn), *plan.draw_refusals(drawn), *rotting, *draw_age(drawn)]
    beside += plan.draw_region_faults(drawn) + plan.draw_relabels(drawn)
    beside += plan.draw_region_changes(drawn)
    drawn = drawn._replace(faults=(*drawn.faults, *beside))
    for fault in drawn.faults:
        assert parse_fault(str(fault)) == fault
        assert not unknown_targets(fault, drawn)


def test_every_kind_of_fault_is_drawn_has_a_text_and_is_carried_out() -> None:
    drawn = {
        *plan.WEIGHTS,
        *plan.SLEEPS,
        *plan.CHANGES,
        *plan.REFUSALS,
        *plan.ROT,
        *plan.REGION_FAULTS,
        "age",
        "rebuild",
        "relabel",
        "strand-region",
        "set-level",
    }
    assert drawn == set(KINDS) == set(faults.KINDS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x kill shard-0-0", "does not begin with a time in ms"),
        ("-5 kill shard-0-0", "does not begin with a time in ms"),
        ("12", 'there is no fault ""'),
        ("12 tickle x", 'there is no fault "tickle", only add-shard, age, clog, '),
        ("12 kill", "kill names one storage server"),
        ("12 kill unknown", "kill names one storage server"),
        ("12 kill mms-0", "kill names one storage server"),
        ("12 kill shard-0-0 shard-0-1", "kill names one storage server"),
        ("12 kill shard-0-0 300", "kill names one storage server"),
        ("12 kill-mms fh-0", "kill-mms names one node of the membership service"),
        ("12 kill-client shard-0-0", "kill-client names one client"),
        ("12 lead-fh fh-0 20ms", "lead-fh names no target"),
        ("12 cut shard-0-0 20ms", "cut names links"),
        ("12 cut shard-0-0 fh-0 fh-0 20ms", "cut names links"),
        ("12 cut shard-0-0 fh-0", "cut has one duration"),
        ("12 pause shard-0-0 0ms", "pause has one duration"),
        ("12 pause shard-0-0 1ms 2ms", "pause has one duration"),
        ("12 kill shard-0-0 300ms", "kill has no duration"),
        ("12 kill shard-0-0 *3", "kill has no amount"),
        ("12 skew shard-0-0 20ms *x", "skew names one server or node"),
        ("12 skew shard-0-0 20ms", "skew says by how much"),
        ("12 skew shard-0-0 20ms *-1000", "skew says by how much"),
        ("12 skew shard-0-0 20ms *0", "skew says by how much"),
        ("12 crash shard-0-0 20ms *-3", "crash says which call fails"),
        ("12 add-shard shard-0-0", "add-shard names one shard"),
        ("12 cut-region mars 20ms", "cut-region names one region: ap, eu, us"),
        ("12 part-regions ap 20ms", "part-regions names two regions of ap, eu, us"),
        ("12 part-regions ap ap 20ms", "part-regions names two regions of ap, eu, us"),
        ("12 destroy-region ap 20ms", "destroy-region has no duration"),
        ("12 relabel shard-0-0", "relabel says its region"),
        ("12 remove-shard 3", "remove-shard names one shard"),
        ("12 finalize-shard shard-1 300ms", "finalize-shard has no duration"),
        ("12 kill shard-7-0", "seed 3 has no shard-7-0, only shard-0-0, "),
        ("12 kill-fh fh-9", "seed 3 has no fh-9, only shard-0-0, "),
        ("5 kill shard-0-0; 12 kill", '"12 kill": kill names'),
    ],
)
def test_an_invalid_fault_is_refused(
    capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    line = refusal(capsys, main, ["--seed", "3", "--faults", text])
    assert text.rpartition("; ")[2] in line
    assert reason in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--seed", "-3"), "--seed: '-3' is no number from 0 on"),
        (("--seed", "abc"), "--seed: 'abc' is no number from 0 on"),
        (("--steps", "-4"), "--steps: '-4' is no number from 0 on"),
        (("--count", "2", "--workers", "0"), "--workers: '0' is no number from 1 on"),
        (("--hours", "-1"), "--hours: '-1' is not a number of hours"),
        (("--hours", "nan"), "--hours: 'nan' is not a number of hours"),
        (("--count", "2", "--hours", "1"), "--count and --hours are exclusive: use one of them"),
        (("--count", "2", "--history", "x"), "--history is for one seed"),
        (("--logdb", "--regions"), "--logdb and --regions are exclusive: use one of them"),
        (("--tickle",), "unrecognized arguments: --tickle"),
    ],
)
def test_invalid_options_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal(capsys, main, arguments)


def test_one_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The output: plan, trace, outcome; an unknown client is no error."""
    arguments = ("--seed", "3", "--writers", "1", "--steps", "2", "--history", str(tmp_path))
    assert main([*arguments, "--faults", "5 kill shard-0-0; 9 kill-client writer-9"]) == 0
    said = capsys.readouterr().out
    assert "fault: 5 kill shard-0-0\n" in said
    assert "fault: 9 kill-client writer-9 (does not fit)\n" in said
    assert "trace_hash=" in said.splitlines()[-1]
    assert any(tmp_path.iterdir())


def test_many_seeds_have_the_faults_that_their_clusters_have_targets_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shards = [draw(seed).shards for seed in (3, 4, 5)]
    assert len(set(shards)) > 1
    options = ("--seed", "3", "--count", "3", "--workers", "1", "--steps", "2")
    assert main([*options, "--faults", f"5 rot shard-{max(shards) - 1}-0"]) == 0
    *_, last = capsys.readouterr().out.splitlines()  # a slow run prints its progress before it
    assert last.startswith("3 seeds, 0 failed; ")


def test_mutants_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mutants"]) == 0
    said = capsys.readouterr().out
    assert "clock_decides: A server uses positions of a lease that it does not hold" in said
    assert said.count("    runs: ") == len(MUTANTS)
