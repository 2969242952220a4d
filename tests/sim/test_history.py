"""The history records all events in order, and the rules of the scripts judge it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import check_history
import msgspec
import pytest

from tests.sim.history import History, certainly_did_not_happen, events, gather
from ziplog.client.common.requests import (
    BarrierRequest,
    Fetched,
    FetchRequest,
    InsertRequest,
    ProgressRequest,
    ReadRequest,
    SealRequest,
    SubscribeRequest,
    SyncRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.core.units import NEVER
from ziplog.errors import (
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    TrimmedError,
    UnavailableError,
)
from ziplog.types import RID_GENESIS, RID_RECENT, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Script:
    """Writer of a history, one operation after the other, all in one nanosecond."""

    def __init__(self) -> None:
        self.history = History(seed=1)
        self.at = 1000
        self.subscriptions = 0

    def do(self, client: str, request: Any, result: Any, *, resumes: int | None = None) -> int:
        number = self.history.call(client, self.at, request, resumes=resumes)
        self.history.returned(number, self.at, result)
        return number

    def insert(
        self, payload: bytes, gsn: int, after: int = 0, *, shard: int = 0, client: str = "a"
    ) -> int:
        return self.do(client, inserting(payload, after=after), [RecordId(gsn, shard)])

    def read(self, gsn: int, result: Any, *, shard: int = 0, client: str = "a") -> int:
        return self.do(client, ReadRequest(NEVER, RecordId(gsn, shard)), result)

    def subscribe(
        self,
        start: RecordId = RID_GENESIS,
        *,
        client: str = "a",
        follow: bool = True,
        shards: frozenset[int] | None = None,
        resumes: int | None = None,
    ) -> tuple[int, int]:
        """Return the operation, and the client's number of it."""
        self.subscriptions += 1
        request = SubscribeRequest(NEVER, start, follow, shards)
        return self.do(client, request, self.subscriptions, resumes=resumes), self.subscriptions

    def fetch(
        self, subscription: int, *records: Record, client: str = "a", ended: bool = False
    ) -> int:
        request = FetchRequest(NEVER, subscription, 100)
        return self.do(client, request, Fetched(list(records), ended=ended))

    def rules(self, *, allow_loss: bool = False) -> set[str]:
        return {v.rule for v in self.history.judge(allow_loss=allow_loss).violations}


def inserting(*payloads: bytes, after: int = 0, key: bytes | None = None) -> InsertRequest:
    return InsertRequest(NEVER, list(payloads), RecordId(after, 0), key, 7, many=len(payloads) > 1)


def record(gsn: int, payload: bytes, *, shard: int = 0, key: bytes | None = None) -> Record:
    return Record(RecordId(gsn, shard), payload, key, 7, 0)


def no_record(gsn: int, shard: int = 0) -> NoSuchRecordError:
    return NoSuchRecordError(RecordId(gsn, shard), "the position is a no-op")


def unknown(doubt: object) -> OutcomeUnknownError:
    return OutcomeUnknownError("unknown outcome", shard=0, seq=1, doubt=doubt)


