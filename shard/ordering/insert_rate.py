"""Limits of each client's insert rate: a client that exceeds one is read again only later.

An admitted insert costs the time that it takes at the limit. A client may be ahead of its time by a
burst; beyond that, its connection is paused, so TCP holds back what it sends. Nothing is refused,
and each server measures for itself: all see the same rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import Pause
from ziplog.core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from shard.state.sessions import Session

#: How far a client may be ahead of its rate.
BURST_NS: Final = 100 * NS_PER_MS
#: Longest pause: a paused client cannot renew its subscriptions, either.
MAX_PAUSE_NS: Final = NS_PER_S


class InsertRate:
    """The limits of one server."""

    def __init__(self, inserts_per_s: int, bytes_per_s: int) -> None:
        """Allow each client this many records and bytes per second; 0: any number."""
        self._inserts_per_s: Final = inserts_per_s
        self._bytes_per_s: Final = bytes_per_s
        self.is_limited: Final = bool(inserts_per_s or bytes_per_s)

    def on_admitted(
        self, session: Session, route: bytes, records: int, size: int, now: int
    ) -> Pause | None:
        """Count an insert of `size` bytes; return the pause that its client needs now, if any."""
        cost = 0
        if self._inserts_per_s:
            cost = records * NS_PER_S // self._inserts_per_s
        if self._bytes_per_s:
            cost = max(cost, size * NS_PER_S // self._bytes_per_s)
        session.paid_until = max(session.paid_until, now) + cost
        if session.paid_until <= now + BURST_NS:
            return None
        return Pause(route, min(session.paid_until - BURST_NS, now + MAX_PAUSE_NS))
