"""The routes of client sessions, to which a coordinator sends decisions unasked.

The least recently seen session is forgotten first; its client then requests its decisions. See
docs/logdb.md, sections 7 and 11.
"""

from __future__ import annotations

from typing import Final

#: Maximum number of sessions.
MAX_SESSIONS: Final = 100_000


class Sessions:
    """The most recently seen sessions."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit: Final = limit
        #: The route of each session, ordered by the last message.
        self._routes: Final[dict[bytes, bytes]] = {}
        #: Returns the route of a session; None: unknown.
        self.route = self._routes.get

    def __len__(self) -> int:
        return len(self._routes)

    def set_route(self, session: bytes, route: bytes) -> None:
        """Record the route of a session that sent a message."""
        routes = self._routes
        routes.pop(session, None)
        routes[session] = route
        if len(routes) > self._limit:
            del routes[next(iter(routes))]
