"""A database's client: its requests to coordinators and the log, and its handling of replies."""

from __future__ import annotations

from typing import Any

import pytest

from logdb import records, wire
from logdb.client.requests import (
    CoordinatorStatusRequest,
    DropRequest,
    GetRequest,
    OpenRequest,
    PutRequest,
    ScanRequest,
    SnapshotRequest,
    UnwatchRequest,
    ValidateRequest,
    WatchHandle,
    WatchRequest,
)
from logdb.errors import SnapshotExpired, TransactionAborted
from logdb.records import KeyRead, Move
from tests.unit.logdb.client.fakes import DatabaseHarness, FakeDatabase, v
from tests.unit.ziplog.client.fakes import CLUSTER, MS, S
from ziplog import wire as log_wire
from ziplog.core.entries import decode_body
from ziplog.core.node import BatchEnd, ConnectionChanged, Received, Wakeup
from ziplog.errors import DeadlineError, UnavailableError, VersionError
from ziplog.types import RecordId


@pytest.fixture
def db() -> FakeDatabase:
    return FakeDatabase().open()


def sent(db: FakeDatabase) -> list[str]:
    """Return the kinds of what was sent, and not looked at; the rest of the log's upkeep aside."""
    return [type(message).__name__ for _, message in db.harness.sent]


# --- messages, counted ---


def test_a_put_is_one_insert_and_one_decision(db: FakeDatabase) -> None:
    call = db.begin(PutRequest, {b"k": v(1)})
    assert sent(db) == ["Insert", "Insert"]
    (primary, insert), (backup, _) = db.harness.sent
    assert primary != backup
    # The decision alone ends it, even if it comes before the acks.
    (commit,) = [records.decode(p) for p in decode_body(insert.body, 1).payloads]
    assert isinstance(commit, records.Commit)
    db.harness.hear(
        0,
        wire.Decided(CLUSTER, commit.id.session, commit.id.number, RecordId(7, 0), "committed", []),
    )
    assert db.harness.answers[call] == RecordId(7, 0)
    assert sent(db) == ["Insert", "Insert"]


