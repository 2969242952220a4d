"""Transactions of many clients on real processes, while these are killed and paused.

What clients saw is written down and judged (docs/history.md): strictly serializable, and no money
is lost or made. The longer form is scripts/chaos.py --workload logdb.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fault_injection.database import DatabaseShape, DatabaseTrial

from tests.history.transactors import BANK, KEYS
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = DatabaseShape(mms=1, failure_handlers=1, rate_per_s=0.0, checkpoint_every=300)


def view_of_first_shard(trial: DatabaseTrial) -> int:
    """Return its number; 0 if the membership service does not answer."""
    status = trial.health.status()
    return status["shards"][0]["view"] if status is not None else 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(BANK, id="bank", marks=pytest.mark.nightly),
        pytest.param(KEYS, id="lists and registers"),
    ],
)
def test_transactions_are_serializable_whatever_dies(tmp_path: Path, mix: dict[str, int]) -> None:
    with DatabaseTrial(tmp_path, replace(SHAPE, mix=mix)) as trial:
        coordinators = trial.coordinators
        trial.wait_commits(100)
        coordinators.kill(0)
        trial.wait_commits(100)
        coordinators.start(0)
        coordinators.wait_ready(0)
        coordinators.pause(1)
        trial.wait_commits(100)
        coordinators.resume(1)
        for _ in range(15):
            # So short that clients still wait for its word when it wakes up.
            coordinators.pause(1)
            trial.wait_commits(10)
            coordinators.resume(1)
            trial.wait_commits(10)
        coordinators.kill(0)
        coordinators.start(0)
        trial.wait_commits(100)
        victim = trial.cluster.config.shards[0].replicas[0].name
        before = view_of_first_shard(trial)
        trial.cluster.kill(victim)
        # Not for an unhealthy server: it may be up again between two looks.
        wait_until(lambda: view_of_first_shard(trial) > before, "the shard begins a new view")
        trial.settle()
        trial.wait_commits(100)
        for number in coordinators.numbers:
            coordinators.kill(number)
        trial.settle()
        trial.wait_commits(100)
        trial.clients.kill(trial.clients.running()[0])
        verdict = trial.judge()
    assert verdict.broken == []
    assert verdict.figures["committed"] >= 600
    # The checker saw all of it: a killed client leaves calls without results.
    assert verdict.figures["in_doubt"] > 0
