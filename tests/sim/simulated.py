"""Where runs and scripts take place: production code of this process, in one kernel's world.

`simulated` puts the kernel's disks, chance and trace where production code finds files, random
numbers and a logger. Rule: nothing of a run outlives it; everything is put back.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import structlog

import shard.storage.data_directory
import shard.storage.flusher
import shard.storage.segment_files
import shard.storage.segment_rewrite
import ziplog.raft.journal
import ziplog.raft.snapshot
import ziplog.segments.segment
from tests.simulator.disk import installed
from tests.simulator.raft import virtual

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulator.kernel import Kernel

#: Modules whose files are on the simulated disk.
_ON_DISK: Final = (
    shard.storage.data_directory,
    shard.storage.segment_files,
    shard.storage.flusher,
    shard.storage.segment_rewrite,
    ziplog.segments.segment,
    ziplog.raft.journal,
    ziplog.raft.snapshot,
)


@contextmanager
def simulated(kernel: Kernel, *, is_raft_real: bool = False) -> Iterator[None]:
    """Let servers and clients live in a kernel's world, as long as this lasts.

    Args:
        kernel: has the time, the chance and the trace.
        is_raft_real: the consensus library lives there, too.

    """
    consensus = virtual(kernel) if is_raft_real else nullcontext()
    with _logged(kernel), _uncollected(), installed(_ON_DISK, kernel.random), consensus:
        yield


@contextmanager
def _logged(kernel: Kernel) -> Iterator[None]:
    """Let what is logged be part of the trace."""

    def tell(_logger: object, _method: str, event: structlog.typing.EventDict) -> str:
        kernel.trace(" ".join(f"{key}={value}" for key, value in event.items()))
        raise structlog.DropEvent

    former = structlog.get_config()
    structlog.configure(processors=[tell], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**former)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let no collection of garbage fall into a run: what it ends would end at any time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
