"""Admission of inserts: a replica accepts those of its cluster, shard and view, within the limits.

A refused unit itself leaves no state, except a tombstone where the refusal is a promise in this
view. The tombstone covers all copies if the shard has no more positions. It covers the copies sent
so far if the server has no room now (docs/protocol.md, section 4, rules 7 to 12; section 13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from shard.ordering.insert_rate import InsertRate
from shard.state.sessions import ALL_COPIES, HeldUnit
from ziplog.core.entries import decode_body
from ziplog.core.fields import MAX_FRAME
from ziplog.errors import ProtocolError

if TYPE_CHECKING:
    from shard.ordering.role import Role
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import Session
    from ziplog.core.entries import Body
    from ziplog.wire import Insert, Limits, RefusalCode

#: Largest body of a unit, in bytes: it must fit into every kind of frame, beside the leases.
MAX_UNIT_BYTES: Final = MAX_FRAME * 9 // 16
_TOO_MANY: Final = "too many inserts are waiting"


class Admission:
    """Accepts or refuses the inserts at one replica."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        self.set_rate(state.config.inserts_per_s, state.config.insert_bytes_per_s)

    def set_rate(self, inserts_per_s: int, bytes_per_s: int) -> None:
        """Limit the insert rate of each client from now on; 0: no limit."""
        self._rate = InsertRate(inserts_per_s, bytes_per_s)
        self._state.limits_rate = self._rate.is_limited

    def admit(self, route: bytes, message: Insert, role: Role, now: int) -> Session | None:
        """Pass an insert to the role, or refuse it; return its session, None if there is none."""
        state, seq, limits = self._state, message.seq, self._state.config.limits
        if self._refuse_target(route, message):
            return None
        session = state.sessions.by_client.get(message.client)
        if session is None and not self._may_open_session(route, message, now):
            return None
        session = state.sessions.open(message.client, now)
        if message.first_incomplete > session.first_incomplete:
            role.on_settled(session, message.first_incomplete, now)
        state.last_insert = now
        known = session.units.get(seq)
        if known is not None:
            self._admit_copy(route, message, role, known)
            return session
        if seq < session.first_incomplete:
            state.refuse(route, seq, "identity-reused", f"seq {seq} was completed before")
            return session
        if seq >= session.first_incomplete + limits.max_unsettled_units:
            detail = f"a client may have {limits.max_unsettled_units} incomplete units"
            state.refuse(route, seq, "full", detail)
            return session
        if 0 < message.since <= session.horizon:
            state.break_promises(now)
            refuse_forgotten(state, route, seq)
            return session
        if session.refused and self._was_refused(route, message, session, now):
            return session
        if state.shard_state != "live" and self._has_no_position(message):
            refuse_permanently(state, route, session, seq)
            return session
        if state.no_space:
            state.break_promises(now)
            refuse_for_lack_of_space(state, route, session, seq, message.copy)
            return session
        if message.predecessor >= seq:
            detail = "the predecessor of a unit must have a lower seq"
            state.refuse(route, seq, "malformed", detail)
            return session
        try:
            body = decode_body(message.body, message.count)
        except ProtocolError as error:
            state.refuse(route, seq, "malformed", str(error))
            return session
        if is_too_large(message, body, limits):
            detail = f"payloads have at most {limits.max_payload_bytes} bytes"
            state.refuse(route, seq, "too-large", detail)
        elif not role.can_accept():
            refuse_for_now(state, route, session, seq, message.copy, _TOO_MANY)
        else:
            unit = session.units[seq] = held_unit(route, message)
            state.counters.on_admitted(unit, now)
            if self._rate.is_limited:
                size = len(message.body)
                pause = self._rate.on_admitted(session, route, message.count, size, now)
                if pause is not None and route:
                    state.effects.append(pause)
            role.accept(session, unit, now)
        return session

    def admit_relayed(self, message: Insert, role: Role, now: int) -> None:
        """Admit the unit that a backup relayed, at the primary. Its client gets no ack from here.

        The backup reports the decision once it is stable.
        """
        if self._state.server == 0:
            self.admit(b"", message, role, now)

    def _refuse_target(self, route: bytes, message: Insert) -> bool:
        """Whether an insert is not for this server in its current state; if so, refuse it."""
        state, seq = self._state, message.seq
        if message.cluster != state.cluster and state.cluster:
            state.refuse(route, seq, "wrong-cluster", f"this is cluster {state.cluster}")
        elif message.shard != state.shard:
            state.refuse(route, seq, "wrong-shard", f"this is shard {state.shard}")
        elif state.server_state != "up":
            state.refuse(route, seq, "not-ready", f"{state.config.name} is {state.server_state}")
        elif message.view != state.view:
            state.refuse(route, seq, "wrong-view", f"the view is {state.view}")
        else:
            return False
        return True

    def _may_open_session(self, route: bytes, message: Insert, now: int) -> bool:
        """Whether a new client gets a session; if not, refuse its insert.

        A unit that may have been placed and forgotten is refused first: other refusals may promise
        that the unit is absent. The refusal for lack of room does: the client may insert elsewhere.
        """
        state, seq = self._state, message.seq
        if state.sessions.may_have_forgotten(message.client, message.since):
            state.break_promises(now)
            refuse_forgotten(state, route, seq)
        elif state.shard_state == "finalized":  # permanently, so no tombstone is needed
            state.refuse(route, seq, "redirect", f"shard {state.shard} is finalized")
        elif state.sessions.is_full(at_primary=state.server == 0):
            copies = state.sessions.refuse_client(message.client, seq, message.copy, now)
            state.refuse(route, seq, "full", "too many clients are known", copies)
        else:
            return True
        return False

    def _admit_copy(self, route: bytes, message: Insert, role: Role, unit: HeldUnit) -> None:
        """Pass a copy of a known unit to the role; refuse other records under its seq."""
        if unit.checksum != crc32c(message.body) or unit.count != message.count:
            detail = f"seq {message.seq} was used for other records"
            self._state.refuse(route, message.seq, "identity-reused", detail)
        else:
            unit.copy = max(unit.copy, message.copy)
            unit.route = route or unit.route
            role.on_copy(unit, message.since)

    def _was_refused(self, route: bytes, message: Insert, session: Session, now: int) -> bool:
        """Whether this copy, or its predecessor, has a tombstone; if so, refuse it again."""
        state, refused, seq = self._state, session.refused, message.seq
        copies = refused.get(seq, -1)
        if ALL_COPIES in {copies, refused.get(message.predecessor)}:
            state.break_promises(now)
            refuse_permanently(state, route, session, seq)
        elif message.copy <= copies:
            why = "there was no room for this copy"
            refuse_for_now(state, route, session, seq, message.copy, why)
        else:
            refused.pop(seq, None)  # there may be room for this copy
            return False
        return True

    def _has_no_position(self, message: Insert) -> bool:
        """Whether the shard will never have a position for a unit that is new here."""
        state = self._state
        if state.server == 0 and state.has_no_positions:
            return True
        return state.is_leaving and message.after >= state.clock.limit


