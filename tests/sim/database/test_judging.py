"""Observations of clients, checked against a small log: correct ones pass, wrong ones are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from logdb import records
from logdb.client.requests import KeyState
from logdb.records import Commit, KeyRead, TransactionId, Write
from logdb.values import encode_value
from tests.sim.database.deeds import Deed
from tests.sim.database.judging import judge, judge_watch
from tests.sim.database.model import Model
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Sequence

X, Y = b"register/x", b"register/y"
SESSION: Final = b"8 bytes."


def value(number: int | None) -> bytes | None:
    return None if number is None else encode_value(number)


def record(gsn: int, payload: records.AnyRecord) -> Record:
    return Record(RecordId(gsn, 0), records.encode(payload), None, 0, 1)


def commit(
    number: int, writes: dict[bytes, int | None], reads: Sequence[KeyRead] = (), began: int = 0
) -> Commit:
    rows = [Write(key, value(each)) for key, each in writes.items()]
    return Commit(TransactionId(SESSION, number), began, list(reads), [], rows)


@pytest.fixture
def model() -> Model:
    """At 10, x is 1; at 20, x is 2 and y is 3; at 30, x is gone."""
    model = Model(100)
    rows: list[tuple[int, dict[bytes, int | None]]] = [
        (10, {X: 1}), (20, {X: 2, Y: 3}), (30, {X: None}),
    ]  # fmt: skip
    for number, (gsn, writes) in enumerate(rows, 1):
        assert model.take(record(gsn, commit(number, writes))) == "committed"
    return model


class Story:
    """Deeds, one line each."""

    def __init__(self) -> None:
        self.deeds: Final[list[Deed]] = []

    def did(
        self, called: int, returned: int, reads: dict[bytes, int | None] | None = None,
        writes: dict[bytes, int | None] | None = None, **more: Any,
    ) -> Story:  # fmt: skip
        deed = Deed(
            "alice", len(self.deeds), "deed", called, returned=returned, outcome="committed"
        )
        deed.reads.update({key: value(each) for key, each in (reads or {}).items()})
        deed.writes.update({key: value(each) for key, each in (writes or {}).items()})
        for name, what in more.items():
            setattr(deed, name, what)
        self.deeds.append(deed)
        return self


def good() -> Story:
    story = Story().did(1, 2, writes={X: 1}, gsn=10)
    story.did(3, 6, {X: 1, Y: None}, {X: 2, Y: 3}, gsn=20)
    # Beside the one before: it may have seen the state before or after it.
    story.did(4, 5, {X: 1, Y: None}, gsn=10).did(4, 5, {X: 2, Y: 3})
    # Old, but one state.
    story.did(40, 41, {X: 1, Y: None}, {X: 77}, outcome="aborted")
    return story.did(7, 8, {X: 2}, {X: None}, gsn=30).did(9, 10, {X: None, Y: 3}, gsn=30)


def test_a_correct_history_passes(model: Model) -> None:
    judge(model, good().deeds)


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (Story().did(1, 2, writes={X: 9}, gsn=10), "is lost"),
        (Story().did(1, 2, writes={X: 9}), "is lost"),
        (Story().did(1, 2, writes={X: 1}, gsn=11), "is at 10"),
        (Story().did(1, 2, writes={X: 1, Y: 3}), r"took effect at \[10, 20\]"),
        (Story().did(1, 2, writes={X: 2, Y: None}, gsn=20), "wrote other than"),
        (Story().did(1, 2, writes={X: 2}, outcome="aborted"), "took effect, at 20"),
        (Story().did(1, 2, {X: 2}, {X: 2, Y: 3}, gsn=20), "was there"),
        (Story().did(1, 2, {X: 7}, outcome="aborted"), "was there"),
        (Story().did(1, 2, {X: 1, Y: 3}, outcome="aborted"), "together"),
        (Story().did(1, 2, {X: 1, Y: 3}, outcome="in doubt"), "together"),
        (Story().did(1, 2, {X: 1}, gsn=20), "was there"),
        (good().did(9, 10, {X: 2}, gsn=20), "should be of 30"),
        (good().did(9, 10, {X: 2}), "was there"),
        (
            Story().did(1, 2, writes={X: 2, Y: 3}, gsn=20).did(3, 4, writes={X: 1}, gsn=10),
            "had returned before it began, at 20",
        ),
    ],
)
def test_a_wrong_read_is_detected(model: Model, lie: Story, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        judge(model, lie.deeds)


STATES: Final = [KeyState(10, value(1)), KeyState(20, value(2)), KeyState(0, None)]


def test_a_watcher_may_skip_states(model: Model) -> None:
    judge_watch(model, X, STATES)
    judge_watch(model, X, [KeyState(0, None), STATES[1]])
    judge_watch(model, X, [])


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([STATES[1], STATES[0]], "after what was given before"),
        ([STATES[0], STATES[0]], "comes twice"),
        ([KeyState(20, value(1))], "never was"),
        ([KeyState(0, None), KeyState(0, None)], "comes twice"),
    ],
)
def test_a_watcher_never_goes_back(model: Model, states: list[KeyState], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        judge_watch(model, X, states)


# --- the model -----------------------------------------------------------------------------------


def test_a_copy_takes_no_effect(model: Model) -> None:
    assert model.take(record(40, commit(2, {X: 2, Y: 3}))) == "repeated"
    assert X not in model.entries


def test_a_copy_of_a_forgotten_decision_expires() -> None:
    model = Model(1)
    model.take(record(10, commit(1, {X: 1})))
    model.take(record(20, commit(2, {Y: 2}, began=10)))
    assert model.take(record(30, commit(1, {X: 1}))) == "expired"
    assert model.take(record(40, commit(4, {X: 4}, began=30))) == "committed"


def test_nothing_takes_effect_twice(model: Model) -> None:
    with pytest.raises(AssertionError, match="takes effect at 10, and at 40 again"):
        model.apply(commit(1, {X: 1}), 40)


def test_a_changed_read_is_a_conflict(model: Model) -> None:
    assert model.take(record(40, commit(4, {X: 4}, [KeyRead(Y, 10)]))) == "conflict"
    assert model.take(record(50, commit(5, {X: 4}, [KeyRead(Y, 20)]))) == "committed"


def test_a_value_before_the_horizon_or_the_version_is_too_late(model: Model) -> None:
    model.take(record(40, records.Value(X, b"\x04")))
    model.take(record(41, records.Value(Y, b"\x05")))
    late = Write(Y, None, RecordId(20, 0), 1)
    old = Commit(TransactionId(SESSION, 4), 0, [], [], [late])
    model.take(record(42, commit(9, {Y: 9})))
    assert model.take(record(43, old)) == "conflict"
    model.take(record(50, records.CheckpointBegun(SESSION, 41)))
    for number, place, outcome in ((5, 40, "expired"), (6, 41, "conflict")):
        key = X if place == 40 else Y
        write = Write(key, None, RecordId(place, 0), 1)
        text = Commit(TransactionId(SESSION, number), 0, [], [], [write])
        assert model.take(record(50 + number, text)) == outcome
    assert model.take(record(60, records.Value(X, b"\x07"))) == ""
    write = Write(X, None, RecordId(60, 0), 1)
    text = Commit(TransactionId(SESSION, 7), 0, [], [], [write])
    assert model.take(record(61, text)) == "committed"
    assert model.at(X, 61) == (60, b"\x07")


def test_a_moved_value_is_unchanged(model: Model) -> None:
    good = records.Move(Y, RecordId(20, 0), value(3) or b"")
    model.take(record(40, records.Moved([good])))
    wrong = records.Move(Y, RecordId(20, 0), b"x")
    with pytest.raises(AssertionError, match="another value"):
        model.take(record(50, records.Moved([wrong])))
