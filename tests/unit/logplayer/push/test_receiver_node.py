"""The receiver's state machine: what it refuses, what it remembers, and what it does once."""

from __future__ import annotations

from typing import Any, Final

import pytest

from logplayer.contract import Fenced, Opened, Rejected, Retry, TargetSpec
from logplayer.push import messages, receiver_node
from logplayer.push.messages import (
    PushBatch,
    PushClose,
    PushDone,
    PushedRecord,
    PushFailed,
    PushMessage,
    PushOpen,
    PushOpened,
    PushQuery,
    PushWorking,
)
from logplayer.push.receiver_node import IDLE_NS, ReceiverNode
from logplayer.steps import CloseTarget, Deliver, OpenTarget, StepEnded
from tests.sim.player.targets import Sink, Store
from tests.unit.logplayer.push_world import behind
from ziplog.core.node import Received, ReportBadMessage, Send, Wakeup
from ziplog.errors import ConfigError

ROUTE: Final = b"\0route"
_RECORD: Final = PushedRecord(10, 0, b"payload", None, 1, 0)


class Bench:
    """A receiver, and what it did."""

    def __init__(self, spec: TargetSpec | None = None) -> None:
        self.node: Final = ReceiverNode(spec or behind(Store("db")))
        self.now = 1
        #: The last worker that opened its target.
        self.worker = 0

    def step(self, event: Any) -> list[Any]:
        effects = self.node.step(event, self.now)
        self.node.check()
        for effect in effects:
            if isinstance(effect, OpenTarget):
                self.worker = effect.worker
        return effects

    def send(self, message: PushMessage, route: bytes = ROUTE) -> list[Any]:
        return self.step(Received(route, message))

    def end(self, result: Any, worker: int = 0) -> list[Any]:
        return self.step(StepEnded(worker or self.worker, result))

    def open(self, number: int = 1, term: int = 5, position: int = 0) -> None:
        assert self.send(opening(number, term)), "nothing was opened"
        (reply,) = self.end(Opened(position))
        assert isinstance(reply.message, PushOpened)


def fields(number: int, term: int = 5, partition: int = 0) -> tuple[int, str, str, int, int, int]:
    return (9, "orders", "db", partition, term, number)


def opening(number: int, term: int = 5, **more: Any) -> PushOpen:
    rest: dict[str, Any] = {"stores_position": True, "keeps_rejected": False, **more}
    return PushOpen(*fields(number, term), 1, 2, 0, 0, b"", has_moved=False, **rest)


def batch(number: int, start: int = 0, stop: int = 20, term: int = 5) -> PushBatch:
    return PushBatch(*fields(number, term), start, stop, 7, [_RECORD], [])


def failure(effects: list[Any]) -> tuple[str, str]:
    (effect,) = effects
    assert isinstance(effect, Send)
    assert isinstance(effect.message, PushFailed)
    return effect.message.kind, effect.message.text


def test_a_target_is_opened_and_gets_batches() -> None:
    bench = Bench()
    (effect,) = bench.send(opening(1))
    assert isinstance(effect, OpenTarget)
    assert effect.task.cursor == "orders/db/0"
    assert effect.task.term == 5
    (reply,) = bench.end(Opened(7, b"mark"))
    assert reply == Send(ROUTE, PushOpened(*fields(1), 7, b"mark"))
    (effect,) = bench.send(batch(2, 7))
    assert isinstance(effect, Deliver)
    assert [one.payload for one in effect.batch.records] == [b"payload"]
    (reply,) = bench.end(b"next")
    assert reply == Send(ROUTE, PushDone(*fields(2), b"next"))


def test_a_repetition_is_answered_from_memory() -> None:
    bench = Bench()
    bench.open()
    first = bench.send(batch(2))
    assert isinstance(first[0], Deliver)
    done = bench.end(None)
    assert bench.send(batch(2), b"\0other") == [Send(b"\0other", done[0].message)]
    assert bench.send(PushQuery(*fields(2))) == done


