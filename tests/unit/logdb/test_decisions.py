"""A transaction is decided once, with bounded memory (docs/logdb.md, section 4)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.decisions import MAX_DECISIONS, Decisions
from logdb.records import Decision, TransactionId
from ziplog.types import RecordId


def name(number: int) -> TransactionId:
    return TransactionId(b"s" * 8, number)


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 8))
def test_the_last_decisions_are_kept_and_the_floor_is_the_last_forgotten_one(
    outcomes: list[bool], most: int
) -> None:
    decisions = Decisions(most)
    for number, committed in enumerate(outcomes, 1):
        decisions.add(name(number), RecordId(number * 10, 3), committed)
    count = len(outcomes)
    forgotten = max(count - most, 0)
    assert decisions.floor == forgotten * 10
    assert len(decisions) == min(count, most)
    for number, committed in enumerate(outcomes, 1):
        kept = Decision(b"s" * 8, number, RecordId(number * 10, 3), committed)
        assert decisions.outcome(name(number)) == (kept if number > forgotten else None)
    again = Decisions(most)
    again.load(decisions.export(), decisions.floor)
    assert again.export() == decisions.export()
    for each in (decisions, again):
        each.add(name(99), RecordId(999, 0), True)
    assert again.export() == decisions.export()
    assert again.floor == decisions.floor


def test_sessions_are_distinguished() -> None:
    decisions = Decisions()
    decisions.add(TransactionId(b"a" * 8, 1), RecordId(1, 0), True)
    assert decisions.outcome(TransactionId(b"b" * 8, 1)) is None


def test_the_number_of_decisions_is_bounded() -> None:
    decisions = Decisions()
    for number in range(1, MAX_DECISIONS + 1):
        decisions.add(name(number), RecordId(number, 0), True)
    assert decisions.floor == 0
    assert decisions.outcome(name(1)) is not None
    decisions.add(name(MAX_DECISIONS + 1), RecordId(MAX_DECISIONS + 1, 0), True)
    assert decisions.floor == 1
    assert decisions.outcome(name(1)) is None


def test_a_second_decision_is_an_assertion_error() -> None:
    decisions = Decisions()
    decisions.add(name(1), RecordId(1, 0), True)
    with pytest.raises(AssertionError, match="twice"):
        decisions.add(name(1), RecordId(2, 0), False)
