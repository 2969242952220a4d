"""The search says what trying all orders says, and tells each way of breaking the log's promise."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster import PureCluster
from tests.sim.history import PENDING, Operation
from tests.sim.linearizability import Explanation, Tally, explain
from tests.sim.test_history import everything
from tests.world import S
from ziplog.client.requests import (
    NEVER,
    Fetched,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    ResolveRequest,
    SubscribeRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.errors import (
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    TrimmedError,
    UnavailableError,
)
from ziplog.types import RID_RECENT, Record, RecordId

FOREVER = 10**9


def shard_of(gsn: int) -> int:
    return gsn % 2


def rid(gsn: int) -> RecordId:
    return RecordId(gsn, shard_of(gsn))


def record(gsn: int, payload: bytes) -> Record:
    return Record(rid(gsn), payload, None, 0, 0)


def empty(gsn: int) -> NoSuchRecordError:
    return NoSuchRecordError(rid(gsn), "nothing was inserted there yet")


def no_op(gsn: int) -> NoSuchRecordError:
    return NoSuchRecordError(rid(gsn), "the position is a no-op")


def unknown() -> OutcomeUnknownError:
    return OutcomeUnknownError("nobody knows", shard=0, seq=1)


class Story:
    """Operations, each with the time of its call and of its result (None: none came)."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(
        self, called: int, returned: int | None, request: Any, result: Any, of: int | None = None
    ) -> int:
        number = len(self.operations)
        result = PENDING if returned is None else result
        self.operations.append(
            Operation(number, f"client-{number}", request, called, of, returned, result)
        )
        return number

    def insert(
        self, called: int, returned: int | None, payloads: bytes, result: Any, after: int = 0
    ) -> int:
        """`payloads`: one for each byte; `result`: gsns, or what was raised."""
        rows = [payloads[i : i + 1] for i in range(len(payloads))]
        request = InsertRequest(NEVER, rows, RecordId(after, 0), None, 0, many=len(rows) > 1)
        if isinstance(result, list):
            result = [rid(gsn) for gsn in result]
        return self.add(called, returned, request, result)

    def read(self, called: int, returned: int, gsn: int, result: Any) -> int:
        """`result`: a payload, or what was raised."""
        found = record(gsn, result) if isinstance(result, bytes) else result
        return self.add(called, returned, ReadRequest(NEVER, rid(gsn)), found)

    def subscribe(self, called: int, returned: int, start: int = 0, *, follow: bool = True) -> int:
        at = RID_RECENT if start < 0 else RecordId(start, 0)
        return self.add(called, returned, SubscribeRequest(NEVER, at, follow), 1)

    def fetch(
        self, called: int, returned: int, of: int, *rows: tuple[int, bytes], ended: bool = False
    ) -> int:
        result = Fetched([record(*row) for row in rows], ended=ended)
        return self.add(called, returned, FetchRequest(NEVER, 1, 9), result, of)

    def trim(self, called: int, returned: int | None, gsn: int, result: Any = None) -> int:
        return self.add(called, returned, TrimRequest(NEVER, rid(gsn)), result)

    def tail(self, called: int, returned: int, gsn: int) -> int:
        return self.add(called, returned, TailRequest(NEVER), rid(gsn))

    def resolve(self, called: int, returned: int, of: int, *gsns: int | None) -> int:
        doubt: Any = None
        result = [None if gsn is None else rid(gsn) for gsn in gsns]
        return self.add(called, returned, ResolveRequest(NEVER, doubt), result, of)

    def explain(self, **options: Any) -> Explanation | None:
        return explain(self.operations, **options)


# --- good ones -----------------------------------------------------------------------------------


def later_is_lower(s: Story) -> None:
    s.insert(1, 2, b"a", [9])
    s.insert(3, 4, b"b", [2])
    s.read(5, 6, 2, b"b")


def a_read_beside_the_insert_misses_it(s: Story) -> None:
    s.insert(1, 9, b"a", [4])
    s.read(2, 3, 4, empty(4))
    s.read(4, 5, 4, b"a")


