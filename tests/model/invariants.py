"""Invariants of the shard model. The names are those of docs/spec/Shard.tla."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.model.parts import NONE, NOOP

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.model.parts import Frame, Server, State


def _current(frame: Frame, state: State) -> list[Server]:
    """Return the servers that are alive in the current view."""
    view = frame.control_of(state).view
    return [server for server in frame.servers_of(state) if server.is_alive and server.view == view]


def _acked_stays(frame: Frame, state: State) -> bool:
    """A record acked by all servers of a view is in every later view, at its position."""
    done = frame.completed(state[frame.acks])
    if not done:
        return True
    current = _current(frame, state)
    return all(server.slots[gsn - 1] == value for value, gsn in done for server in current)


def _deliv_agree(frame: Frame, state: State) -> bool:
    """All subscribers receive the same at a position, and it was acked there."""
    known = frame.delivered_in(state)
    if not known:
        return True
    for value, gsn in frame.completed(state[frame.acks]):
        if gsn <= len(known) and known[gsn - 1] != value:
            return False
    view, may_guess = frame.control_of(state).view, not frame.on["stable-reads"]
    return not any(
        held != delivered
        and (gsn <= server.stable or server.view == view > 1 or (may_guess and held != NONE))
        for server in frame.servers_of(state)
        if server.is_alive and server.slots[: len(known)] != known
        for gsn, (held, delivered) in enumerate(zip(server.slots, known, strict=False), 1)
    )


def _stable_agree(frame: Frame, state: State) -> bool:
    """All servers of a view have the same stable entries."""
    servers = [server for server in frame.servers_of(state) if server.is_alive]
    return all(
        one.slots[: one.stable] == other.slots[: one.stable]
        for one in servers
        if one.stable
        for other in servers
        if other.view == one.view
    )


def _view_agree(frame: Frame, state: State) -> bool:
    """A view has one start state."""
    control = frame.control_of(state)
    if control.view == 1:
        return True
    limit = frame.begins_with(control)
    return len({server.slots[:limit] for server in _current(frame, state)}) <= 1


def _no_dup(frame: Frame, state: State) -> bool:
    """A record has at most one decided position."""
    for server in _current(frame, state):
        records = [
            held
            for gsn, held in enumerate(server.slots, 1)
            if held > NOOP and server.decided >> gsn & 1
        ]
        if len(set(records)) < len(records):
            return False
    return True


def _no_hole(frame: Frame, state: State) -> bool:
    """A frontier never passes a position that is not decided."""
    return not any(
        NONE in server.slots[: server.stable]
        for server in frame.servers_of(state)
        if server.is_alive
    )


def _decided_stays(frame: Frame, state: State) -> bool:
    """Within a view, the primary's decision for a position never changes."""
    primary, *backups = frame.servers_of(state)
    return not primary.is_alive or all(
        mine == its
        for backup in backups
        if backup.is_alive and backup.view == primary.view
        for gsn, (mine, its) in enumerate(zip(primary.slots, backup.slots, strict=True), 1)
        if primary.decided & backup.decided & 1 << gsn
    )


def _no_gap(frame: Frame, state: State) -> bool:
    """A subscriber delivers no position before all earlier ones are decided."""
    given, other = divmod(state[frame.merge], 2)
    return given < 2 or other == 1


def _later_above(frame: Frame, state: State) -> bool:
    """A record that is inserted after an append of another shard is above it."""
    last, late = frame.bounds.append, frame.bounds.records + 1
    if not last:
        return True
    completed = frame.completed(state[frame.acks])
    return not any(value == late and gsn <= last for value, gsn in completed) and not any(
        late in server.slots[:last] and server.decided >> (server.slots.index(late) + 1) & 1
        for server in _current(frame, state)
    )


INVARIANTS: Final[dict[str, Callable[[Frame, State], bool]]] = {
    "AckedStays": _acked_stays,
    "DelivAgree": _deliv_agree,
    "StableAgree": _stable_agree,
    "ViewAgree": _view_agree,
    "NoDup": _no_dup,
    "NoHole": _no_hole,
    "DecidedStays": _decided_stays,
    "NoGap": _no_gap,
    "LaterAbove": _later_above,
}