def test_a_repetition_of_a_step_under_way_is_answered_at_its_end() -> None:
    bench = Bench()
    bench.send(opening(1))
    assert bench.send(opening(1)) == [Send(ROUTE, PushWorking(*fields(1)))]
    bench.end(Opened(0))
    bench.send(batch(2))
    assert bench.send(PushQuery(*fields(2))) == [Send(ROUTE, PushWorking(*fields(2)))]
    assert bench.send(batch(2), b"\0new") == [Send(b"\0new", PushWorking(*fields(2)))]
    assert bench.end(None) == [Send(b"\0new", PushDone(*fields(2), None))]


def test_an_old_number_is_ignored() -> None:
    bench = Bench()
    bench.open(number=3)
    assert bench.send(batch(2)) == []
    assert bench.send(PushClose(*fields(2))) == []
    assert bench.send(batch(4))


def test_a_batch_that_comes_after_its_query_is_refused() -> None:
    bench = Bench()
    bench.open()
    assert failure(bench.send(PushQuery(*fields(2))))[0] == "lost"
    assert failure(bench.send(batch(2)))[0] == "lost"
    assert failure(bench.send(batch(3)))[0] == "lost", "the outcome of 2 is unknown to the player"
    bench.open(number=4)
    assert isinstance(bench.send(batch(5))[0], Deliver)


def test_the_result_of_an_older_request_is_no_reply_to_a_newer_one() -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    assert failure(bench.send(PushQuery(*fields(3))))[0] == "lost"
    assert bench.end(None) == []
    assert failure(bench.send(PushQuery(*fields(3))))[0] == "lost"


def test_lower_terms_are_refused() -> None:
    bench = Bench()
    bench.open(term=6)
    for message in (opening(1), batch(2), PushQuery(*fields(3))):
        assert failure(bench.send(message))[0] == "fenced"
    assert bench.send(PushClose(*fields(4))) == []
    assert isinstance(bench.send(batch(2, term=6))[0], Deliver)


def test_a_term_is_refused_from_the_request_of_a_later_one_on() -> None:
    bench = Bench()
    bench.open(term=5)
    bench.send(opening(1, term=6))
    assert failure(bench.send(batch(2)))[0] == "fenced"


def test_a_term_that_did_not_open_gets_no_batch() -> None:
    bench = Bench()
    assert failure(bench.send(batch(1)))[0] == "lost"
    bench.open(term=5)
    assert failure(bench.send(batch(1, term=6)))[0] == "lost"
    assert failure(bench.send(PushQuery(*fields(1, term=6))))[0] == "lost"
    assert bench.send(PushClose(*fields(1, term=6))) == []
    assert isinstance(bench.send(batch(2))[0], Deliver), "the receiver forgot term 5"


@pytest.mark.parametrize(("start", "stop"), [(21, 30), (19, 30), (20, 19)])
def test_a_batch_that_does_not_start_where_the_target_stands_is_refused(
    start: int, stop: int
) -> None:
    bench = Bench()
    bench.open(position=20)
    assert failure(bench.send(batch(2, start, stop)))[0] == "fenced"
    assert failure(bench.send(batch(3, 20, 30)))[0] == "lost"


def test_a_target_without_position_may_pass_positions_but_not_go_back() -> None:
    bench = Bench(behind(Sink("db")))
    bench.send(opening(1, stores_position=False))
    bench.end(Opened())
    bench.send(batch(2, 5, 20))
    bench.end(None)
    assert isinstance(bench.send(batch(3, 25, 30))[0], Deliver)
    bench.end(None)
    assert failure(bench.send(batch(4, 20, 31)))[0] == "fenced"


def test_an_open_waits_for_the_step_of_the_former_claim() -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    worker = bench.worker
    assert bench.send(opening(1, term=6), b"\0new") == []
    assert bench.send(opening(1, term=6), b"\0new") == [
        Send(b"\0new", PushWorking(*fields(1, term=6)))
    ]
    closed, opened = bench.end(None, worker)
    assert closed == CloseTarget(worker)
    assert isinstance(opened, OpenTarget)
    assert opened.task.term == 6
    assert opened.worker != worker


def test_the_last_of_several_opens_counts() -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    worker = bench.worker
    for term in (6, 7):
        assert bench.send(opening(1, term=term)) == []
    assert bench.end(None, worker)[-1].task.term == 7


def test_an_open_of_the_same_claim_uses_its_connection() -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    bench.end(Retry("the connection broke"))
    (opened,) = bench.send(opening(3))
    assert isinstance(opened, OpenTarget)
    assert opened.worker == bench.worker == 1