def test_a_get_is_one_request_and_one_reply(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    db.harness.sent.clear()
    call = db.begin(GetRequest, [b"k"], True)
    assert sent(db) == ["Get"]
    assert db.end(call).values == [v(1)]
    assert sent(db) == []


def test_read_modify_write_is_one_request_and_one_insert(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    db.harness.sent.clear()
    everything: list[str] = []
    serve = db.serve

    def spy(name: str, message: Any) -> None:
        everything.append(type(message).__name__)
        serve(name, message)

    db.serve = spy  # type: ignore[method-assign]
    db.end(db.increment(b"k"))
    assert everything == ["Get", "Insert", "Insert"]
    assert db.get(b"k") == [v(2)]


# --- connecting ---


def test_no_coordinator_replies() -> None:
    db = FakeDatabase(2)
    for coordinator in db.coordinators:
        coordinator.is_dead = True
    with pytest.raises(UnavailableError, match=r"at c0:1 \(no reply\), c1:1 \(no reply\);"):
        db.do(OpenRequest, within=S)


def test_absent_coordinators_are_reported_at_once() -> None:
    harness = DatabaseHarness(coordinators=2)
    call = harness.call(OpenRequest(harness.until()))
    assert {name for name, _ in harness.sent} == {"coordinator c0:1"}
    harness.step(ConnectionChanged(b"coordinator c0:1", "connection refused"))
    assert {name for name, _ in harness.sent} == {"coordinator c0:1", "coordinator c1:1"}
    assert call not in harness.answers
    harness.step(ConnectionChanged(b"coordinator c1:1", "connection refused"))
    error = harness.answers[call]
    assert type(error) is UnavailableError
    assert "at c0:1 (connection refused), c1:1 (connection refused); check" in str(error)


def test_another_node_at_a_coordinators_address_is_named() -> None:
    harness = DatabaseHarness()
    call = harness.call(OpenRequest(harness.until()))
    info = log_wire.NodeInfo(1, 0, "storage", "shard-0-0", "c", "0.1", 1, 1, [])
    harness.step(Received(b"coordinator c0:1", info))
    assert "c0:1 (this is storage server shard-0-0 of cluster 'c');" in str(harness.answers[call])


def test_a_coordinator_of_another_version_is_a_version_error() -> None:
    harness = DatabaseHarness()
    call = harness.call(OpenRequest(harness.until()))
    version = log_wire.VERSION + 1
    info = log_wire.NodeInfo(1, 0, "coordinator", "c0:1", "", "9.1", version, version, [])
    harness.step(Received(b"coordinator c0:1", info))
    error = harness.answers[call]
    assert type(error) is VersionError
    assert f"Ziplog 9.1 there speaks wire version {version}, this client" in str(error)


def test_a_coordinator_that_restarts_is_waited_for() -> None:
    db = FakeDatabase(1)
    db.do(OpenRequest)
    call = db.begin(GetRequest, [b"k"])
    db.harness.step(ConnectionChanged(b"coordinator c0:1", "connection refused"))
    assert call not in db.harness.answers


def test_a_replaying_coordinator_is_waited_for_and_named() -> None:
    db = FakeDatabase()
    db.first.not_ready = "it replays the log: 7 of 9"
    with pytest.raises(UnavailableError, match="c0:1: it replays the log: 7 of 9"):
        db.do(OpenRequest, within=S)
    call = db.begin(OpenRequest)
    db.later(500, lambda: setattr(db.first, "not_ready", ""))
    assert db.end(call).max_payload_bytes == log_wire.Limits().max_payload_bytes


def test_another_ready_coordinator_is_used() -> None:
    db = FakeDatabase(2)
    db.first.not_ready = "it replays the log"
    db.do(OpenRequest, within=100 * MS)
    assert db.put(b"k", 1)


@pytest.mark.parametrize("coordinators", [1, 2, 3])
@pytest.mark.parametrize("delay_ms", [350, 550, 700, 1000])
def test_slow_coordinators_do_not_stop_writes(coordinators: int, delay_ms: int) -> None:
    """Each replies only after the client has left it for the next one."""
    db = FakeDatabase(coordinators).open()
    db.say = lambda number, reply: db.later(delay_ms, lambda: db.harness.hear(number, reply))  # type: ignore[method-assign]
    start = db.harness.now
    for value in range(3):
        db.harness.pass_time(100 * MS)
        assert db.put(b"k", value)
    assert db.harness.now - start < 4 * 3 * delay_ms * MS


def test_a_refusal_before_a_call_does_not_explain_its_time_out() -> None:
    db = FakeDatabase(2)
    db.first.not_ready = "it replays the log"
    db.do(OpenRequest)
    db.put(b"k", 1)
    state = db.do(WatchRequest, b"k", -1)
    with pytest.raises(DeadlineError, match="'k' did not change; call again to wait longer"):
        db.do(WatchRequest, b"k", state.version, within=3 * S)


def test_a_coordinator_of_another_log_is_replaced_and_named() -> None:
    db = FakeDatabase()
    call = db.begin(OpenRequest, within=S)
    db.harness.hear(0, wire.Invalid(9, 2**40 + 1, "wrong-cluster", "of log 9"))
    db.first.is_dead = True
    with pytest.raises(UnavailableError, match="serves another log"):
        db.end(call)


def test_a_coordinator_of_a_former_cluster_is_refused() -> None:
    db = FakeDatabase()
    db.first.cluster = 9
    call = db.begin(OpenRequest, within=S)
    what = r"c0:1: it follows cluster 9, but the log at .* is cluster 7: stop that coordinator"
    with pytest.raises(UnavailableError, match=what.replace("7", str(CLUSTER))):
        db.end(call)
    with pytest.raises(UnavailableError, match="it follows cluster 9"):
        db.do(PutRequest, {b"k": v(1)}, within=S)
    assert not list(db.sealed())
    with pytest.raises(UnavailableError, match="it follows cluster 9"):
        db.do(GetRequest, [b"k"], True, within=S)


def test_a_coordinator_of_a_former_cluster_is_replaced() -> None:
    db = FakeDatabase(2)
    db.first.cluster = 9
    db.do(OpenRequest, within=S)
    assert db.put(b"k", 1)
    assert db.get(b"k") == [v(1)]


# --- reading ---


def test_uncached_values_are_read_from_the_log(db: FakeDatabase) -> None:
    db.put(b"k", 1)
    db.put(b"l", 2)
    db.first.cache.drop(b"k")
    assert db.get(b"l", b"absent", b"k") == [v(2), None, v(1)]


def test_a_key_at_a_trimmed_place_is_requested_again(db: FakeDatabase) -> None:
    place = db.put(b"k", 1)
    db.first.cache.drop(b"k")
    db.first.is_stuck = True
    db.gone.add(place.gsn)
    db.append(records.Moved([Move(b"k", place, v(1))]))
    db.later(50, lambda: setattr(db.first, "is_stuck", False))
    assert db.get(b"k") == [v(1)]
    assert db.first.state.versions.get(b"k").place != place  # type: ignore[union-attr]


def test_a_read_sees_at_least_what_the_client_knows(db: FakeDatabase) -> None:
    two = FakeDatabase(2).open()
    two.coordinators[1].is_stuck = True
    rid = two.put(b"k", 1)
    two.first.is_dead = True
    call = two.begin(GetRequest, [b"k"])
    two.later(1000, lambda: setattr(two.coordinators[1], "is_stuck", False))
    assert two.end(call).versions == [rid.gsn]


def test_a_read_that_conflicts_with_earlier_ones_aborts(db: FakeDatabase) -> None:
    rid = db.put(b"k", 1)
    db.write(b"k", 2)
    db.run(lambda: db.first.passed > rid.gsn)
    reads = [KeyRead(b"k", rid.gsn)]
    with pytest.raises(TransactionAborted) as caught:
        db.do(GetRequest, [b"l"], False, reads)
    assert caught.value.conflicts == [b"k"]
    with pytest.raises(TransactionAborted):
        db.do(ScanRequest, b"", None, 10, False, reads)
    with pytest.raises(TransactionAborted):
        db.do(ValidateRequest, reads, [])


def test_a_scan_reads_pages(db: FakeDatabase) -> None:
    for key in (b"a", b"b", b"c"):
        db.put(key, key.decode())
    page = db.do(ScanRequest, b"a", None, 2, True)
    assert page.rows == [(b"a", v("a")), (b"b", v("b"))]
    assert (page.range.start, page.range.stop, page.is_end) == (b"a", b"c", False)
    page = db.do(ScanRequest, b"c", None, 2, True)
    assert (page.rows, page.is_end) == ([(b"c", v("c"))], True)


def test_a_watch_waits_for_another_version(db: FakeDatabase) -> None:
    state = db.do(WatchRequest, b"k", -1)
    assert (state.version, state.value) == (0, None)
    call = db.begin(WatchRequest, b"k", 0)
    db.later(2000, lambda: db.write(b"k", 5))
    state = db.end(call)
    assert state.value == v(5)
    with pytest.raises(DeadlineError):
        db.do(WatchRequest, b"k", state.version, within=3 * S)


def test_a_closed_watch_completes_immediately(db: FakeDatabase) -> None:
    closed, other = WatchHandle(), WatchHandle()
    state = db.do(WatchRequest, b"k", -1, closed)
    calls = [db.begin(WatchRequest, b"k", state.version, each) for each in (closed, closed, other)]
    closed.is_closed = True
    assert db.do(UnwatchRequest, closed) is None
    assert [db.end(call) for call in calls[:2]] == [None, None]
    assert db.harness.core._tasks.keys() == {calls[2]}
    # A coordinator that has not seen the watch does not restart it.
    assert db.do(WatchRequest, b"k", state.version, closed) is None
    assert db.do(UnwatchRequest, closed) is None
    db.write(b"k", 5)
    assert db.end(calls[2]).value == v(5)
    assert not db.harness.core._watch_handles


def test_a_watch_continues_at_another_coordinator() -> None:
    db = FakeDatabase(2).open()
    call = db.begin(WatchRequest, b"k", 0)
    db.later(100, lambda: setattr(db.first, "is_dead", True))
    db.later(200, lambda: db.write(b"k", 5))
    assert db.end(call).value == v(5)


def test_status(db: FakeDatabase) -> None:
    assert db.do(CoordinatorStatusRequest) == (b"{}", "c0:1")


# --- snapshots ---


def test_a_snapshot_is_read_from_its_coordinator() -> None:
    db = FakeDatabase(2).open()
    db.put(b"k", 1)
    snapshot, position = db.do(SnapshotRequest)
    assert position.gsn >= 1
    db.put(b"k", 2)
    assert db.do(GetRequest, [b"k"], snapshot=snapshot).values == [v(1)]
    # The client goes on to the other coordinator; the snapshot does not.
    db.first.not_ready = "it has too much to do"
    db.put(b"k", 3)
    db.first.not_ready = ""
    assert db.do(GetRequest, [b"k"], snapshot=snapshot).values == [v(1)]
    assert db.do(ScanRequest, b"", None, 9, snapshot=snapshot).rows == [(b"k", v(1))]
    db.do(DropRequest, snapshot)
    # The fake network lets a read overtake it.
    db.run(lambda: any(isinstance(m, wire.DropSnapshot) for m in db.first.received))
    with pytest.raises(SnapshotExpired):
        db.do(GetRequest, [b"k"], snapshot=snapshot)


def test_a_snapshot_read_stays_when_other_queries_switch() -> None:
    db = FakeDatabase(2).open()
    db.put(b"k", 1)
    snapshot, _ = db.do(SnapshotRequest)
    db.first.silent = {wire.Get, wire.Validate}
    call = db.begin(GetRequest, [b"k"], snapshot=snapshot)
    other = db.begin(ValidateRequest, [], [])
    db.first.silent |= {wire.Open}
    assert db.end(other)
    assert not [m for m in db.coordinators[1].received if isinstance(m, wire.Get)]
    db.first.silent = set()
    assert db.end(call).values == [v(1)]


def test_a_snapshot_expires_with_its_coordinator() -> None:
    db = FakeDatabase(2).open()
    snapshot, _ = db.do(SnapshotRequest)
    db.first.is_dead = True
    with pytest.raises(SnapshotExpired, match="does not reply"):
        db.do(GetRequest, [b"k"], snapshot=snapshot)


@pytest.mark.parametrize(("coordinators", "seconds"), [(1, 3), (2, 1)])
def test_a_silent_owner_of_a_snapshot_times_out_sooner_if_others_exist(
    coordinators: int, seconds: int
) -> None:
    db = FakeDatabase(coordinators).open()
    snapshot, _ = db.do(SnapshotRequest)
    db.first.is_dead = True
    before = db.harness.now
    with pytest.raises(SnapshotExpired):
        db.do(GetRequest, [b"k"], snapshot=snapshot)
    assert seconds * S <= db.harness.now - before < (seconds + 0.5) * S


def test_the_message_of_a_call_after_its_deadline(db: FakeDatabase) -> None:
    with pytest.raises(DeadlineError, match=r"timed out before.* nothing was written"):
        db.put(b"k", 1, within=0)
    assert not db.inserts
    db.harness.pass_time(100 * MS)
    for begin in (lambda: db.put(b"k", 1, within=0), lambda: db.do(GetRequest, [b"k"], within=0)):
        with pytest.raises(DeadlineError, match="timeout is too short"):
            begin()
    db.first.is_dead = True
    with pytest.raises(DeadlineError, match="no coordinator replied") as caught:
        db.do(GetRequest, [b"k"], within=S)
    assert "written" not in str(caught.value)
    with pytest.raises(DeadlineError, match=r"no coordinator replied.* nothing was written"):
        db.put(b"k", 1, within=S)


def test_a_snapshot_of_a_cancelled_call_is_dropped() -> None:
    db = FakeDatabase(2).open()
    db.first.silent = {wire.TakeSnapshot}
    snapshot, _ = db.do(SnapshotRequest)
    (late,) = {m.request for m in db.first.received if isinstance(m, wire.TakeSnapshot)}
    assert snapshot.coordinator == b"coordinator c1:1"
    db.harness.hear(0, wire.SnapshotTaken(CLUSTER, late, 77, RecordId(1, 0)))
    assert ("coordinator c0:1", wire.DropSnapshot(CLUSTER, 77)) in db.harness.sent


# --- late, repeated and unrelated replies ---


def test_repeated_replies_count_once(db: FakeDatabase) -> None:
    db.repetition = 1.0
    for number in range(5):
        db.put(b"k", number)
        assert db.get(b"k") == [v(number)]
    assert len(db.commits()) == 5
    assert db.harness.core.stats()["protocol_errors"] == 0


def test_the_reply_of_a_former_coordinator_counts() -> None:
    db = FakeDatabase(2).open()
    db.put(b"k", 1)
    db.first.silent = {wire.Get, wire.Open}
    db.coordinators[1].silent = {wire.Get}
    call = db.begin(GetRequest, [b"k"])
    db.run(lambda: any(isinstance(m, wire.Get) for m in db.coordinators[1].received))
    db.first.silent = set()
    db.first.answer(next(m for m in db.first.received if isinstance(m, wire.Get)))
    assert db.end(call).values == [v(1)]


def test_a_reply_of_the_wrong_type_is_counted_and_dropped(db: FakeDatabase) -> None:
    db.first.silent = {wire.Get}
    call = db.begin(GetRequest, [b"k"], within=S)
    number = db.harness.sent[-1][1].request
    db.harness.hear(0, wire.Validated(CLUSTER, number, RecordId(1, 0), []))
    db.harness.hear(0, wire.Got(CLUSTER + 1, number, RecordId(1, 0), [wire.KeyResult(None)], []))
    assert call not in db.harness.answers
    assert db.harness.core.stats()["protocol_errors"] == 2
    db.harness.hear(0, wire.Got(CLUSTER, number, RecordId(1, 0), [wire.KeyResult(None)], []))
    assert db.end(call).values == [None]


def test_a_silent_coordinator_is_replaced_by_the_next() -> None:
    db = FakeDatabase(3).open()
    db.put(b"k", 1)
    db.first.is_dead = db.coordinators[1].is_dead = True
    before = db.harness.now
    assert db.get(b"k") == [v(1)]
    assert db.harness.now - before < S


def test_a_coordinator_without_the_log_is_replaced_after_one_second() -> None:
    db = FakeDatabase(2).open()
    db.first.is_stuck = True
    before = db.harness.now
    position = db.put(b"k", 1)
    assert S <= db.harness.now - before < 2 * S
    assert db.get(b"k") == [v(1)]
    assert db.first.passed < position.gsn


def test_a_coordinator_without_an_answer_yet_is_kept() -> None:
    db = FakeDatabase(2).open()
    db.first.is_stuck = True
    db.write(b"k", 1)
    call = db.begin(WatchRequest, b"k", 0)
    db.later(5000, lambda: setattr(db.first, "is_stuck", False))
    db.later(5000, db.first.follow)
    assert db.end(call).value == v(1)
    assert not db.coordinators[1].received


def pause(db: FakeDatabase, ms: int) -> None:
    over: list[bool] = []
    db.later(ms, lambda: over.append(True))
    db.run(lambda: bool(over))


def test_a_responsive_coordinator_with_an_idle_log_is_kept() -> None:
    """However the questions lie in time: none may pass for a sign that was not answered."""
    db = FakeDatabase(2).open()
    for coordinator in db.coordinators:
        coordinator.is_stuck = True
    db.write(b"k", 1)
    begun = db.harness.now
    calls = []
    while db.harness.now < begun + 900 * MS:
        calls.append(db.begin(GetRequest, [b"k"], fresh=True))
        pause(db, 7 + len(calls) * 13 % 53)
    assert not db.coordinators[1].received
    signs = [m for m in db.first.received if isinstance(m, wire.Open)]
    assert len(signs) <= 1 + 900 // 150, "seldom"
    db.first.is_stuck = False
    db.first.follow()
    for call in calls:
        assert db.end(call).values == [v(1)]


# --- steps ---


def test_calls_and_acks_have_the_effects_of_their_events() -> None:
    def run(*, by_events: bool) -> tuple[list[Any], list[Any], dict[int, Any]]:
        db = FakeDatabase()
        db.harness.by_events = by_events
        db.open()
        everything: list[Any] = []
        serve = db.serve

        def spy(name: str, message: Any) -> None:
            everything.append((name, message))
            serve(name, message)

        db.serve = spy  # type: ignore[method-assign]
        for _ in range(3):
            db.end(db.increment(b"k"))
        return everything, db.log, db.harness.answers

    assert run(by_events=False) == run(by_events=True)


def test_no_batch_has_to_end_after_an_insert_on_the_short_path(db: FakeDatabase) -> None:
    assert not DatabaseHarness().core.is_batch_open
    db.put(b"k", 1)
    db.harness.step(BatchEnd())
    assert not db.harness.core.is_batch_open
    db.put(b"k", 2)
    assert not db.harness.core.is_batch_open
    db.harness.step(Wakeup())
    assert db.harness.core.is_batch_open
