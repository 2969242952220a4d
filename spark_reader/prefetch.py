"""What is read next is read while what was read before is taken.

Spark's Python process sends a batch to Java, which takes it in when it is through with the one
before; for most of that time it would wait. Rule: one step ahead, no more, as each holds memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

_T = TypeVar("_T")


def prefetch(steps: Generator[_T]) -> Generator[_T]:
    """Give what a generator gives, which runs in a thread and goes on before it is asked to.

    Its error comes where it would come without. Who closes this one does not wait: the thread ends
    the step that is under way, and closes the generator.

    Args:
        steps: gives anything but None.

    """
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        upcoming = thread.submit(next, steps, None)
        while (step := upcoming.result()) is not None:
            upcoming = thread.submit(next, steps, None)
            yield step
    finally:
        # Nothing is waited for here: the thread itself may be where this is found to be garbage.
        # When Python ends, no thread is given anything to do.
        with suppress(RuntimeError):
            thread.submit(steps.close)
        thread.shutdown(wait=False)