def test_a_close_waits_for_the_step_under_way() -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    assert bench.send(PushClose(*fields(3))) == []
    assert bench.end(None) == [CloseTarget(bench.worker)]
    assert failure(bench.send(batch(4)))[0] == "lost"


def test_a_closed_task_keeps_its_term() -> None:
    bench = Bench()
    bench.open(term=6)
    assert bench.send(PushClose(*fields(2, term=6))) == [CloseTarget(1)]
    assert failure(bench.send(opening(1)))[0] == "fenced"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Retry("busy", 2), ("retry", "busy", 2.0, None, "")),
        (Retry("busy", 10**400), ("retry", "busy", 3600.0, None, "")),
        (Retry("busy"), ("retry", "busy", None, None, "")),
        (OSError("full"), ("retry", "OSError: full", None, None, "")),
        (Rejected(0, "bad"), ("rejected", "bad", None, 0, "")),
        (Rejected(2**70, "bad"), ("rejected", "bad", None, None, "")),
        (Rejected("bad"), ("rejected", "bad", None, None, "")),
        (Fenced("later"), ("fenced", "later", None, None, "")),
        (TypeError("x" * 9000), ("bug", "x" * 2000, None, None, "TypeError")),
        (ModuleNotFoundError("no"), ("bug", "no", None, None, "ImportError")),
        (ConfigError("a", 1, "2"), ("bug", "a is 1; it must be 2", None, None, "ConfigError")),
    ],
)  # fmt: skip
def test_errors_of_the_target_keep_their_attributes(error: Exception, expected: Any) -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    (effect,) = bench.end(error)
    reply = messages.decode(messages.msgspec.msgpack.encode(effect.message))
    assert isinstance(reply, PushFailed)
    assert (reply.kind, reply.text, reply.after_s, reply.index, reply.error) == expected


@pytest.mark.parametrize("error", [Retry("x"), OSError(), Fenced("x"), TypeError("x")])
def test_after_an_unknown_outcome_the_target_is_opened_first(error: Exception) -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    bench.end(error)
    assert failure(bench.send(batch(3)))[0] == "lost"


def test_after_a_rejection_the_target_stands_where_it_stood() -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    bench.end(Rejected(0, "bad"))
    assert isinstance(bench.send(batch(3, 0, 10))[0], Deliver)


def test_tasks_without_messages_are_closed_and_forgotten() -> None:
    bench = Bench()
    bench.open()
    assert bench.node.next_wakeup() == 1 + IDLE_NS
    bench.now = IDLE_NS
    assert bench.step(Wakeup()) == []
    bench.now += 1
    assert bench.step(Wakeup()) == [CloseTarget(bench.worker)]
    assert bench.node.next_wakeup() is None
    assert failure(bench.send(batch(2)))[0] == "lost"


def test_a_step_under_way_is_never_forgotten() -> None:
    bench = Bench()
    bench.open()
    bench.send(batch(2))
    bench.now += 2 * IDLE_NS
    assert bench.node.next_wakeup() is None
    assert bench.step(Wakeup()) == []
    assert bench.end(None)


def test_the_number_of_tasks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_node, "MAX_TASKS", 1)
    bench = Bench()
    bench.open()
    other = PushOpen(
        *fields(1, partition=1), 1, 2, 0, 0, b"", has_moved=False, stores_position=True,
        keeps_rejected=False,
    )  # fmt: skip
    assert failure(bench.send(other)) == ("retry", "the receiver has 1 tasks already")


def test_a_reply_is_no_request() -> None:
    (effect,) = Bench().send(PushWorking(*fields(1)))
    assert effect == ReportBadMessage(ROUTE, "PushWorking for a receiver")


def test_players_with_other_settings_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_node, "MAX_TASKS", 1)
    bench = Bench()
    other = PushOpen(
        9, "orders", "db", 0, 5, 1, 3, 2, 0, 0, b"", has_moved=False, stores_position=True,
        keeps_rejected=False,
    )  # fmt: skip
    for _ in range(2):
        kind, text = failure(bench.send(other))
        assert kind == "bug"
        assert "partitions = 1, the player's 3" in text
    bench.open()
