"""Commits with lost, late or foreign replies: never applied twice, never guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb import records, wire
from logdb.client.requests import (
    CommitRequest,
    GetRequest,
    PutRequest,
    ResolveCommitRequest,
)
from logdb.errors import TransactionAborted
from logdb.records import KeyRead
from tests.properties import examples
from tests.unit.logdb.client.fakes import FakeDatabase, v
from tests.unit.ziplog.client.fakes import CLUSTER, MS, S, placement
from ziplog.core.entries import decode_body
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable


def value_of(db: FakeDatabase, key: bytes = b"k") -> int:
    """Return what a coordinator that begins now finds."""
    last = db.coordinators[-1]
    last.is_dead = last.is_stuck = last.is_shy = False
    last.restart()
    last.follow()
    entry = last.state.versions.get(key)
    if entry is None:
        return 0
    value = last.cache.get(key, entry.version)
    assert value is not None
    return value[0]


def resolve(db: FakeDatabase, error: OutcomeUnknownError, within: int = 10 * S) -> Any:
    return db.do(ResolveCommitRequest, error.doubt, within=within)


def learn(db: FakeDatabase, view: int, state: str) -> None:
    """Let the client learn of the shards' view and state."""
    db.states = dict.fromkeys(db.states, state)
    placements = [placement(shard, view=view, state=state) for shard in db.states]
    db.harness.core._calls.core._routing.update_placements(placements)


