"""The short path of plain inserts, beside `Replica.step`.

An insert is plain if it depends on nothing but its session and the end of the log: it is new,
within the limits, and waits for nothing. Most inserts are plain. After each batch, the role
determines until when it accepts them. Every event ends that time but a plain insert, and the
messages that follow inserts (`MESSAGES`). Meanwhile an insert needs no look at the rest of the
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
from ziplog.wire import Ahead, Credit, Forward, Report, Want

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard.ordering.role import Role
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import Session
    from ziplog.core.message import Message
    from ziplog.segments.entry import Entry
    from ziplog.wire import Insert, InsertAck

#: Longest time that the path is open after a `BatchEnd`.
MAX_PLAIN_NS: Final = 50 * NS_PER_MS
#: Longest time from one `BatchEnd` to the next while plain inserts arrive: the insert rate, for
#: example, is measured there.
GENERAL_END_INTERVAL_NS: Final = 5 * NS_PER_MS

#: The other messages on the path: those that follow inserts while readers wait for their records.
MESSAGES: Final = (Forward, Report, Ahead, Want, Credit)


class PlainInserts:
    """The plain inserts at one replica, and the messages that follow them."""

    def __init__(
        self,
        state: ReplicaState,
        handle: Callable[[bytes, Message, int], None],
        deliver: Callable[[list[Entry], int], bool],
        send_early: Callable[[], bool],
    ) -> None:
        """Create a closed path.

        Args:
            state: of the replica.
            handle: handles a message of `MESSAGES`.
            deliver: passes stable entries to the readers; returns whether one is behind.
            send_early: sends new decisions to early streams; returns False if that needs the store,
                which gets the entries of this path later.

        """
        self._state: Final = state
        self._handle: Final = handle
        self._deliver: Final = deliver
        self._send_early: Final = send_early
        self._role: Role | None = None
        #: Another message than an insert was handled since the last end of a batch.
        self._has_message = False
        #: The next `BatchEnd` is due at this time, in ns, if plain inserts arrive.
        self._general_end_due = 0
        #: The kinds of messages that `receive` accepts.
        self.messages: Final = MESSAGES
        #: Returns the effects of the messages on this path since the last step.
        self.pop_effects: Final = state.pop_effects
        #: Plain inserts are accepted until this time, in ns. Level `disk` acks after a flush.
        self._until = 0

    @property
    def has_effects(self) -> bool:
        """Whether `pop_effects` returns any."""
        return bool(self._state.effects)

    def stop(self) -> None:
        """Accept no plain inserts until `start`: another event happens."""
        self._until = 0

    def start(self, role: Role, now: int) -> None:
        """Accept plain inserts for as long as the role allows; call it after a batch."""
        state = self._state
        self._role = role
        self._has_message = False
        self._general_end_due = now + GENERAL_END_INTERVAL_NS
        if (
            state.level.is_memory
            and state.server_state == "up"
            and state.shard_state == "live"
            and not state.no_space
            and not state.has_no_positions
            and not state.limits_rate
        ):
            self._until = min(role.plain_until(now), now + MAX_PLAIN_NS)

    def insert(self, route: bytes, message: Insert, now: int) -> InsertAck | None:
        """Accept a plain insert and return its ack; None: it is not plain, pass it to `step`.

        The effect of storing it stays in the replica until `pop_effects`. If it is not plain, only
        units that its client has settled may have been forgotten.
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
            or (predecessor and (predecessor >= seq or not session.has_slots(predecessor)))
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

    def receive(self, route: bytes, message: Message, now: int) -> bool:
        """Handle a message of `MESSAGES`; return False if nothing happened: pass it to `step`."""
        role = self._role
        if now >= self._until or role is None:
            return False
        self._handle(route, message, now)
        self._has_message = True
        self._until = min(self._until, role.plain_until(now))
        return True

    def end_batch(self, now: int) -> int:
        """End a batch of messages on this path, for the role and the readers only.

        Returns the time until which no `BatchEnd` is needed, in ns; 0: one is due.
        """
        role = self._role
        if now >= self._until or role is None:
            return 0
        batch_end_due = role.batch_end_due
        if self._has_message or now >= batch_end_due:
            self._has_message = False
            news = role.newly_stable(now)
            role.on_batch_end(now)
            if self._deliver(news, now):
                return 0
            if self._state.has_early_streams and not self._send_early():
                return 0
            batch_end_due = role.batch_end_due
        return min(self._general_end_due, batch_end_due)
