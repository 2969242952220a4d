"""The fake log keeps exactly the promises of the real one on which LogDB relies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.logdb.fakelog import (
    OUTCOME_UNKNOWN_IN,
    OUTCOME_UNKNOWN_OUT,
    SILENT_IN,
    FakeLog,
    fail_inserts,
)
from ziplog.client.common.requests import (
    Fetched,
    FetchRequest,
    InsertRequest,
    Progress,
    ProgressRequest,
    ReadRequest,
    Request,
    SubscribeRequest,
    TrimRequest,
    UnsubscribeRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import Wakeup
from ziplog.core.units import NEVER
from ziplog.errors import (
    ClosedError,
    NoSuchRecordError,
    OutcomeUnknownError,
    TrimmedError,
)
from ziplog.types import RID_GENESIS, RecordId


def ask(calls: LogTasks, request: Request) -> Any:
    answers: list[Any] = []
    calls.call(request, answers.append)
    return answers[0]


def insert(payload: bytes, after: RecordId = RID_GENESIS, deadline: int = NEVER) -> InsertRequest:
    return InsertRequest(deadline, [payload], after, None, 0)


@given(st.integers(0, 2**20), st.integers(1, 4), st.integers(0, 5), st.integers(1, 1000))
def test_an_insert_is_after_its_predecessor_and_all_passed_positions(
    seed: int, shards: int, holes: int, step: int
) -> None:
    log = FakeLog(seed=seed, shards=shards, holes=holes, step=step)
    calls = LogTasks(log.core(), 0)
    number = ask(calls, SubscribeRequest(NEVER, RID_GENESIS, follow=True))
    seen: list[int] = []
    waiting: list[Fetched] = []
    for i in range(60):
        after = log.records[log.random.choice(log.gsns)].rid if log.gsns else RID_GENESIS
        (rid,) = ask(calls, insert(b"%d" % i, after))
        assert rid > after
        assert rid.gsn > (seen[-1] if seen else 0)
        assert log.owner(rid.gsn) == rid
        if i % 7 == 0:
            waiting.clear()
            calls.call(FetchRequest(NEVER, number, 3), waiting.append)
            seen += [record.rid.gsn for record in waiting[0].records]
    assert seen == sorted(set(seen))
    assert set(seen) <= set(log.gsns)


def test_a_subscription_ends_at_the_tail_or_follows_and_reports_progress() -> None:
    log = FakeLog(seed=1)
    calls = LogTasks(log.core(at_once=False), 0)
    answers: dict[str, Any] = {}

    def call(name: str, request: Request) -> None:
        calls.call(request, lambda result: answers.update({name: result}))

    def pump() -> None:
        for _ in range(50):
            calls.step(Wakeup(), 1)

    log.insert(b"1", b"2")
    call("ends", SubscribeRequest(NEVER, RID_GENESIS, follow=False))
    call("follows", SubscribeRequest(NEVER, RID_GENESIS, follow=True))
    pump()
    call("all", FetchRequest(NEVER, answers["ends"], 9))
    pump()
    call("end", FetchRequest(NEVER, answers["ends"], 9))
    pump()
    call("news", FetchRequest(NEVER, answers["follows"], 9))
    pump()
    assert [record.payload for record in answers["all"].records] == [b"1", b"2"]
    assert answers["end"] == Fetched([], ended=True)
    assert len(answers.pop("news").records) == 2
    call("news", FetchRequest(NEVER, answers["follows"], 9))
    call("progress", ProgressRequest(NEVER, answers["follows"]))
    pump()
    assert "news" not in answers
    progress: Progress = answers["progress"]
    assert progress.caught_up
    (rid,) = log.insert(b"3")
    assert rid.gsn >= progress.position.gsn
    pump()
    assert [record.rid for record in answers.pop("news").records] == [rid]
    call("news", FetchRequest(NEVER, answers["follows"], 9))
    call("unsubscribed", UnsubscribeRequest(NEVER, answers["follows"]))
    pump()
    assert answers["news"] == Fetched([], ended=True)
    call("late", FetchRequest(NEVER, answers["follows"], 9))
    pump()
    assert isinstance(answers["late"], ClosedError)


def test_trimmed_records_are_absent_for_reads_and_subscriptions() -> None:
    log = FakeLog(seed=2, holes=0)
    calls = LogTasks(log.core(), 0)
    rids = [ask(calls, insert(b"%d" % i, log.tail))[0] for i in range(9)]
    number = ask(calls, SubscribeRequest(NEVER, RID_GENESIS, follow=True))
    ask(calls, TrimRequest(NEVER, rids[4]))
    error = ask(calls, ReadRequest(NEVER, rids[3]))
    assert isinstance(error, TrimmedError)
    assert error.first == rids[4]
    assert ask(calls, ReadRequest(NEVER, rids[4])).payload == b"4"
    assert isinstance(ask(calls, FetchRequest(NEVER, number, 1)), TrimmedError)
    assert isinstance(ask(calls, SubscribeRequest(NEVER, rids[0], follow=True)), TrimmedError)
    nothing = RecordId(10**6, 0)
    assert isinstance(ask(calls, ReadRequest(NEVER, nothing)), NoSuchRecordError)


@pytest.mark.parametrize(
    ("fault", "is_in"), [(OUTCOME_UNKNOWN_IN, True), (OUTCOME_UNKNOWN_OUT, False)]
)
def test_an_unknown_insert_is_resolved_to_its_outcome(fault: str, is_in: bool) -> None:
    log = FakeLog()
    log.faults.append(fail_inserts(fault))
    calls = LogTasks(log.core(), 0)
    error = ask(calls, insert(b"x"))
    assert isinstance(error, OutcomeUnknownError)
    (rid,) = ask(calls, ResolveRequest(NEVER, error.doubt))  # type: ignore[arg-type]
    assert (rid is not None) == is_in == bool(log.gsns)


def test_a_silent_insert_has_an_unknown_outcome_at_its_deadline() -> None:
    log = FakeLog()
    log.faults.append(fail_inserts(SILENT_IN))
    calls = LogTasks(log.core(), 0)
    answers: list[Any] = []
    calls.call(insert(b"x", deadline=10), answers.append)
    calls.step(Wakeup(), 9)
    assert not answers
    calls.step(Wakeup(), 10)
    assert isinstance(answers[0], OutcomeUnknownError)
    assert len(log.gsns) == 1
