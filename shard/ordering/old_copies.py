"""Detects an old copy of a data directory that was put in the place of a server's own one.

The copy of a directory that was stopped cleanly has a checkpoint, so its server resumes in its view
as if it held its whole log. It does not: the other replicas hold entries that it had reported or
forwarded. The server with the old copy halts. It then starts in limbo, and a recovery gives it the
log of another replica (docs/protocol.md, section 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.state.decision_log import end_after
from ziplog.core.entries import Place
from ziplog.core.node import Halt
from ziplog.segments.entry import UnreadableError

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.core.entries import Decision
    from ziplog.wire import Forward, Report


#: A backup reports this in place of its last entry: the primary has another one in that place.
CONTRADICTED: Final = 2**62


def lacks_reported(state: ReplicaState, report: Report) -> bool:
    """Whether this primary lacks entries that a backup of its view holds; it halts then."""
    number = report.replicated_up_to
    if number <= state.stream.last:
        return False
    is_other = number == CONTRADICTED
    _halt(
        state, f"a backup has {'other entries' if is_other else f'entries up to number {number}'}"
    )
    return True


def lacks_requested(state: ReplicaState, first: int) -> bool:
    """Whether this primary lacks the entry before one that a backup requests; it halts then."""
    if first <= state.stream.last + 1:
        return False
    _halt(state, f"a backup has entries up to number {first - 1}")
    return True


def lacks_stable(state: ReplicaState, forward: Forward) -> bool:
    """Whether this backup lacks an entry that it reported to its primary; it halts then."""
    stream = state.stream
    if forward.stable <= stream.last or forward.first <= stream.last + 1:
        return False
    _halt(state, f"the primary has had reports of entries up to number {forward.stable}")
    return True


def contradicts(state: ReplicaState, forward: Forward) -> bool:
    """Whether a forward has another decision in the place of this backup's last one."""
    known = state.stream.last - forward.first
    return 0 <= known < len(forward.decisions) and not _is_last(state, forward.decisions[known])


def shows_last(state: ReplicaState, forward: Forward) -> bool:
    """Whether the primary of a forward that contradicts nothing has this backup's last entry."""
    last = state.stream.last
    return forward.stable >= last or forward.first <= last < forward.first + len(forward.decisions)


def _is_last(state: ReplicaState, decision: Decision) -> bool:
    """Whether a decision is that of the last entry, as far as this server can read that."""
    stream = state.stream
    if end_after(decision, stream.end) != stream.end:
        return False
    if type(decision) is not Place:
        return True
    try:
        last = state.store.find(stream.end - 1)
    except (UnreadableError, OSError):
        return True
    own = None if last is None or last.fseq != stream.last else last.decision
    return type(own) is not Place or (own.client, own.seq) == (decision.client, decision.seq)


def _halt(state: ReplicaState, found: str) -> None:
    state.effects.append(Halt(
        f"{found} in view {state.view} of shard {state.shard}, but the log of"
        f" {state.config.name} ends at {state.stream.last}: an old copy of a data directory is in"
        " the place of its own one. Start this server again: it copies the log of another server"
    ))  # fmt: skip
