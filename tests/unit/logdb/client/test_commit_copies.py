"""Copies of one commit record in the log: what each outcome says about the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logdb.client.commits import Commits
from tests.unit.ziplog.client.fakes import MS, S
from ziplog.client.common.requests import InsertRequest
from ziplog.client.common.step_context import StepContext
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.errors import (
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    ProtocolError,
    UnavailableError,
)
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable


def unknown(token: str) -> OutcomeUnknownError:
    return OutcomeUnknownError("it may be in the log", shard=0, seq=1, doubt=token)


class Coordinators:
    """No coordinator replies."""

    def send_query(self, *_: Any) -> int:
        return 1

    def forget(self, query: int) -> None:
        """Do nothing."""


class Log:
    """A log that answers a call when a test says so."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[Any, Callable[[Any], None]]] = {}
        self._last = 0

    def call(self, request: Any, on_result: Callable[[Any], None]) -> int:
        self._last += 1
        self.open[self._last] = request, on_result
        return self._last

    def cancel(self, call: int) -> None:
        self.open.pop(call, None)

    def answer(self, result: Any, outcome: Any = None) -> None:
        """Answer the oldest insert, or the question for the outcome of a copy."""
        kind = InsertRequest if outcome is None else ResolveRequest
        number = next(
            number
            for number, (request, _) in self.open.items()
            if isinstance(request, kind) and (outcome is None or request.outcome == outcome)
        )
        self.open.pop(number)[1](result)

    @property
    def inserts(self) -> int:
        return sum(isinstance(request, InsertRequest) for request, _ in self.open.values())


class World:
    """One commit."""

    def __init__(self) -> None:
        self.context = StepContext(b"c" * 16)
        self.context.now = S
        self.log = Log()
        self.commits = Commits(self.context, Coordinators(), b"s" * 8, lambda: 0)  # type: ignore[arg-type]
        self.commits.calls = self.log  # type: ignore[assignment]
        self.results: list[Any] = []
        self.commits.start(1, b"record", RID_GENESIS, 60 * S, self.results.append)

    def run(self, ns: int) -> None:
        self.context.now += ns
        self.commits.tick()
        self.commits.check()

    def in_doubt(self) -> Any:
        """Return the outcome of the commit after its deadline, which is unknown."""
        self.run(60 * S)
        (error,) = self.results
        assert isinstance(error, OutcomeUnknownError)
        self.results.clear()
        return error.doubt


REFUSALS = [DeadlineError("nothing was written"), NoSuchRecordError(RecordId(9, 0), "it is gone")]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_copy_that_may_exist_outlives_the_refusal_of_another_one(refusal: Exception) -> None:
    world = World()
    world.log.answer(unknown("first"))
    world.log.answer(refusal)
    assert world.results == []
    assert world.in_doubt().attempts[0].unknown == "first"


def test_servers_that_contradict_each_other_may_have_placed_the_record() -> None:
    world = World()
    world.log.answer(ProtocolError("two shards placed it"))
    assert world.results == []
    assert world.log.inserts == 1, "the same record is inserted again"
    world.log.answer(DeadlineError("nothing was written"))
    assert len(world.in_doubt().attempts) == 1


def test_record_that_the_log_refuses_is_inserted_again_after_a_pause() -> None:
    world = World()
    world.log.answer(UnavailableError("no shard is live"))
    assert (world.results, world.log.inserts) == ([], 0)
    world.run(S)
    assert world.log.inserts == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_commit_is_absent_once_all_its_copies_are(*, is_first: bool) -> None:
    world = World()
    world.log.answer(unknown("first"))
    world.log.answer(unknown("second"))
    world.log.answer(DeadlineError("nothing was written"))
    doubt = world.in_doubt()
    world.commits.resolve(doubt, world.context.now + S, world.results.append)
    one, other = ("first", "second") if is_first else ("second", "first")
    world.log.answer([None], one)
    assert world.results == []
    world.log.answer([None], other)
    assert world.results == [None]


def test_copy_that_was_placed_keeps_the_commit_in_doubt() -> None:
    world = World()
    world.log.answer(unknown("first"))
    world.log.answer(unknown("second"))
    world.log.answer(DeadlineError("nothing was written"))
    world.commits.resolve(world.in_doubt(), world.context.now + S, world.results.append)
    world.log.answer([RecordId(5, 0)], "first")
    world.log.answer([None], "second")
    world.run(S // 2)
    assert world.results == [], "only a coordinator knows the decision"


def test_copy_whose_insert_fails_after_the_deadline_is_none() -> None:
    world = World()
    doubt = world.in_doubt()
    assert len(doubt.attempts) == 1
    world.log.answer(DeadlineError("nothing was written"))
    world.commits.resolve(doubt, world.context.now + MS, world.results.append)
    assert world.results == [None]
