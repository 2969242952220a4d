"""Environment of runs and scripts: production code in one kernel's time.

`simulated` replaces files, random numbers and the logger of production code by the kernel's disks,
generator and trace. Rule: everything is restored after a run.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import shard.storage.data_directory
import shard.storage.flusher
import shard.storage.segment_files
import shard.storage.segment_rewrite
import ziplog.raft.journal
import ziplog.raft.snapshot
import ziplog.runtime.wire_file
import ziplog.segments.durable_files
import ziplog.segments.segment
from tests.logged_events import events_go_to
from tests.simulator.disk import installed
from tests.simulator.raft import virtual

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulator.kernel import Kernel

#: Modules with files on the simulated disk.
_ON_DISK: Final = (
    shard.storage.data_directory,
    shard.storage.segment_files,
    shard.storage.flusher,
    shard.storage.segment_rewrite,
    ziplog.segments.durable_files,
    ziplog.segments.segment,
    ziplog.raft.journal,
    ziplog.raft.snapshot,
    ziplog.runtime.wire_file,
)


@contextmanager
def simulated(kernel: Kernel, *, is_raft_real: bool = False) -> Iterator[None]:
    """Run servers and clients in a kernel's time, within the context.

    Args:
        kernel: provides time, random numbers and trace.
        is_raft_real: run the real consensus library, too.

    """
    consensus = virtual(kernel) if is_raft_real else nullcontext()
    with _logged(kernel), _uncollected(), installed(_ON_DISK, kernel.random), consensus:
        yield


@contextmanager
def _logged(kernel: Kernel) -> Iterator[None]:
    """Add log messages to the trace."""

    def add_to_trace(event: dict[str, Any]) -> None:
        kernel.trace(" ".join(f"{key}={value}" for key, value in event.items()))

    with events_go_to(add_to_trace):
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection during a run: finalizers would run at random times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
