"""Detection of an old copy of a data directory that was put in the place of a server's own one.

    a server resumes --heartbeats of all peers--> its log is compared: a primary decides again
    a heartbeat shows a longer log --> limbo: a recovery gives the server another server's log

A server that stopped cleanly resumes in its view as if it held its whole log. With an old copy of
its directory it does not: it would decide positions again that hold acknowledged records, or lead
a recovery without them. So the replicas of a view compare where their logs end.

Rule: a primary that resumed decides nothing before it has compared its log with all backups'.
Invariant: in one view, no backup's log is longer than the primary's, and no replica knows an entry
to be stable that another one lacks. See docs/protocol.md, section 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core.node import LogWarning

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.wire import Beat

#: States of a server that holds the whole log of its view, and has appended nothing of a later one.
_WHOLE: Final = frozenset({"up", "joined"})


class OldCopyDetector:
    """Compares the end of one replica's log with those of its peers."""

    def __init__(self, state: ReplicaState, *, resumes: bool) -> None:
        """`resumes`: the server resumed from a checkpoint."""
        self._state: Final = state
        self._resumed_view: Final = state.view
        # Without a failure handler, replicas send no heartbeats, and nothing recovers the shard.
        has_to_compare = resumes and state.server == 0 and bool(state.config.handlers)
        #: The backups whose logs this primary has to compare with its own.
        self._uncompared: Final = set(
            range(1, len(state.config.replicas)) if has_to_compare else ()
        )
        state.is_compared = not self._uncompared

    def compare(self, beat: Beat) -> bool:
        """Compare the logs; return whether this server's log is an old copy."""
        state, last = self._state, self._state.stream.last
        if beat.view != state.view or beat.state not in _WHOLE or state.server_state not in _WHOLE:
            return False
        held = beat.last if state.server == 0 else beat.stable
        if held > last:
            state.effects.append(LogWarning(
                f"{state.config.name} has an old copy of its data directory, so it copies the log"
                f" of another server: its log ends at entry {last}, but server {beat.server} of"
                f" the shard reports entry {held} in view {state.view}"
            ))  # fmt: skip
            return True
        self._uncompared.discard(beat.server)
        state.is_compared = not self._uncompared
        return False

    def on_view_start(self) -> None:
        """Record that a view starts: a recovery has compared the logs, unless it is an old view."""
        if self._state.view != self._resumed_view:
            self._uncompared.clear()
            self._state.is_compared = True
