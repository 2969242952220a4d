"""How a task goes through its records: steps, unknown outcomes, rejected records."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logplayer.contract import Rejected
from logplayer.delivery import Delivery
from logplayer.selection import Selection
from tests.properties import examples
from tests.unit.logplayer.test_selection import record, ring_of, spec

if TYPE_CHECKING:
    from logplayer.ring import Ring

FAR = 10**9


def delivery(policy: Any = "stop", **more: Any) -> Delivery:
    found = Delivery(Selection(spec(**more), 0), policy)
    found.restart(1)
    return found


def looked(count: int = 8, policy: Any = "stop") -> Delivery:
    found = delivery(policy)
    found.look(ring_of([record(2 * n) for n in range(1, count + 1)]), FAR)
    return found


def test_steps_follow_each_other_without_a_gap() -> None:
    found, ring = delivery(batch_records=2), ring_of([record(2 * n) for n in range(1, 6)])
    spans = []
    while found.looked < ring.stop:
        found.look(ring, FAR)
        spans.append((found.take(FAR).start, found.take(FAR).stop))
        found.succeed()
        found.check()
    assert spans == [(1, 5), (5, 9), (9, 11)]


@pytest.mark.parametrize("more", [{}, {"map": lambda one: one}])
def test_a_batch_that_is_not_full_takes_later_records(more: Any) -> None:
    found, ring = delivery(batch_records=3, **more), ring_of([record(2)])
    found.look(ring, FAR)
    ring.append([record(4)], now=9)
    ring.extend(6)
    found.look(ring, FAR)
    assert found.cut is not None
    assert (found.cut.origins, found.cut.stop, found.cut.is_full) == ([2, 4], 5, False)
    assert (found.cut.arrived, found.looked) == (7, 5)
    ring.append([record(7), record(9)], now=10)
    found.look(ring, FAR)
    assert (found.cut.origins, found.cut.stop, found.cut.is_full) == ([2, 4, 7], 8, True)
    found.take(FAR)
    found.succeed()
    found.check()
    found.look(ring, FAR)
    assert found.cut.origins == [9]


@pytest.mark.parametrize("more", [{}, {"map": lambda one: one}])
def test_a_batch_is_full_before_a_record_that_is_too_large_for_it(more: Any) -> None:
    found, ring = delivery(batch_bytes=5, **more), ring_of([record(2, None, b"xxx")])
    found.look(ring, FAR)
    ring.extend(8)
    ring.append([record(9, None, b"xxx")], now=9)
    found.look(ring, FAR)
    assert found.cut is not None
    assert (found.cut.origins, found.cut.is_full, found.looked) == ([2], True, 9)
    found.take(FAR)
    found.succeed()
    found.look(ring, FAR)
    assert found.cut.origins == [9]


def test_a_batch_that_was_delivered_takes_no_later_records() -> None:
    found = looked()
    assert found.cut is not None
    assert not found.cut.is_full
    found.take(6)
    assert found.cut.is_full
    found.succeed()
    assert found.cut.is_full, "what is left follows at once"


def test_what_a_rejection_leaves_of_a_batch_takes_no_later_records() -> None:
    found = looked(3, "skip")
    found.take(FAR)
    found.reject(Rejected(1, "no"))
    assert found.cut is not None
    assert (found.cut.origins, found.cut.is_full) == ([2, 6], True)


def test_a_look_without_records_stops_at_its_limit() -> None:
    found, ring = delivery(), ring_of([record(2)])
    found.look(ring, FAR)
    found.take(FAR)
    found.succeed()
    ring.extend(100)
    found.look(ring, 40)
    assert (found.looked, found.cut) == (40, None)
    found.look(ring, FAR)
    assert found.looked == 100


@pytest.mark.parametrize("position", range(1, 18))
def test_after_an_unknown_outcome_it_continues_where_the_target_stands(position: int) -> None:
    found, ring = looked(), ring_of([record(2 * n) for n in range(1, 9)])
    found.take(FAR)
    found.given = None
    found.continue_at(position)
    found.check()
    if found.cut is None and found.looked < ring.stop:
        found.look(ring, FAR)
    left = found.cut.origins if found.cut is not None else []
    assert left == [gsn for gsn in range(2, 17, 2) if gsn >= position]


def test_a_target_that_went_back_gets_everything_from_there() -> None:
    found = looked()
    found.take(FAR)
    found.succeed()
    found.continue_at(5)
    assert (found.position, found.looked, found.cut) == (5, 5, None)


def play(found: Delivery, ring: Ring, bad: set[int], *, named: bool) -> tuple[list[int], int, str]:
    """Return what a target took, the number of its steps, and why the task stopped."""
    done: list[int] = []
    kept: list[int] = []
    steps = 0
    while found.looked < ring.stop or found.cut is not None:
        if found.cut is None:
            found.look(ring, FAR)
            if found.cut is None:
                break
        if found.stopped_by:
            return done, steps, found.stopped_by
        cut = found.take(FAR)
        aside = found.rejected_of(cut)
        steps += 1
        assert steps < 1000, "it does not end"
        assert cut.start == found.position
        wrong = [n for n, origin in enumerate(cut.origins) if origin in bad]
        if wrong:
            found.reject(Rejected(wrong[0] if named else None, "no"))
        else:
            done += cut.origins
            kept += [one.record.rid.gsn for one in aside]
            found.succeed()
        found.check()
    assert kept == (sorted(bad) if found._policy == "dead-letter" else [])
    return done, steps, ""


@examples(200)
@given(st.sets(st.integers(1, 24)), st.booleans(), st.sampled_from(["skip", "dead-letter"]))
def test_rejected_records_are_left_out_and_all_others_are_done_in_order(
    bad: set[int], named: bool, policy: str
) -> None:
    ring = ring_of([record(n) for n in range(1, 25)])
    done, steps, _ = play(delivery(policy, batch_records=10), ring, bad, named=named)
    assert done == [n for n in range(1, 25) if n not in bad]
    each = 2 if named else 2 * math.ceil(math.log2(10)) + 3
    assert steps <= 3 + each * len(bad)


@examples(100)
@given(st.sets(st.integers(1, 24), min_size=1), st.booleans())
def test_a_task_stops_in_front_of_a_rejected_record(bad: set[int], named: bool) -> None:
    ring = ring_of([record(n) for n in range(1, 25)])
    found = delivery("stop", batch_records=10)
    done, _, why = play(found, ring, bad, named=named)
    assert done == list(range(1, min(bad)))
    assert why == f"the target rejects gsn {min(bad)}: no"
    assert found.position == min(bad) or not done or found.position == done[-1] + 1
    found.try_again()
    again, _, _ = play(found, ring, set(), named=named)
    assert done + again == list(range(1, 25))


def test_all_records_of_one_that_was_mapped_are_rejected_together() -> None:
    found = Delivery(Selection(spec(map=lambda one: [one, one]), 0), "skip")
    found.restart(1)
    found.look(ring_of([record(4)]), FAR)
    found.take(FAR)
    assert len(found.reject(Rejected("no"))) == 2
    assert found.take(FAR).records == []


def test_one_of_the_records_that_a_map_returned_is_rejected_alone() -> None:
    found = Delivery(Selection(spec(map=lambda one: [one, one]), 0), "dead-letter")
    found.restart(1)
    found.look(ring_of([record(4)]), FAR)
    found.take(FAR)
    assert len(found.reject(Rejected(1, "no"))) == 1
    cut = found.take(FAR)
    assert len(cut) == len(found.rejected_of(cut)) == 1


@pytest.mark.parametrize("bad", [set(range(1, 25)), set(range(1, 24))])
def test_rejected_records_count_when_a_step_is_halved(bad: set[int]) -> None:
    """The target has space for three records, together with the rejected ones that it keeps."""
    ring = ring_of([record(n) for n in range(1, 25)])
    found = delivery("dead-letter", batch_records=24)
    found.look(ring, FAR)
    done: list[int] = []
    kept: list[int] = []
    for _ in range(200):
        if found.cut is None:
            break
        cut = found.take(FAR)
        aside = found.rejected_of(cut)
        wrong = [n for n, origin in enumerate(cut.origins) if origin in bad]
        if wrong or len(cut) + len(aside) > 3:
            assert found.can_reject, "it can only be repeated, for ever"
            found.reject(Rejected(wrong[0] if wrong else None, "no"))
        else:
            done += cut.origins
            kept += [one.record.rid.gsn for one in aside]
            found.succeed()
        found.check()
    assert (done, kept) == (sorted(set(range(1, 25)) - bad), sorted(bad))


def test_a_limit_ends_a_step_before_it() -> None:
    found = looked()
    cut = found.take(7)
    assert (cut.origins, cut.stop) == ([2, 4, 6], 7)
    found.succeed()
    assert found.take(FAR).origins == [8, 10, 12, 14, 16]
