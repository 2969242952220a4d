"""An event loop that waits to the microsecond."""

from __future__ import annotations

import asyncio
import select
import selectors
from typing import Any


class _ExactSelector(selectors.EpollSelector):
    """Waits to the microsecond: epoll's own time-outs are whole milliseconds, rounded up."""

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait for a file, or for `timeout` seconds."""
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def exact_loop() -> asyncio.AbstractEventLoop:
    """Return such a loop, for `asyncio.Runner`."""
    return asyncio.SelectorEventLoop(_ExactSelector())
