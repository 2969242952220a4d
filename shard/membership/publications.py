"""Leases that the membership service publishes to all servers at once.

A publication may be lost. The server notices that with the next publication, which leaves a gap, or
when its last lease ends. Its next heartbeat then reports the gap, or that no publication came, and
the service sends what is missing over the server's own connection (docs/protocol.md, section 13.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import ReceivePublications
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import LeaseAnnounced

#: Time after which a server without publications begins to receive them again: the system may have
#: refused it what that needs.
_REPEAT_NS: Final = 60 * NS_PER_S


class Publications:
    """The publications that one server receives."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The endpoint of each node of the service that publishes.
        self._endpoints: Final[dict[bytes, str]] = {}
        #: Time from which on the effect is repeated if leases come otherwise.
        self._repeat_at = 0
        #: Time at which the publication of the next lease is overdue, in ns; None: none is awaited.
        self.overdue_at: int | None = None

    def on_lease_announced(
        self, route: bytes, message: LeaseAnnounced, now: int, *, has_leases: bool
    ) -> None:
        """Receive what the sender publishes; record whether the last lease was a publication."""
        state, publisher = self._state, message.publisher
        is_silent = has_leases and not message.is_publication and now >= self._repeat_at
        if publisher and (is_silent or self._endpoints.get(route) != publisher):
            self._endpoints[route] = publisher
            self._repeat_at = now + _REPEAT_NS
            state.effects.append(ReceivePublications(route, publisher))
        if message.is_publication and self._brought_last_lease(message):
            state.publisher = publisher
        elif has_leases:
            state.publisher = ""
        self.overdue_at = state.clock.ends_at if state.publisher else None

    def _brought_last_lease(self, message: LeaseAnnounced) -> bool:
        last = self._state.clock.last
        digest = message.runs[-1].last.digest if message.runs else message.digest
        return last is not None and last.digest == digest

    def tick(self, now: int) -> bool:
        """Return whether the publication of the next lease was lost, as of now."""
        if self.overdue_at is None or now < self.overdue_at:
            return False
        self.overdue_at = None
        self._state.publisher = ""
        return True
