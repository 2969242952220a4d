"""The checkpoint of a clean stop, and the start: from a checkpoint, with an empty log, or in limbo.

Rule: only a server that was `up` or `joined` resumes from a checkpoint: it holds its whole log, and
no promise binds it. Any other server may have made promises that it no longer knows, or may hold
only a part of its log (docs/protocol.md, sections 9 and 11).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from shard.recovery.log_comparison import watermark_at
from shard.state.decision_log import Watermark
from shard.state.sessions import ALL_COPIES, HeldUnit
from ziplog.core.node import LogWarning
from ziplog.core.view import LeaseRun
from ziplog.segments.entry import Entry, UnreadableError

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The state that a replica resumes from after a clean stop (D20)."""

    cluster: int
    view: int
    trim: int
    ack_counter: int
    #: The server was not `up`: unless it had joined its view, its log and sessions prove nothing.
    limbo: bool
    leases: list[LeaseRun]
    stable: Watermark
    durable: Watermark
    #: The entries after `stable`.
    window: list[Entry]
    #: Per session: client, `first_incomplete`, units.
    sessions: list[tuple[bytes, int, list[HeldUnit]]]
    #: Per session with tombstones: client, and the seqs that were refused permanently in this view.
    refused: list[tuple[bytes, list[int]]] = []
    #: The shard was out of the leases in this view, so units may have been refused permanently.
    was_excluded: bool = False
    #: Per session with tombstones: client, and the number of refused copies by seq.
    tombstones: list[tuple[bytes, dict[int, int]]] = []
    #: No record of an expired session is above this position.
    horizon: int = 0
    #: Tombstones of clients without a session.
    strangers: list[tuple[bytes, dict[int, int]]] = []
    #: Per entry of `sessions`: its horizon, and an upper bound of its records' positions.
    bounds: list[tuple[int, int]] = []
    #: The server had joined its view, which had not begun.
    is_joined: bool = False


def save(state: ReplicaState) -> bytes:
    """Return the encoded checkpoint for a clean restart. The state must not change afterwards."""
    stream = state.stream
    tombstones = [(s.client, s.refused) for s in state.sessions.by_client.values() if s.refused]
    return msgspec.msgpack.encode(
        Checkpoint(
            state.cluster, state.view, state.trim, state.ack_counter,
            state.server_state in {"frozen", "joined", "limbo"}, list(state.clock.recent),
            stream.stable_mark,
            stream.durable_mark,
            list(stream.window),
            [
                (s.client, s.first_incomplete, [s.units[seq] for seq in sorted(s.units)])
                for s in state.sessions.by_client.values()
            ],
            [
                (client, sorted(seq for seq, copies in refused.items() if copies == ALL_COPIES))
                for client, refused in tombstones
            ],
            state.clock.was_excluded,
            tombstones,
            state.sessions.horizon,
            [(client, one.refused) for client, one in state.sessions.refused_clients.items()],
            [(s.horizon, s.last) for s in state.sessions.by_client.values()],
            state.server_state == "joined",
        )
    )  # fmt: skip


def start(state: ReplicaState, saved: bytes | None, now: int, *, limbo: bool) -> bool:
    """Restore the state from the checkpoint, or enter limbo; return whether it was restored."""
    checkpoint = None if saved is None else msgspec.msgpack.decode(saved, type=Checkpoint)
    resumes = checkpoint is not None and (checkpoint.is_joined or not checkpoint.limbo)
    if checkpoint is not None and resumes and _check_store(state, checkpoint):
        _restore(state, checkpoint, now)
        return True
    if checkpoint is not None or limbo:
        _enter_limbo(state)
    return False


def _check_store(state: ReplicaState, checkpoint: Checkpoint) -> bool:
    """Return whether the store ends where the checkpoint does, and warn if not.

    Segment files may have been lost.
    """
    window = checkpoint.window
    last = window[-1].fseq if window else checkpoint.stable.fseq
    is_all_trimmed = not window and checkpoint.trim >= checkpoint.stable.end
    if state.store.last_fseq == last or is_all_trimmed:
        return True
    state.effects.append(LogWarning(
        f"{state.config.name} is in limbo: its store ends at entry {state.store.last_fseq}, but"
        f" it had {last} when it stopped. Stop it, put the missing files back, and start it"
    ))  # fmt: skip
    return False


def _restore(state: ReplicaState, checkpoint: Checkpoint, now: int) -> None:
    state.cluster, state.view = checkpoint.cluster, checkpoint.view
    state.trim, state.ack_counter = checkpoint.trim, checkpoint.ack_counter
    state.stream.restore(checkpoint.stable, checkpoint.durable, checkpoint.window)
    if checkpoint.leases:
        state.clock.restore(checkpoint.leases, now)
    state.clock.was_excluded = checkpoint.was_excluded
    if checkpoint.is_joined:
        state.server_state, state.view_base = "joined", state.stream.last
    elif checkpoint.view:
        state.server_state = "up"
    state.sessions.horizon = checkpoint.horizon
    for client, first_incomplete, units in checkpoint.sessions:
        session = state.sessions.open(client, now)
        session.last = state.stream.end - 1
        session.first_incomplete = first_incomplete
        for unit in units:
            session.units[unit.seq] = unit
            # Routes of the former process may lead to other clients now.
            unit.route = b""
    for (client, _, _), (horizon, last) in zip(
        checkpoint.sessions, checkpoint.bounds, strict=False
    ):
        session = state.sessions.by_client[client]
        session.horizon, session.last = horizon, last
    for client, seqs in checkpoint.refused:
        state.sessions.by_client[client].refused = dict.fromkeys(seqs, ALL_COPIES)
    for client, refused in checkpoint.tombstones:
        state.sessions.by_client[client].refused = refused
    for client, refused in checkpoint.strangers:
        state.sessions.restore_refused_client(client, refused, now)


def _enter_limbo(state: ReplicaState) -> None:
    store, mark = state.store, state.store.mark
    state.server_state = "limbo"
    known = Watermark(0, 1, 0)
    if mark is not None:
        state.cluster, state.trim = mark.cluster, mark.trim
        record = store.last_record_below(mark.frontier)
        known = Watermark(mark.stable, mark.frontier, record)
    if known.fseq < store.first_fseq - 1:
        with suppress(UnreadableError):  # trimmed entries were stable
            known = watermark_at(store, store.first_fseq - 1)
    state.stream.restore(known, known, [])