def seen_before_it_returned(s: Story) -> None:
    s.insert(1, 9, b"a", [4])
    s.fetch(3, 4, s.subscribe(1, 2), (4, b"a"))


def an_unknown_one_appears_late(s: Story) -> None:
    s.insert(1, 2, b"a", unknown())
    s.read(3, 4, 4, empty(4))
    s.read(5, 6, 4, b"a")


def an_unknown_one_never_appears(s: Story) -> None:
    s.insert(1, 2, b"a", unknown())
    s.insert(1, None, b"b", None)
    s.fetch(4, 5, s.subscribe(3, 4, follow=False), ended=True)


def below_the_start_of_a_subscription(s: Story) -> None:
    s.insert(1, 9, b"a", [2])
    s.insert(1, 2, b"b", [5])
    s.fetch(4, 5, s.subscribe(3, 4, 5), (5, b"b"))


def a_fetch_in_pieces(s: Story) -> None:
    s.insert(1, 2, b"abc", [2, 4, 6])
    number = s.subscribe(3, 4, 2, follow=False)
    s.fetch(5, 6, number)
    s.fetch(7, 8, number, (2, b"a"))
    s.fetch(9, 10, number, (4, b"b"), (6, b"c"))
    s.fetch(11, 12, number, ended=True)


def two_fetches_at_a_time(s: Story) -> None:
    s.insert(1, 2, b"ab", [2, 4])
    number = s.subscribe(3, 4)
    s.fetch(5, 9, number, (4, b"b"))
    s.fetch(6, 10, number, (2, b"a"))


