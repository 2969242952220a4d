"""Targets that are Python functions: at least once, in order."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from logplayer import targets
from logplayer.contract import Batch, Fenced, Opened, Rejected, Retry, Task
from tests.unit.logplayer.targets.databases import batch, record, task
from tests.waiting import next_turn
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.types import Record


def gsns(records: list[Record]) -> list[int]:
    return [one.rid.gsn for one in records]


def test_function_is_called_with_each_record() -> None:
    seen: list[Record] = []
    target = targets.function("list", seen.append).connect()
    assert target.open(task()) == Opened(None)
    assert target.deliver(batch(task(), 1, 4)) is None
    assert target.deliver(batch(task(), 4, 9)) is None
    target.close()
    assert gsns(seen) == [1, 2, 3, 5, 8]


def test_function_may_be_called_with_batches() -> None:
    seen: list[Any] = []
    target = targets.function("list", seen.append, batch=True).connect()
    target.open(task())
    target.deliver(batch(task(), 1, 4))
    target.deliver(batch(task(), 6, 8))  # no record in it
    assert [gsns(one) for one in seen] == [[1, 2, 3]]


def test_retry_does_not_repeat_the_records_that_are_done() -> None:
    seen: list[int] = []

    def handle(one: Record) -> None:
        seen.append(one.rid.gsn)
        if seen == [1, 2]:
            raise Retry("busy")

    target = targets.function("list", handle).connect()
    target.open(task())
    with pytest.raises(Retry):
        target.deliver(batch(task(), 1, 4))
    target.deliver(batch(task(), 1, 4))
    assert seen == [1, 2, 2, 3]


def test_rejected_record_has_its_index_and_may_be_left_out() -> None:
    seen: list[int] = []

    def handle(one: Record) -> None:
        if one.payload == b"bad":
            raise Rejected("no")
        seen.append(one.rid.gsn)

    target = targets.function("list", handle).connect()
    target.open(task())
    records = [record(1), record(2, b"bad"), record(3)]
    with pytest.raises(Rejected, match="no") as caught:
        target.deliver(batch(task(), 1, 4, records))
    assert caught.value.index == 1
    target.deliver(batch(task(), 1, 4, [records[0], records[2]]))
    assert seen == [1, 3]


def test_claim_begins_without_knowledge_of_the_former_one() -> None:
    seen: list[int] = []

    def handle(one: Record) -> None:
        seen.append(one.rid.gsn)
        if len(seen) == 2:
            raise OSError("broken")

    target = targets.function("list", handle).connect()
    target.open(task())
    with pytest.raises(OSError, match="broken"):
        target.deliver(batch(task(), 1, 4))
    target.open(task(2))
    target.deliver(batch(task(2), 1, 4))
    assert seen == [1, 2, 1, 2, 3]


async def stored(seen: list[Any], value: Any) -> None:
    await next_turn()
    seen.append((value, asyncio.get_running_loop()))


class Storing:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    async def __call__(self, one: Any) -> None:
        await stored(self.seen, one)


@pytest.mark.parametrize("kind", ["function", "partial", "object", "returns"])
def test_coroutines_are_awaited_in_order_in_one_loop(kind: str) -> None:
    seen: list[Any] = []

    async def handle(one: Record) -> None:
        await stored(seen, one)

    function: Any = {
        "function": handle,
        "partial": functools.partial(stored, seen),
        "object": Storing(seen),
        "returns": lambda one: stored(seen, one),
    }[kind]
    target = targets.function("list", function).connect()
    target.open(task())
    target.deliver(batch(task(), 1, 4))
    target.deliver(batch(task(), 4, 9))
    loops = {loop for _, loop in seen}
    assert [one.rid.gsn for one, _ in seen] == [1, 2, 3, 5, 8]
    assert len(loops) == 1
    target.close()
    assert loops.pop().is_closed()
    target.close()


def test_a_coroutine_may_take_batches_and_fail_as_a_function() -> None:
    seen: list[int] = []

    async def handle(records: list[Record]) -> None:
        await next_turn()
        if not seen:
            seen.append(0)
            raise Rejected(1, "no")
        seen.extend(gsns(records))

    target = targets.function("list", handle, batch=True).connect()
    target.open(task())
    with pytest.raises(Rejected, match="no") as caught:
        target.deliver(batch(task(), 1, 4))
    assert caught.value.index == 1
    target.deliver(batch(task(), 1, 4))
    target.close()
    assert seen == [0, 1, 2, 3]


def test_a_cancelled_coroutine_is_repeated_and_its_tasks_end_with_the_target() -> None:
    seen: list[int] = []
    ended: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    started = []

    async def handle(one: Record) -> None:
        started.append(asyncio.create_task(linger()))
        await next_turn()
        current = asyncio.current_task()
        if len(started) == 2 and current is not None:
            current.cancel()
            await next_turn()
        seen.append(one.rid.gsn)

    target = targets.function("list", handle).connect()
    target.open(task())
    with pytest.raises(asyncio.CancelledError):
        target.deliver(batch(task(), 1, 4))
    assert seen == [1]
    target.deliver(batch(task(), 1, 4))
    assert (seen, ended) == ([1, 2, 3], [])
    target.close()
    assert ended == ["cancelled"] * 4


class Own:
    """A target of its own."""

    stores_position = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.during: Callable[[], object] | None = None

    def open(self, of: Task) -> Opened:
        self.calls.append(f"open {of.term}")
        return Opened(of.position)

    def deliver(self, step: Batch) -> None:
        self.calls.append(f"deliver {step.start}")
        if self.during is not None:
            self.during()
            self.calls.append("delivered")

    def close(self) -> None:
        self.calls.append("close")


def test_target_object_is_used_as_it_is() -> None:
    own = Own()
    spec = targets.function("own", own)
    assert spec.stores_position
    used = spec.connect()
    assert used.open(task(position=5)) == Opened(5)
    used.deliver(batch(task(), 5, 9))
    used.close()
    assert own.calls == ["open 1", "deliver 5", "close"]


def test_target_object_is_not_closed_under_a_later_claim() -> None:
    """A seek ends a claim while its step is under way; its end comes after the next open."""
    own = Own()
    spec = targets.function("own", own)
    former, later = spec.connect(), spec.connect()
    former.open(task(1))
    later.open(task(2))
    with pytest.raises(Fenced):
        former.deliver(batch(task(1), 1, 4))
    former.close()
    later.deliver(batch(task(2), 1, 4))
    assert own.calls == ["open 1", "open 2", "deliver 1"]


def test_target_object_has_one_call_at_a_time() -> None:
    began, may_end, own = threading.Event(), threading.Event(), Own()

    def wait() -> None:
        began.set()
        may_end.wait()

    own.during = wait
    spec = targets.function("own", own)
    former, later = spec.connect(), spec.connect()
    former.open(task(1))
    slow = threading.Thread(target=former.deliver, args=(batch(task(1), 1, 4),))
    slow.start()
    began.wait()
    opens = threading.Thread(target=later.open, args=(task(2),))
    opens.start()
    may_end.set()
    for thread in (slow, opens):
        thread.join()
    assert own.calls == ["open 1", "deliver 1", "delivered", "open 2"]


def test_class_of_a_target_makes_one_for_each_task() -> None:
    spec = targets.function("own", Own, partitions=4)
    assert isinstance(spec.connect(), Own)
    assert spec.connect() is not spec.connect()


def test_unusable_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="partitions is 4; it must be 1 with one target object"):
        targets.function("own", Own(), partitions=4)
    with pytest.raises(ConfigError, match="batch is True; it must be left out"):
        targets.function("own", Own, batch=True)

    async def each(record: Record) -> Any:
        yield record

    with pytest.raises(ConfigError, match="a function without `yield`"):
        targets.function("own", each)

    class Silent(Own):
        stores_position = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="stores_position of the target is None"):
        targets.function("own", Silent)
