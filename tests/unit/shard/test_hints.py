"""Hints at a backup: followed until the primary places units below them."""

from __future__ import annotations

from shard.ordering.hints import MAX_UNITS_BELOW, Hints


def hinted(*gsns: int) -> Hints:
    hints = Hints()
    for gsn in gsns:
        hints.on_hint(gsn)
    return hints


def test_the_highest_hint_counts() -> None:
    assert hinted(100, 90).floor == 100


def test_hint_is_ignored_after_units_in_a_row_below_it() -> None:
    hints = hinted(100)
    for _ in range(MAX_UNITS_BELOW - 1):
        hints.on_place(100, 50)
    hints.on_place(101, 101)
    for _ in range(MAX_UNITS_BELOW - 1):
        hints.on_place(100, 50)
    assert hints.floor == 100, "a right guess begins another row"
    hints.on_place(0, 50)
    assert hints.floor == 100, "there was no guess"
    hints.on_place(100, 50)
    assert hints.floor == 0


def test_hints_are_followed_again_after_the_primary_followed_one() -> None:
    hints = hinted(100)
    for _ in range(MAX_UNITS_BELOW):
        hints.on_place(100, 50)
    hints.on_hint(200)
    assert hints.floor == 0
    hints.on_skip(150)
    hints.on_hint(250)
    assert hints.floor == 0, "the primary gave up positions for another reason"
    hints.on_skip(250)
    hints.on_hint(300)
    assert hints.floor == 300
