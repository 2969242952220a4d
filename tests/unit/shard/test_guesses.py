from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.state.epoch_clock import EpochClock
from shard.state.guesses import Guesses
from shard.state.sessions import HeldUnit
from tests.properties import examples
from tests.world import S, first_lease
from ziplog.core.view import run_of


def guesses_of(*, epoch_size: int = 1 << 20) -> tuple[Guesses, EpochClock]:
    clock = EpochClock(0)
    clock.announce([run_of(first_lease(1, epoch_size=epoch_size))], S, S)
    return Guesses(clock), clock


def unit(seq: int, count: int = 1, after: int = 0) -> HeldUnit:
    return HeldUnit(b"c" * 16, seq, count, 7, b"body", after)


def promised(guesses: Guesses, first: int, last: int, floor: int = 1) -> list[HeldUnit]:
    units = [unit(seq) for seq in range(first, last + 1)]
    for each in units:
        guesses.promise(each, floor)
    return units


def test_next_guess_follows_the_highest_promise_and_the_floor() -> None:
    guesses, _ = guesses_of()
    first, second, third = unit(1, 3), unit(2), unit(3, after=50)
    assert guesses.promise(first, 1)
    assert guesses.promise(second, 1)
    assert guesses.promise(third, 1)
    assert (first.gsns, second.gsns, third.gsns) == ([1, 2, 3], [4], [51])
    later = unit(4)
    guesses.promise(later, 70)
    assert later.gsns == [70]
    guesses.check(1)


def test_decision_breaks_only_the_promises_it_contradicts() -> None:
    guesses, _ = guesses_of()
    one, two, three, four = promised(guesses, 1, 4)
    assert guesses.apply_place(one, [1]) == []
    assert guesses.apply_place(three, [2]) == [two]
    three.gsns = [2]
    assert two.gsns is None
    assert four.gsns == [4], "a freed slot stays empty; no unit moves up"
    guesses.check(3)
    assert guesses.apply_skip(9) == [four], "a no-op decides the slot too"


def test_freed_slot_at_the_end_is_used_again() -> None:
    guesses, _ = guesses_of()
    one, two = promised(guesses, 1, 2)
    guesses.apply_place(one, [1])
    guesses.apply_place(two, [2])
    three = unit(3)
    guesses.promise(three, 3)
    assert three.gsns == [3]


def feed(guesses: Guesses, units: list[HeldUnit], first: int) -> None:
    """Decide the units at consecutive slots from `first` on."""
    for gsn, each in enumerate(units, first):
        guesses.apply_place(each, [gsn])


def test_backup_that_is_ahead_gives_no_guesses() -> None:
    guesses, _ = guesses_of()
    orphan, *units = promised(guesses, 1, 11)
    feed(guesses, units[:4], 1)  # the orphan never arrives: all slots are one lower
    assert orphan.gsns is None
    unlucky, lucky = unit(12), unit(13)
    assert not guesses.promise(unlucky, 5)
    assert guesses.promise(lucky, 5)
    assert lucky.gsns == [12]  # units 2 to 11 get 1 to 10, unit 12 gets 11


def test_backup_that_is_behind_skips_the_same_number_of_slots() -> None:
    guesses, _ = guesses_of()
    units = promised(guesses, 1, 10)
    # Two units reached only the primary, so all slots are two higher; each guess is displaced by
    # the decision before it, and still shows the offset.
    for gsn, each in enumerate(units[:4], 3):
        guesses.apply_place(each, [gsn])
    nxt = unit(11)
    guesses.promise(nxt, 7)
    assert nxt.gsns == [13]


def test_single_wrong_guesses_do_not_realign() -> None:
    guesses, _ = guesses_of()
    units = promised(guesses, 1, 12)
    for gsn, each in zip((1, 3, 5, 6, 7, 9), units, strict=False):
        guesses.apply_place(each, [gsn])
    nxt = unit(13)
    guesses.promise(nxt, 1)
    assert nxt.gsns == [13]


def test_offset_of_another_epoch_does_not_realign() -> None:
    guesses, clock = guesses_of(epoch_size=100)
    ahead = unit(1, after=350)
    guesses.promise(ahead, 1)
    units = promised(guesses, 2, 9)
    assert units[0].gsns == [352]
    feed(guesses, units, 1)  # hundreds of slots lower, again and again
    nxt = unit(10)
    assert guesses.promise(nxt, 9), "every unit still gets a guess"
    assert clock.slots_between(1, 352) is None


def test_guesses_resume_when_no_promise_is_left() -> None:
    guesses, _ = guesses_of()
    units = promised(guesses, 1, 25)
    feed(guesses, units[20:], 1)  # twenty lower
    guesses.apply_place(unit(99), [59])
    assert not guesses.promised
    nxt = unit(26)
    assert guesses.promise(nxt, 60)
    assert nxt.gsns == [60]


def test_restart_keeps_promises_in_order() -> None:
    guesses, clock = guesses_of()
    units = promised(guesses, 1, 3)
    again = Guesses(clock)
    again.restore([units[2], unit(9), units[0], units[1]])
    assert list(again.promised.values()) == units
    nxt = unit(4)
    again.promise(nxt, 1)
    assert nxt.gsns == [4]


@examples(150, derandomize=True)
@given(st.data())
def test_promises_stay_until_they_are_contradicted(data: st.DataObject) -> None:
    """D3, against a simple model: a slot changes only by a decision about it or its unit."""
    guesses, _ = guesses_of(epoch_size=data.draw(st.sampled_from((5, 40))))
    end, seq = 1, 0
    known: dict[int, HeldUnit] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        before = {s: list(u.gsns) for s, u in known.items() if u.gsns is not None}
        action = data.draw(st.sampled_from(["promise", "promise", "place", "skip"]))
        named: list[int] = []
        chosen = None
        if action == "promise":
            seq += 1
            known[seq] = unit(seq, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 60)))
            guesses.promise(known[seq], end)
        elif action == "skip":
            stop = end + data.draw(st.integers(1, 4))
            named, end = list(range(end, stop)), stop
            guesses.apply_skip(end)
        elif known:
            chosen = data.draw(st.sampled_from(sorted(known)))
            each = known.pop(chosen)
            first = data.draw(st.sampled_from([end, *(each.gsns or [])[:1], end + 1]))
            gsns = list(range(max(first, end), max(first, end) + each.count))
            named, end = list(range(end, gsns[-1] + 1)), gsns[-1] + 1
            guesses.apply_place(each, gsns)
        for s, gsns in before.items():
            if s != chosen:
                kept = known[s].gsns
                assert kept == (None if set(gsns) & set(named) else gsns)
        guesses.check(end)


@pytest.mark.parametrize("offset", [-3, 5])
def test_offsets_are_followed_within_an_epoch_only_once(offset: int) -> None:
    guesses, _ = guesses_of()
    units = promised(guesses, 1, 30, floor=20)
    feed(guesses, units[:8], 20 + offset)  # eight equal offsets realign once
    free = 0 if offset > 0 else -offset
    for seq in range(31, 31 + free):
        assert not guesses.promise(unit(seq), 20)
    nxt = unit(99)
    assert guesses.promise(nxt, 20)
    assert nxt.gsns == [50 + max(offset, 0)]
