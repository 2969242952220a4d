"""What a coordinator tells unasked, and what it answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from logdb import wire
from logdb.coordinator import node
from logdb.coordinator.pending_requests import PATIENCE_NS
from logdb.coordinator.queries import MAX_ROWS, MAX_VALUE_BYTES
from logdb.records import KeyRead, RangeRead, Value, encode
from logdb.versions import digest_of
from tests.logdb.fakelog import FakeLog
from tests.logdb.glass import CLUSTER, MS, ROUTE, SESSION, Glass, S, commit
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


def test_a_decision_is_told_in_the_step_in_which_its_record_came() -> None:
    glass = Glass.ready()
    glass.open()
    rid = glass.insert(commit(1, {b"k": b"v"}))
    told = [e.message for e in glass.step(BatchEnd()) if isinstance(e, Send)]
    assert told == [wire.Decided(CLUSTER, SESSION, 1, rid, "committed", [])]


def test_a_decision_is_told_to_its_session_alone_by_the_route_last_heard_of() -> None:
    glass = Glass.ready()
    glass.open(SESSION, b"old")
    glass.open(OTHER, b"other")
    glass.open(SESSION, b"new")
    glass.sent.clear()
    glass.insert(commit(1, {b"k": b"v"}))
    glass.turn()
    assert [route for route, _ in glass.sent] == [b"new"]


def test_an_abort_tells_its_conflicts_and_a_repeated_record_tells_nothing() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}, session=OTHER))
    glass.open()
    late = commit(2, {b"k": b"w"}, reads=[(b"k", 0)])
    rid = glass.insert(late)
    glass.insert(late)
    glass.turn()
    assert glass.take() == [wire.Decided(CLUSTER, SESSION, 2, rid, "conflict", [b"k"])]


def test_who_asks_for_a_decision_is_told_at_once_or_when_it_is_there() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}), commit(2, {b"k": b"w"}, reads=[(b"k", 0)]))
    first, second = (glass.log.records[gsn].rid for gsn in glass.log.gsns)
    asked = wire.Ask(CLUSTER, glass.request(), SESSION, 1)
    assert glass.ask(asked) == wire.Decided(CLUSTER, SESSION, 1, first, "committed", [])
    asked = wire.Ask(CLUSTER, glass.request(), SESSION, 2)
    assert glass.ask(asked) == wire.Decided(CLUSTER, SESSION, 2, second, "conflict", [b"k"])
    glass.give(wire.Ask(CLUSTER, glass.request(), SESSION, 3))
    glass.give(wire.Ask(CLUSTER, glass.request(), SESSION, 3), b"another")
    assert not glass.sent
    rid = glass.insert(commit(3, {b"k": b"x"}))
    glass.turn()
    decided = wire.Decided(CLUSTER, SESSION, 3, rid, "committed", [])
    # Once each, although the first one's session would be told, too.
    assert glass.take() == [decided]
    assert glass.take(b"another") == [decided]
    assert not len(glass.node.waitings)


def test_aborts_are_forgotten_in_the_end_but_not_that_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "_MAX_ABORTS", 2)
    aborts = [commit(n, {b"k": b"w"}, reads=[(b"k", 9)]) for n in range(1, 5)]
    glass = Glass.ready(*aborts)
    told = [glass.ask(wire.Ask(CLUSTER, glass.request(), SESSION, n)) for n in range(1, 5)]
    assert [each.outcome for each in told] == ["aborted", "aborted", "conflict", "conflict"]
    assert [each.conflicts for each in told] == [[], [], [b"k"], [b"k"]]


# --- reads ---


def test_keys_come_with_version_place_and_small_values() -> None:
    glass = Glass.ready()
    (stored,) = glass.log.insert(encode(Value(b"big", b"far")))
    rid = glass.insert(commit(1, {b"k": b"v", b"gone": b"x"}))
    last = glass.insert(commit(2, {b"gone": None}))
    glass.turn()
    got = glass.ask(glass.get(b"k", b"gone", b"never"))
    assert got.position == last
    assert [each.entry and (each.entry.version, each.entry.place) for each in got.found] == [
        (rid.gsn, rid), None, None,
    ]  # fmt: skip
    assert [each.value for each in got.found] == [b"v", None, None]
    assert stored < rid


def test_a_value_that_is_not_at_hand_is_left_to_the_log() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v" * 100}), cache_bytes=10)
    got = glass.ask(glass.get(b"k"))
    assert got.found[0].entry.size == 100
    assert value(got) is None


def test_an_answer_has_bounded_bytes_of_values() -> None:
    size = 15_000
    keys = [b"%03d" % n for n in range(100)]
    glass = Glass.ready(*(commit(n + 1, {key: b"v" * size}) for n, key in enumerate(keys)))
    got = glass.ask(glass.get(*keys))
    with_value = [each for each in got.found if each.value is not None]
    assert len(with_value) == MAX_VALUE_BYTES // size
    assert all(each.entry.size == size for each in got.found)


def test_a_read_that_no_longer_fits_what_was_read_before_is_a_conflict() -> None:
    glass = Glass.ready(commit(1, {b"a": b"1", b"b": b"1"}))
    version = glass.log.tail.gsn
    rows = glass.node.follower.state.versions.range(b"a", b"b", 10)
    fits = RangeRead(b"a", b"b", digest_of(rows))
    wrong = RangeRead(b"b", b"c", digest_of(rows))
    got = glass.ask(glass.get(b"b", reads=[(b"a", version)], ranges=[fits]))
    assert value(got) == b"1"
    assert not got.conflicts
    got = glass.ask(glass.get(b"b", reads=[(b"a", version + 1), (b"c", 0)], ranges=[wrong]))
    assert (got.found, got.conflicts) == ([], [b"a", b"b"])
    scanned = glass.ask(glass.scan(b"", None, 10, reads=[(b"a", 0)]))
    assert (scanned.rows, scanned.conflicts) == ([], [b"a"])


def test_a_read_waits_for_the_position_that_its_client_knows() -> None:
    glass = Glass.ready()
    (rid,) = glass.log.insert(commit(1, {b"k": b"v"}))
    question = glass.get(b"k", at_least=rid.gsn)
    glass.step(Received(ROUTE, question))
    assert not glass.take()
    glass.turn()
    (got,) = glass.take()
    assert value(got) == b"v"


def test_a_fresh_read_sees_what_was_in_the_log_before() -> None:
    glass = Glass.ready()
    glass.insert(commit(1, {b"k": b"v"}))
    glass.step(Received(ROUTE, glass.get(b"k")))
    (stale,) = glass.take()
    assert stale.found[0].entry is None
    glass.step(Received(ROUTE, glass.get(b"k", fresh=True)))
    assert not glass.take()
    glass.turn()
    (got,) = glass.take()
    assert value(got) == b"v"


def test_validation_is_fresh() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}))
    version = glass.log.tail.gsn
    glass.insert(commit(2, {b"k": b"w"}))
    glass.step(Received(ROUTE, wire.Validate(CLUSTER, 1, [KeyRead(b"k", version)], [])))
    glass.turn()
    (validated,) = glass.take()
    assert validated.conflicts == [b"k"]
    now = KeyRead(b"k", glass.log.tail.gsn)
    glass.give(wire.Validate(CLUSTER, 2, [now], []))
    glass.turn()
    (validated,) = glass.take()
    assert (validated.conflicts, validated.position) == ([], glass.log.tail)


def test_a_scan_tells_how_far_it_came_and_can_be_gone_on_with() -> None:
    keys = [b"%04d" % n for n in range(25)]
    glass = Glass.ready(*(commit(n + 1, {key: key}) for n, key in enumerate(keys)))
    found, start, rounds = [], b"0003", 0
    is_end = False
    while not is_end:
        scanned = glass.ask(glass.scan(start, b"0020", 7))
        rows = [(key, each.entry) for key, each in scanned.rows]
        covered = glass.node.follower.state.versions.digest(start, scanned.stop)
        assert scanned.digest == covered == digest_of(rows)
        assert all(each.value == key for key, each in scanned.rows)
        found += [key for key, _ in rows]
        start, is_end, rounds = scanned.stop, scanned.is_end, rounds + 1
    assert found == keys[3:20]
    assert (start, rounds) == (b"0020", 3)


def test_a_scan_has_bounded_rows() -> None:
    many = {b"%05d" % n: b"" for n in range(MAX_ROWS + 5)}
    glass = Glass.ready(commit(1, many))
    scanned = glass.ask(glass.scan(b"", None, 10_000))
    assert len(scanned.rows) == MAX_ROWS
    assert not scanned.is_end
    rest = glass.ask(glass.scan(scanned.stop, None, 10_000))
    assert len(rest.rows) == 5
    assert (rest.is_end, rest.stop) == (True, None)


# --- snapshots ---


def take_snapshot(glass: Glass, route: bytes = ROUTE) -> int:
    glass.give(wire.TakeSnapshot(CLUSTER, glass.request(), SESSION), route)
    glass.turn()
    (taken,) = glass.take(route)
    number: int = taken.snapshot
    return number


def test_a_snapshot_is_read_as_it_was_until_it_is_dropped() -> None:
    glass = Glass.ready(commit(1, {b"a": b"1", b"b": b"1"}))
    first = glass.log.tail.gsn
    number = take_snapshot(glass)
    glass.insert(commit(2, {b"a": None, b"c": b"2"}))
    glass.turn()
    got = glass.ask(glass.get(b"a", b"c", snapshot=number, fresh=True))
    assert [each.entry and each.entry.version for each in got.found] == [first, None]
    scanned = glass.ask(glass.scan(b"", None, 10, snapshot=number))
    assert [key for key, _ in scanned.rows] == [b"a", b"b"]
    glass.give(wire.DropSnapshot(CLUSTER, number))
    assert not glass.take()
    for question in (glass.get(b"a", snapshot=number), glass.scan(b"", None, 1, snapshot=number)):
        assert glass.ask(question).code == "snapshot-expired"


def test_a_snapshot_that_nobody_reads_expires() -> None:
    glass = Glass.ready(commit(1, {b"a": b"1"}))
    number = take_snapshot(glass)
    glass.pass_time(62 * S)
    assert not len(glass.node.snapshots)
    assert glass.ask(glass.get(b"a", snapshot=number)).code == "snapshot-expired"


def test_a_number_names_no_snapshot_of_another_state() -> None:
    glass = Glass.ready(commit(1, {b"a": b"1"}))
    number = take_snapshot(glass)
    glass.lose()
    glass.pass_time(2 * S)
    again = take_snapshot(glass)
    assert again != number
    assert glass.ask(glass.get(b"a", snapshot=number)).code == "snapshot-expired"
    assert value(glass.ask(glass.get(b"a", snapshot=again))) == b"1"


# --- watches ---


def watch(glass: Glass, version: int, at_least: int = 0) -> wire.Watch:
    return wire.Watch(CLUSTER, glass.request(), b"k", version, at_least)


def test_a_watch_is_answered_when_the_key_is_another_one_once_for_a_batch() -> None:
    glass = Glass.ready()
    glass.give(watch(glass, 0))
    glass.insert(commit(1, {b"other": b"v"}))
    glass.turn()
    assert not glass.take()
    glass.insert(commit(2, {b"k": b"v"}))
    glass.insert(commit(3, {b"k": b"w"}))
    glass.turn()
    (got,) = glass.take()
    assert value(got) == b"w"
    got = glass.ask(watch(glass, 0))
    assert value(got) == b"w"
    glass.give(watch(glass, glass.log.tail.gsn))
    glass.insert(commit(4, {b"k": None}))
    glass.turn()
    (got,) = glass.take()
    assert got.found[0].entry is None


def test_a_watch_of_what_came_back_to_be_absent_goes_on() -> None:
    glass = Glass.ready()
    glass.give(watch(glass, 0))
    glass.insert(commit(1, {b"k": b"v"}))
    glass.insert(commit(2, {b"k": None}))
    glass.turn()
    assert not glass.take()
    glass.insert(commit(3, {b"k": b"v"}))
    glass.turn()
    assert len(glass.take()) == 1


def test_a_watch_waits_for_the_position_that_its_client_knows() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}))
    old = glass.log.tail.gsn
    rid = glass.insert(commit(2, {b"k": b"w"}))
    glass.step(Received(ROUTE, watch(glass, rid.gsn, at_least=rid.gsn)))
    glass.turn()
    # The state of before is another one, too; but its client has seen a later one.
    assert not glass.take()
    assert glass.ask(watch(glass, old)).found[0].entry.version == rid.gsn


def test_a_watch_ends_after_a_while_with_what_is_there() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}))
    glass.give(watch(glass, glass.log.tail.gsn))
    glass.pass_time(PATIENCE_NS - S)
    assert not glass.take()
    glass.pass_time(3 * S)
    (got,) = glass.take()
    assert value(got) == b"v"
    assert not len(glass.node.waitings)


def test_a_watch_that_ends_while_it_waits_for_its_position_is_not_told_an_older_state() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}))
    seen_elsewhere = glass.log.tail.gsn + 1000
    glass.give(watch(glass, seen_elsewhere, at_least=seen_elsewhere))
    glass.pass_time(PATIENCE_NS + 2 * S)
    assert not glass.take()
    assert not len(glass.node.waitings)


# --- what it refuses, and what is bounded ---


def test_a_coordinator_that_replays_is_not_ready() -> None:
    glass = Glass(at_once=False)
    questions = [
        wire.Open(0, 1, SESSION), glass.get(b"k"), glass.scan(b"", None, 1),
        wire.Validate(CLUSTER, 2, [], []), wire.Ask(CLUSTER, 3, SESSION, 1), watch(glass, 0),
        wire.TakeSnapshot(CLUSTER, 4, SESSION),
    ]  # fmt: skip
    for question in questions:
        glass.step(Received(ROUTE, question))
        (answer,) = glass.take()
        assert isinstance(answer, wire.NotReady)
        assert answer.request == question.request
    glass.step(Received(ROUTE, wire.DropSnapshot(CLUSTER, 1)))
    assert not glass.take()
    assert json.loads(glass.ask(wire.Status(0, 9)).document)["ready"] is False


def test_it_opens_for_any_cluster_and_refuses_another_one() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}))
    opened = glass.ask(wire.Open(0, 1, SESSION))
    assert opened == wire.Opened(CLUSTER, 1, ["mms:1", "mms:2"], glass.log.tail)
    refused = glass.ask(wire.Open(CLUSTER + 1, 2, SESSION))
    assert (refused.code, refused.request) == ("wrong-cluster", 2)


def test_a_question_that_comes_again_is_the_same_one() -> None:
    glass = Glass.ready()
    (rid,) = glass.log.insert(commit(1, {b"k": b"v"}))
    question = glass.get(b"k", fresh=True, at_least=rid.gsn)
    for _ in range(3):
        glass.step(Received(ROUTE, question))
    assert len(glass.node.waitings) == 1
    glass.turn()
    assert len(glass.take()) == 1
    assert not len(glass.node.waitings)


def test_more_questions_than_may_wait_are_refused() -> None:
    glass = Glass.ready()
    glass.node.waitings._limit = 3
    for number in range(1, 6):
        glass.give(wire.Ask(CLUSTER, number, SESSION, number))
    refused = glass.take()
    assert [each.request for each in refused] == [4, 5]
    assert all(isinstance(each, wire.NotReady) for each in refused)
    # What needs not wait is answered.
    assert glass.ask(glass.get(b"k")).found[0].entry is None


def test_who_no_longer_asks_is_forgotten_also_where_the_log_is_away() -> None:
    glass = Glass.ready()
    glass.log.faults.append(
        lambda request: "silent, out" if isinstance(request, BarrierRequest) else None
    )
    for number in range(1, 50):
        glass.give(wire.Validate(CLUSTER, number, [], []))
    assert glass.node.follower.waiting == 49
    glass.pass_time(PATIENCE_NS + 2 * S)
    assert not len(glass.node.waitings)
    assert not glass.node.follower.waiting
    assert not glass.take()


# --- its own troubles ---


def test_without_a_log_it_ends() -> None:
    log = FakeLog()
    log.is_down = True
    glass = Glass(log)
    glass.core.cluster = 0
    glass.turn()
    assert glass.node.failure is not None
    assert glass.halts == [str(glass.node.failure)]


def test_what_happened_while_it_was_behind_is_told_when_it_is_back() -> None:
    """Its subscription failed, and it began again: who waited is told what they waited for."""
    glass = Glass.ready(commit(1, {b"k": b"v"}))
    version = glass.log.tail.gsn
    glass.open()
    glass.give(watch(glass, version))
    glass.give(wire.Ask(CLUSTER, glass.request(), OTHER, 5))
    glass.insert(commit(5, {b"k": b"w"}, session=OTHER))
    glass.lose()
    assert not glass.take()
    glass.pass_time(2 * S)
    got, decided = sorted(glass.take(), key=lambda each: type(each).__name__, reverse=True)
    assert value(got) == b"w"
    assert (decided.session, decided.number, decided.outcome) == (OTHER, 5, "committed")


def test_while_a_shard_recovers_it_says_what_it_waits_for() -> None:
    glass = Glass()
    glass.log.is_down = True
    glass.core.waiting_for = ["shard 1 (recovering)"]
    glass.turn()
    told = glass.ask(glass.get(b"k"))
    assert told.reason == "it replays the log, is at 0 of 0, and waits for shard 1 (recovering)"
    glass.log.is_down = False
    glass.pass_time(2 * S)
    assert glass.node.is_ready
    assert glass.node.follower.awaited == []


def test_the_status_tells_how_it_is() -> None:
    glass = Glass.ready(commit(1, {b"k": b"v"}), commit(2, {b"k": b"w"}, reads=[(b"k", 0)]), b"?")
    glass.open()
    told = json.loads(glass.ask(wire.Status(CLUSTER, 1)).document)
    assert told["ready"] is True
    assert (told["commits"], told["aborts"], told["keys"], told["records"]) == (1, 1, 1, 3)
    assert told["position"] == str(glass.log.tail)
    assert told["first_foreign"] == glass.log.tail.gsn
    assert (told["sessions"], told["cached_values"]) == (1, 1)


def test_it_makes_checkpoints_and_another_one_starts_from_them() -> None:
    log = FakeLog(seed=3)
    glass = Glass.ready(log=log, checkpoints=True, checkpoint_every=50)
    for number in range(1, 120):
        glass.insert(commit(number, {b"%d" % (number % 7): b"v%d" % number}))
        glass.turn(2)
    glass.pass_time(5 * S)
    assert json.loads(glass.ask(wire.Status(CLUSTER, 1)).document)["cleaner"]["rounds"] >= 1
    other = Glass.ready(log=log)
    mine, theirs = (each.node.follower.state for each in (glass, other))
    assert other.node.follower.state.commits < 119
    assert mine.versions.after(None, 100) == theirs.versions.after(None, 100)
    assert mine.position == theirs.position


def test_records_are_applied_in_slices_while_it_answers() -> None:
    log = FakeLog(seed=4)
    for number in range(1, 3001):
        log.insert(commit(number, {b"k": b"v"}), after=log.tail)
    glass = Glass(log)
    glass.step(BatchEnd())
    assert 0 < glass.node.follower.state.records < 3000
    assert glass.node.next_wakeup() == glass.now
    assert isinstance(glass.ask(glass.get(b"k")), wire.NotReady)
    glass.turn(10)
    assert glass.node.follower.state.records == 3000
    assert glass.ask(glass.get(b"k")).found[0].entry.place == RecordId(*log.tail)
    assert glass.now == 5 * S
    glass.pass_time(10 * MS)


def long_log() -> FakeLog:
    """Return a log that is replayed in several slices: `k` is written first, and last."""
    log = FakeLog(seed=5)
    payloads = [commit(1, {b"k": b"v"}), commit(2, {b"k": b"x"}, reads=[(b"k", 0)])]
    payloads += [commit(number, {b"other": b"v"}) for number in range(3, 2000)]
    payloads += [commit(2000, {b"k": b"w"})]
    for payload in payloads:
        log.insert(payload, after=log.tail)
    return log


def test_nothing_is_told_while_it_replays_and_a_watch_never_goes_back() -> None:
    glass = Glass.ready(log=long_log())
    glass.open()
    glass.give(watch(glass, glass.log.tail.gsn))
    glass.lose()
    glass.pass_time(2 * S)
    assert glass.node.is_ready
    assert glass.node.follower.starts == 2
    assert not glass.take()


def test_a_change_that_it_did_not_see_itself_ends_a_watch() -> None:
    """It begins again behind a change: at a checkpoint that another coordinator made."""
    glass = Glass.ready(commit(1, {b"k": b"v"}))
    glass.give(watch(glass, glass.log.tail.gsn))
    other = Glass.ready(log=glass.log, checkpoints=True, checkpoint_every=50)
    for number in range(2, 60):
        other.insert(commit(number, {b"k" if number < 5 else b"x": b"w"}))
    other.pass_time(5 * S)
    assert other.node.follower.state.last_done is not None
    glass.lose()
    glass.pass_time(2 * S)
    assert glass.node.follower.state.commits < 58
    (got,) = glass.take()
    assert got.found[0].entry.version == other.node.follower.state.versions.version(b"k")