def everything() -> Script:
    """Return a correct history with every kind of operation."""
    script = Script()
    script.insert(b"one", 1)
    script.insert(b"two", 5, after=1, shard=1, client="b")
    rids = [RecordId(6, 0), RecordId(8, 0)]
    script.do("a", inserting(b"three", b"four", after=5), rids)
    doubt: Any = object()
    script.do("b", inserting(b"five"), unknown(doubt))
    script.do("b", ResolveRequest(NEVER, doubt), unknown(doubt))
    script.do("b", ResolveRequest(NEVER, doubt), [RecordId(2, 0)])
    script.do("b", inserting(b"never"), DeadlineError("no shard is live"))
    script.read(1, record(1, b"one"), client="b")
    script.read(3, no_record(3))
    script.do("a", TailRequest(NEVER), RecordId(8, 0))
    script.do("a", TailRequest(NEVER, sealed=True), RecordId(8, 0))
    script.do("a", SealRequest(NEVER, RecordId(8, 0)), RecordId(8, 0))
    script.do("a", msgspec.structs.replace(inserting(b"six"), sealed=True), [RecordId(9, 1)])
    script.do("a", SyncRequest(NEVER), RecordId(9, 1))
    first, name = script.subscribe()
    script.fetch(name, record(1, b"one"), record(2, b"five"))
    _, name = script.subscribe(RecordId(3, 0), follow=False, resumes=first)
    script.fetch(name, record(5, b"two", shard=1), record(6, b"three"))
    script.fetch(name)
    script.fetch(name, record(8, b"four"))
    script.fetch(name, record(9, b"six", shard=1))
    script.do("a", BarrierRequest(NEVER, name), RecordId(10, 0))
    script.fetch(name, ended=True)
    _, name = script.subscribe(RID_RECENT, client="b")
    script.fetch(name, record(8, b"four"), client="b")
    script.do("b", TrimRequest(NEVER, RecordId(5, 1)), None)
    script.read(1, TrimmedError(RecordId(5, 1)))
    script.history.call("c", script.at, inserting(b"killed meanwhile"))
    script.history.fault(script.at, "kill c")
    script.history.losses(script.at, [(1, 900, 1000)])
    return script


def test_a_correct_history_of_every_kind_of_operation_is_clean() -> None:
    judgement = everything().history.check()
    observed = judgement.observed
    assert len(observed.records) == 8
    assert sorted(judgement.places) == [1, 2, 5, 6, 8, 9]
    assert [len(s.gsns) for s in observed.subscriptions] == [6, 1], "the resumed one is one"
    assert len(observed.readings) == 3
    assert len(observed.syncs) == len(observed.trims) == 1
    assert [seal.is_tail for seal in observed.seals] == [True, False]
    assert len(observed.tails) == len(observed.barriers) + 1 == 2
    assert observed.losses == {(1, 900, 1000)}


def two_at_one_position(script: Script) -> None:
    script.insert(b"x", 4)
    script.insert(b"y", 4)


def one_at_two_positions(script: Script) -> None:
    script.insert(b"x", 4)
    script.read(9, record(9, b"x"))


def inserted_by_no_client(script: Script) -> None:
    script.read(4, record(4, b"from nowhere"))


def another_key(script: Script) -> None:
    script.insert(b"x", 4)
    script.read(4, record(4, b"x", key=b"k"))


def another_position_than_requested(script: Script) -> None:
    script.insert(b"x", 4)
    script.read(5, record(4, b"x"))


def it_certainly_did_not_happen(script: Script) -> None:
    script.do("a", inserting(b"x"), UnavailableError("nothing was done"))
    script.read(4, record(4, b"x"))


def before_what_it_names(script: Script) -> None:
    script.insert(b"x", 4, after=4)


def a_call_out_of_order(script: Script) -> None:
    script.do("a", inserting(b"x", b"y"), [RecordId(4, 0), RecordId(3, 0)])


def read_your_insert(script: Script) -> None:
    script.insert(b"x", 4)
    script.read(4, no_record(4))


def passed_over(script: Script) -> None:
    script.insert(b"x", 4)
    script.insert(b"y", 5)
    script.fetch(script.subscribe()[1], record(5, b"y"))


def not_delivered_at_the_end(script: Script) -> None:
    script.insert(b"x", 4)
    script.fetch(script.subscribe(follow=False)[1], ended=True)


def filled_behind_a_delivery(script: Script) -> None:
    script.insert(b"y", 5)
    script.fetch(script.subscribe()[1], record(5, b"y"))
    script.insert(b"x", 4)


def delivered_twice(script: Script) -> None:
    script.insert(b"x", 4)
    _, name = script.subscribe()
    script.fetch(name, record(4, b"x"))
    script.fetch(name, record(4, b"x"))


def two_subscribers_differ(script: Script) -> None:
    script.do("a", inserting(b"x"), unknown(object()))
    script.insert(b"y", 5)
    script.fetch(script.subscribe()[1], record(4, b"x"), record(5, b"y"))
    script.fetch(script.subscribe()[1], record(5, b"y"))


def lost_between_two_parts(script: Script) -> None:
    script.insert(b"x", 4)
    script.insert(b"y", 5)
    first, _ = script.subscribe(RecordId(1, 0))
    _, name = script.subscribe(RecordId(5, 0), resumes=first)
    script.fetch(name, record(5, b"y"))


