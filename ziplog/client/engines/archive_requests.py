"""Requests of an engine to archives, each in a thread of its own.

An archive serves one request at a time over TCP, and a client asks it rarely: once for each shard
when a reader begins in the middle of the log. So the node's step does not wait for the reply.

Rule: only the thread that drives the engine takes replies; a reply wakes it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.client.common.requests import ArchiveReply
from ziplog.core.units import NEVER
from ziplog.errors import UnavailableError
from ziplog.runtime.descriptors import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.core.node import AskArchive
    from ziplog.core.writer_table import TableAt

#: Timeout of each step of an answer, in seconds.
_TIMEOUT_S: Final = 5.0


class ArchiveRequests:
    """The requests of one engine."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create it; `wake` is called on another thread when a reply has come."""
        self._wake: Final = wake
        #: The replies that were not taken yet.
        self.replies: Final[deque[ArchiveReply]] = deque()

    def start(self, request: AskArchive) -> None:
        """Send a request in the background."""
        thread = threading.Thread(
            target=self._run, args=(request,), name="ziplog-archive", daemon=True
        )
        try:
            start_thread(thread, "cannot ask an archive")
        except UnavailableError:
            self._reply(request, None)

    def _run(self, request: AskArchive) -> None:
        self._reply(request, _table(request))

    def _reply(self, request: AskArchive, table: TableAt | None) -> None:
        self.replies.append(ArchiveReply(NEVER, request.number, table))
        self._wake()


def _table(request: AskArchive) -> TableAt | None:
    """Return the reply of an archive; None: it has none."""
    from ziplog.archive.client import ArchiveClient  # noqa: PLC0415 - few clients need it

    archive = ArchiveClient(
        request.host, request.port, request.cluster, request.shard, timeout_s=_TIMEOUT_S
    )
    with archive:
        try:
            return archive.writers(request.gsn)
        except UnavailableError:
            return None
