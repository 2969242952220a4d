"""Each rule of cursors and players has a history that breaks it; a correct history breaks none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.history import events
from tests.history.observed import gather
from tests.history.rules import check
from tests.unit.scripts.simulated import write

if TYPE_CHECKING:
    from pathlib import Path

Lines = list[events.Event]


def found(directory: Path, **lines: Lines) -> set[str]:
    """Return the rules that a history breaks."""
    write(directory / "history", dict(lines))
    return {one.rule for one in check(gather(events.files_of([directory / "history"]))).violations}


# --- cursors ---


def claim(op: int, at: int, term: int, gsn: int, mark: str = "", seek: int = 0) -> Lines:
    """Return a claim of the cursor `a` that takes 1 ns."""
    claimed = events.Claimed(op, at + 1, 1, term, seek, gsn, mark)
    return [events.Claim(op, at, "a"), claimed]


def commit(op: int, at: int, of: int, gsn: int) -> Lines:
    """Return a commit of a claim that takes 1 ns."""
    return [events.Commit(op, at, of, gsn), events.Committed(op, at + 1, gsn)]


def test_a_correct_cursor_is_not_blamed(tmp_path: Path) -> None:
    assert not found(
        tmp_path,
        one=[*claim(1, 10, 1, 0), *commit(2, 20, 1, 5), events.Commit(3, 30, 1, 8)],
        two=[*claim(1, 40, 2, 8, "8"), *commit(2, 50, 1, 9)],
        operator=[
            events.SeekCursor(1, 60, "a"), events.Sought(1, 61),
            events.CursorIs(62, 63, "a", 1, 3, 1, 2),
        ],
        three=claim(1, 70, 4, 2, seek=1),
    )  # fmt: skip


@pytest.mark.parametrize("term", [1, 2])
def test_a_term_is_above_all_terms_before(tmp_path: Path, term: int) -> None:
    lines = {"one": claim(1, 10, 2, 0), "two": claim(1, 20, term, 0)}
    assert found(tmp_path, **lines) == {"term-order"}


def test_two_claims_at_once_have_two_terms(tmp_path: Path) -> None:
    assert found(tmp_path, one=claim(1, 10, 2, 0), two=claim(1, 10, 2, 0)) == {"term-order"}


def test_no_listing_has_a_term_below_one_before(tmp_path: Path) -> None:
    listing: Lines = [events.CursorIs(20, 21, "a", 1, 1, 0, 0)]
    assert found(tmp_path, one=claim(1, 10, 2, 0), two=listing) == {"term-order"}


def test_a_position_does_not_go_back_without_a_seek(tmp_path: Path) -> None:
    one = [*claim(1, 10, 1, 0), *commit(2, 20, 1, 5)]
    assert found(tmp_path, one=one, two=claim(1, 30, 2, 4)) == {"position-order"}


def test_a_position_goes_forward_by_commits_only(tmp_path: Path) -> None:
    one = [*claim(1, 10, 1, 0), *commit(2, 20, 1, 5)]
    assert found(tmp_path, one=one, two=claim(1, 30, 2, 6)) == {"position-order"}


@pytest.mark.parametrize("returned", [4, 6])
def test_a_commit_returns_the_position_that_it_requested(tmp_path: Path, returned: int) -> None:
    committed: Lines = [events.Commit(2, 20, 1, 5), events.Committed(2, 21, returned)]
    assert found(tmp_path, one=[*claim(1, 10, 1, 0), *committed]) == {"position-order"}


@pytest.mark.parametrize("mark", ["4", ""])
def test_a_mark_is_that_of_the_last_commit(tmp_path: Path, mark: str) -> None:
    one = [*claim(1, 10, 1, 0), *commit(2, 20, 1, 4), *commit(3, 25, 1, 5)]
    assert found(tmp_path, one=one, two=claim(1, 30, 2, 5, mark)) == {"mark"}


@pytest.mark.parametrize(("mark", "broken"), [("3", set()), ("", {"mark"})])
def test_a_claim_may_commit_its_own_position(tmp_path: Path, mark: str, broken: set[str]) -> None:
    one = [*claim(1, 10, 1, 3), *commit(2, 20, 1, 3)]
    assert found(tmp_path, one=one, two=claim(1, 30, 2, 3, mark)) == broken


def test_a_commit_with_an_old_term_has_no_effect(tmp_path: Path) -> None:
    one = [*claim(1, 10, 1, 0), *commit(2, 30, 1, 5)]
    assert found(tmp_path, one=one, two=claim(1, 20, 2, 0)) == {"fence"}


def test_no_cursor_was_sought_more_often_than_operators_asked(tmp_path: Path) -> None:
    assert found(tmp_path, one=claim(1, 10, 1, 0, seek=1)) == {"seek"}


# --- players ---


def opening(
    op: int, at: int, term: int, gsn: int, position: int, *, once: bool = True, owner: str = ""
) -> Lines:
    """Return an open of the target of `p/t/0` that takes 1 ns; `gsn`: of its cursor."""
    call = events.Open(op, at, "p/t/0", 1, term, 0, gsn, once, owner)
    return [call, events.Opened(op, at + 1, position)]


def step(op: int, at: int, of: int, start: int, gsns: list[int]) -> Lines:
    """Return a step up to behind its last record that takes 1 ns."""
    call = events.Deliver(op, at, of, start, gsns[-1] + 1, gsns)
    return [call, events.Done(op, at + 1)]


FIRST = [*opening(1, 10, 1, 0, 0), *step(2, 20, 1, 0, [3, 4])]


def test_a_correct_player_is_not_blamed(tmp_path: Path) -> None:
    unknown = [events.Deliver(3, 30, 1, 5, 8, [6, 7]), events.Undone(3, 31, "Retry")]
    held: Lines = [events.Holds(90, "p/t/0", [3, 4, 6, 7, 9])]
    assert not found(
        tmp_path,
        one=[*FIRST, *unknown, *opening(4, 40, 1, 0, 8), events.Deliver(5, 45, 4, 8, 10, [9])],
        two=[*opening(1, 50, 2, 5, 8), *step(2, 60, 1, 8, [9])],
        trial=[events.CursorIs(70, 71, "p/t/0", 0, 2, 0, 8), *held],
    )


def test_a_correct_function_is_not_blamed(tmp_path: Path) -> None:
    assert not found(
        tmp_path,
        one=[*opening(1, 10, 1, 0, -1, once=False), *step(2, 20, 1, 0, [3, 4])],
        two=[*opening(1, 30, 2, 0, -1, once=False), *step(2, 40, 1, 0, [3, 4])],
        trial=[events.Holds(90, "p/t/0", [3, 4, 3, 4])],
    )


@pytest.mark.parametrize(
    ("rules", "lines"),
    [
        ({"term-order"}, {
            "one": opening(1, 10, 1, 0, 0, owner="a"), "two": opening(1, 20, 1, 0, 0, owner="b"),
        }),
        ({"sequence", "exactly-once"}, {"one": [*FIRST, *step(3, 30, 1, 3, [3, 4])]}),
        ({"sequence"}, {"one": [*FIRST, *step(3, 30, 1, 7, [8])]}),
        ({"sequence"}, {"one": [
            *FIRST, events.Deliver(3, 30, 1, 5, 7, [6]), events.Undone(3, 31, "Retry"),
            *step(4, 40, 1, 5, [6]),
        ]}),
        ({"records"}, {
            "one": [*FIRST, *step(3, 30, 1, 5, [6, 7])],
            "two": [*opening(1, 40, 2, 0, 5), *step(2, 50, 1, 5, [7])],
        }),
        ({"fence"}, {
            "one": [*FIRST, *step(3, 40, 1, 5, [6])], "two": opening(1, 30, 2, 0, 5),
        }),
        ({"exactly-once"}, {
            "one": [*opening(1, 10, 1, 0, 0), events.Deliver(2, 20, 1, 0, 5, [3, 4]),
                    events.Done(2, 60)],
            "two": [*opening(1, 30, 2, 0, 0), *step(2, 40, 1, 0, [3, 4])],
        }),
        ({"loss"}, {"one": FIRST, "two": opening(1, 30, 2, 0, 0)}),
        ({"exactly-once"}, {"one": FIRST, "two": opening(1, 30, 2, 0, 7)}),
        ({"cursor-ahead"}, {
            "one": [*opening(1, 10, 1, 0, 0), events.Deliver(2, 20, 1, 0, 5, [3, 4])],
            "two": opening(1, 40, 2, 5, 0),
        }),
        ({"cursor-ahead"}, {
            "trial": [events.CursorIs(20, 21, "p/t/0", 0, 1, 0, 5)], "two": opening(1, 40, 2, 0, 0),
        }),
        ({"at-least-once"}, {
            "one": [*opening(1, 10, 1, 5, -1, once=False), *step(2, 20, 1, 5, [7])],
            "two": [*opening(1, 30, 2, 5, -1, once=False), *step(2, 40, 1, 5, [6, 7])],
        }),
        ({"at-least-once", "sequence"}, {
            "one": [*opening(1, 10, 1, 5, -1, once=False), *step(2, 20, 1, 3, [4])],
        }),
        ({"loss"}, {"one": FIRST, "trial": [events.Holds(90, "p/t/0", [3])]}),
        ({"phantom"}, {"one": FIRST, "trial": [events.Holds(90, "p/t/0", [3, 4, 5])]}),
        ({"exactly-once"}, {"one": FIRST, "trial": [events.Holds(90, "p/t/0", [3, 4, 4])]}),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_found(
    tmp_path: Path, rules: set[str], lines: dict[str, Lines]
) -> None:
    assert rules <= found(tmp_path, **lines)


def test_a_target_that_was_replaced_is_judged_by_terms_only(tmp_path: Path) -> None:
    lines = {"one": FIRST, "two": opening(1, 30, 2, 0, 0)}
    assert not found(tmp_path, **lines, trial=[events.Replaced(25, "p/t/0")])