def a_low_tail(script: Script) -> None:
    script.insert(b"x", 4)
    script.do("b", TailRequest(NEVER), RecordId(3, 0))


def a_low_sync(script: Script) -> None:
    script.insert(b"x", 4)
    script.do("a", SyncRequest(NEVER), RecordId(3, 0))


def a_change_of_mind(script: Script) -> None:
    doubt: Any = object()
    script.do("a", inserting(b"x"), unknown(doubt))
    script.do("a", ResolveRequest(NEVER, doubt), [None])
    script.do("a", ResolveRequest(NEVER, doubt), [RecordId(4, 0)])


def trimmed_by_no_client(script: Script) -> None:
    script.read(4, TrimmedError(RecordId(9, 0)))


def read_after_a_trim(script: Script) -> None:
    script.insert(b"x", 4)
    script.do("b", TrimRequest(NEVER, RecordId(5, 0)), None)
    script.read(4, record(4, b"x"))


def no_shard_had_the_position(script: Script) -> None:
    script.insert(b"x", 4)
    script.do("b", inserting(b"y", after=3), no_record(3))


def an_error_of_ours(script: Script) -> None:
    script.do("a", TailRequest(NEVER), ValueError("a bug"))


def too_few_rids(script: Script) -> None:
    script.do("a", inserting(b"x", b"y"), [RecordId(4, 0)])


WRONG = [
    (two_at_one_position, "agreement"),
    (one_at_two_positions, "duplicate"),
    (inserted_by_no_client, "phantom"),
    (another_key, "phantom"),
    (another_position_than_requested, "phantom"),
    (it_certainly_did_not_happen, "phantom"),
    (before_what_it_names, "insert-after"),
    (a_call_out_of_order, "batch-order"),
    (read_your_insert, "loss"),
    (passed_over, "loss"),
    (not_delivered_at_the_end, "loss"),
    (filled_behind_a_delivery, "loss"),
    (delivered_twice, "order"),
    (two_subscribers_differ, "gap"),
    (lost_between_two_parts, "loss"),
    (a_low_tail, "tail"),
    (a_low_sync, "sync"),
    (a_change_of_mind, "resolve"),
    (trimmed_by_no_client, "trim"),
    (read_after_a_trim, "trim"),
    (no_shard_had_the_position, "refusal"),
    (an_error_of_ours, "errors"),
    (too_few_rids, "results"),
]


@pytest.mark.parametrize(("story", "rule"), WRONG, ids=[story.__name__ for story, _ in WRONG])
def test_each_wrong_is_found_though_all_happens_at_once(
    story: Callable[[Script], None], rule: str
) -> None:
    script = Script()
    story(script)
    assert rule in script.rules()
    with pytest.raises(AssertionError, match=rule):
        script.history.check()


def test_what_is_written_is_what_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = everything()
    script.history.write(tmp_path / "clean")
    assert check_history.main([str(tmp_path / "clean")]) == 0
    passed_over_more = everything()
    passed_over_more.insert(b"behind", 7, client="b")
    passed_over_more.history.write(tmp_path / "broken")
    assert check_history.main([str(tmp_path / "broken")]) == 1
    assert "loss" in capsys.readouterr().out
    observed = gather(events.files_of([tmp_path / "broken"]))
    assert observed.operations == passed_over_more.history.observed().operations
    written = {path.stem: path.read_bytes() for path in (tmp_path / "broken").iterdir()}
    lines = passed_over_more.history.lines()
    assert written == {process: b"".join(rows) for process, rows in lines.items()}


def test_reported_losses_are_allowed_on_request() -> None:
    script = Script()
    script.insert(b"x", 4)
    script.read(4, no_record(4))
    script.history.losses(script.at, [(0, 3, 5)])
    assert script.rules() == {"loss"}
    assert script.rules(allow_loss=True) == set()


