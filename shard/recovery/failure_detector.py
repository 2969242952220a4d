"""Failure detector of one shard: tracks heartbeats of the other replicas.

Every replica sends its peers four heartbeats per suspicion timeout, each with its view, state and
timeout. A peer is suspected after one suspicion timeout without a healthy heartbeat in the current
view or a later one, or at once if it reports limbo or an older view. Time during which this process
was paused does not count. Nor does, within limits, time with unread input.

Timeouts of replicas may differ while an operator changes them. So the timeout for a peer is the
larger one of both, and heartbeats follow the smallest one. See docs/protocol.md, section 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.core import distance
from ziplog.core.units import NS_PER_MS
from ziplog.wire import Beat, Suspect

if TYPE_CHECKING:
    from shard.recovery.participant import LogClaim
    from shard.state.replica_state import ReplicaState

#: Grace period after a start: all servers of a shard start at about the same time.
STARTUP_NS: Final = 4000 * NS_PER_MS
#: Interval between `Suspect` messages while a peer is suspected.
SUSPECT_INTERVAL_NS: Final = 100 * NS_PER_MS
#: Pause after which this server may have missed any message, a recovery's too.
STALE_NS: Final = 5000 * NS_PER_MS
#: Suspicion timeouts of silence that count even if input was unread all the time: a flood must not
#: hide a dead peer.
UNREAD_TIMEOUTS: Final = 5
#: Suspicion timeouts after the start of a view within which a heartbeat may be from before it.
LATE_TIMEOUTS: Final = 5
#: The least suspicion timeout of a cluster file; a heartbeat has 0 if the sender reports none.
_LEAST_SUSPICION_MS: Final = 100


class FailureDetector:
    """Heartbeats and suspicions of one replica's peers."""

    def __init__(self, state: ReplicaState, now: int) -> None:
        self._state: Final = state
        config = state.config
        self._others: Final = [s for s in range(len(config.replicas)) if s != state.server]
        self._handlers: Final = tuple(node.name.encode() for node in config.handlers)
        #: This server's suspicion timeout, and that of each peer: at first the same.
        self._suspicion_ns = config.suspicion_ms * NS_PER_MS
        self._peer_suspicion_ns: Final = dict.fromkeys(self._others, self._suspicion_ns)
        #: Time of the last healthy heartbeat of each peer.
        self._last_beat: Final = dict.fromkeys(self._others, now + STARTUP_NS)
        #: The incarnation in the last heartbeat of each peer.
        self._incarnations: Final[dict[int, int]] = {}
        #: When the view started, and the incarnations that were known then.
        self._view_started_at = now
        self._joined: dict[int, int] = {}
        #: Peers that reported limbo or an older view.
        self._unfit: Final[set[int]] = set()
        #: Messages within this time after a pause may have waited in a queue: they prove nothing.
        self._waiting_ns: Final = distance.waiting_ns(config.limits.rtt_ms)
        #: Silence before this time does not count.
        self._listening_since = now
        self._beat_due = now
        self._ticked_at = now
        #: Whether received frames are unread, and the last time when they were.
        self._is_unread = False
        self._read_at = now
        self._suspect_due = now
        #: This server was paused for long and has received no message since.
        self.is_stale = False
        #: Since when the membership service reports that the shard is recovered; None: it is not.
        self._recovering_since: int | None = None
        #: Since when a peer is suspected and the membership service announces nothing; None: no.
        self._isolated_since: int | None = None

    def set_suspicion(self, suspicion_ms: int, now: int) -> None:
        """Change this server's suspicion timeout, and announce it to the peers."""
        if suspicion_ms * NS_PER_MS == self._suspicion_ns:
            return
        self._suspicion_ns = suspicion_ms * NS_PER_MS
        self.expedite(now)

    def on_pause(self, now: int) -> None:
        """Record a pause of this process: peers may have sent heartbeats meanwhile."""
        self._listening_since = now
        if self._others:
            self.is_stale = True

    def on_unread_input(self, now: int, *, unread: bool) -> None:
        """Record whether input is unread: it may contain a heartbeat."""
        if unread or self._is_unread:
            self._read_at, self._is_unread = now, unread

    def on_fresh_message(self, now: int) -> None:
        """Record a message from a process that would know of a higher view."""
        if now - self._listening_since >= self._waiting_ns:
            self.is_stale = False

    def on_beat(self, beat: Beat, now: int) -> None:
        """Record a peer's heartbeat."""
        if beat.server not in self._last_beat:
            return
        self.on_fresh_message(now)
        if beat.incarnation != self._incarnations.get(beat.server):
            self._incarnations[beat.server] = beat.incarnation
            self._beat_due = now  # A primary that has resumed decides nothing before it.
        if beat.suspicion_ms >= _LEAST_SUSPICION_MS:
            self._peer_suspicion_ns[beat.server] = beat.suspicion_ms * NS_PER_MS
        state = self._state
        # A server may still have to join a peer that has entered a later view.
        is_in_view = beat.view == state.view or (
            beat.view > state.view and state.server_state != "starting"
        )
        if self._is_from_before_view(beat, now):
            self._last_beat[beat.server] = now
        elif is_in_view and beat.state in {"up", "frozen", "joined"}:
            self._last_beat[beat.server] = now
            self._unfit.discard(beat.server)
        elif beat.state == "limbo" or 0 < beat.view < state.view:
            self._unfit.add(beat.server)
            self._suspect_due = min(self._suspect_due, now)

    def _is_from_before_view(self, beat: Beat, now: int) -> bool:
        """Whether the sender has joined the view since: the heartbeat is late.

        A process never returns to an older view. Without this rule, a heartbeat that takes longer
        than a recovery would begin the next recovery.
        """
        late_ns = LATE_TIMEOUTS * self._suspicion_of(beat.server)
        return (
            beat.view < self._state.view
            and self._state.server_state == "up"
            and beat.incarnation == self._joined.get(beat.server)
            and now - self._view_started_at < late_ns
        )

    def on_view_start(self, now: int) -> None:
        """Record that a view starts: all replicas were reachable then."""
        self._view_started_at, self._joined = now, dict(self._incarnations)
        self._unfit.clear()
        for server in self._others:
            self._last_beat[server] = now

    def on_placement(self, now: int, *, is_recovering: bool) -> None:
        """Record whether the membership service reports that the shard is recovered."""
        self._isolated_since = None
        if not is_recovering:
            self._recovering_since = None
        elif self._recovering_since is None:
            self._recovering_since = now

    def is_left_out(self, now: int) -> bool:
        """Whether the shard is, or may be, recovered without a request to this server to freeze.

        It may be if this server hears neither a peer nor the service, which would announce that.
        """
        rtt_ms = self._state.config.limits.rtt_ms
        limits = (
            (self._recovering_since, distance.left_out_ns(rtt_ms)),
            (self._isolated_since, distance.isolated_ns(rtt_ms)),
        )
        is_overdue = any(since is not None and now - since >= limit for since, limit in limits)
        return is_overdue and self._state.server_state == "up"

    def suspects(self, now: int) -> list[int]:
        """Return the indices of the suspected peers."""
        since = self._listening_since
        read = now if self._is_unread else self._read_at

        def is_silent(server: int, heard: int) -> bool:
            suspicion = self._suspicion_of(server)
            return (
                now - max(heard, since, read) >= suspicion
                or now - max(heard, since) >= UNREAD_TIMEOUTS * suspicion
            )

        return [
            server
            for server, heard in self._last_beat.items()
            if server in self._unfit or is_silent(server, heard)
        ]

    def _suspicion_of(self, server: int) -> int:
        """Return the silence after which a peer is suspected."""
        return max(self._suspicion_ns, self._peer_suspicion_ns[server])

    @property
    def _beat_ns(self) -> int:
        """Interval between heartbeats."""
        return min((self._suspicion_ns, *self._peer_suspicion_ns.values())) // 4

    def _next_check(self, now: int) -> int:
        """Return when to look for silent peers: with the next heartbeat, or before it."""
        times = (
            max(heard, self._listening_since, self._read_at) + self._suspicion_of(server)
            for server, heard in self._last_beat.items()
        )
        return min((at for at in times if now < at < self._beat_due), default=self._beat_due)

    def tick(self, now: int, claim: LogClaim) -> None:
        """Send a heartbeat, and report suspicions to the failure handlers, if they are due."""
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
            if not suspects:
                self._isolated_since = None
            elif self._isolated_since is None:
                self._isolated_since = now
            is_well = self._state.server_state == "up" and self._recovering_since is None
            if suspects or not (is_well or self._state.server_state == "starting"):
                self._suspect_due = now + SUSPECT_INTERVAL_NS
                self._send_suspicions(suspects, claim)
            else:
                self._suspect_due = self._next_check(now)

    def expedite(self, now: int) -> None:
        """Send the next heartbeat and report immediately: this server's state has changed."""
        self._beat_due = self._suspect_due = now

    def next_wakeup(self) -> int | None:
        """Return when the next message is due."""
        if not self._handlers or not self._state.cluster:
            return None
        return min(self._beat_due, self._suspect_due)

    def _send_beat(self) -> None:
        state = self._state
        state.broadcast(
            state.peers,
            Beat(
                state.cluster,
                state.shard,
                state.view,
                state.server,
                state.incarnation,
                state.server_state,
                self._suspicion_ns // NS_PER_MS,
                state.full,
                state.stream.last,
                state.stream.stable,
            ),
        )

    def _send_suspicions(self, suspects: list[int], claim: LogClaim) -> None:
        state = self._state
        state.broadcast(
            self._handlers,
            Suspect(
                state.cluster, state.config.name, state.shard, state.view, state.server,
                state.incarnation, state.server_state, suspects, claim.last, claim.last_view,
                claim.number, state.config.identity, claim.is_damaged,
                state.config.region,
            ),
        )  # fmt: skip

    def check(self) -> None:
        """Assert that this server does not track itself."""
        assert self._state.server not in self._last_beat
