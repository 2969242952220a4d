"""The linearizability search: explanations, budget, assumptions.

Single stories: tests/sim/test_stories. Comparison with a search of all orders:
tests/sim/test_orders.
"""

from __future__ import annotations

import pytest

from tests.cluster import PureCluster
from tests.sim.linearizability import explain
from tests.sim.stories import Story, empty
from tests.sim.test_history import everything
from tests.world import S
from ziplog.errors import NoSuchRecordError
from ziplog.types import RecordId


def test_the_explanation_is_of_the_shortest_beginning() -> None:
    story = Story()
    story.insert(1, 2, b"a", [4])
    story.read(3, 4, 4, b"a")
    culprit = story.read(5, 6, 4, empty(4))
    story.insert(7, 8, b"b", [4])
    story.read(9, 10, 6, b"foreign")
    explanation = story.explain()
    assert explanation is not None
    assert explanation.culprit.number == culprit
    assert [o.number for o in explanation.placed] == [0, 1]
    assert [(o.number, why) for o, why in explanation.stuck] == [
        (culprit, "4 holds b'a' of shard 0")
    ]


def test_losses_are_left_out() -> None:
    story = Story()
    story.insert(1, 2, b"a", [4])
    story.insert(1, 2, b"b", [6])
    story.read(3, 4, 4, empty(4))
    story.fetch(6, 7, story.subscribe(5, 6), (6, b"b"))
    assert story.explain() is not None
    assert story.explain(lost=[(0, 4, 5)]) is None
    assert story.explain(lost=[(1, 4, 5)]) is not None, "another shard's"
    story.fetch(6, 7, story.subscribe(5, 6), (4, b"a"), (6, b"b"))
    assert story.explain(lost=[(0, 4, 5)]) is None
    story.read(8, 9, 6, empty(6))
    assert story.explain(lost=[(0, 4, 5)]) is not None


# --- the budget ----------------------------------------------------------------------------------


def contended(positions: int, *, passed: bool) -> Story:
    """Return a story with a race at each position, and a wrong result at the last one."""
    story = Story()
    for index in range(positions):
        gsn = 2 * index + 2
        story.insert(1, 1000, bytes([index]), [gsn])
        story.read(2, 1001, gsn, empty(gsn))
        story.read(2, 1002, gsn, bytes([index]))
    if passed:
        story.trim(1, 1003, 2 * positions + 10)
    story.insert(1, 1000, b"!", [2 * positions + 2])
    story.read(1001, 1003, 2 * positions + 2, empty(2 * positions + 2))
    return story


def test_an_undecided_search_does_not_count_as_passed() -> None:
    story = contended(9, passed=True)
    explanation = story.explain(budget_states=100)
    assert explanation is not None
    assert not explanation.is_decided
    assert explanation.states == 100
    assert "not decided" in str(explanation)
    decided = contended(3, passed=True).explain()
    assert decided is not None
    assert decided.is_decided


def test_positions_that_no_reader_passes_are_searched_one_by_one() -> None:
    explanation = contended(12, passed=False).explain(budget_states=100)
    assert explanation is not None
    assert explanation.is_decided


def test_a_correct_history_is_decided_without_trying_around() -> None:
    story = Story()
    for index in range(40):
        story.insert(1 + index, 60 + index, bytes([index]), [index + 1])
    number = story.subscribe(1, 2)
    for index in range(40):
        row = (index + 1, bytes([index]))
        story.fetch(50 + index, 70 + index, number, row)
    assert story.explain(budget_states=200) is None


def test_independent_steps_are_tried_in_one_order() -> None:
    story = Story()
    for index in range(20):
        story.insert(1, 1000, bytes([index]), [index + 1])
    story.fetch(3, 900, story.subscribe(1, 2), *((i + 1, bytes([i])) for i in range(20)))
    story.read(5, 2000, 3, b"foreign")
    explanation = story.explain(budget_states=60)
    assert explanation is not None
    assert explanation.is_decided


# --- the system's messages -----------------------------------------------------------------------


def test_the_reasons_that_the_client_gives_are_those_that_the_search_knows() -> None:
    cluster = PureCluster(2, 1)
    cluster.run(2 * S)
    client = cluster.client("client-0")
    client.insert(b"a", RecordId(10, 0))
    reasons = set()
    for shard in (0, 1):
        for gsn in range(1, 5):
            with pytest.raises(NoSuchRecordError) as raised:
                client.read(RecordId(gsn, shard))
            reasons.add(str(raised.value).partition(": ")[2])
    assert "the position is a no-op" in reasons
    assert any("does not own the position" in reason for reason in reasons)


def test_a_recorded_history_is_judged() -> None:
    assert explain(everything().history.operations) is None
