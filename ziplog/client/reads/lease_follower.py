"""The leases from a reader's position on.

    (no lease known) --requested--> known --a `Deliver` or a reply extends them--> known

Streams bring the leases that follow (`Deliver.leases`). The reader requests them if it knows none,
if one is missing between, or if it has reached the end of the known ones and no stream brings more.
See docs/protocol.md, sections 3 and 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.lease_map import LeaseMap
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.wire import LeaseQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.core.view import LeaseRun
    from ziplog.wire import LeaseHistory

#: Interval before the first lease is requested again, and before later leases are.
_FIRST_RETRY_NS: Final = 50 * NS_PER_MS
_NEXT_RETRY_NS: Final = NS_PER_S


class LeaseFollower:
    """The known leases of one reader, and its requests for more."""

    def __init__(
        self, context: StepContext, routing: Routing, on_history: Callable[[int, bool], None]
    ) -> None:
        """Create one that knows no lease.

        Args:
            context: of the client.
            routing: of the client.
            on_history: called after each reply with the log's trim point, and whether the known
                leases have no gap.

        """
        self._context: Final = context
        self._routing: Final = routing
        self._membership: Final = routing.membership
        self._on_history: Final = on_history
        self.known: Final = LeaseMap()
        #: The open request (0: none), when to send it again, and the number of requests.
        self._request = 0
        self._due = NEVER
        self._attempts = 0
        self._is_closed = False

    def request(self, position: int) -> None:
        """Request the leases after the known ones; if none is known, the one of `position`."""
        gsn = self.known.stop or position
        lease = self._routing.lease
        if not self.known.stop and self._attempts % 2:
            # No lease contained the position: start with the newest one, unless it is beyond.
            gsn = min(lease.base, position) if lease is not None else 1
        self._attempts += 1
        self._due = NEVER
        self._membership.cancel(self._request)
        self._request = self._membership.send_request(
            lambda cluster, request: LeaseQuery(cluster, request, gsn),
            lambda history: self._on_reply(history, position),
        )

    def _on_reply(self, history: LeaseHistory, position: int) -> None:
        self._request = 0
        self._routing.update_placements(history.placements)
        is_whole = self.known.extend(history.runs)
        self._on_history(history.trim, is_whole)
        if self._is_closed:
            return
        if self.known.stop:
            self._retry_within(_NEXT_RETRY_NS)
        elif self._attempts == 1:
            self.request(position)
        else:
            self._retry_within(_FIRST_RETRY_NS)

    def _retry_within(self, interval: int) -> None:
        self._due = min(self._due, self._context.now + interval)
        self._context.set_timer(self._due)

    def extend(self, runs: Sequence[LeaseRun], position: int) -> bool:
        """Add the leases of a `Deliver`; return whether they were news."""
        if not runs or runs[-1].last.stop <= self.known.stop:
            return False
        if not self.known.extend(runs) and not self._request:
            self.request(position)
        return True

    def pass_end(self, *, is_urgent: bool) -> None:
        """Note that the reader has reached the end of the known leases."""
        self._retry_within(_FIRST_RETRY_NS if is_urgent else _NEXT_RETRY_NS)

    def tick(self, position: int) -> None:
        """Send the request that is due, if the reader still needs it."""
        if self._context.now >= self._due:
            self._due = NEVER
            if position >= self.known.stop:
                self.request(position)
        self._context.set_timer(self._due)

    def cancel(self) -> None:
        """End the open request."""
        self._membership.cancel(self._request)
        self._request, self._due = 0, NEVER

    def close(self) -> None:
        """End for good."""
        self._is_closed = True
        self.cancel()