#: Moments of a commit: what has to have happened.
MOMENTS: dict[str, Callable[[FakeDatabase], bool]] = {
    "before the insert arrives": lambda _: True,
    "once it is placed": lambda db: bool(db.commits()),
    "once it is acked": lambda db: db.harness.core.stats()["inserts"] > 0,
    "once it is decided": lambda db: bool(db.first.decisions),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("others", [0, 1])
def test_the_coordinator_dies(moment: str, others: int) -> None:
    db = FakeDatabase(1 + others).open()
    db.first.is_shy = True
    call = db.increment(b"k")
    db.run(lambda: MOMENTS[moment](db))
    db.first.is_dead = True
    if not others:
        # It comes back after a while, and replays the log.
        def back() -> None:
            db.first.is_dead = False
            db.first.restart()

        db.later(1500, back)
    before = db.harness.now
    assert isinstance(db.end(call), RecordId)
    assert db.harness.now - before < 3 * S
    assert len(db.commits()) == 1
    assert value_of(db) == 1


def test_commits_have_the_times_of_a_wall_clock_that_was_corrected() -> None:
    db = FakeDatabase().open()
    db.put(b"k", 1)
    before = len(db.inserts)
    db.harness.wall_offset_ns, started = 10**9 * S, db.harness.now
    assert isinstance(db.end(db.increment(b"k")), RecordId)
    times = {decode_body(one.body, 1).timestamp_us for one in db.inserts[before:]}
    assert times
    assert all(10**9 * S + started <= 1000 * at <= 10**9 * S + db.harness.now for at in times)


def test_the_coordinator_never_returns() -> None:
    db = FakeDatabase().open()
    call = db.increment(b"k")
    db.run(lambda: bool(db.commits()))
    db.first.is_dead = True
    with pytest.raises(OutcomeUnknownError, match="no coordinator reported the decision") as caught:
        db.end(call)
    with pytest.raises(OutcomeUnknownError):
        resolve(db, caught.value, within=S)
    db.first.is_dead = False
    rid = resolve(db, caught.value)
    assert [rid.gsn] == [gsn for gsn, _ in db.log]
    # It may be asked again.
    assert resolve(db, caught.value) == rid


def test_an_aborted_commit_with_unknown_outcome_resolves_to_none() -> None:
    db = FakeDatabase().open()
    db.put(b"k", 1)
    call = db.increment(b"k")
    db.first.is_dead = True
    with pytest.raises(OutcomeUnknownError) as caught:
        db.end(call)
    (mine,) = [c for c in db.commits() if c.reads]
    # Another transaction committed first: the same transaction in another log order.
    db.units[0].clear()
    db.units[1].clear()
    db.write(b"k", 5)
    db.append(mine)
    db.first.is_dead = False
    db.first.restart()
    assert resolve(db, caught.value) is None


def test_a_silent_log_reports_the_record_absent() -> None:
    db = FakeDatabase().open()
    db.is_log_silent = True
    with pytest.raises(OutcomeUnknownError, match="may have taken effect") as caught:
        db.put(b"k", 1, within=5 * S)
    # Each copy is the same record.
    bodies = {decode_body(i.body, 1).payloads[0] for i in db.inserts}
    assert len(bodies) == 1
    assert len({(i.shard, i.seq) for i in db.inserts}) > 1
    db.is_log_silent = False
    rid = resolve(db, caught.value)
    assert value_of(db) == 1
    assert rid.gsn == db.log[0][0]


def test_only_the_log_proves_that_a_record_will_never_exist() -> None:
    db = FakeDatabase().open()
    db.is_log_silent = True
    call = db.begin(PutRequest, {b"k": v(1)}, within=500 * MS)
    with pytest.raises(OutcomeUnknownError) as caught:
        db.end(call)
    with pytest.raises(OutcomeUnknownError):
        # Coordinators have not seen it, which proves nothing.
        resolve(db, caught.value, within=2 * S)
    # A recovery ended without it.
    db.views[0] = 2
    learn(db, view=2, state="live")
    assert resolve(db, caught.value) is None
    # It may be asked again, and replies at once.
    assert resolve(db, caught.value, within=MS) is None


def test_an_outcome_is_resolved_by_two_calls_at_once() -> None:
    db = FakeDatabase().open()
    db.is_log_silent = True
    with pytest.raises(OutcomeUnknownError) as caught:
        db.put(b"k", 1, within=500 * MS)
    former, latter = (db.begin(ResolveCommitRequest, caught.value.doubt) for _ in range(2))
    with pytest.raises(OutcomeUnknownError, match="another call resolves it now"):
        db.end(former)
    db.views[0] = 2
    learn(db, view=2, state="live")
    assert db.end(latter) is None


def test_a_decision_completes_a_commit_without_acks() -> None:
    db = FakeDatabase().open()
    db.loses_acks = True
    assert db.put(b"k", 1, within=S)
    assert len(db.commits()) == 1


def test_a_repeated_insert_counts_once() -> None:
    db = FakeDatabase().open()
    db.loses_acks = True
    db.first.is_shy = True
    db.first.silent = {wire.AwaitDecision}
    call = db.increment(b"k")
    db.run(lambda: len(db.commits()) == 3)
    db.first.silent = set()
    db.loses_acks = False
    rid = db.end(call)
    assert rid.gsn == db.log[0][0]
    assert len({commit.id.number for commit in db.commits()}) == 1
    assert value_of(db) == 1


def test_nothing_is_written_if_the_log_refuses_the_record() -> None:
    db = FakeDatabase().open()
    learn(db, view=1, state="recovering")
    with pytest.raises(DeadlineError, match="nothing was written"):
        db.put(b"k", 1, within=3 * S)
    assert not db.commits()


# --- what a decision is worth ---


def begun(db: FakeDatabase, copies: int) -> tuple[int, records.TransactionId]:
    """Begin a commit of which so many copies may be in the log, and nothing more is known."""
    db.is_log_silent = True
    call = db.begin(CommitRequest, [KeyRead(b"k", 0)], [], {b"k": v(1)}, within=60 * S)

    def is_begun() -> bool:
        return len({(i.shard, i.seq) for i in db.inserts}) == copies

    db.run(is_begun)
    payload = decode_body(db.inserts[0].body, 1).payloads[0]
    commit = records.decode(payload)
    assert isinstance(commit, records.Commit)
    return call, commit.id


def decided(id_: records.TransactionId, outcome: Any, gsn: int) -> wire.Decided:
    return wire.Decided(CLUSTER, id_.session, id_.number, RecordId(gsn, 0), outcome, [])


def test_expired_is_final_for_a_single_copy() -> None:
    db = FakeDatabase().open()
    call, id_ = begun(db, 1)
    db.harness.hear(0, decided(id_, "expired", 99))
    with pytest.raises(TransactionAborted, match="too many transactions committed in the meantime"):
        db.end(call)


@pytest.mark.parametrize("outcome", ["expired", "aborted"])
def test_expired_is_not_final_while_another_copy_may_precede(outcome: str) -> None:
    """A coordinator that began behind the copy that expired knows only that it was aborted."""
    db = FakeDatabase().open()
    call, id_ = begun(db, 2)
    db.harness.hear(0, decided(id_, outcome, 99))
    assert call not in db.harness.answers
    db.harness.hear(0, decided(id_, "committed", 7))
    assert db.end(call) == RecordId(7, 0)


def test_decisions_of_other_sessions_and_old_ones_are_ignored() -> None:
    db = FakeDatabase().open()
    call, id_ = begun(db, 1)
    db.harness.hear(0, decided(records.TransactionId(b"anothers", id_.number), "committed", 5))
    db.harness.hear(0, decided(records.TransactionId(id_.session, id_.number + 1), "committed", 5))
    assert call not in db.harness.answers
    db.harness.hear(0, decided(id_, "conflict", 6))
    db.harness.hear(0, decided(id_, "conflict", 6))
    with pytest.raises(TransactionAborted):
        db.end(call)


def test_a_decision_of_any_coordinator_counts() -> None:
    db = FakeDatabase(2).open()
    call, id_ = begun(db, 1)
    db.harness.hear(1, decided(id_, "committed", 6))
    assert db.end(call) == RecordId(6, 0)


# --- the user gives up ---


def test_a_cancelled_commit_is_forgotten() -> None:
    db = FakeDatabase().open()
    call, id_ = begun(db, 1)
    db.harness.cancel(call)
    assert not db.harness.core._commits._open
    assert not db.harness.core._tasks
    db.harness.hear(0, decided(id_, "committed", 6))
    assert call not in db.harness.answers


def test_cancelled_reads_and_sleeps_are_forgotten() -> None:
    db = FakeDatabase().open()
    rid = db.put(b"k", 1)
    db.first.cache.drop(b"k")
    db.gone.add(rid.gsn)
    call = db.begin(GetRequest, [b"k"])
    db.run(lambda: bool(db.harness.core._step_runner.sleepers))
    db.harness.cancel(call)
    db.harness.pass_time(S)
    assert not db.harness.core._tasks
    db.first.silent = {wire.Get}
    call = db.begin(GetRequest, [b"k"])
    db.harness.cancel(call)
    assert not db.harness.core._coordinators._queries
    assert not db.harness.answers


# --- everything at once ---


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.0, 0.1, 0.3]),
    repetition=st.sampled_from([0.0, 0.3]),
    faults=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["is_dead", "is_shy", "is_stuck", "restart", "loses_acks"]),
            st.integers(0, 2000),
            st.integers(10, 2000),
        ),
        max_size=6,
    ),
)
def test_no_acknowledged_increment_is_lost_or_repeated(
    seed: int, loss: float, repetition: float, faults: list[tuple[int, str, int, int]]
) -> None:
    """Despite losses, delays, repeats and crashes, each acknowledged increment took effect once."""
    db = FakeDatabase(2, seed).open()
    db.loss, db.repetition = loss, repetition
    for number, what, begin, length in faults:
        coordinator = db.coordinators[number]
        if what == "restart":
            db.later(begin, coordinator.restart)
        else:
            victim: Any = db if what == "loses_acks" else coordinator
            db.later(begin, lambda v=victim, w=what: setattr(v, w, True))  # type: ignore[misc]
            db.later(begin + length, lambda v=victim, w=what: setattr(v, w, False))  # type: ignore[misc]
    received = doubtful = 0
    for number in range(6):
        try:
            calls = [db.increment(b"k", within=4 * S) for _ in range(1 + number % 2)]
        except (UnavailableError, TransactionAborted):
            continue
        for call in calls:
            result = db.result(call)
            if isinstance(result, RecordId):
                received += 1
            elif isinstance(result, OutcomeUnknownError):
                doubtful += 1
            else:
                assert isinstance(result, (TransactionAborted, UnavailableError)), result
    db.loses_acks = False
    assert received <= value_of(db) <= received + doubtful
