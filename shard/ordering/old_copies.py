"""Detects an old copy of a data directory that was put in the place of a server's own one.

The copy of a directory that was stopped cleanly has a checkpoint, so its server resumes in its view
as if it held its whole log. It does not: the other replicas hold entries that it had reported or
forwarded. A server that learns of such an entry halts. It then starts in limbo, and a recovery
gives it the log of another replica (docs/protocol.md, section 9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard.state.decision_log import end_after
from ziplog.core.entries import Place
from ziplog.core.node import Halt
from ziplog.segments.entry import UnreadableError

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.core.entries import Decision
    from ziplog.wire import Forward, Report


def lacks_reported(state: ReplicaState, report: Report) -> bool:
    """Whether this primary lacks entries that a backup of its view holds; it halts then."""
    if report.replicated_up_to <= state.stream.last:
        return False
    _halt(state, f"a backup has entries up to number {report.replicated_up_to}")
    return True


def lacks_forwarded(state: ReplicaState, forward: Forward) -> bool:
    """Whether this backup or its primary lacks an entry that the other one holds; it halts then."""
    stream = state.stream
    if forward.stable > stream.last and forward.first > stream.last + 1:
        _halt(state, f"the primary has had reports of entries up to number {forward.stable}")
        return True
    known = stream.last - forward.first
    if not 0 <= known < len(forward.decisions) or _is_last(state, forward.decisions[known]):
        return False
    _halt(state, f"the primary has another entry of number {stream.last}")
    return True


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