@pytest.mark.parametrize("again", [7, None])
def test_record_that_was_read_before_a_loss_may_move_or_fail(again: int | None) -> None:
    script = Script()
    number = script.history.call("a", script.at, inserting(b"x"))
    script.read(4, record(4, b"x"), client="b")
    result = UnavailableError("lost") if again is None else [RecordId(again, 0)]
    script.history.returned(number, script.at, result)
    if again is not None:
        script.read(again, record(again, b"x"), client="b")
    assert script.rules(allow_loss=True) == {"phantom" if again is None else "duplicate"}
    script.history.losses(script.at, [(0, 4, 5)])
    assert script.rules(allow_loss=True) == set()


def after_a_loss(*before: int, during: tuple[int, ...] = (), lost: int = 6) -> Script:
    """Return a history in which a `sync` reports the loss of position 6.

    `before` and `during` it, inserts return positions; `lost` is the position that was lost.
    """
    script = Script()
    for gsn in before:
        script.insert(b"%d" % gsn, gsn)
    number = script.history.call("a", script.at, SyncRequest(NEVER))
    for gsn in during:
        script.insert(b"%d" % gsn, gsn)
    script.history.returned(number, script.at, no_record(6))
    script.history.losses(script.at, [(0, lost, lost + 1)])
    return script


def sync(script: Script, gsn: int) -> set[str]:
    """Return the rules that a `sync` with this result violates."""
    script.do("a", SyncRequest(NEVER), RecordId(gsn, 0))
    return script.rules(allow_loss=True)


def test_a_sync_after_a_reported_loss_does_not_count_the_records_before_it() -> None:
    assert sync(after_a_loss(5, 6), 0) == set()
    assert sync(after_a_loss(6, during=(5,)), 0) == set()


def test_a_sync_after_a_reported_loss_counts_all_other_records() -> None:
    assert sync(after_a_loss(6, 7), 0) == {"sync"}, "it is above the lost one"
    assert sync(after_a_loss(6, 5, lost=7), 0) == {"sync"}, "nothing was lost there"
    script = after_a_loss(6)
    script.insert(b"5", 5)
    assert sync(script, 0) == {"sync"}, "its insert returned after the report"
    script = after_a_loss(6)
    script.insert(b"5", 5, shard=1)
    assert sync(script, 0) == {"sync"}, "it is at another shard"


def test_a_loss_that_no_sync_reported_is_counted() -> None:
    script = Script()
    script.insert(b"6", 6)
    script.read(6, no_record(6))
    script.history.losses(script.at, [(0, 6, 7)])
    assert sync(script, 0) == {"sync"}


def test_a_waiting_sync_reports_the_loss_of_what_returns_meanwhile() -> None:
    script = after_a_loss(6, during=(5,))
    script.read(5, no_record(5))
    script.history.losses(script.at, [(0, 5, 7)])
    assert sync(script, 9) == set()
    script = after_a_loss(6)
    script.insert(b"5", 5)
    script.read(5, no_record(5))
    script.history.losses(script.at, [(0, 5, 7)])
    assert sync(script, 9) == {"sync"}, "its insert returned after the report"


def test_calls_under_way_may_have_any_result() -> None:
    script = Script()
    history = script.history
    reading = history.call("a", 1000, ReadRequest(NEVER, RecordId(4, 0)))
    inserting_it = history.call("b", 1000, inserting(b"x"))
    script.read(4, record(4, b"x"), client="c")
    assert list(history.open) == [reading, inserting_it]
    history.returned(reading, 1000, no_record(4))
    history.check()


def test_the_digest_is_of_all_that_happened_and_its_order() -> None:
    assert everything().history.digest() == everything().history.digest()
    seen = {everything().history.digest()}
    for client, at, gsn in (("a", 1000, 20), ("b", 1000, 20), ("a", 1001, 20), ("a", 1000, 21)):
        script = everything()
        script.at = at
        script.insert(b"more", gsn, client=client)
        seen.add(script.history.digest())
    assert len(seen) == 5
    fetching = set()
    for client in ("a", "b"):
        script = Script()
        names = {name: script.subscribe(client=name)[1] for name in ("a", "b")}
        script.fetch(names[client], client=client)
        fetching.add(script.history.digest())
    assert len(fetching) == 2, "an empty fetch is recorded, too"
    orders = set()
    for first, second in (("a", "b"), ("b", "a")):
        script = Script()
        script.at = 5
        calls = {
            client: script.history.call(client, 5, inserting(client.encode()))
            for client in ("a", "b")
        }
        script.history.returned(calls[first], 9, [RecordId(1, 0)])
        script.history.returned(calls[second], 9, [RecordId(1, 0)])
        orders.add(script.history.digest())
    assert len(orders) == 2


