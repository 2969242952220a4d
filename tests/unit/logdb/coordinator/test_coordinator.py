"""A coordinator's unasked decisions, and its replies to requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from logdb import wire
from logdb.coordinator import node, pending_requests
from logdb.coordinator.pending_requests import EXPIRY_NS, bytes_of
from logdb.coordinator.queries import MAX_ROWS, MAX_VALUE_BYTES
from logdb.records import KeyRead, RangeRead, Value, encode
from logdb.versions import digest_of
from tests.unit.logdb.fakelog import FakeLog
from tests.unit.logdb.harness import (
    CLUSTER,
    MS,
    ROUTE,
    SESSION,
    CoordinatorHarness,
    S,
    commit,
    waiter_count,
)
from ziplog.client.common.requests import BarrierRequest
from ziplog.core.node import BatchEnd, Received, Send
from ziplog.types import RecordId

if TYPE_CHECKING:
    import pytest

OTHER = b"session2"


def value(answer: Any, index: int = 0) -> bytes | None:
    found: bytes | None = answer.found[index].value
    return found


# --- decisions ---


def test_a_decision_is_sent_in_the_step_that_delivers_its_record() -> None:
    harness = CoordinatorHarness.ready()
    harness.open()
    rid = harness.insert(commit(1, {b"k": b"v"}))
    received = [e.message for e in harness.step(BatchEnd()) if isinstance(e, Send)]
    assert received == [wire.Decided(CLUSTER, SESSION, 1, rid, "committed", [], 0)]


def test_a_decision_is_sent_only_to_the_last_route_of_its_session() -> None:
    harness = CoordinatorHarness.ready()
    harness.open(SESSION, b"old")
    harness.open(OTHER, b"other")
    harness.open(SESSION, b"new")
    harness.sent.clear()
    harness.insert(commit(1, {b"k": b"v"}))
    harness.poll()
    assert [route for route, _ in harness.sent] == [b"new"]


def test_an_abort_reports_conflicts_and_a_repeated_record_nothing() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}, session=OTHER))
    (first,) = harness.log.gsns
    harness.open()
    late = commit(2, {b"k": b"w"}, reads=[(b"k", 0)])
    rid = harness.insert(late)
    harness.insert(late)
    harness.poll()
    decided = wire.Decided(CLUSTER, SESSION, 2, rid, "conflict", [b"k"], first)
    assert harness.pop_sent() == [decided]


def test_a_request_for_a_decision_is_answered_once_it_is_decided() -> None:
    harness = CoordinatorHarness.ready(
        commit(1, {b"k": b"v"}), commit(2, {b"k": b"w"}, reads=[(b"k", 0)])
    )
    first, second = (harness.log.records[gsn].rid for gsn in harness.log.gsns)
    asked = wire.AwaitDecision(CLUSTER, harness.request(), SESSION, 1)
    assert harness.query(asked) == wire.Decided(CLUSTER, SESSION, 1, first, "committed", [])
    asked = wire.AwaitDecision(CLUSTER, harness.request(), SESSION, 2)
    decided = wire.Decided(CLUSTER, SESSION, 2, second, "conflict", [b"k"], first.gsn)
    assert harness.query(asked) == decided
    harness.deliver(wire.AwaitDecision(CLUSTER, harness.request(), SESSION, 3))
    harness.deliver(wire.AwaitDecision(CLUSTER, harness.request(), SESSION, 3), b"another")
    assert not harness.sent
    rid = harness.insert(commit(3, {b"k": b"x"}))
    harness.poll()
    decided = wire.Decided(CLUSTER, SESSION, 3, rid, "committed", [], first.gsn)
    # Once each, although the first route's session would receive the decision too.
    assert harness.pop_sent() == [decided]
    assert harness.pop_sent(b"another") == [decided]
    assert not len(harness.node.pending)


def test_the_conflicts_of_old_aborts_are_forgotten_but_not_the_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "_MAX_ABORTS", 2)
    aborts = [commit(n, {b"k": b"w"}, reads=[(b"k", 9)]) for n in range(1, 5)]
    harness = CoordinatorHarness.ready(*aborts)
    received = [
        harness.query(wire.AwaitDecision(CLUSTER, harness.request(), SESSION, n))
        for n in range(1, 5)
    ]
    assert [each.outcome for each in received] == ["aborted", "aborted", "conflict", "conflict"]
    assert [each.conflicts for each in received] == [[], [], [b"k"], [b"k"]]


def test_the_conflicts_of_large_aborts_are_bounded_by_their_bytes() -> None:
    keys = [b"%04d" % n + bytes(996) for n in range(1_000)]
    reads = [(key, 9) for key in keys]
    aborts = [commit(n, {b"k": b"w"}, reads=reads) for n in range(1, 41)]
    harness = CoordinatorHarness.ready(*aborts)
    received = [
        harness.query(wire.AwaitDecision(CLUSTER, harness.request(), SESSION, n))
        for n in range(1, 41)
    ]
    assert {each.outcome for each in received} == {"aborted", "conflict"}
    assert len([each for each in received if each.conflicts]) <= 16
    assert received[-1].conflicts == keys


# --- reads ---


def test_a_get_returns_version_place_and_small_values() -> None:
    harness = CoordinatorHarness.ready()
    (stored,) = harness.log.insert(encode(Value(b"big", b"far")))
    rid = harness.insert(commit(1, {b"k": b"v", b"gone": b"x"}))
    last = harness.insert(commit(2, {b"gone": None}))
    harness.poll()
    got = harness.query(harness.get(b"k", b"gone", b"never"))
    assert got.position == last
    assert [each.entry and (each.entry.version, each.entry.place) for each in got.found] == [
        (rid.gsn, rid), None, None,
    ]  # fmt: skip
    assert [each.value for each in got.found] == [b"v", None, None]
    assert stored < rid


def test_an_uncached_value_is_left_to_the_log() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v" * 100}), cache_bytes=10)
    got = harness.query(harness.get(b"k"))
    assert got.found[0].entry.size == 100
    assert value(got) is None


def test_the_bytes_of_values_in_a_reply_are_bounded() -> None:
    size = 15_000
    keys = [b"%03d" % n for n in range(100)]
    harness = CoordinatorHarness.ready(
        *(commit(n + 1, {key: b"v" * size}) for n, key in enumerate(keys))
    )
    got = harness.query(harness.get(*keys))
    with_value = [each for each in got.found if each.value is not None]
    assert len(with_value) == MAX_VALUE_BYTES // size
    assert all(each.entry.size == size for each in got.found)


def test_a_read_after_a_change_of_an_earlier_read_is_a_conflict() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"a": b"1", b"b": b"1"}))
    version = harness.log.tail.gsn
    rows = harness.node.tailer.state.versions.range(b"a", b"b", 10)
    fits = RangeRead(b"a", b"b", digest_of(rows))
    wrong = RangeRead(b"b", b"c", digest_of(rows))
    got = harness.query(harness.get(b"b", reads=[(b"a", version)], ranges=[fits]))
    assert value(got) == b"1"
    assert not got.conflicts
    got = harness.query(harness.get(b"b", reads=[(b"a", version + 1), (b"c", 0)], ranges=[wrong]))
    assert (got.found, got.conflicts) == ([], [b"a", b"b"])
    scanned = harness.query(harness.scan(b"", None, 10, reads=[(b"a", 0)]))
    assert (scanned.rows, scanned.conflicts) == ([], [b"a"])


def test_a_read_waits_for_the_position_that_its_client_knows() -> None:
    harness = CoordinatorHarness.ready()
    (rid,) = harness.log.insert(commit(1, {b"k": b"v"}))
    message = harness.get(b"k", at_least=rid.gsn)
    harness.step(Received(ROUTE, message))
    assert not harness.pop_sent()
    harness.poll()
    (got,) = harness.pop_sent()
    assert value(got) == b"v"


def test_a_fresh_read_sees_all_earlier_records() -> None:
    harness = CoordinatorHarness.ready()
    harness.insert(commit(1, {b"k": b"v"}))
    harness.step(Received(ROUTE, harness.get(b"k")))
    (stale,) = harness.pop_sent()
    assert stale.found[0].entry is None
    harness.step(Received(ROUTE, harness.get(b"k", fresh=True)))
    assert not harness.pop_sent()
    harness.poll()
    (got,) = harness.pop_sent()
    assert value(got) == b"v"


def test_validation_is_fresh() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}))
    version = harness.log.tail.gsn
    harness.insert(commit(2, {b"k": b"w"}))
    harness.step(Received(ROUTE, wire.Validate(CLUSTER, 1, [KeyRead(b"k", version)], [])))
    harness.poll()
    (validated,) = harness.pop_sent()
    assert validated.conflicts == [b"k"]
    now = KeyRead(b"k", harness.log.tail.gsn)
    harness.deliver(wire.Validate(CLUSTER, 2, [now], []))
    harness.poll()
    (validated,) = harness.pop_sent()
    assert (validated.conflicts, validated.position) == ([], harness.log.tail)


def test_a_scan_returns_where_it_stopped_and_can_be_continued() -> None:
    keys = [b"%04d" % n for n in range(25)]
    harness = CoordinatorHarness.ready(*(commit(n + 1, {key: key}) for n, key in enumerate(keys)))
    found, start, rounds = [], b"0003", 0
    is_end = False
    while not is_end:
        scanned = harness.query(harness.scan(start, b"0020", 7))
        rows = [(key, each.entry) for key, each in scanned.rows]
        covered = harness.node.tailer.state.versions.digest(start, scanned.stop)
        assert scanned.digest == covered == digest_of(rows)
        assert all(each.value == key for key, each in scanned.rows)
        found += [key for key, _ in rows]
        start, is_end, rounds = scanned.stop, scanned.is_end, rounds + 1
    assert found == keys[3:20]
    assert (start, rounds) == (b"0020", 3)


def test_the_rows_of_a_scan_are_bounded() -> None:
    many = {b"%05d" % n: b"" for n in range(MAX_ROWS + 5)}
    harness = CoordinatorHarness.ready(commit(1, many))
    scanned = harness.query(harness.scan(b"", None, 10_000))
    assert len(scanned.rows) == MAX_ROWS
    assert not scanned.is_end
    rest = harness.query(harness.scan(scanned.stop, None, 10_000))
    assert len(rest.rows) == 5
    assert (rest.is_end, rest.stop) == (True, None)


# --- snapshots ---


def take_snapshot(harness: CoordinatorHarness, route: bytes = ROUTE) -> int:
    harness.deliver(wire.TakeSnapshot(CLUSTER, harness.request(), SESSION), route)
    harness.poll()
    (taken,) = harness.pop_sent(route)
    number: int = taken.snapshot
    return number


def test_a_snapshot_keeps_its_state_until_it_is_dropped() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"a": b"1", b"b": b"1"}))
    first = harness.log.tail.gsn
    number = take_snapshot(harness)
    harness.insert(commit(2, {b"a": None, b"c": b"2"}))
    harness.poll()
    got = harness.query(harness.get(b"a", b"c", snapshot=number, fresh=True))
    assert [each.entry and each.entry.version for each in got.found] == [first, None]
    scanned = harness.query(harness.scan(b"", None, 10, snapshot=number))
    assert [key for key, _ in scanned.rows] == [b"a", b"b"]
    harness.deliver(wire.DropSnapshot(CLUSTER, number))
    assert not harness.pop_sent()
    for message in (
        harness.get(b"a", snapshot=number),
        harness.scan(b"", None, 1, snapshot=number),
    ):
        assert harness.query(message).code == "snapshot-expired"


def test_an_unread_snapshot_expires() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"a": b"1"}))
    number = take_snapshot(harness)
    harness.pass_time(62 * S)
    assert not len(harness.node.snapshots)
    assert harness.query(harness.get(b"a", snapshot=number)).code == "snapshot-expired"


def test_a_snapshot_number_is_invalid_for_another_state() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"a": b"1"}))
    number = take_snapshot(harness)
    harness.lose()
    harness.pass_time(2 * S)
    again = take_snapshot(harness)
    assert again != number
    assert harness.query(harness.get(b"a", snapshot=number)).code == "snapshot-expired"
    assert value(harness.query(harness.get(b"a", snapshot=again))) == b"1"


# --- watches ---


def watch(harness: CoordinatorHarness, version: int, at_least: int = 0) -> wire.Watch:
    return wire.Watch(CLUSTER, harness.request(), b"k", version, at_least)


def test_a_watch_is_answered_once_per_batch_when_the_key_changes() -> None:
    harness = CoordinatorHarness.ready()
    harness.deliver(watch(harness, 0))
    harness.insert(commit(1, {b"other": b"v"}))
    harness.poll()
    assert not harness.pop_sent()
    harness.insert(commit(2, {b"k": b"v"}))
    harness.insert(commit(3, {b"k": b"w"}))
    harness.poll()
    (got,) = harness.pop_sent()
    assert value(got) == b"w"
    got = harness.query(watch(harness, 0))
    assert value(got) == b"w"
    harness.deliver(watch(harness, harness.log.tail.gsn))
    harness.insert(commit(4, {b"k": None}))
    harness.poll()
    (got,) = harness.pop_sent()
    assert got.found[0].entry is None


def test_a_watch_continues_if_the_key_is_absent_again() -> None:
    harness = CoordinatorHarness.ready()
    harness.deliver(watch(harness, 0))
    harness.insert(commit(1, {b"k": b"v"}))
    harness.insert(commit(2, {b"k": None}))
    harness.poll()
    assert not harness.pop_sent()
    harness.insert(commit(3, {b"k": b"v"}))
    harness.poll()
    assert len(harness.pop_sent()) == 1


def test_a_watch_waits_for_the_position_that_its_client_knows() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}))
    old = harness.log.tail.gsn
    rid = harness.insert(commit(2, {b"k": b"w"}))
    harness.step(Received(ROUTE, watch(harness, rid.gsn, at_least=rid.gsn)))
    harness.poll()
    # The former state differs too, but its client has seen a later one.
    assert not harness.pop_sent()
    assert harness.query(watch(harness, old)).found[0].entry.version == rid.gsn


def test_an_expired_watch_returns_the_present_state() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}))
    harness.deliver(watch(harness, harness.log.tail.gsn))
    harness.pass_time(EXPIRY_NS - S)
    assert not harness.pop_sent()
    harness.pass_time(3 * S)
    (got,) = harness.pop_sent()
    assert value(got) == b"v"
    assert not len(harness.node.pending)


def test_a_watch_that_expires_before_its_position_returns_no_older_state() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}))
    seen_elsewhere = harness.log.tail.gsn + 1000
    harness.deliver(watch(harness, seen_elsewhere, at_least=seen_elsewhere))
    harness.pass_time(EXPIRY_NS + 2 * S)
    assert not harness.pop_sent()
    assert not len(harness.node.pending)


# --- what it refuses, and what is bounded ---


def test_a_replaying_coordinator_is_not_ready() -> None:
    harness = CoordinatorHarness(at_once=False)
    messages = [
        wire.Open(0, 1, SESSION), harness.get(b"k"), harness.scan(b"", None, 1),
        wire.Validate(CLUSTER, 2, [], []), wire.AwaitDecision(CLUSTER, 3, SESSION, 1),
        watch(harness, 0), wire.TakeSnapshot(CLUSTER, 4, SESSION),
    ]  # fmt: skip
    for message in messages:
        harness.step(Received(ROUTE, message))
        (answer,) = harness.pop_sent()
        assert isinstance(answer, wire.NotReady)
        assert answer.request == message.request
    harness.step(Received(ROUTE, wire.DropSnapshot(CLUSTER, 1)))
    assert not harness.pop_sent()
    assert json.loads(harness.query(wire.Status(0, 9)).document)["ready"] is False


def test_open_accepts_any_cluster_and_other_requests_only_their_own() -> None:
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}))
    opened = harness.query(wire.Open(0, 1, SESSION))
    assert opened == wire.Opened(CLUSTER, 1, ["mms:1", "mms:2"], harness.log.tail)
    refused = harness.query(wire.Open(CLUSTER + 1, 2, SESSION))
    assert (refused.code, refused.request) == ("wrong-cluster", 2)


def test_a_repeated_request_is_the_same_request() -> None:
    harness = CoordinatorHarness.ready()
    (rid,) = harness.log.insert(commit(1, {b"k": b"v"}))
    message = harness.get(b"k", fresh=True, at_least=rid.gsn)
    for _ in range(3):
        harness.step(Received(ROUTE, message))
    assert len(harness.node.pending) == 1
    harness.poll()
    assert len(harness.pop_sent()) == 1
    assert not len(harness.node.pending)


def test_requests_beyond_the_limit_are_refused() -> None:
    harness = CoordinatorHarness.ready()
    harness.node.pending._limit = 3
    for number in range(1, 6):
        harness.deliver(wire.AwaitDecision(CLUSTER, number, SESSION, number))
    refused = harness.pop_sent()
    assert [each.request for each in refused] == [4, 5]
    assert all(isinstance(each, wire.NotReady) for each in refused)
    # Requests that need not wait are answered.
    assert harness.query(harness.get(b"k")).found[0].entry is None


def test_expired_requests_are_forgotten_while_the_log_is_unavailable() -> None:
    harness = CoordinatorHarness.ready()
    harness.log.faults.append(
        lambda request: "silent, out" if isinstance(request, BarrierRequest) else None
    )
    for number in range(1, 50):
        harness.deliver(wire.Validate(CLUSTER, number, [], []))
    assert waiter_count(harness.node.tailer) == 49
    harness.pass_time(EXPIRY_NS + 2 * S)
    assert not len(harness.node.pending)
    assert not waiter_count(harness.node.tailer)
    assert not harness.pop_sent()


# --- failures of the log ---


def test_a_coordinator_without_a_log_stops() -> None:
    log = FakeLog()
    log.is_down = True
    harness = CoordinatorHarness(log)
    harness.core.cluster = 0
    harness.poll()
    assert harness.node.failure is not None
    assert harness.halts == [str(harness.node.failure)]


def test_missed_decisions_are_sent_after_a_restart() -> None:
    """The subscription failed and restarted: waiting requests get their answers."""
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}))
    version = harness.log.tail.gsn
    harness.open()
    harness.deliver(watch(harness, version))
    harness.deliver(wire.AwaitDecision(CLUSTER, harness.request(), OTHER, 5))
    harness.insert(commit(5, {b"k": b"w"}, session=OTHER))
    harness.lose()
    assert not harness.pop_sent()
    harness.pass_time(2 * S)
    got, decided = sorted(harness.pop_sent(), key=lambda each: type(each).__name__, reverse=True)
    assert value(got) == b"w"
    assert (decided.session, decided.number, decided.outcome) == (OTHER, 5, "committed")


def test_a_start_reports_a_recovering_shard() -> None:
    harness = CoordinatorHarness()
    harness.log.is_down = True
    harness.core.waiting_for = ["shard 1 (recovering)"]
    harness.poll()
    received = harness.query(harness.get(b"k"))
    assert (
        received.reason == "it is replaying the log, at 0 of 0, and waits for shard 1 (recovering)"
    )
    harness.log.is_down = False
    harness.pass_time(2 * S)
    assert harness.node.is_ready
    assert harness.node.tailer.waiting_for == []


def test_the_report_of_a_start_fits_its_message_however_many_shards_are_awaited() -> None:
    harness = CoordinatorHarness()
    harness.log.is_down = True
    harness.core.waiting_for = [f"shard {number} (silent)" for number in range(16_384)]
    harness.poll()
    received = harness.query(harness.get(b"k"))
    assert received.reason.endswith("shard 7 (silent), and 16376 more")


def test_the_status_has_all_fields() -> None:
    harness = CoordinatorHarness.ready(
        commit(1, {b"k": b"v"}), commit(2, {b"k": b"w"}, reads=[(b"k", 0)]), b"?"
    )
    harness.open()
    received = json.loads(harness.query(wire.Status(CLUSTER, 1)).document)
    assert received["ready"] is True
    assert (received["commits"], received["aborts"], received["keys"], received["records"]) == (
        1,
        1,
        1,
        3,
    )
    assert received["position"] == str(harness.log.tail)
    assert received["first_foreign"] == harness.log.tail.gsn
    assert (received["sessions"], received["cached_values"]) == (1, 1)


def test_a_coordinator_starts_from_the_checkpoint_of_another() -> None:
    log = FakeLog(seed=3)
    harness = CoordinatorHarness.ready(log=log, checkpoints=True, checkpoint_every=50)
    for number in range(1, 120):
        harness.insert(commit(number, {b"%d" % (number % 7): b"v%d" % number}))
        harness.poll(2)
    harness.pass_time(5 * S)
    assert json.loads(harness.query(wire.Status(CLUSTER, 1)).document)["cleaner"]["rounds"] >= 1
    other = CoordinatorHarness.ready(log=log)
    mine, theirs = (each.node.tailer.state for each in (harness, other))
    assert other.node.tailer.state.commits < 119
    assert mine.versions.after(None, 100) == theirs.versions.after(None, 100)
    assert mine.position == theirs.position


def test_requests_are_answered_between_slices_of_records() -> None:
    log = FakeLog(seed=4)
    for number in range(1, 3001):
        log.insert(commit(number, {b"k": b"v"}), after=log.tail)
    harness = CoordinatorHarness(log)
    harness.step(BatchEnd())
    assert 0 < harness.node.tailer.state.records < 3000
    assert harness.node.next_wakeup() == harness.now
    assert isinstance(harness.query(harness.get(b"k")), wire.NotReady)
    harness.poll(10)
    assert harness.node.tailer.state.records == 3000
    assert harness.query(harness.get(b"k")).found[0].entry.place == RecordId(*log.tail)
    assert harness.now == 5 * S
    harness.pass_time(10 * MS)


def long_log() -> FakeLog:
    """Return a log that is replayed in several slices: `k` is written first, and last."""
    log = FakeLog(seed=5)
    payloads = [commit(1, {b"k": b"v"}), commit(2, {b"k": b"x"}, reads=[(b"k", 0)])]
    payloads += [commit(number, {b"other": b"v"}) for number in range(3, 2000)]
    payloads += [commit(2000, {b"k": b"w"})]
    for payload in payloads:
        log.insert(payload, after=log.tail)
    return log


def test_nothing_is_sent_during_replay_and_a_watch_never_goes_back() -> None:
    harness = CoordinatorHarness.ready(log=long_log())
    harness.open()
    harness.deliver(watch(harness, harness.log.tail.gsn))
    harness.lose()
    harness.pass_time(2 * S)
    assert harness.node.is_ready
    assert harness.node.tailer.starts == 2
    assert not harness.pop_sent()


def test_a_change_before_the_restored_checkpoint_answers_a_watch() -> None:
    """It begins again behind a change: at a checkpoint that another coordinator made."""
    harness = CoordinatorHarness.ready(commit(1, {b"k": b"v"}))
    harness.deliver(watch(harness, harness.log.tail.gsn))
    other = CoordinatorHarness.ready(log=harness.log, checkpoints=True, checkpoint_every=50)
    for number in range(2, 60):
        other.insert(commit(number, {b"k" if number < 5 else b"x": b"w"}))
    other.pass_time(5 * S)
    assert other.node.tailer.state.last_done is not None
    harness.lose()
    harness.pass_time(2 * S)
    assert harness.node.tailer.state.commits < 58
    (got,) = harness.pop_sent()
    assert got.found[0].entry.version == other.node.tailer.state.versions.version(b"k")


def test_the_size_of_a_waiting_request_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes time in proportion to the keys that the request names."""
    harness = CoordinatorHarness.ready()
    sizes: list[int] = []

    def counted(message: Any) -> int:
        sizes.append(bytes_of(message))
        return sizes[-1]

    monkeypatch.setattr(pending_requests, "bytes_of", counted)
    assert value(harness.query(harness.get(b"k", fresh=True))) is None
    assert len(sizes) == 1
