"""What Spark's Python processes keep from task to task: they run one after the other."""

from __future__ import annotations

import gc
from functools import cache

from ziplog.segments.buffer_pool import ReadMemory


@cache
def freeze_gc() -> None:
    """Let no search for garbage look at what is there by now, in this process, for good.

    To be called in a process of Spark's once all is imported: Spark has Python look through all its
    objects after each task, and nearly all of them are modules.
    """
    gc.freeze()


@cache
def read_memory() -> ReadMemory:
    """Return the memory that this process's tasks read into."""
    return ReadMemory()