def held_unit(route: bytes, message: Insert) -> HeldUnit:
    """Return the unit of an insert, as a server holds it."""
    body = message.body
    return HeldUnit(
        message.client, message.seq, message.count, crc32c(body), body, message.after,
        message.predecessor, route, copy=message.copy, sealed=message.sealed,
    )  # fmt: skip


def is_too_large(message: Insert, body: Body, limits: Limits) -> bool:
    """Whether a unit, one of its payloads or one of its keys exceeds the limits."""
    size = len(message.body)
    if size > MAX_UNIT_BYTES:
        return True
    if size > limits.max_payload_bytes and max(map(len, body.payloads)) > limits.max_payload_bytes:
        return True
    if body.keys is None:
        return body.key is not None and len(body.key) > limits.max_key_bytes
    return max(map(len, filter(None, body.keys)), default=0) > limits.max_key_bytes


def refuse_permanently(
    state: ReplicaState, route: bytes, session: Session, seq: int, why: str = ""
) -> None:
    """Refuse a unit permanently in this view, and keep a tombstone."""
    session.refused[seq] = ALL_COPIES
    if route:
        detail = why or f"shard {state.shard} has no more positions"
        state.refuse(route, seq, "redirect", detail)


def refuse_for_now(
    state: ReplicaState,
    route: bytes,
    session: Session,
    seq: int,
    copy: int,
    why: str,
    *,
    code: RefusalCode = "full",
) -> None:
    """Refuse the copies of a unit up to `copy`, in this view; later copies may be accepted.

    So the client knows that the unit is absent here, although the same copies may arrive later.
    """
    copies = max(copy, session.refused.get(seq, 0))
    if copies:
        session.refused[seq] = copies
    state.refuse(route, seq, code, why, copies)


def refuse_for_lack_of_space(
    state: ReplicaState, route: bytes, session: Session, seq: int, copy: int
) -> None:
    """Refuse the copies of a unit up to `copy`: a disk is full, this server's or its primary's."""
    refuse_for_now(state, route, session, seq, copy, state.no_space, code="no-space")


def refuse_forgotten(state: ReplicaState, route: bytes, seq: int) -> None:
    """Refuse a unit that may have been placed in a session that is forgotten.

    The horizon never decreases, so the refusal is permanent and needs no tombstone.
    """
    detail = "it may have been placed before this client was forgotten"
    state.refuse(route, seq, "expired", detail, since=state.stream.end)
