"""Random and chosen faults in real clusters under load; clients record histories."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from chaos import run_chaos
from fault_injection.log import LogShape, LogTrial
from fault_injection.matrix import run_trial

if TYPE_CHECKING:
    from pathlib import Path

    from fault_injection.trial import Verdict

#: Of faults by chance, of which the first kills a server of a shard.
SEED = 46
SHAPE = LogShape(mms=1, failure_handlers=1, clients=2, subscribers=1)
KINDS = ("kill", "pause", "cut-peers", "cut-clients", "isolate", "slow")


@pytest.mark.timeout(300)
def test_random_faults_break_no_guarantee(tmp_path: Path) -> None:
    said: list[str] = []
    shape = replace(SHAPE, mms=3, failure_handlers=3, seed=SEED)
    assert run_chaos(LogTrial(tmp_path, shape), 25.0, said.append, kinds=KINDS) == [], "\n".join(
        said
    )
    # A server did die, and there was something to lose.
    assert any(re.search(r" s  kill shard-\d-\d$", line) for line in said), "\n".join(said)
    assert any(", lost as reported 0," in line for line in said), "\n".join(said)


def passes(faults: tuple[str, ...], shape: LogShape, folder: Path) -> Verdict:
    row = run_trial(faults, shape, folder)
    assert row.wrong == ""
    assert row.verdict is not None
    assert row.verdict.figures["acknowledged"] > 0
    return row.verdict


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "faults",
    [
        ("primary_killed",),
        ("disk_lost",),
        pytest.param(
            ("handler_leader_killed_when_a_view_is_decided", "client_killed"),
            marks=pytest.mark.nightly,
        ),
        ("primary_paused", "membership_leader_killed"),
    ],
    ids=" and ".join,
)
def test_nothing_is_lost_while_one_server_of_a_shard_lives(
    tmp_path: Path, faults: tuple[str, ...]
) -> None:
    assert passes(faults, SHAPE, tmp_path).figures["lost_as_reported"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("survivor_killed", marks=pytest.mark.nightly),
        pytest.param("everything_killed", marks=pytest.mark.nightly),
        "power_lost",
    ],
)
def test_at_level_disk_nothing_is_ever_lost(tmp_path: Path, fault: str) -> None:
    assert (
        passes((fault,), replace(SHAPE, durability="disk"), tmp_path).figures["lost_as_reported"]
        == 0
    )


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_at_level_memory_losses_of_a_power_cut_are_reported(tmp_path: Path) -> None:
    # An unreported loss is a violation.
    passes(("power_lost",), replace(SHAPE, syncs=False), tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_with_f_2_two_servers_of_a_shard_may_die(tmp_path: Path) -> None:
    shape = replace(SHAPE, f=2, shards=1)
    assert (
        passes(("primary_killed", "backup_killed"), shape, tmp_path).figures["lost_as_reported"]
        == 0
    )
