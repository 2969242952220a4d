"""The short path of plain inserts, beside `Replica.step`.

An insert is plain if it depends on nothing but its session and the end of the log: it is new,
within the limits, and waits for nothing. Most inserts are plain. After each batch, the role
determines until when it accepts them; every event but a plain insert, a forward of these inserts,
or a hint of another shard ends that time. Meanwhile an insert needs no look at the rest of the
server. Its ack waits neither for the store nor for the end of the batch. The batch ends for the
role and the readers only (`end_batch`): the decisions are forwarded, and stable records delivered.

Invariant: the same inserts at the same times get the same slots and the same acks by `step`.
See docs/protocol.md, section 4.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.ordering.admission import held_unit, is_too_large
from ziplog.core.entries import decode_body
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.ordering.role import Role
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import Session
    from ziplog.segments.entry import Entry
    from ziplog.wire import Ahead, Forward, Insert, InsertAck

#: Longest time that the path is open after a `BatchEnd`.
MAX_PLAIN_NS: Final = 50 * NS_PER_MS
#: Longest time from one `BatchEnd` to the next while plain inserts arrive: the insert rate, for
#: example, is measured there.
MAX_REST_NS: Final = 5 * NS_PER_MS


class PlainInserts:
    """The plain inserts at one replica, their forwards, and hints of other shards."""

    def __init__(
        self,
        state: ReplicaState,
        apply_forward: Callable[[Forward, int], bool],
        deliver: Callable[[list[Entry], int], bool],
        send_early: Callable[[], bool],
    ) -> None:
        """Create a closed path.

        Args:
            state: of the replica.
            apply_forward: has the backup handle a forward, unless it is of another view.
            deliver: passes stable entries to the readers; returns whether one is behind.
            send_early: sends new decisions to early streams; returns whether one is behind.

        """
        self._state: Final = state
        self._apply_forward: Final = apply_forward
        self._deliver: Final = deliver
        self._send_early: Final = send_early
        self._role: Role | None = None
        #: A forward was handled since the last end of a batch.
        self._has_forward = False
        #: The next `BatchEnd` is due at this time, in ns, if plain inserts arrive.
        self._rest_until = 0
        #: Returns the effects of the plain inserts since the last step.
        self.pop_effects: Final = state.pop_effects
        #: Plain inserts are accepted until this time, in ns. Level `disk` acks after a flush.
        self._until = 0

    def stop(self) -> None:
        """Accept no plain inserts until `start`: another event happens."""
        self._until = 0

    def start(self, role: Role, now: int) -> None:
        """Accept plain inserts for as long as the role allows; call it after a batch."""
        state = self._state
        self._role = role
        self._has_forward = False
        self._rest_until = now + MAX_REST_NS
        if (
            state.level.is_memory
            and state.state == "up"
            and state.shard_state == "live"
            and not state.no_space
            and not state.has_no_positions
            and not state.limits_rate
        ):
            self._until = min(role.plain_until(now), now + MAX_PLAIN_NS)

    def insert(self, route: bytes, message: Insert, now: int) -> InsertAck | None:
        """Accept a plain insert and return its ack; None: nothing happened, pass it to `step`.

        The effect of storing it stays in the replica until `pop_effects`.
        """
        if now >= self._until:
            return None
        session = self._plain_session(message)
        if session is None:
            return None
        role, state = self._role, self._state
        assert role is not None, "plain inserts have not started"
        if message.first_incomplete > session.first_incomplete:
            role.on_settled(session, message.first_incomplete, now)
        unit = held_unit(route, message)
        if not role.accept_plain(session, unit, now):
            return None
        session.last_seen = state.last_insert = now
        return state.ack_of(unit)

    def _plain_session(self, message: Insert) -> Session | None:
        """Return the session of a plain insert; None: it is not plain."""
        state, seq, predecessor = self._state, message.seq, message.predecessor
        session = state.sessions.by_client.get(message.client)
        if (
            session is None
            or message.cluster != state.cluster
            or message.shard != state.shard
            or message.view != state.view
            or session.refused
            or 0 < message.since <= session.horizon
            or seq in session.units
            or (predecessor and (predecessor >= seq or not session.is_placed(predecessor)))
        ):
            return None
        lowest = max(message.first_incomplete, session.first_incomplete)
        limits = state.config.limits
        if not lowest <= seq < lowest + limits.max_unsettled_units:
            return None
        try:
            body = decode_body(message.body, message.count)
        except ProtocolError:
            return None
        return None if is_too_large(message, body, limits) else session

    def forward(self, message: Forward, now: int) -> bool:
        """Handle a forward at a backup; return False if nothing happened: pass it to `step`."""
        if now >= self._until or not self._apply_forward(message, now):
            return False
        assert self._role is not None, "plain inserts have not started"
        self._has_forward = True
        self._until = min(self._until, self._role.plain_until(now))
        return True

    def hint(self, message: Ahead, now: int) -> bool:
        """Handle a hint at a primary; return False if nothing happened: pass it to `step`."""
        role = self._role
        if now >= self._until or role is None or message.cluster != self._state.cluster:
            return False
        if not role.on_ahead_hint(message.gsn, now):
            return False
        self._until = min(self._until, role.plain_until(now))
        return True

    def end_batch(self, now: int) -> int:
        """End a batch of plain inserts, forwards and hints, for the role and the readers only.

        Returns the time until which no `BatchEnd` is needed, in ns; 0: one is due.
        """
        role = self._role
        if now >= self._until or role is None:
            return 0
        if self._has_forward:
            self._has_forward = False
            if self._deliver(role.on_batch_end(now) or [], now):
                return 0
        elif role.forwards_at_once:
            role.on_batch_end(now)
            if self._state.has_early_streams and self._send_early():
                return 0
        return min(self._rest_until, role.rest_until)
