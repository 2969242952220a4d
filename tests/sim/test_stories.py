"""The linearizability search on stories: correct ones, and one for each violation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

from tests.sim.stories import Story, empty, no_op, record, rid, unknown
from ziplog.client.common.requests import FetchRequest, ReadRequest
from ziplog.core.units import NEVER
from ziplog.errors import DeadlineError, NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    Good = Callable[[Story], None]
    Bad = Callable[[Story], int]

GOOD: Final[dict[str, Good]] = {}
BAD: Final[dict[str, Bad]] = {}


def good(story_of: Good) -> Good:
    """Register a story that the log may produce."""
    GOOD[story_of.__name__] = story_of
    return story_of


def bad(story_of: Bad) -> Bad:
    """Register a story that it may not produce; it returns the unexplainable operation."""
    BAD[story_of.__name__] = story_of
    return story_of


# --- good ones -----------------------------------------------------------------------------------


@good
def later_is_lower(s: Story) -> None:
    s.insert(1, 2, b"a", [9])
    s.insert(3, 4, b"b", [2])
    s.read(5, 6, 2, b"b")


@good
def a_read_beside_the_insert_misses_it(s: Story) -> None:
    s.insert(1, 9, b"a", [4])
    s.read(2, 3, 4, empty(4))
    s.read(4, 5, 4, b"a")


@good
def seen_before_it_returned(s: Story) -> None:
    s.insert(1, 9, b"a", [4])
    s.fetch(3, 4, s.subscribe(1, 2), (4, b"a"))


@good
def an_unknown_one_appears_late(s: Story) -> None:
    s.insert(1, 2, b"a", unknown())
    s.read(3, 4, 4, empty(4))
    s.read(5, 6, 4, b"a")


@good
def an_unknown_one_never_appears(s: Story) -> None:
    s.insert(1, 2, b"a", unknown())
    s.insert(1, None, b"b", None)
    s.fetch(4, 5, s.subscribe(3, 4, follow=False), ended=True)


@good
def below_the_start_of_a_subscription(s: Story) -> None:
    s.insert(1, 9, b"a", [2])
    s.insert(1, 2, b"b", [5])
    s.fetch(4, 5, s.subscribe(3, 4, 5), (5, b"b"))


@good
def a_fetch_in_pieces(s: Story) -> None:
    s.insert(1, 2, b"abc", [2, 4, 6])
    number = s.subscribe(3, 4, 2, follow=False)
    s.fetch(5, 6, number)
    s.fetch(7, 8, number, (2, b"a"))
    s.fetch(9, 10, number, (4, b"b"), (6, b"c"))
    s.fetch(11, 12, number, ended=True)


@good
def two_fetches_at_a_time(s: Story) -> None:
    s.insert(1, 2, b"ab", [2, 4])
    number = s.subscribe(3, 4)
    s.fetch(5, 9, number, (4, b"b"))
    s.fetch(6, 10, number, (2, b"a"))


@good
def a_shard_that_does_not_own_it(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    error = NoSuchRecordError(RecordId(4, 1), "shard 1 does not own the position")
    s.add(3, 4, ReadRequest(NEVER, RecordId(4, 1)), error)
    s.read(5, 6, 4, b"a")


@good
def recent_starts_anywhere(s: Story) -> None:
    s.insert(1, 2, b"ab", [2, 4])
    s.fetch(5, 6, s.subscribe(3, 4, -1), (4, b"b"))


@good
def a_tail_above_all(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.insert(1, 9, b"b", [6])
    s.tail(3, 4, 4)
    s.tail(3, 4, 8)


@good
def a_tail_below_what_is_trimmed(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.insert(1, 2, b"b", [6])
    s.trim(3, 8, 7)
    s.tail(3, 7, 4)


@good
def trims_are_learned_one_by_one(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 9, 5)
    s.read(4, 5, 4, TrimmedError(rid(5)))
    s.read(6, 7, 4, b"a")
    s.read(10, 11, 4, TrimmedError(rid(5)))


@good
def a_trim_that_timed_out(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 5, DeadlineError("late"))
    s.read(5, 6, 4, b"a")
    s.read(7, 8, 4, TrimmedError(rid(5)))


@good
def an_unknown_outcome_that_is_resolved(s: Story) -> None:
    first = s.insert(1, 2, b"ab", unknown())
    s.read(3, 4, 4, empty(4))
    s.resolve(3, 6, first, 4, None)
    s.read(7, 8, 4, b"a")


@good
def two_recent_fetches_at_a_time(s: Story) -> None:
    s.insert(1, 2, b"ab", [2, 4])
    number = s.subscribe(3, 4, -1)
    s.fetch(5, 9, number, (4, b"b"))
    s.fetch(6, 10, number, (2, b"a"))


@good
def it_began_beyond_the_end(s: Story) -> None:
    s.insert(1, 2, b"a", [4])
    s.fetch(5, 6, s.subscribe(3, 4, 9, follow=False), ended=True)
    s.insert(7, 8, b"b", [3])


@good
def one_fetch_beside_another_that_is_refused(s: Story) -> None:
    s.insert(1, 2, b"a", [2])
    number = s.subscribe(3, 4)
    s.trim(5, 20, 3)
    s.fetch(6, 15, number, (2, b"a"))
    s.add(6, 16, FetchRequest(NEVER, 1, 9), TrimmedError(rid(3)), number)


@good
def calls_without_effect(s: Story) -> None:
    s.insert(1, 2, b"a", UnavailableError("try again"))
    s.read(1, 2, 4, DeadlineError("late"))
    s.trim(1, 2, 4, UnavailableError("try again"))
    s.read(3, 4, 2, empty(2))


@good
def failed_in_part(s: Story) -> None:
    error = UnavailableError("no room for the second")
    error.results = [rid(4), None]
    s.insert(1, 2, b"ab", error)
    s.read(3, 4, 4, b"a")


@pytest.mark.parametrize("story_of", GOOD.values(), ids=GOOD)
def test_what_the_log_may_do(story_of: Good) -> None:
    story = Story()
    story_of(story)
    assert story.explain() is None


# --- bad ones ------------------------------------------------------------------------------------


@bad
def a_read_misses_what_returned(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.read(3, 4, 4, empty(4))


@bad
def a_read_goes_back(s: Story) -> int:
    s.insert(1, 9, b"a", [4])
    s.read(2, 3, 4, b"a")
    return s.read(4, 5, 4, empty(4))


@bad
def a_passed_position_is_filled(s: Story) -> int:
    s.insert(1, 2, b"a", [5])
    s.fetch(4, 5, s.subscribe(3, 4), (5, b"a"))
    return s.insert(6, 7, b"b", [2])


@bad
def a_position_below_the_start_is_filled(s: Story) -> int:
    s.insert(1, 2, b"a", [5])
    s.fetch(4, 5, s.subscribe(3, 4, 5), (5, b"a"))
    return s.insert(6, 7, b"b", [2])


@bad
def a_passed_record_is_missing(s: Story) -> int:
    s.insert(1, 2, b"ab", [4, 6])
    return s.fetch(4, 5, s.subscribe(3, 4), (6, b"b"))


@bad
def a_fetch_jumps(s: Story) -> int:
    s.insert(1, 2, b"abc", [2, 4, 6])
    number = s.subscribe(3, 4)
    s.fetch(5, 6, number, (2, b"a"))
    return s.fetch(7, 8, number, (6, b"c"))


@bad
def a_fetch_repeats(s: Story) -> int:
    s.insert(1, 2, b"ab", [2, 4])
    number = s.subscribe(3, 4)
    s.fetch(5, 6, number, (2, b"a"))
    return s.fetch(7, 8, number, (2, b"a"), (4, b"b"))


@bad
def out_of_order(s: Story) -> int:
    s.insert(1, 2, b"ab", [2, 4])
    return s.fetch(4, 5, s.subscribe(3, 4), (4, b"b"), (2, b"a"))


@bad
def before_its_start(s: Story) -> int:
    s.insert(1, 2, b"ab", [2, 4])
    return s.fetch(4, 5, s.subscribe(3, 4, 3), (2, b"a"), (4, b"b"))


@bad
def it_ended_too_early(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.fetch(4, 5, s.subscribe(3, 4, follow=False), ended=True)


@bad
def filled_after_the_end(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    number = s.subscribe(3, 4, 4, follow=False)
    s.fetch(5, 6, number, (4, b"a"))
    s.fetch(7, 8, number, ended=True)
    return s.insert(9, 10, b"b", [3])


@bad
def one_position_twice(s: Story) -> int:
    s.insert(1, 5, b"a", [4])
    return s.insert(2, 6, b"b", [4])


@bad
def one_record_twice(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.read(3, 4, 6, b"a")


@bad
def not_after(s: Story) -> int:
    return s.insert(1, 2, b"a", [4], after=4)


@bad
def not_after_an_unreported_insert(s: Story) -> int:
    s.insert(1, 2, b"a", unknown(), after=4)
    return s.read(3, 4, 4, b"a")


@bad
def a_call_in_another_order(s: Story) -> int:
    return s.insert(1, 2, b"ab", [4, 2])


@bad
def a_call_at_two_shards(s: Story) -> int:
    return s.insert(1, 2, b"ab", [3, 4])


@bad
def too_few_rids(s: Story) -> int:
    return s.insert(1, 2, b"ab", [4])


@bad
def it_did_not_happen(s: Story) -> int:
    s.insert(1, 2, b"a", UnavailableError("try again"))
    return s.read(3, 4, 4, b"a")


@bad
def it_did_not_happen_either(s: Story) -> int:
    s.insert(1, 2, b"a", DeadlineError("nothing was sent"))
    return s.read(3, 4, 4, b"a")


@bad
def inserted_by_no_client(s: Story) -> int:
    return s.read(3, 4, 4, b"a")


@bad
def seen_before_it_was_inserted(s: Story) -> int:
    number = s.read(1, 2, 4, b"a")
    s.insert(3, 4, b"a", [4])
    return number


@bad
def a_no_op_becomes_a_record(s: Story) -> int:
    s.insert(1, 9, b"a", [4])
    s.read(2, 3, 4, no_op(4))
    return 0


@bad
def another_owner_after_all(s: Story) -> int:
    error = NoSuchRecordError(rid(4), "shard 0 does not own the position")
    s.add(1, 2, ReadRequest(NEVER, rid(4)), error)
    return s.insert(3, 4, b"a", [4])


@bad
def another_record_than_requested(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.add(3, 4, ReadRequest(NEVER, rid(6)), record(4, b"a"))


@bad
def another_position_than_requested(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.add(3, 4, ReadRequest(NEVER, rid(4)), record(6, b"a"))


@bad
def before_its_start_after_its_end(s: Story) -> int:
    s.insert(1, 2, b"a", [2])
    number = s.subscribe(3, 4, 4, follow=False)
    s.fetch(5, 6, number, ended=True)
    return s.fetch(7, 8, number, (2, b"a"))


@bad
def a_trim_that_did_nothing(s: Story) -> int:
    s.trim(1, 2, 5, UnavailableError("try again"))
    return s.read(3, 4, 2, TrimmedError(rid(5)))


@bad
def another_key(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.add(3, 4, ReadRequest(NEVER, rid(4)), Record(rid(4), b"a", b"k", 0, 0))


@bad
def two_subscribers_differ(s: Story) -> int:
    s.insert(1, 2, b"a", unknown())
    s.insert(1, 2, b"b", [6])
    s.fetch(4, 5, s.subscribe(3, 4), (4, b"a"), (6, b"b"))
    return s.fetch(7, 8, s.subscribe(6, 7), (6, b"b"))


@bad
def a_tail_below(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    return s.tail(3, 4, 2)


@bad
def a_tail_below_what_was_resolved(s: Story) -> int:
    s.resolve(3, 4, s.insert(1, 2, b"a", unknown()), 4)
    return s.tail(5, 6, 2)


@bad
def resolved_and_gone(s: Story) -> int:
    s.resolve(3, 4, s.insert(1, 2, b"a", unknown()), 4)
    return s.read(5, 6, 4, empty(4))


@bad
def resolved_to_nothing_and_there(s: Story) -> int:
    s.resolve(3, 4, s.insert(1, 2, b"a", unknown()), None)
    return s.read(5, 6, 4, b"a")


@bad
def resolved_in_two_ways(s: Story) -> int:
    first = s.insert(1, 2, b"a", unknown())
    s.resolve(3, 4, first, 4)
    return s.resolve(5, 6, first, 6)


@bad
def trimmed_by_no_client(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 4)
    return s.read(5, 6, 4, TrimmedError(rid(6)))


@bad
def trimmed_before_any_request(s: Story) -> int:
    number = s.read(1, 2, 4, TrimmedError(rid(5)))
    s.trim(3, 4, 5)
    return number


@bad
def trimmed_but_not_below(s: Story) -> int:
    s.trim(1, 2, 5)
    return s.read(3, 4, 6, TrimmedError(rid(5)))


@bad
def read_after_a_trim(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 5)
    return s.read(5, 6, 4, b"a")


@bad
def delivered_after_a_trim(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    s.trim(3, 4, 5)
    return s.fetch(7, 8, s.subscribe(5, 6), (4, b"a"))


@bad
def a_subscription_is_trimmed_ahead_of_its_place(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    number = s.subscribe(3, 4)
    s.fetch(5, 6, number, (4, b"a"))
    s.trim(7, 8, 4)
    return s.add(9, 10, FetchRequest(NEVER, 1, 9), TrimmedError(rid(4)), number)


@bad
def filled_below_a_trim(s: Story) -> int:
    s.trim(1, 2, 5)
    return s.insert(3, 4, b"a", [4])


@bad
def filled_below_a_trim_seen_by_a_reader(s: Story) -> int:
    s.trim(1, None, 5)
    s.read(2, 3, 2, TrimmedError(rid(5)))
    return s.insert(4, 5, b"a", [4])


# --- appends -------------------------------------------------------------------------------------


@good
def an_insert_under_way_is_before_an_append(s: Story) -> None:
    s.insert(1, 20, b"a", [2])
    s.append(2, 10, b"b", [4])


@good
def appends_under_way_have_no_order(s: Story) -> None:
    s.append(1, 10, b"a", [4])
    s.append(2, 12, b"b", [2])


@good
def a_sealed_tail_is_before_what_follows(s: Story) -> None:
    s.append(1, 2, b"a", [2])
    s.tail(3, 4, 3, sealed=True)
    s.insert(5, 6, b"b", [4])
    s.seal(7, 8, 9)


@bad
def a_later_insert_is_before_an_append(s: Story) -> int:
    s.append(1, 2, b"ab", [4, 6])
    return s.insert(3, 4, b"c", [5])


@bad
def a_later_insert_is_before_a_sealed_position(s: Story) -> int:
    s.insert(1, 2, b"a", [4])
    s.seal(3, 4, 4)
    return s.insert(5, 6, b"b", [3])


@bad
def a_later_insert_is_before_a_sealed_tail(s: Story) -> int:
    s.tail(1, 2, 4, sealed=True)
    return s.insert(3, 4, b"b", [3])


@bad
def a_later_insert_is_before_a_resolved_append(s: Story) -> int:
    number = s.append(1, 2, b"a", unknown())
    s.resolve(3, 4, number, 4)
    return s.insert(5, 6, b"b", [3])


@bad
def an_insert_appears_before_an_append_after_a_read(s: Story) -> int:
    number = s.insert(1, 20, b"a", [2])
    s.append(2, 10, b"b", [4])
    s.read(11, 12, 2, empty(2))
    return number


@pytest.mark.parametrize("story_of", BAD.values(), ids=BAD)
def test_what_the_log_may_not_do(story_of: Bad) -> None:
    story = Story()
    culprit = story_of(story)
    explanation = story.explain()
    assert explanation is not None
    assert explanation.is_decided
    assert explanation.culprit.number == culprit, str(explanation)
    assert re.match(r"not linearizable(.|\n)*none of these can come next", str(explanation))
