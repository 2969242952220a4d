"""Prefetching: a background thread reads the next batch while Spark consumes the current one.

Without it, Spark's Python process would mostly wait until Java accepts the batch. Rule: prefetch
one batch only, because each one holds memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

_T = TypeVar("_T")


def prefetch(steps: Generator[_T]) -> Generator[_T]:
    """Yield the items of a generator that runs one item ahead, in a thread.

    An error of the generator is raised in its place in the order. `close()` does not block: the
    thread finishes the current item, then closes the generator.

    Args:
        steps: yields anything except None.

    """
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        upcoming = thread.submit(next, steps, None)
        while (step := upcoming.result()) is not None:
            upcoming = thread.submit(next, steps, None)
            yield step
    finally:
        # No wait: the garbage collector may run this in the thread itself. While Python shuts down,
        # `submit` raises RuntimeError.
        with suppress(RuntimeError):
            thread.submit(steps.close)
        thread.shutdown(wait=False)
