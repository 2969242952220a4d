"""The progress of the backups, as their primary knows it from their reports.

The watermarks and the size of forwards depend on it: an entry is stable once all backups hold it,
and decisions may wait for others while no backup needs them at once (docs/protocol.md, section 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.ordering.reports import SUBSCRIBERS_EXPIRY_NS

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import Report


class BackupProgress:
    """What the backups of a view have reported, by their index."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        backups = range(1, len(state.config.replicas))
        #: The last entry that each backup holds, by its level.
        self.held: Final = dict.fromkeys(backups, state.stream.stable)
        #: The last entry that each backup has on stable storage.
        self.durable: Final = dict.fromkeys(backups, state.stream.durable)
        #: The backups that accept batched forwards.
        self._batching: Final[set[int]] = set()
        #: The backups whose readers receive records.
        self._followed: Final[set[int]] = set()
        #: Backups with subscribers, and the time until which that counts, in ns.
        self._subscribed: Final[dict[int, int]] = {}

    @property
    def may_batch(self) -> bool:
        """Whether there are backups, and all accept batched forwards."""
        return 0 < len(self.held) == len(self._batching)

    @property
    def is_followed(self) -> bool:
        """Whether a backup has readers that receive records."""
        return bool(self._followed)

    @property
    def has_subscribers(self) -> bool:
        """Whether a backup has subscribers."""
        return bool(self._subscribed)

    @property
    def complete_up_to(self) -> int:
        """The last entry that all backups have on stable storage, and hold by their level."""
        return min(*self.held.values(), *self.durable.values())

    def on_report(self, report: Report, now: int) -> bool:
        """Record a report of a backup of this view; return whether the backup holds more."""
        state, server = self._state, report.server
        is_batching = not report.forward_immediately
        is_followed = report.has_followers and not is_batching
        (self._followed.add if is_followed else self._followed.discard)(server)
        (self._batching.add if is_batching else self._batching.discard)(server)
        if report.has_subscribers:
            self._subscribed[server] = now + SUBSCRIBERS_EXPIRY_NS
            state.subscribers_until = max(self._subscribed.values())
        elif self._subscribed.pop(server, None) is not None:
            state.subscribers_until = max(self._subscribed.values(), default=now)
        last = state.stream.last
        held, durable = min(report.replicated_up_to, last), min(report.durable, last)
        state.round_trips.on_report(state.peers[server - 1], held, now)
        if held <= self.held[server] and durable <= self.durable[server]:
            return False
        self.held[server] = max(self.held[server], held)
        self.durable[server] = max(self.durable[server], durable)
        return True

    def behind(self, fseq: int) -> list[tuple[int, int]]:
        """Return the backups that lack entries below `fseq`: their indices, and what they hold."""
        return [
            (server, held)
            for server, held in self.held.items()
            if min(held, self.durable[server]) + 1 < fseq
        ]
