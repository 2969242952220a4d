"""The workload of a player's trial outlives failed inserts, and its end is noticed."""

from __future__ import annotations

from typing import Any

import pytest
from player_trial.trial import Workload

from tests.waiting import wait_until
from ziplog.errors import ConfigError, OutcomeUnknownError, UnavailableError
from ziplog.types import RecordId


class FailingLog:
    """Raises what it is given, one error a call; then it inserts."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = [*errors]
        self._next = 1
        self.calls = 0

    def insert_many(self, payloads: list[bytes], **_: object) -> list[RecordId]:
        self.calls += 1
        rids = [RecordId(self._next + n, 0) for n in range(len(payloads))]
        self._next += len(payloads)
        if not self._errors:
            return rids
        error = self._errors.pop(0)
        if isinstance(error, UnavailableError):
            error.results = [rids[0], *[None] * (len(rids) - 1)]
        raise error


def test_the_workload_of_a_player_continues_after_an_error() -> None:
    log: Any = FailingLog(UnavailableError("no shard"), OutcomeUnknownError("late", shard=0, seq=1))
    made = Workload(log, 1)
    try:
        wait_until(lambda: log.calls > 3, "it inserts")
        assert not made.has_ended
    finally:
        made.stop()
    assert 1 in made.placed
    assert made.possible.isdisjoint(made.placed.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_workload_that_died_is_noticed() -> None:
    log: Any = FailingLog(ConfigError("key", 1, "text"))
    made = Workload(log, 1)
    wait_until(lambda: made.has_ended, "it ended")
    made.stop()
