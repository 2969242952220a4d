"""State that a Python worker process of Spark keeps between tasks, which run one at a time."""

from __future__ import annotations

import gc
from functools import cache

from ziplog.segments.buffer_pool import BufferPool


@cache
def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection in this process, permanently.

    Call it in a worker process after all imports. Spark runs a full garbage collection after each
    task, and nearly all objects belong to modules.
    """
    gc.freeze()


@cache
def read_memory() -> BufferPool:
    """Return the buffer pool of this process's tasks."""
    return BufferPool()
