"""Which inserts a replica takes: those of its cluster, shard and view, within the limits.

Rule: what is refused leaves no trace (docs/protocol.md, section 4, rules 7 to 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from shard.sessions import HeldUnit
from ziplog.errors import ProtocolError
from ziplog.wire import MAX_FRAME, decode_body

if TYPE_CHECKING:
    from shard.sessions import Session
    from shard.state import ReplicaState
    from ziplog.wire import Insert

#: The longest body of a unit: it must fit into a frame of any kind, leases and all.
MAX_UNIT_BYTES: Final = MAX_FRAME * 9 // 16


def accepts(state: ReplicaState, route: bytes, message: Insert) -> bool:
    """Whether an insert is for this server as it is; otherwise it is refused."""
    request = message.seq
    if message.cluster != state.cluster and state.cluster:
        state.refuse(route, request, "wrong-cluster", f"this is cluster {state.cluster}")
    elif message.shard != state.shard:
        state.refuse(route, request, "wrong-shard", f"this is shard {state.shard}")
    elif state.state != "up":
        state.refuse(route, request, "not-ready", f"{state.config.name} is {state.state}")
    elif message.view != state.view:
        state.refuse(route, request, "wrong-view", f"the view is {state.view}")
    else:
        return True
    return False


def take(state: ReplicaState, route: bytes, message: Insert, session: Session) -> HeldUnit | None:
    """Return the unit of an insert that is new here; None if it is refused."""
    limits = state.config.limits
    seq = message.seq
    if seq < session.done_below:
        state.refuse(route, seq, "identity-reused", f"seq {seq} is settled")
        return None
    if state.full:
        state.refuse(route, seq, "full", f"{state.config.name} has no disk space left")
        return None
    if seq >= session.done_below + limits.max_unsettled_units:
        detail = f"{limits.max_unsettled_units} units may be unsettled"
        state.refuse(route, seq, "full", detail)
        return None
    if message.follows >= seq:
        state.refuse(route, seq, "malformed", "a unit follows one with a lower seq")
        return None
    try:
        body = decode_body(message.body, message.count)
    except ProtocolError as error:
        state.refuse(route, seq, "malformed", str(error))
        return None
    largest = max(map(len, body.payloads))
    if (
        largest > limits.max_payload_bytes
        or len(body.key or b"") > limits.max_key_bytes
        or len(message.body) > MAX_UNIT_BYTES
    ):
        detail = f"payloads have at most {limits.max_payload_bytes} bytes"
        state.refuse(route, seq, "too-large", detail)
        return None
    unit = HeldUnit(
        message.client, seq, message.count, crc32c(message.body), message.body,
        message.after, message.follows, route,
    )  # fmt: skip
    session.units[seq] = unit
    return unit
