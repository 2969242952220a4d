"""Prefetching: same items, one item ahead, and the thread ends with its consumer."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from spark_reader.prefetch import prefetch
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Generator


class Steps:
    """Numbers up to a stop, and what became of them."""

    def __init__(self, stop: int, error: Exception | None = None) -> None:
        self._stop, self._error = stop, error
        self.made = 0
        self.threads: set[int] = set()
        self.closed_in: int | None = None

    def run(self) -> Generator[int]:
        try:
            for number in range(self._stop):
                self.threads.add(threading.get_ident())
                self.made += 1
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.closed_in = threading.get_ident()


@pytest.mark.parametrize("stop", [0, 1, 2, 50])
def test_items_come_in_order(stop: int) -> None:
    steps = Steps(stop)
    assert list(prefetch(steps.run())) == list(range(stop))
    assert steps.closed_in is not None


def test_exactly_one_item_is_prefetched() -> None:
    steps = Steps(10)
    with closing(prefetch(steps.run())) as taken:
        for number in range(4):
            assert next(taken) == number
            wait_until(lambda made=number + 2: steps.made == made, "the next step")  # type: ignore[misc]
    assert steps.made == 5


def test_an_error_comes_after_the_items_before_it() -> None:
    steps = Steps(3, OSError("lost"))
    taken = prefetch(steps.run())
    assert [next(taken) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="lost"):
        next(taken)


def test_close_closes_the_generator_in_its_own_thread() -> None:
    before = threading.active_count()
    steps = Steps(10)
    taken = prefetch(steps.run())
    assert next(taken) == 0
    taken.close()
    wait_until(lambda: steps.closed_in, "it is closed")
    assert {steps.closed_in} == steps.threads
    assert threading.get_ident() not in steps.threads
    wait_until(lambda: threading.active_count() <= before, "the thread ends")


def test_its_own_thread_may_garbage_collect_it() -> None:
    may_go_on, ended = threading.Event(), threading.Event()
    taken: list[Generator[int]] = []

    def run() -> Generator[int]:
        try:
            yield 0
            may_go_on.wait()
            taken.clear()
            yield 1
        finally:
            ended.set()

    taken.append(prefetch(run()))
    assert next(taken[0]) == 0
    may_go_on.set()
    assert ended.wait(40)


def test_without_a_first_read_no_thread_starts() -> None:
    steps = Steps(10)
    prefetch(steps.run()).close()
    assert steps.made == 0
