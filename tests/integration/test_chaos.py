"""Faults by chance and on purpose, on real clusters under load: clients tell what they saw."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from chaos import run_chaos
from injection.matrix import run_trial
from injection.trial import Shape

SHAPE = Shape(mms=1, failure_handlers=1, clients=2, subscribers=1)
KINDS = ("kill", "pause", "cut-peers", "cut-clients", "isolate", "slow")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_faults_by_chance_break_no_promise(tmp_path: Path) -> None:
    said: list[str] = []
    shape = SHAPE._replace(mms=3, failure_handlers=3)
    assert run_chaos(tmp_path, shape, 25.0, said.append, kinds=KINDS) == [], "\n".join(said)
    # Faults did come, and shards were out of service and back.
    assert any("outages of shards" in line for line in said), "\n".join(said)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "faults",
    [
        ("primary_killed",),
        ("survivor_killed",),
        ("disk_lost",),
        ("handler_leader_killed_when_a_view_is_decided", "client_killed"),
        ("primary_paused", "membership_leader_killed"),
        ("everything_killed",),
    ],
    ids=" and ".join,
)
def test_a_fault_breaks_no_promise(tmp_path: Path, faults: tuple[str, ...]) -> None:
    row = run_trial(faults, SHAPE, tmp_path)
    assert row.wrong == ""
    assert row.verdict is not None
    assert row.verdict.acknowledged > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_f_2_two_servers_of_a_shard_may_die(tmp_path: Path) -> None:
    shape = SHAPE._replace(f=2, shards=1)
    row = run_trial(("primary_killed", "backup_killed"), shape, tmp_path)
    assert row.wrong == ""
    assert row.verdict is not None
    assert row.verdict.lost == 0