def test_each_event_has_a_time_of_its_own_that_is_not_before_it_happened() -> None:
    history = everything().history
    times = [o.called for o in history.operations]
    times += [o.returned for o in history.operations if o.returned is not None]
    assert len(set(times)) == len(times)
    assert min(times) == 1000
    later = history.call("a", 5000, TailRequest(NEVER))
    assert history.operations[later].called == 5000


def test_an_operation_can_be_read() -> None:
    history = everything().history
    text = "\n".join(map(str, history.operations))
    assert "insert(b'two', after 1@0) -> [5@1]" in text
    assert "read(3@0) -> NoSuchRecordError" in text
    assert "-> [1@0=b'one', 2@0=b'five']" in text
    assert "c 1" in text
    assert "... insert(b'killed meanwhile', after 0@0) -> pending" in text


def test_a_fetch_and_a_resolve_know_what_they_are_of() -> None:
    script = Script()
    doubts: list[Any] = [object(), object()]
    inserts = [script.do("a", inserting(b"%d" % n), unknown(doubts[n])) for n in (0, 1)]
    resolve = script.do("a", ResolveRequest(NEVER, doubts[1]), [RecordId(3, 0)])
    script.subscribe(client="b")
    script.subscriptions = 0
    subscribing, name = script.subscribe(client="a")
    fetch = script.fetch(name, record(3, b"1"))
    operations = script.history.operations
    assert operations[resolve].of == inserts[1]
    assert operations[fetch].of == subscribing
    assert script.rules() == set()


@pytest.mark.parametrize(
    ("bound", "reader", "is_bounded"),
    [
        (None, None, True),
        (None, frozenset({0}), False),
        (frozenset({0}), None, True),
        (frozenset({0}), frozenset({0, 2}), True),
        (frozenset({0, 2}), frozenset({0}), False),
    ],
)
def test_a_barrier_bounds_readers_of_at_least_its_shards(
    bound: frozenset[int] | None, reader: frozenset[int] | None, *, is_bounded: bool
) -> None:
    script = Script()
    script.insert(b"x", 5)
    _, name = script.subscribe(client="b", shards=reader)
    script.fetch(name, record(5, b"x"), client="b")
    _, name = script.subscribe(shards=bound)
    script.do("a", BarrierRequest(NEVER, name), RecordId(4, 0))
    assert script.rules() == ({"barrier"} if is_bounded else set())


def test_a_misuse_is_refused() -> None:
    script = Script()
    script.insert(b"x", 1)
    with pytest.raises(AssertionError, match="a second time"):
        script.insert(b"x", 2)
    with pytest.raises(AssertionError, match="many=True"):
        script.do("a", InsertRequest(NEVER, [b"y", b"z"], RID_GENESIS, None, 0), [])
    with pytest.raises(AssertionError, match="time runs back"):
        script.history.call("a", 999, TailRequest(NEVER))
    progress: Any = ProgressRequest(NEVER, 1)
    with pytest.raises(AssertionError, match="no operation of a history"):
        script.history.call("a", 1000, progress)


def test_the_outcome_of_an_insert_by_its_error() -> None:
    assert certainly_did_not_happen(DeadlineError("late"))
    assert certainly_did_not_happen(no_record(3))
    assert not certainly_did_not_happen(unknown(None))
    assert not certainly_did_not_happen(ConnectionError("of ours"))


def test_what_failed_in_part_is_there_in_part() -> None:
    script = Script()
    error = UnavailableError("the second was not accepted")
    error.results = [RecordId(4, 0), None]
    script.do("a", inserting(b"x", b"y"), error)
    script.read(4, record(4, b"x"))
    assert script.rules() == set()
    script.read(6, record(6, b"y"))
    assert script.rules() == {"phantom"}
