"""What a replica leaves when it stops cleanly, and how it starts: with that, anew, or in limbo.

Rule: only a server that was up goes on from a checkpoint; any other one may have promised something
that it does not know any more, or holds only a part (docs/protocol.md, sections 9 and 11).
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
    """Everything that a replica needs to go on where it stopped (D20)."""

    cluster: int
    view: int
    trim: int
    ack_counter: int
    #: It was not up, and what it holds proves nothing.
    limbo: bool
    leases: list[LeaseRun]
    stable: Watermark
    durable: Watermark
    #: The entries after `stable`.
    window: list[Entry]
    #: Per session: client, done_below, its units.
    sessions: list[tuple[bytes, int, list[HeldUnit]]]
    #: Per session that has any: client, and the units that were refused for good in this view.
    refused: list[tuple[bytes, list[int]]] = []
    #: Units may have been refused so.
    was_out: bool = False
    #: The same, and the units of which only the first copies were: how many, by seq.
    tombstones: list[tuple[bytes, dict[int, int]]] = []
    #: No record of a session that was forgotten is above this position.
    horizon: int = 0
    #: The same of clients that have no session.
    strangers: list[tuple[bytes, dict[int, int]]] = []
    #: Of each of `sessions`: its horizon, and what no record of it is above.
    bounds: list[tuple[int, int]] = []


def save(state: ReplicaState) -> bytes:
    """Return what a clean restart needs. Nothing may be stepped after it."""
    stream = state.stream
    tombstones = [(s.client, s.refused) for s in state.sessions.by_client.values() if s.refused]
    return msgspec.msgpack.encode(
        Checkpoint(
            state.cluster, state.view, state.trim, state.ack_counter,
            state.state in {"frozen", "joined", "limbo"}, list(state.clock.recent),
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
            state.clock.was_out,
            tombstones,
            state.sessions.horizon,
            [(client, stranger.refused) for client, stranger in state.sessions.strangers.items()],
            [(s.horizon, s.last) for s in state.sessions.by_client.values()],
        )
    )  # fmt: skip


def start(state: ReplicaState, saved: bytes | None, now: int, *, limbo: bool) -> bool:
    """Take up what there is; whether the server goes on from its checkpoint."""
    checkpoint = None if saved is None else msgspec.msgpack.decode(saved, type=Checkpoint)
    if checkpoint is not None and not checkpoint.limbo and _is_stored(state, checkpoint):
        _restore(state, checkpoint, now)
        return True
    if checkpoint is not None or limbo:
        _enter_limbo(state)
    return False


def _is_stored(state: ReplicaState, checkpoint: Checkpoint) -> bool:
    """Whether the store has what the checkpoint follows: its files may have been lost."""
    window = checkpoint.window
    last = window[-1].fseq if window else checkpoint.stable.fseq
    is_all_trimmed = not window and checkpoint.trim >= checkpoint.stable.end
    if state.store.last_fseq == last or is_all_trimmed:
        return True
    state.out.append(LogWarning(
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
    state.clock.was_out = checkpoint.was_out
    if checkpoint.view:
        state.state = "up"
    state.sessions.horizon = checkpoint.horizon
    for client, first_incomplete, units in checkpoint.sessions:
        session = state.sessions.open(client, now)
        session.last = state.stream.end - 1
        session.first_incomplete = first_incomplete
        for unit in units:
            session.units[unit.seq] = unit
            # The way back was one of connections that are gone: it may lead to another client.
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
        state.sessions.restore_stranger(client, refused, now)


def _enter_limbo(state: ReplicaState) -> None:
    store, mark = state.store, state.store.mark
    state.state = "limbo"
    known = Watermark(0, 1, 0)
    if mark is not None:
        state.cluster, state.trim = mark.cluster, mark.trim
        record = store.last_record_below(mark.frontier)
        known = Watermark(mark.stable, mark.frontier, record)
    if known.fseq < store.first_fseq - 1:
        with suppress(UnreadableError):  # what came before was trimmed: it was stable
            known = watermark_at(store, store.first_fseq - 1)
    state.stream.restore(known, known, [])
