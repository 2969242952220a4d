"""The oracle, on two coordinators' states fed by hand: it detects every difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

import logdb.state
from logdb import records
from logdb.cleaner.checkpoint import PartEncoder
from logdb.decisions import Decisions
from logdb.records import CheckpointDone, CheckpointPart, Entry
from logdb.state import State
from logdb.validation import Verdict
from tests.sim.database.draws import draw
from tests.sim.database.oracle import Oracle
from tests.sim.database.test_judging import SESSION, X, Y, commit, record
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.types import Record

LOG: Final = [
    record(10 * i + 10, commit(i + 1, {X: i, (Y if i % 2 else X + b"%d" % i): 100 + i}, (), 10 * i))
    for i in range(16)
]


@pytest.fixture
def oracle() -> Iterator[Oracle]:
    database = draw(1).database
    assert database is not None
    oracle = Oracle(database._replace(decisions=65_536))
    with oracle.observing():
        yield oracle


def fed(log: list[Record], state: State | None = None) -> State:
    state = state or State()
    for each in log:
        state.apply(each)
    return state


def checkpoint(
    oracle: Oracle, state: State, gsn: int
) -> tuple[CheckpointDone, list[CheckpointPart]]:
    """Write a checkpoint of a state; its parts come into the log from a gsn on."""
    image = state.image()
    parts = PartEncoder(10_000)
    payloads = list(parts.add(state.versions.after(None, 1_000)))
    payloads += parts.finish(image.decisions, image.segments)
    rids = [RecordId(gsn + i, 0) for i in range(len(payloads))]
    decoded = [records.decode(payload) for payload in payloads]
    done = CheckpointDone(
        SESSION, image.position, image.floor, rids, parts.checksum, parts.keys, image.horizon,
        image.first_foreign, image.records, image.position.gsn,
        image.first_unreadable,
    )  # fmt: skip
    found = [part for part in decoded if isinstance(part, CheckpointPart)]
    fed([record(rid.gsn, part) for rid, part in zip(rids, found, strict=True)], state)
    fed([record(rids[-1].gsn + 1, done)], state)
    return done, found


def test_equal_states_pass(oracle: Oracle) -> None:
    first = fed(LOG)
    second = fed(LOG)
    assert first.position == second.position
    assert oracle.model.commits == len(LOG)


def test_a_state_from_a_checkpoint_continues_equally(oracle: Oracle) -> None:
    state = fed(LOG[:5])
    done, parts = checkpoint(oracle, state, 51)
    rest = oracle.model.records[5:]
    late = State()
    late.restore(done, parts)
    fed([*rest, *LOG[6:]], late)
    fed(LOG[6:], state)
    assert late.records == state.records


def test_an_incomplete_checkpoint_is_detected(oracle: Oracle) -> None:
    state = fed(LOG[:5])
    done, parts = checkpoint(oracle, state, 51)
    part = CheckpointPart(parts[0].entries[1:], [], [])
    with pytest.raises(AssertionError, match="two states at 50 differ"):
        State().restore(done, [part, *parts[1:]])


def test_a_changed_state_is_detected(oracle: Oracle) -> None:
    fed(LOG)
    second = fed(LOG[:-1])
    second.versions.remove(X)
    with pytest.raises(AssertionError, match="two states at 160 differ"):
        fed(LOG[-1:], second)


def test_a_wrong_state_of_the_first_coordinator_is_detected(oracle: Oracle) -> None:
    first = fed(LOG[:-1])
    first.versions.remove(X + b"0")
    with pytest.raises(AssertionError, match="by the rules it is"):
        fed(LOG[-1:], first)


def test_a_skipped_record_is_detected(oracle: Oracle) -> None:
    fed(LOG)
    with pytest.raises(AssertionError, match="for others"):
        fed([*LOG[:3], *LOG[4:]])


def test_a_different_decision_is_detected(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logdb.state, "decide", lambda *_: Verdict("conflict", [X]))
    with pytest.raises(AssertionError, match="is decided as 'conflict'"):
        fed(LOG)


def test_a_decision_remembered_longer_is_detected(oracle: Oracle) -> None:
    fed(LOG)
    with pytest.raises(AssertionError, match="two states at 160 differ"):
        fed(LOG, State(decisions=Decisions(3)))


def test_a_trim_without_a_checkpoint_is_detected(oracle: Oracle) -> None:
    state = fed(LOG[:5])
    oracle.check_trim(1)
    with pytest.raises(AssertionError, match="no checkpoint"):
        oracle.check_trim(5)
    checkpoint(oracle, state, 51)
    oracle.check_trim(10)
    assert oracle.trims == 2


def test_a_place_in_a_checkpoint_must_not_be_trimmed(oracle: Oracle) -> None:
    state = fed(LOG[:5])
    checkpoint(oracle, state, 51)
    # The first key was written at 10, and was not moved.
    with pytest.raises(AssertionError, match="no checkpoint"):
        oracle.check_trim(11)


def test_a_trimmed_value_is_detected(oracle: Oracle) -> None:
    state = fed(LOG[:5])
    checkpoint(oracle, state, 51)
    oracle.check_trim(10)
    oracle.check_places(state)
    state.versions.put(X, Entry(9, RecordId(9, 0), 1))
    with pytest.raises(AssertionError, match="is at 9@0, and the log is trimmed"):
        oracle.check_places(state)
    # A coordinator that is behind may not know the new place yet.
    behind = fed(LOG[:2])
    behind.versions.put(X, Entry(9, RecordId(9, 0), 1))
    oracle.check_places(behind)


def test_every_record_of_the_log_was_delivered_to_coordinators(oracle: Oracle) -> None:
    fed(LOG[:3])
    rows = {each.rid.gsn: each.payload for each in LOG[:3]}
    oracle.check_log(rows)
    with pytest.raises(AssertionError, match="no coordinator was given"):
        oracle.check_log(rows | {35: b"more"})
    with pytest.raises(AssertionError, match="something else"):
        oracle.check_log(rows | {30: b"else"})
