"""A round of the cleaner ends once the coordinator has applied its checkpoint."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from logdb.records import CheckpointBegun, CheckpointDone
from tests.unit.logdb.cleaner.rounds import overwrite, records, run
from tests.unit.logdb.fakelog import FakeLog
from tests.unit.logdb.small import Oracle, Small
from ziplog.client.common.requests import FetchRequest, TrimRequest

if TYPE_CHECKING:
    from collections.abc import Callable


def delay_done(small: Small) -> Callable[[], None]:
    """Deliver nothing once the log has a `CheckpointDone`; return a function that ends that."""
    fetch = small.core._answer[FetchRequest]

    def delayed(call: int, request: Any) -> Any:
        return None if records(small.log, CheckpointDone) else fetch(call, request)

    small.core._answer[FetchRequest] = delayed
    return lambda: small.core._answer.update({FetchRequest: fetch})


def test_a_round_lasts_until_its_checkpoint_is_applied() -> None:
    """Otherwise the next one would seem to be due, and a trim would precede the checkpoint."""
    log = FakeLog(seed=1)
    oracle = Oracle(log)
    overwrite(oracle, random.Random(1), 120)
    small = Small(log, "a")
    deliver = delay_done(small)
    run(small, oracle, 400)
    assert len(records(log, CheckpointDone)) == 1
    run(small, oracle, 400)
    cleaner = small.cleaner
    assert cleaner is not None
    assert (cleaner.is_busy, cleaner.counts.rounds) == (True, 0)
    assert len(records(log, CheckpointBegun)) == 1
    assert not any(isinstance(one, TrimRequest) for one in small.core.requests)
    deliver()
    small.settle()
    assert (cleaner.is_busy, cleaner.counts.rounds) == (False, 1)
    assert any(isinstance(one, TrimRequest) for one in small.core.requests)


def moving() -> Small:
    """Return a coordinator whose round reads the log to move its entries."""
    log = FakeLog(seed=1)
    oracle = Oracle(log)
    overwrite(oracle, random.Random(1), 120)
    small = Small(log, "a", at_once=False)
    for _ in range(400):
        small.step()
        if len(small.core.subscriptions) == 2:
            return small
    raise AssertionError("no round read the log")


def test_a_cancelled_round_ends_its_subscription() -> None:
    small = moving()
    assert small.cleaner is not None
    small.cleaner.close()
    small.step()
    assert len(small.core.subscriptions) == 1


def test_an_abandoned_round_starts_no_call() -> None:
    """The collector closes its generator at any moment, also while the log's client runs."""
    small = moving()
    assert small.cleaner is not None
    task = small.cleaner._task
    assert task is not None
    before = len(small.core.requests)
    task._steps.close()
    assert len(small.core.requests) == before
