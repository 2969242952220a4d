"""Tickets: the open calls of a blocking client, each with its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.engines.insert_future import InsertFuture

if TYPE_CHECKING:
    from queue import SimpleQueue

    from ziplog.client.common.requests import Request


class Ticket:
    """A thread's call. The driver writes it; the thread reads it once `done` is set."""

    __slots__ = ("done", "result", "signal")

    def __init__(self) -> None:
        self.done = False
        self.result: Any = None
        #: Set while its thread does not drive; wakes the thread.
        self.signal: SimpleQueue[None] | None = None


class FutureTicket(Ticket):
    """The ticket of a future."""

    __slots__ = ("future", "order", "size")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size: Final = size
        #: Its number among the futures of its client, from 1 on.
        self.order = 0
        self.future: Final = InsertFuture()
        # It cannot be cancelled: a sent insert may happen.
        self.future.set_running_or_notify_cancel()


#: A call with its number and perhaps its future's ticket; or a cancellation.
Incoming = tuple[int, "Request | None", FutureTicket | None]
