"""Cursors at the leader of the membership service: requests, and which owners are silent.

    request --> proposed (moves: `mms.cursor_moves`) --committed--> reply
    claim of a cursor whose owner is heard --> a read barrier --> refused, then at once
    renewal --> reply at once

Rules: a claim of an owned cursor is proposed only when its owner was silent about it for its lease,
by the leader's clock: no renewal, claim or move. For a new leader every owner was heard just now.
So a wrong clock may let two clients believe that they own a cursor, but only the moves of one term
count.

Invariants: at most `MAX_WAITING` requests and moves wait, and each is counted. At most
`MAX_COMMANDS` other commands are pending. What this part remembers may be lost with the leader;
that costs time only. See docs/protocol.md, section 19.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, cast

from mms.commands import (
    ClaimCursor,
    EditCursor,
    MoveCursors,
    ReleaseCursor,
    decode_refusal,
    decode_refusals,
)
from mms.cursor_moves import LOST_NS, PendingMoves
from ziplog.core.node import Propose, Send
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.wire import CursorList, CursorReply, CursorsRenewed, Refused
from ziplog.wire.cursors import MAX_LISTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from mms.commands import AnyCursorCommand, Refusal
    from mms.state import ClusterState
    from ziplog.core.cursors import Cursor, CursorError
    from ziplog.core.node import Effect
    from ziplog.wire import (
        CursorClaim,
        CursorEdit,
        CursorMoves,
        CursorQuery,
        CursorRelease,
        CursorRenewal,
    )

#: Maximum number of requests, and of moves in them, that wait for consensus; more are refused.
MAX_WAITING: Final = 4096
#: Maximum number of commands that wait for consensus; more are refused. Consensus drops what is
#: proposed beyond its limit, leases too, and these are half of it.
MAX_COMMANDS: Final = 500
#: Maximum number of holds that lapse at once: all holds of one length lapse together if a new
#: leader counted all cursors as used.
MAX_LAPSES: Final = 64
#: Maximum number of refused claims that the leader remembers.
MAX_REFUSED: Final = 1024
#: The route back to the client, and the number of its request.
_Waiting = tuple[bytes, int]
#: What copies of a command have in common.
_Key = tuple[str, str, bytes | int]


class _Pending:
    """A proposed command about one cursor, and the requests that wait for its outcome."""

    __slots__ = ("proposed_at", "requests")

    def __init__(self, now: int) -> None:
        self.proposed_at: Final = now
        self.requests: Final[list[_Waiting]] = []


class Cursors:
    """The requests about cursors at one node of the service."""

    def __init__(self, state: ClusterState, wall_offset_ns: Callable[[], int]) -> None:
        """`wall_offset_ns` returns Unix time minus the time of `now`."""
        self._state: Final = state
        self._wall_offset_ns: Final = wall_offset_ns
        #: By cursor: when its owner was heard of it, and when it was claimed or moved.
        self._heard_at: dict[str, int] = {}
        self._used_at: dict[str, int] = {}
        #: Nothing counts as silent or unused before.
        self._forgiven_at = 0
        self._pending: Final[dict[_Key, _Pending]] = {}
        #: The nonces of the latest claims that were refused as the cursor was owned. A client that
        #: waits for a cursor repeats its claim, five times a second.
        self._refused: Final[dict[bytes, None]] = {}
        self._moves: Final = PendingMoves(state, self._at_us)
        #: Number of requests of pending commands.
        self._waiting_count = 0

    def __len__(self) -> int:
        return self._waiting_count + len(self._moves)

    def forgive_silence_before(self, now: int) -> None:
        """Count every owner as heard now: this node was paused, or begins to lead."""
        self._forgiven_at = now

    # --- requests ---

    def would_refuse(self, message: CursorClaim, now: int) -> bool:
        """Whether to refuse a claim for the first time: a newer leader may have granted it."""
        is_new = message.nonce not in self._refused and _claim_key(message) not in self._pending
        return is_new and self._is_owned(message, now)

    def _is_owned(self, message: CursorClaim, now: int) -> bool:
        """Whether another claim's owner is heard."""
        cursor = self._state.cursors.get(message.name)
        if cursor is None or cursor.claim == message.nonce:
            return False
        return bool(cursor.owner) and not self._is_silent(cursor, now)

    def claim(self, src: bytes, message: CursorClaim, now: int) -> list[Effect]:
        """Handle a claim; refuse it while another owner is heard.

        One that `would_refuse` comes after a read barrier, so that the first refusal is final.
        """
        cursor = self._state.cursors.get(message.name)
        if cursor is not None and cursor.claim == message.nonce:
            return [self._reply(src, message.request, message.name)]
        if self._is_owned(message, now):
            pending = self._pending.get(_claim_key(message))
            if pending is None:
                return [self._refuse_owned(src, message)]
            self._join(pending, (src, message.request))  # It may still be granted.
            return []
        command = ClaimCursor(
            message.name, message.owner, message.owner_text, message.nonce, message.start,
            message.lease_ms, message.hold_s, cursor.term if cursor is not None else 0,
            self._at_us(now),
        )  # fmt: skip
        return self._propose((src, message.request), command, now)

    def _refuse_owned(self, src: bytes, message: CursorClaim) -> Effect:
        self._refused[message.nonce] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        return self._reply(src, message.request, message.name, "owned")

    def _is_silent(self, cursor: Cursor, now: int) -> bool:
        heard_at = max(self._heard_at.get(cursor.name, 0), self._forgiven_at)
        return now - heard_at >= cursor.lease_ms * NS_PER_MS

    def move(self, src: bytes, message: CursorMoves, now: int) -> list[Effect]:
        """Handle moves: propose them, or gather them if the last command with moves is new."""
        if len(self) + len(message.moves) > MAX_WAITING:
            return [self._refuse(src, message.request)]
        self._moves.add(src, message)
        return self._moves.propose(now)

    def propose_moves(self, now: int) -> list[Effect]:
        """Propose the gathered moves, if a command with moves is due."""
        return self._moves.propose(now)

    def release(self, src: bytes, message: CursorRelease, now: int) -> list[Effect]:
        """Handle the release of a cursor by its owner."""
        command = ReleaseCursor(message.name, message.term)
        effects = self._moves.propose_before_release(message.name, message.term, now)
        return effects + self._propose((src, message.request), command, now)

    def edit(self, src: bytes, message: CursorEdit, now: int) -> list[Effect]:
        """Handle an operator's change of a cursor."""
        command = EditCursor(
            message.name, message.edit, message.nonce, message.position, message.hold_s,
            self._at_us(now),
        )  # fmt: skip
        return self._propose((src, message.request), command, now)

    def renew(self, src: bytes, message: CursorRenewal, now: int) -> Effect:
        """Note that an owner has its claims; return what it may not know of them.

        This node may be a former leader, which has not seen the latest claims: it says nothing of
        them. A cursor that its owner does not name is not renewed, so a claim that a client
        forgot ends with its lease.
        """
        lost: list[Cursor] = []
        deleted: list[str] = []
        paused: list[Cursor] = []
        for owned in message.owned:
            cursor = self._state.cursors.get(owned.name)
            if owned.term > self._state.cursors.terms:
                continue
            if cursor is None:
                deleted.append(owned.name)
            elif cursor.term != owned.term or not cursor.owner:
                lost.append(cursor)
            else:
                self._heard_at[owned.name] = now
                if cursor.is_paused:
                    paused.append(cursor)
        cluster = self._state.cluster
        return Send(src, CursorsRenewed(cluster, message.request, lost, deleted, paused))

    def answer_query(self, src: bytes, message: CursorQuery, now: int) -> Effect:
        """Return the reply to a query whose read barrier is committed."""
        found = [one for one in self._state.cursors.in_order() if one.name > message.after]
        some, has_more = found[:MAX_LISTED], len(found) > MAX_LISTED
        shards = [self._shard(cursor) for cursor in some]
        silent = [bool(cursor.owner) and self._is_silent(cursor, now) for cursor in some]
        cluster, request = self._state.cluster, message.request
        return Send(src, CursorList(cluster, request, some, shards, has_more, silent))

    # --- proposals and replies ---

    def _at_us(self, now: int) -> int:
        return max(now + self._wall_offset_ns(), 0) // 1000

    def _propose(
        self, waiting: _Waiting, command: ClaimCursor | ReleaseCursor | EditCursor, now: int
    ) -> list[Effect]:
        """Propose a command, unless a copy of it is pending; its outcome answers the request.

        It is proposed once: another copy might succeed after this one was refused.
        """
        pending = self._pending.get(_key(command))
        if len(self) >= MAX_WAITING or (pending is None and len(self._pending) >= MAX_COMMANDS):
            return [self._refuse(*waiting)]
        if pending is not None:
            self._join(pending, waiting)
            return []
        pending = self._pending[_key(command)] = _Pending(now)
        self._join(pending, waiting)
        return [Propose(command.encode())]

    def _join(self, pending: _Pending, waiting: _Waiting) -> None:
        """Have a request wait for the outcome of a pending command, if there is room."""
        if waiting not in pending.requests and len(self) < MAX_WAITING:
            pending.requests.append(waiting)
            self._waiting_count += 1

    def on_decided(
        self, command: AnyCursorCommand, encoded: bytes, result: bytes, now: int
    ) -> list[Effect]:
        """Answer the requests that wait for a command; consensus applied or refused it.

        For the leader.
        """
        if isinstance(command, MoveCursors):
            refusals = decode_refusals(result)
            for move, refusal in zip(command.moves, refusals, strict=True):
                if not refusal:
                    self._used_at[move.name] = self._heard_at[move.name] = now
            return self._moves.on_decided(encoded, command.moves, refusals)
        name, refusal = command.name, decode_refusal(result)
        if not refusal and self._state.cursors.get(name) is not None:
            self._used_at[name] = now
            if isinstance(command, ClaimCursor):
                self._heard_at[name] = now
        waiting = self._forget(_key(command))
        return [self._reply(src, request, name, refusal) for src, request in waiting]

    def _forget(self, key: _Key) -> list[_Waiting]:
        """Remove a pending command; return its requests."""
        pending = self._pending.pop(key, None)
        requests = pending.requests if pending is not None else []
        self._waiting_count -= len(requests)
        return requests

    def _reply(self, src: bytes, request: int, name: str, refusal: Refusal = "") -> Effect:
        # A refusal of a command about a cursor is one that the reply knows.
        error = cast("CursorError", refusal)
        state, cursor = self._state, self._state.cursors.get(name)
        shard = self._shard(cursor) if cursor is not None else 0
        return Send(src, CursorReply(state.cluster, request, error, cursor, shard, state.trim))

    def _shard(self, cursor: Cursor) -> int:
        lease = self._state.lease_at(max(cursor.position, 1))
        return lease.owner(max(cursor.position, 1)) if lease is not None else 0

    def _refuse(self, src: bytes, request: int) -> Effect:
        why = f"{len(self)} requests and moves of cursors are already waiting"
        return Send(src, Refused(self._state.cluster, 0, 0, 0, request, "full", why))

    # --- time ---

    def next_wakeup(self) -> int | None:
        """Return when the next command with moves is due; None: none is."""
        return self._moves.next_wakeup()

    def check_holds(self, now: int) -> list[Effect]:
        """Let the holds of unused cursors lapse; forget lost commands and former owners."""
        lost = [key for key, one in self._pending.items() if now >= one.proposed_at + LOST_NS]
        for key in lost:
            self._forget(key)
        self._moves.forget_lost(now)
        cursors = self._state.cursors.in_order()
        names = {one.name for one in cursors}
        self._heard_at = {one: at for one, at in self._heard_at.items() if one in names}
        self._used_at = {one: at for one, at in self._used_at.items() if one in names}
        unused = (
            one
            for one in cursors
            if one.is_holding and now - self._last_use(one) >= one.hold_s * NS_PER_S
        )
        return [effect for one in islice(unused, MAX_LAPSES) for effect in self._lapse(one, now)]

    def _lapse(self, cursor: Cursor, now: int) -> list[Effect]:
        """Let the hold of a cursor lapse, unless that is pending."""
        command = EditCursor(cursor.name, "lapse", b"", 0, 0, self._at_us(now), cursor.term)
        if _key(command) in self._pending or len(self._pending) >= MAX_COMMANDS:
            return []
        self._pending[_key(command)] = _Pending(now)
        return [Propose(command.encode())]

    def _last_use(self, cursor: Cursor) -> int:
        heard_at = self._heard_at.get(cursor.name, 0) if cursor.owner else 0
        return max(heard_at, self._used_at.get(cursor.name, 0), self._forgiven_at)

    def abandon(self) -> list[_Waiting]:
        """Forget all requests; return them: this node no longer leads."""
        every = [one for pending in self._pending.values() for one in pending.requests]
        for memory in (self._pending, self._refused, self._heard_at, self._used_at):
            memory.clear()
        self._waiting_count = 0
        return every + self._moves.abandon()

    def check(self) -> None:
        """Assert the invariants."""
        self._moves.check()
        pending = sum(len(one.requests) for one in self._pending.values())
        assert self._waiting_count == pending
        assert len(self) <= MAX_WAITING
        assert len(self._pending) <= MAX_COMMANDS
        assert len(self._refused) <= MAX_REFUSED


def _claim_key(claim: ClaimCursor | CursorClaim) -> _Key:
    return ("claim", claim.name, claim.nonce)


def _key(command: ClaimCursor | ReleaseCursor | EditCursor) -> _Key:
    match command:
        case ReleaseCursor():
            return ("release", command.name, command.term)
        case ClaimCursor():
            return _claim_key(command)
        case EditCursor():
            return (command.edit, command.name, command.nonce)
