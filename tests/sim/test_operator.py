"""The operator: answers to its requests, and its checks at the end."""

from __future__ import annotations

import pytest

from tests.sim.operator import Change
from tests.sim.plan import Fault
from tests.sim.script import stage
from tests.simulator.kernel import S
from ziplog.errors import ConfigError


def test_a_requested_change_is_done_or_refused_with_a_reason() -> None:
    with stage(shards=2) as s:
        operator = s.operator
        for kind, shard in (
            ("remove-shard", 7), ("add-shard", 2), ("remove-shard", 0), ("finalize-shard", 0),
            ("add-shard", 2), ("remove-shard", 2), ("add-shard", 2), ("remove-shard", 1),
        ):  # fmt: skip
            change = operator.request(Fault(0, kind, (f"shard-{shard}",)))
            assert operator.open == [change]
            s.until(lambda change=change: change.ended)
        s.until(s.cluster.is_whole)
        operator.check_end()
        assert [change.refused is None for change in operator.changes] == [
            False, True, True, True, True, True, False, False,
        ]  # fmt: skip
        refused = [str(change.refused) for change in operator.changes if change.refused]
        for text, words in zip(
            refused, ("one of [0, 1]", "never comes back", "the last shard"), strict=True
        ):
            assert words in text


def test_a_shard_in_another_state_than_requested_is_reported() -> None:
    with stage(shards=2) as s:
        s.operator.changes.append(Change("remove", 0, 1, 2))
        with pytest.raises(AssertionError, match=r"'live'.* after remove 0: done"):
            s.operator.check_end()


def test_a_shard_that_left_without_a_request_is_reported() -> None:
    with stage(shards=2) as s:
        change = s.operator.change("remove", 0)
        s.until(lambda: change.ended and s.cluster.is_whole())
        s.operator.check_end()
        s.operator.changes.clear()
        with pytest.raises(AssertionError, match="'finalized'"):
            s.operator.check_end()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Change("remove", 0, 1, 2), "must be one of [0, 1]"),
        (Change("remove", 0, 1, 2), "a number: a removed shard never comes back"),
        (Change("add", 2, 1, 2), "another one: 0 is the last shard that accepts records"),
        (Change("add", 2, 1, 2), "as many servers as every shard of the cluster has: 2"),
    ],
)
def test_a_refusal_without_a_reason_is_reported(change: Change, why: str) -> None:
    with stage(shards=2) as s:
        change.refused = ConfigError("shard", change.shard, why)
        s.operator.changes.append(change)
        with pytest.raises(AssertionError, match="refused"):
            s.operator.check_end()


def test_an_unanswered_change_is_reported() -> None:
    with stage() as s:
        change = s.operator.change("remove", 9)
        with pytest.raises(AssertionError, match="not answered: remove 9: under way"):
            s.operator.check_end()
        s.until(lambda: change.ended, 5 * S)
        s.operator.check_end()
