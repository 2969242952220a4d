"""The recorded events of the cluster: the latest ones, numbered from 1, for operators.

Part of the replicated state, so it survives restarts and changes of the leader. Rule: no decision
depends on it. Invariant: the number of kept events is limited, and their numbers have no gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from mms.commands import ClusterEvent, RecordEvents, Refusal

#: Maximum number of events that are kept.
MAX_EVENTS: Final = 500


class EventHistory:
    """The latest events."""

    def __init__(self, events: list[ClusterEvent] | None = None, last: int = 0) -> None:
        """Continue with these events; `last`: the number of the newest one, 0: there was none."""
        #: Oldest first.
        self.events: list[ClusterEvent] = events or []
        self.last = last

    def record(self, command: RecordEvents) -> Refusal:
        """Append the events of a command, unless it was applied before."""
        if command.first != self.last + 1:
            return "out-of-turn"
        self.events = [*self.events, *command.events][-MAX_EVENTS:]
        self.last += len(command.events)
        return ""

    def document(self, after: int) -> bytes:
        """Return the events with numbers above `after`, as JSON."""
        first = self.last - len(self.events) + 1
        found: list[dict[str, Any]] = [
            {
                "number": number,
                "at_us": event.at_us,
                "kind": event.kind,
                "shard": event.shard if event.shard >= 0 else None,
                "node": event.node or None,
                "text": event.text,
            }
            for number, event in enumerate(self.events, first)
            if number > after
        ]
        return msgspec.json.encode({"events": found, "last": self.last})

    def check(self) -> None:
        """Assert the invariant."""
        assert len(self.events) <= min(self.last, MAX_EVENTS)