def a_shard_that_does_not_own_it(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    error = NoSuchRecordError(RecordId(4, 1), "shard 1 does not own the position")
    s.add(3, 4, ReadRequest(NEVER, RecordId(4, 1)), error)
    s.read(5, 6, 4, b"a")


def recent_starts_anywhere(s: Story) -> None:
    s.insert(1, 2, b"ab", [2, 4])
    s.fetch(5, 6, s.subscribe(3, 4, -1), (4, b"b"))


def a_tail_above_all(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.insert(1, 9, b"b", [6])
    s.tail(3, 4, 4)
    s.tail(3, 4, 8)


def a_tail_below_what_is_trimmed(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.insert(1, 2, b"b", [6])
    s.trim(3, 8, 7)
    s.tail(3, 7, 4)


def trims_are_learned_one_by_one(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 9, 5)
    s.read(4, 5, 4, TrimmedError(rid(5)))
    s.read(6, 7, 4, b"a")
    s.read(10, 11, 4, TrimmedError(rid(5)))


def a_trim_that_timed_out(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 5, DeadlineError("late"))
    s.read(5, 6, 4, b"a")
    s.read(7, 8, 4, TrimmedError(rid(5)))


def a_doubt_that_is_resolved(s: Story) -> None:
    first = s.insert(1, 2, b"ab", unknown())
    s.read(3, 4, 4, empty(4))
    s.resolve(3, 6, first, 4, None)
    s.read(7, 8, 4, b"a")


def two_recent_fetches_at_a_time(s: Story) -> None:
    s.insert(1, 2, b"ab", [2, 4])
    number = s.subscribe(3, 4, -1)
    s.fetch(5, 9, number, (4, b"b"))
    s.fetch(6, 10, number, (2, b"a"))


def it_began_beyond_the_end(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.fetch(5, 6, s.subscribe(3, 4, 9, follow=False), ended=True)
    s.insert(7, 8, b"b", [3])


def one_fetch_beside_another_that_is_refused(s: Story) -> None:
    s.insert(1, 2, b"a", [2])
    number = s.subscribe(3, 4)
    s.trim(5, 20, 3)
    s.fetch(6, 15, number, (2, b"a"))
    s.add(6, 16, FetchRequest(NEVER, 1, 9), TrimmedError(rid(3)), number)


def what_did_nothing(s: Story) -> None:
    s.insert(1, 2, b"a", UnavailableError("try again"))
    s.read(1, 2, 4, DeadlineError("late"))
    s.trim(1, 2, 4, UnavailableError("try again"))
    s.read(3, 4, 2, empty(2))


def failed_in_part(s: Story) -> None:
    error = UnavailableError("no room for the second")
    error.results = [rid(4), None]
    s.insert(1, 2, b"ab", error)
    s.read(3, 4, 4, b"a")


GOOD = [
    later_is_lower,
    a_read_beside_the_insert_misses_it,
    seen_before_it_returned,
    an_unknown_one_appears_late,
    an_unknown_one_never_appears,
    below_the_start_of_a_subscription,
    a_fetch_in_pieces,
    two_fetches_at_a_time,
    a_shard_that_does_not_own_it,
    recent_starts_anywhere,
    a_tail_above_all,
    a_tail_below_what_is_trimmed,
    trims_are_learned_one_by_one,
    a_trim_that_timed_out,
    a_doubt_that_is_resolved,
    two_recent_fetches_at_a_time,
    it_began_beyond_the_end,
    one_fetch_beside_another_that_is_refused,
    what_did_nothing,
    failed_in_part,
]


@pytest.mark.parametrize("tell", GOOD, ids=lambda tell: tell.__name__)
def test_what_the_log_may_do(tell: Any) -> None:
    story = Story()
    tell(story)
    assert story.explain() is None


# --- bad ones ------------------------------------------------------------------------------------
# Each returns the operation that cannot be explained.


def a_read_misses_what_returned(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.read(3, 4, 4, empty(4))


def a_read_goes_back(s: Story) -> int:
    s.insert(1, 9, b"a", [4])
    s.read(2, 3, 4, b"a")
    return s.read(4, 5, 4, empty(4))


def a_passed_position_is_filled(s: Story) -> int:
    s.insert(1, 2, b"a", [5])
    s.fetch(4, 5, s.subscribe(3, 4), (5, b"a"))
    return s.insert(6, 7, b"b", [2])


def a_position_below_the_start_is_filled(s: Story) -> int:
    s.insert(1, 2, b"a", [5])
    s.fetch(4, 5, s.subscribe(3, 4, 5), (5, b"a"))
    return s.insert(6, 7, b"b", [2])


def a_passed_record_is_missing(s: Story) -> int:
    s.insert(1, 2, b"ab", [4, 6])
    return s.fetch(4, 5, s.subscribe(3, 4), (6, b"b"))


def a_fetch_jumps(s: Story) -> int:
    s.insert(1, 2, b"abc", [2, 4, 6])
    number = s.subscribe(3, 4)
    s.fetch(5, 6, number, (2, b"a"))
    return s.fetch(7, 8, number, (6, b"c"))


def a_fetch_repeats(s: Story) -> int:
    s.insert(1, 2, b"ab", [2, 4])
    number = s.subscribe(3, 4)
    s.fetch(5, 6, number, (2, b"a"))
    return s.fetch(7, 8, number, (2, b"a"), (4, b"b"))


def out_of_order(s: Story) -> int:
    s.insert(1, 2, b"ab", [2, 4])
    return s.fetch(4, 5, s.subscribe(3, 4), (4, b"b"), (2, b"a"))


def before_its_start(s: Story) -> int:
    s.insert(1, 2, b"ab", [2, 4])
    return s.fetch(4, 5, s.subscribe(3, 4, 3), (2, b"a"), (4, b"b"))


def it_ended_too_early(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.fetch(4, 5, s.subscribe(3, 4, follow=False), ended=True)


def filled_after_the_end(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    number = s.subscribe(3, 4, 4, follow=False)
    s.fetch(5, 6, number, (4, b"a"))
    s.fetch(7, 8, number, ended=True)
    return s.insert(9, 10, b"b", [3])


def one_position_twice(s: Story) -> int:
    s.insert(1, 5, b"a", [4])
    return s.insert(2, 6, b"b", [4])


def one_record_twice(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.read(3, 4, 6, b"a")


def not_after(s: Story) -> int:
    return s.insert(1, 2, b"a", [4], after=4)


def not_after_though_nobody_was_told(s: Story) -> int:
    s.insert(1, 2, b"a", unknown(), after=4)
    return s.read(3, 4, 4, b"a")


def a_call_in_another_order(s: Story) -> int:
    return s.insert(1, 2, b"ab", [4, 2])


def a_call_at_two_shards(s: Story) -> int:
    return s.insert(1, 2, b"ab", [3, 4])


def too_few_rids(s: Story) -> int:
    return s.insert(1, 2, b"ab", [4])


def it_did_not_happen(s: Story) -> int:
    s.insert(1, 2, b"a", UnavailableError("try again"))
    return s.read(3, 4, 4, b"a")


def it_did_not_happen_either(s: Story) -> int:
    s.insert(1, 2, b"a", DeadlineError("nothing was sent"))
    return s.read(3, 4, 4, b"a")


def nobody_inserted_it(s: Story) -> int:
    return s.read(3, 4, 4, b"a")


def seen_before_it_was_inserted(s: Story) -> int:
    number = s.read(1, 2, 4, b"a")
    s.insert(3, 4, b"a", [4])
    return number


def a_no_op_becomes_a_record(s: Story) -> int:
    s.insert(1, 9, b"a", [4])
    s.read(2, 3, 4, no_op(4))
    return 0


def another_owner_after_all(s: Story) -> int:
    error = NoSuchRecordError(rid(4), "shard 0 does not own the position")
    s.add(1, 2, ReadRequest(NEVER, rid(4)), error)
    return s.insert(3, 4, b"a", [4])


def another_record_than_asked_for(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.add(3, 4, ReadRequest(NEVER, rid(6)), record(4, b"a"))


def another_place_than_asked_for(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.add(3, 4, ReadRequest(NEVER, rid(4)), record(6, b"a"))


def before_its_start_after_its_end(s: Story) -> int:
    s.insert(1, 2, b"a", [2])
    number = s.subscribe(3, 4, 4, follow=False)
    s.fetch(5, 6, number, ended=True)
    return s.fetch(7, 8, number, (2, b"a"))


def a_trim_that_did_nothing(s: Story) -> int:
    s.trim(1, 2, 5, UnavailableError("try again"))
    return s.read(3, 4, 2, TrimmedError(rid(5)))


def another_key(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.add(3, 4, ReadRequest(NEVER, rid(4)), Record(rid(4), b"a", b"k", 0, 0))


def two_subscribers_differ(s: Story) -> int:
    s.insert(1, 2, b"a", unknown())
    s.insert(1, 2, b"b", [6])
    s.fetch(4, 5, s.subscribe(3, 4), (4, b"a"), (6, b"b"))
    return s.fetch(7, 8, s.subscribe(6, 7), (6, b"b"))


def a_tail_below(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.tail(3, 4, 2)


def a_tail_below_what_was_resolved(s: Story) -> int:
    s.resolve(3, 4, s.insert(1, 2, b"a", unknown()), 4)
    return s.tail(5, 6, 2)


def resolved_and_gone(s: Story) -> int:
    s.resolve(3, 4, s.insert(1, 2, b"a", unknown()), 4)
    return s.read(5, 6, 4, empty(4))


def resolved_to_nothing_and_there(s: Story) -> int:
    s.resolve(3, 4, s.insert(1, 2, b"a", unknown()), None)
    return s.read(5, 6, 4, b"a")


def resolved_in_two_ways(s: Story) -> int:
    first = s.insert(1, 2, b"a", unknown())
    s.resolve(3, 4, first, 4)
    return s.resolve(5, 6, first, 6)


def nobody_trimmed(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 4)
    return s.read(5, 6, 4, TrimmedError(rid(6)))


def trimmed_before_anybody_asked(s: Story) -> int:
    number = s.read(1, 2, 4, TrimmedError(rid(5)))
    s.trim(3, 4, 5)
    return number


def trimmed_but_not_below(s: Story) -> int:
    s.trim(1, 2, 5)
    return s.read(3, 4, 6, TrimmedError(rid(5)))


def read_after_a_trim(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 5)
    return s.read(5, 6, 4, b"a")


def delivered_after_a_trim(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 5)
    return s.fetch(7, 8, s.subscribe(5, 6), (4, b"a"))


def a_subscription_is_trimmed_ahead_of_its_place(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    number = s.subscribe(3, 4)
    s.fetch(5, 6, number, (4, b"a"))
    s.trim(7, 8, 4)
    return s.add(9, 10, FetchRequest(NEVER, 1, 9), TrimmedError(rid(4)), number)


def filled_below_a_trim(s: Story) -> int:
    s.trim(1, 2, 5)
    return s.insert(3, 4, b"a", [4])


def filled_below_a_trim_that_a_reader_was_told_of(s: Story) -> int:
    s.trim(1, None, 5)
    s.read(2, 3, 2, TrimmedError(rid(5)))
    return s.insert(4, 5, b"a", [4])


BAD = [
    a_read_misses_what_returned,
    a_read_goes_back,
    a_passed_position_is_filled,
    a_position_below_the_start_is_filled,
    a_passed_record_is_missing,
    a_fetch_jumps,
    a_fetch_repeats,
    out_of_order,
    before_its_start,
    it_ended_too_early,
    filled_after_the_end,
    one_position_twice,
    one_record_twice,
    not_after,
    not_after_though_nobody_was_told,
    a_call_in_another_order,
    a_call_at_two_shards,
    too_few_rids,
    it_did_not_happen,
    it_did_not_happen_either,
    nobody_inserted_it,
    seen_before_it_was_inserted,
    a_no_op_becomes_a_record,
    another_owner_after_all,
    another_record_than_asked_for,
    another_place_than_asked_for,
    before_its_start_after_its_end,
    a_trim_that_did_nothing,
    another_key,
    two_subscribers_differ,
    a_tail_below,
    a_tail_below_what_was_resolved,
    resolved_and_gone,
    resolved_to_nothing_and_there,
    resolved_in_two_ways,
    nobody_trimmed,
    trimmed_before_anybody_asked,
    trimmed_but_not_below,
    read_after_a_trim,
    delivered_after_a_trim,
    a_subscription_is_trimmed_ahead_of_its_place,
    filled_below_a_trim,
    filled_below_a_trim_that_a_reader_was_told_of,
]


@pytest.mark.parametrize("tell", BAD, ids=lambda tell: tell.__name__)
def test_what_the_log_may_not_do(tell: Any) -> None:
    story = Story()
    culprit = tell(story)
    explanation = story.explain()
    assert explanation is not None
    assert explanation.is_decided
    assert explanation.culprit.number == culprit, str(explanation)
    with pytest.raises(AssertionError, match=r"not linearizable(.|\n)*none of these can come next"):
        Tally().judge(story.operations)


def test_the_explanation_is_of_the_shortest_beginning() -> None:
    story = Story()
    story.insert(1, 2, b"a", [4])
    story.read(3, 4, 4, b"a")
    culprit = story.read(5, 6, 4, empty(4))
    story.insert(7, 8, b"b", [4])
    story.read(9, 10, 6, b"nobody's")
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
    """Return a story with a race at each position, and a lie at the last one."""
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


def test_what_is_not_decided_is_no_pass() -> None:
    story = contended(9, passed=True)
    explanation = story.explain(budget_states=100)
    assert explanation is not None
    assert not explanation.is_decided
    assert explanation.states == 100
    assert "not decided" in str(explanation)
    tally = Tally(100)
    tally.judge(story.operations)
    assert (tally.linearizable, len(tally.undecided)) == (0, 1)
    tally.judge(story.operations[:2])
    assert (tally.linearizable, len(tally.undecided)) == (1, 1)
    decided = contended(3, passed=True).explain()
    assert decided is not None
    assert decided.is_decided


def test_positions_that_nobody_passes_are_searched_one_by_one() -> None:
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


def test_what_harms_nobody_is_tried_in_one_order() -> None:
    story = Story()
    for index in range(20):
        story.insert(1, 1000, bytes([index]), [index + 1])
    story.fetch(3, 900, story.subscribe(1, 2), *((i + 1, bytes([i])) for i in range(20)))
    story.read(5, 2000, 3, b"nobody's")
    explanation = story.explain(budget_states=60)
    assert explanation is not None
    assert explanation.is_decided


# --- against all orders --------------------------------------------------------------------------


class Log:
    """The log, told once more, as plainly as it goes."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.sealed = 0  # up to here, inclusive
        self.empty: set[int] = set()
        self.trim = 0
        self.handed_out: dict[int, int] = {}

    def copy(self) -> Log:
        other = Log()
        other.records, other.empty = dict(self.records), set(self.empty)
        other.sealed, other.trim = self.sealed, self.trim
        other.handed_out = dict(self.handed_out)
        return other

    def put(self, gsn: int, payload: bytes) -> bool:
        if gsn in self.records or gsn <= self.sealed or gsn in self.empty:
            return False
        self.records[gsn] = payload
        return True

    def read(self, gsn: int, result: Any) -> bool:
        if isinstance(result, TrimmedError):
            return gsn < result.first.gsn <= self.trim
        if isinstance(result, NoSuchRecordError):
            if "no-op" in str(result):
                self.empty.add(gsn)
            return gsn not in self.records
        return self.records.get(gsn) == result.payload

    def fetch(self, number: int, start: int, result: Fetched, highest: int) -> bool:
        given = [(r.rid.gsn, r.payload) for r in result.records]
        knows_start = start >= 0 or number in self.handed_out or given
        start = self.handed_out.get(number, given[0][0] if start < 0 and given else start)
        end = given[-1][0] if given else 0
        if result.ended and start <= highest:
            end = max(end, highest)
        due = sorted((g, p) for g, p in self.records.items() if start <= g <= end)
        self.sealed = max(self.sealed, end)
        if end:
            self.handed_out[number] = max(start, end + 1)
        return due == given or not knows_start


def tries_all_orders(operations: list[Operation]) -> bool:
    """Whether some order, and some fate of what nobody knows, explains everything."""
    done = [o for o in operations if o.returned is not None]
    acked: list[tuple[int, int]] = [
        (o.returned or 0, r.gsn)
        for o in done
        if isinstance(o.request, InsertRequest) and isinstance(o.result, list)
        for r in o.result
    ]
    trims = [
        (o.returned or 0, o.request.rid.gsn)
        for o in done
        if isinstance(o.request, TrimRequest) and o.result is None
    ]
    moments: list[tuple[int, int, Any]] = []  # called, returned, what it does
    fates: list[tuple[int, Any]] = []  # of what nobody knows: called, what it may do

    def highest(rows: list[tuple[int, int]], before: int) -> int:
        return max((gsn for at, gsn in rows if at < before), default=0)

    for o in operations:
        result, request = o.result, o.request
        end = FOREVER if o.returned is None else o.returned
        match request:
            case InsertRequest() if isinstance(result, list):
                gsns = [r.gsn for r in result]
                if gsns != sorted(set(gsns)) or gsns[0] <= request.after.gsn:
                    return False
                moments += [
                    (o.called, end, lambda log, g=g, p=p: log.put(g, p))
                    for g, p in zip(gsns, request.payloads, strict=True)
                ]
            case InsertRequest() if not isinstance(result, UnavailableError):
                low = request.after.gsn + 1
                (payload,) = request.payloads
                fates.append((o.called, [
                    lambda log, g=g, p=payload: log.put(g, p) for g in range(low, 7)
                ]))  # fmt: skip
            case ReadRequest(rid=at) if end != FOREVER and not isinstance(result, DeadlineError):
                if isinstance(result, Record) and at.gsn < highest(trims, o.called):
                    return False
                moments.append((o.called, end, lambda log, g=at.gsn, r=result: log.read(g, r)))
            case FetchRequest() if end != FOREVER:
                assert o.of is not None
                begun = operations[o.of]
                assert isinstance(begun.request, SubscribeRequest)
                start, floor = begun.request.start.gsn, highest(acked, begun.called)
                first = min((r.rid.gsn for r in result.records), default=FOREVER)
                if first < highest(trims, begun.called):
                    return False
                start = start if start < 0 else max(start, 1)
                moments.append((
                    o.called, end,
                    lambda log, n=o.of, s=start, r=result, f=floor: log.fetch(n, s, r, f),
                ))  # fmt: skip
            case TailRequest() if end != FOREVER and result.gsn < highest(acked, o.called):
                asked = [(t.called, t.request.rid.gsn) for t in operations if _is_trim(t)]
                if highest(acked, o.called) >= highest(asked, end):
                    return False
            case TrimRequest(rid=at):

                def trim(log: Log, gsn: int = at.gsn) -> bool:
                    log.trim = max(log.trim, gsn)
                    log.sealed = max(log.sealed, gsn - 1)
                    return True

                if result is None:
                    moments.append((o.called, end, trim))
                else:
                    fates.append((o.called, [trim]))

    def go_on(log: Log, left: list[int], open_fates: list[int]) -> bool:
        if not left:
            return True
        first_end = min(moments[i][1] for i in left)
        for i in left:
            called, _, act = moments[i]
            after = log.copy()
            if (
                called <= first_end
                and act(after)
                and go_on(after, [j for j in left if j != i], open_fates)
            ):
                return True
        for i in open_fates:
            called, acts = fates[i]
            for act in acts if called <= first_end else ():
                after = log.copy()
                if act(after) and go_on(after, left, [j for j in open_fates if j != i]):
                    return True
        return False

    return go_on(Log(), list(range(len(moments))), list(range(len(fates))))


def tiny(seed: int) -> list[Operation]:
    """Return a short history of a correct log, in which up to three things are changed."""
    random = Random(seed)
    story, log = Story(), Log()
    number = story.subscribe(-9, -8, random.choice((-1, 0, 2)), follow=random.random() < 0.5)
    handed_out: list[int] = []
    payloads = iter(b"abcdefgh")
    count = random.randint(2, 6)
    for index in range(count):
        point = 100 * (index + 1)
        called = point - random.randint(1, 250)
        returned = point + random.randint(1, 250)
        match random.choice(
            ("insert", "insert", "insert", "read", "read", "fetch", "trim", "tail")
        ):
            case "insert":
                _tiny_insert(random, story, log, called, returned, next(payloads))
            case "read":
                gsn = random.randint(1, 5)
                result: Any = log.records.get(gsn, empty(gsn))
                if isinstance(result, NoSuchRecordError) and random.random() < 0.3:
                    result = no_op(gsn)
                    log.empty.add(gsn)
                if gsn < log.trim:
                    result = TrimmedError(rid(log.trim))
                story.read(called, returned, gsn, result)
            case "fetch":
                start = story.operations[number].request.start.gsn
                low = max([start, *(g + 1 for g in handed_out), 1])
                rows = sorted(row for row in log.records.items() if row[0] >= low)[:2]
                ended = not rows and random.random() < 0.5
                handed_out += [gsn for gsn, _ in rows]
                log.sealed = max([log.sealed, *(gsn for gsn, _ in rows)])
                story.fetch(called, returned, number, *rows, ended=ended)
            case "trim":
                gsn = random.randint(1, 4)
                log.trim = max(gsn, log.trim)
                log.sealed = max(gsn - 1, log.sealed)
                late = DeadlineError("late") if random.random() < 0.3 else None
                story.trim(called, returned if random.random() < 0.8 else None, gsn, late)
            case "tail":
                story.tail(called, returned, max(log.records, default=0))
    operations = story.operations
    for _ in range(random.choice((0, 1, 2, 3))):
        _change(random, operations)
    return _apart(operations)


def _tiny_insert(
    random: Random, story: Story, log: Log, called: int, returned: int, payload: int
) -> None:
    gsns = [
        g for g in range(1, 6) if g > log.sealed and g not in log.records | dict.fromkeys(log.empty)
    ]
    contents = bytes([payload])
    if not gsns or random.random() < 0.1:
        story.insert(called, returned, contents, UnavailableError("full"))
        return
    gsn = random.choice(gsns)
    after = random.choice((0, gsn - 1))
    fate = random.random()
    if fate < 0.85:
        log.records[gsn] = contents
    if fate < 0.65:
        story.insert(called, returned, contents, [gsn], after)
    else:
        story.insert(called, returned if fate < 0.9 else None, contents, unknown(), after)


def _change(random: Random, operations: list[Operation]) -> None:
    """Change what an operation returned, or when."""
    index = random.randrange(1, len(operations))
    o = operations[index]
    result = o.result
    if o.returned is None or isinstance(o.request, TrimRequest) or random.random() < 0.25:
        by = random.randint(-300, 300)
        end = None if o.returned is None else o.returned + by
        operations[index] = replace(o, called=o.called + by, returned=end)
        return
    match o.request:
        case InsertRequest():
            result = [rid(random.randint(1, 5))]
        case ReadRequest(rid=at):
            result = random.choice((
                empty(at.gsn), no_op(at.gsn), TrimmedError(rid(at.gsn + 1)),
                record(at.gsn, bytes([random.choice(b"abc")])),
            ))  # fmt: skip
        case FetchRequest():
            gsns = sorted(random.sample(range(1, 6), random.randint(0, 2)))
            records = [record(g, bytes([random.choice(b"abc")])) for g in gsns]
            result = Fetched(random.choice((records, result.records[1:])), ended=not gsns)
        case TailRequest():
            result = rid(random.randint(0, 3))
    operations[index] = replace(o, result=result)


def _is_trim(operation: Operation) -> bool:
    return isinstance(operation.request, TrimRequest)


def _apart(operations: list[Operation]) -> list[Operation]:
    """Return the same with times that all differ."""
    moments = sorted(
        [(o.called if o.number else -1000, o.number, 0) for o in operations]
        + [
            (o.returned if o.number else -999, o.number, 1)
            for o in operations
            if o.returned is not None
        ]
    )
    at = {(number, kind): index for index, (_, number, kind) in enumerate(moments)}
    return [
        replace(
            o,
            called=at[o.number, 0],
            returned=None if o.returned is None else at[o.number, 1],
        )
        for o in operations
    ]


def agrees(seed: int) -> bool:
    """Hold the search against all orders; return what both say."""
    operations = tiny(seed)
    explanation = explain(operations)
    expected = tries_all_orders(operations)
    told = "\n".join(map(str, operations))
    assert (explanation is None) == expected, f"seed {seed}:\n{told}\n{explanation}"
    return expected


@settings(max_examples=300, deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_the_search_says_what_trying_all_orders_says(seed: int) -> None:
    agrees(seed)


def test_both_answers_are_common() -> None:
    found = [agrees(seed) for seed in range(300)]
    assert 60 < sum(found) < 240


# --- with what the system says -------------------------------------------------------------------


def test_the_reasons_that_the_client_gives_are_those_that_the_search_knows() -> None:
    cluster = PureCluster(2, 1)
    cluster.run(2 * S)
    client = cluster.client("client-0")
    client.insert(b"a", RecordId(10, 0))
    told = set()
    for shard in (0, 1):
        for gsn in range(1, 5):
            with pytest.raises(NoSuchRecordError) as raised:
                client.read(RecordId(gsn, shard))
            told.add(str(raised.value).partition(": ")[2])
    assert "the position is a no-op" in told
    assert any("does not own the position" in reason for reason in told)


def test_a_recorded_history_is_judged() -> None:
    assert explain(everything().history.operations) is None
