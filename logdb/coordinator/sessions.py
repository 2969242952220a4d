"""Which route leads to which client's session, so that decisions are told unasked.

Rule: the session that was not heard of for longest is forgotten first; its client asks, then.
See docs/logdb.md, sections 7 and 11.
"""

from __future__ import annotations

from typing import Final

#: As many sessions are known.
MAX_SESSIONS: Final = 100_000


class Sessions:
    """The sessions that were heard of last."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit: Final = limit
        #: Each one's route; the one heard of last stands last.
        self._routes: Final[dict[bytes, bytes]] = {}
        #: The route of a session; None if it is not known.
        self.route = self._routes.get

    def __len__(self) -> int:
        return len(self._routes)

    def set_route(self, session: bytes, route: bytes) -> None:
        """Take a sign of life."""
        routes = self._routes
        routes.pop(session, None)
        routes[session] = route
        if len(routes) > self._limit:
            del routes[next(iter(routes))]
