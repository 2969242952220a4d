"""What is read next is read while what was read before is taken.

Spark's Python process sends a batch to Java, which takes it in when it is through with the one
before; for most of that time it would wait. Rule: one step ahead, no more, so memory holds two.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

_T = TypeVar("_T")


def ahead(steps: Generator[_T]) -> Generator[_T]:
    """Give what a generator gives, which runs in a thread and goes on before it is asked to.

    Its error comes where it would come without. It is closed with this one, once it has done the
    step that is under way.
    """
    with ThreadPoolExecutor(1, "ahead") as thread:
        try:
            upcoming = thread.submit(next, steps, None)
            while (step := upcoming.result()) is not None:
                upcoming = thread.submit(next, steps, None)
                yield step
        finally:
            # By the thread that runs it.
            thread.submit(steps.close).result()
