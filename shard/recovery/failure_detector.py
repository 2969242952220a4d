"""Who of the shard's replicas is there, as this one hears it (docs/protocol.md, section 11).

Every replica tells the others four times per suspicion time that it is there, and in which view. A
peer that is silent for so long, in limbo, or in an older view is suspected. Rule: time that this
server itself did not run accuses nobody, nor (within limits) time in which it had input that it had
not looked at. Invariant: nobody is suspected who was just heard to be
fine, in this view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.wire import Beat, Suspect

if TYPE_CHECKING:
    from shard.recovery.participant import LogClaim
    from shard.state.replica_state import ReplicaState

_MS: Final = 1_000_000
#: All servers of a shard are started at about the same time: nobody is suspected before that.
STARTUP_NS: Final = 4000 * _MS
#: While something is wrong, the failure handler is told so so often.
SUSPECT_INTERVAL_NS: Final = 100 * _MS
#: After so long without running, this server may have missed everything.
STALE_NS: Final = 5000 * _MS
#: So many suspicion times of silence count even if input was unread all the time: a flood must not
#: hide that a peer has died.
UNREAD_TIMES: Final = 5
#: What comes so soon after that may have been waiting for it all the time: it proves nothing.
_WAITING_NS: Final = 250 * _MS


class FailureDetector:
    """What one replica knows of the others."""

    def __init__(self, state: ReplicaState, now: int) -> None:
        self._state: Final = state
        config = state.config
        self._others: Final = [s for s in range(len(config.replicas)) if s != state.server]
        self._handlers: Final = tuple(node.name.encode() for node in config.handlers)
        self._suspicion_ns: Final = config.suspicion_ms * _MS
        self._beat_ns: Final = self._suspicion_ns // 4
        #: When each peer was last heard to be fine, and what it said last.
        self._last_beat: Final = dict.fromkeys(self._others, now + STARTUP_NS)
        #: Peers that said that they are not fit for this view.
        self._unfit: Final[set[int]] = set()
        #: Silence counts from here on at the earliest.
        self._listening_since = now
        self._beat_due = now
        self._ticked_at = now
        #: Frames wait that this server has not looked at; the last time that this was so.
        self._is_unread = False
        self._read_at = now
        self._suspect_due = now
        #: This server did not run for long and has heard nobody since.
        self.is_stale = False
        #: The membership service says that the shard is being recovered, whatever is seen here.
        self.is_recovering = False

    def on_pause(self, now: int) -> None:
        """Note that this server did not run: whom it did not hear may have spoken."""
        self._listening_since = now
        if self._others:
            self.is_stale = True

    def on_unread_input(self, now: int, *, unread: bool) -> None:
        """Note whether all input was looked at: a sign of life may be in the rest."""
        if unread or self._is_unread:
            self._read_at, self._is_unread = now, unread

    def on_fresh_message(self, now: int) -> None:
        """Note that somebody who would know of a higher view was heard."""
        if now - self._listening_since >= _WAITING_NS:
            self.is_stale = False

    def on_beat(self, beat: Beat, now: int) -> None:
        """Take a peer's sign of life."""
        if beat.server not in self._last_beat:
            return
        self.on_fresh_message(now)
        if beat.view == self._state.view and beat.state in {"up", "frozen", "joined"}:
            self._last_beat[beat.server] = now
            self._unfit.discard(beat.server)
        elif beat.state == "limbo" or 0 < beat.view < self._state.view:
            self._unfit.add(beat.server)
            self._suspect_due = min(self._suspect_due, now)

    def on_view_start(self, now: int) -> None:
        """Everybody was there when this view began."""
        self._unfit.clear()
        for server in self._others:
            self._last_beat[server] = now

    def suspects(self, now: int) -> list[int]:
        """Return the peers that have probably failed, by index."""
        since, suspicion = self._listening_since, self._suspicion_ns
        read = now if self._is_unread else self._read_at
        return [
            server
            for server, heard in self._last_beat.items()
            if server in self._unfit
            or now - max(heard, since, read) >= suspicion
            or now - max(heard, since) >= UNREAD_TIMES * suspicion
        ]

    def tick(self, now: int, claim: LogClaim) -> None:
        """Say that this server is there; tell the handler what is wrong."""
        if not self._handlers or not self._state.cluster:
            return
        if now - self._ticked_at > self._suspicion_ns // 2:
            self._listening_since = now
        self._ticked_at = now
        if now >= self._beat_due:
            self._beat_due = now + self._beat_ns
            self._send_beat()
        if now >= self._suspect_due:
            suspects = self.suspects(now)
            is_well = self._state.state == "up" and not self.is_recovering
            if suspects or not (is_well or self._state.state == "starting"):
                self._suspect_due = now + SUSPECT_INTERVAL_NS
                self._send_suspicions(suspects, claim)
            else:
                self._suspect_due = self._beat_due

    def expedite(self, now: int) -> None:
        """Something has changed that the others should know at once."""
        self._beat_due = self._suspect_due = now

    def next_wakeup(self) -> int | None:
        """Return when something becomes due."""
        if not self._handlers or not self._state.cluster:
            return None
        return min(self._beat_due, self._suspect_due)

    def _send_beat(self) -> None:
        state = self._state
        state.broadcast(
            state.peers,
            Beat(
                state.cluster, state.shard, state.view, state.server, state.incarnation, state.state
            ),
        )

    def _send_suspicions(self, suspects: list[int], claim: LogClaim) -> None:
        state = self._state
        state.broadcast(
            self._handlers,
            Suspect(
                state.cluster, state.config.name, state.shard, state.view, state.server,
                state.incarnation, state.state, suspects, claim.last, claim.last_view,
                claim.number, state.config.identity, claim.is_damaged,
            ),
        )  # fmt: skip

    def check(self) -> None:
        """Assert the invariant."""
        assert self._state.server not in self._last_beat
