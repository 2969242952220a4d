"""Connections that are not read for a while: TCP holds back what their peers send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import select

    from ziplog.runtime.connection import Connection


class PausedConnections:
    """The paused connections of a transport.

    Invariant: a paused connection has `is_readable`, so events do not queue it for reading.
    """

    def __init__(self) -> None:
        #: When each is read again, in ns.
        self.until: Final[dict[Connection, int]] = {}

    def add(self, connection: Connection, until: int) -> None:
        """Pause a connection, or pause it for longer."""
        connection.is_readable = True
        self.until[connection] = max(until, self.until.get(connection, 0))

    def resume(self, now: int, epoll: select.epoll) -> None:
        """End the pauses that are over: the kernel reports what has arrived meanwhile."""
        for connection in [one for one, until in self.until.items() if until <= now]:
            del self.until[connection]
            connection.is_readable = False
            if connection.fd >= 0:
                connection.report_again(epoll)
