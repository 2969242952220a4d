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
