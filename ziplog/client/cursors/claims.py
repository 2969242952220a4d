"""The cursors that this client claims: their renewals, moves and releases.

    ClaimRequest --> claiming --granted--> owned, most with a subscription --> released
                     claiming --owned by another client--> claiming again, or failed
    claiming --its call ends--> unwanted --granted all the same--> released
    owned --another term, or deleted--> lost: the subscription fails

Rules: an owner renews all its claims three times in each lease; copies of a claim or move count
once, by their numbers; a lost claim does not come back.

Invariant: while a claim is owned, its next renewal is due in time. See docs/protocol.md, section
19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    ClaimState,
    CommitRequest,
    EndClaimsRequest,
    ReleaseRequest,
    SubscribeRequest,
    UnsubscribeRequest,
    WatchClaimRequest,
)
from ziplog.client.cursors.claim import Claim, Move
from ziplog.core.cursors import MAX_MOVES, Cursor, CursorMove
from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.errors import (
    THIS_CLIENT,
    ClosedError,
    ConfigError,
    CursorHeldError,
    CursorLostError,
    DeadlineError,
    NoSuchRecordError,
    TrimmedError,
    UnavailableError,
)
from ziplog.types import RecordId
from ziplog.wire import CursorClaim, CursorMoves, CursorRelease, CursorRenewal
from ziplog.wire.cursors import OwnedTerm

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.subscribe import Subscriptions
    from ziplog.client.reads.tail import LogTail, TailQueries
    from ziplog.wire import CursorReply, CursorsMoved, CursorsRenewed
    from ziplog.wire.cursors import RefusedMove

#: Interval between two copies of a claim of a cursor that another client owns.
_CLAIM_INTERVAL_NS: Final = 200 * NS_PER_MS
#: Maximum time until a soon move is sent.
COMMIT_INTERVAL_NS: Final = NS_PER_S
#: Number of renewals in each lease.
_RENEWALS: Final = 3


class PendingClaim(PendingRequest, kw_only=True):
    """A call about a claim: to claim, to move, to watch, to release, or to end all claims."""

    #: The cursor; "": all.
    name: str
    #: Of a claim.
    request: ClaimRequest | None = None
    start: int = 0
    #: The owner that the service reported; "": none.
    owner: str = ""
    #: Of a watch: the claim's number, and the state that the caller knows.
    claim: int = 0
    known: ClaimState | None = None


class Claims(PendingRequests[PendingClaim]):
    """The claims of a client."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        tail_queries: TailQueries,
        subscriptions: Subscriptions,
    ) -> None:
        super().__init__(context, routing)
        self._tail_queries: Final = tail_queries
        self._subscriptions: Final = subscriptions
        #: By the number of the claim, which its subscription has as well.
        self._claims: Final[dict[int, Claim]] = {}
        #: Claims whose calls ended before the service replied, by call: the number of the request,
        #: and when to give it up.
        self._unwanted: Final[dict[int, tuple[int, int]]] = {}
        #: The pending renewals, at most the oldest and the newest, and when the next one is due.
        self._renewals: list[int] = []
        self._renew_at = NEVER
        #: The last requests with soon moves, and when the next ones are due; those of all claims
        #: leave together.
        self._soon_requests: list[int] = []
        self._moves_at = NEVER

    @property
    def calls(self) -> dict[type, Callable[[int, Any], None]]:
        """The handler of each request."""
        return {
            ClaimRequest: self.start,
            CommitRequest: self.commit,
            ClaimQuery: self.query,
            WatchClaimRequest: self.watch,
            ReleaseRequest: self.release,
            EndClaimsRequest: self.end,
            UnsubscribeRequest: self.unsubscribe,
        }

    @property
    def waiting(self) -> bool:
        """False: no such call waits for a shard."""
        return False

    @property
    def has_claims(self) -> bool:
        """Whether this client owns cursors, so that it must renew its claims."""
        return any(not claim.lost for claim in self._claims.values())

    @property
    def has_calls(self) -> bool:
        """Whether the service may still grant a claim, or reply to another call; for any thread."""
        return bool(self._pending or self._unwanted)

    # --- claiming ---

    def start(self, call: int, request: ClaimRequest) -> None:
        """Claim a cursor."""
        pending = PendingClaim(call, request.deadline, name=request.name, request=request)
        self._add(pending)
        owned = (claim for claim in self._claims.values() if not claim.lost)
        if any(claim.cursor.name == request.name for claim in owned):
            self._finish(pending, CursorHeldError(request.name, THIS_CLIENT))
        elif request.start.gsn < 0:
            self._tail_queries.query(
                call, request.deadline, lambda tail: self._on_tail(pending, tail), with_recent=False
            )
        else:
            pending.start = request.start.gsn
            self._send(pending)

    def _on_tail(self, pending: PendingClaim, tail: LogTail | DeadlineError) -> None:
        if isinstance(tail, DeadlineError):
            self._finish(pending, tail)
        else:
            pending.start = tail.last.gsn + 1
            self._send(pending)

    def _send(self, pending: PendingClaim) -> None:
        request, client = pending.request, self._context.client
        assert request is not None
        nonce = client[:8] + pending.call.to_bytes(8, "big")
        pending.retry_at = NEVER
        pending.service_request = self._membership.send_request(
            lambda cluster, number: CursorClaim(
                cluster, number, request.name, client, request.owner, nonce, pending.start,
                request.lease_ms, request.hold_s,
            ),
            lambda reply: self._on_claim_reply(pending, request, reply),
        )  # fmt: skip

    def _retry(self, pending: PendingClaim) -> None:
        self._send(pending)

    def _on_claim_reply(
        self, pending: PendingClaim, request: ClaimRequest, reply: CursorReply
    ) -> None:
        if pending.call in self._unwanted:
            self._forget_unwanted(pending.call)
            if not reply.error and reply.cursor is not None:
                self._send_release(reply.cursor, lambda: None)
            return
        if not reply.error and reply.cursor is not None:
            self._on_granted(pending, request, reply.cursor, reply.shard)
            return
        pending.owner = reply.cursor.owner_text if reply.cursor is not None else ""
        match reply.error:
            case "trimmed":
                self._finish(pending, TrimmedError(RecordId(reply.trim, 0)))
            case "no-such-position":
                rid = RecordId(pending.start, request.start.shard)
                self._finish(pending, NoSuchRecordError(rid, "no shard owns the position yet"))
            case "full":
                why = f"{self._routing} has as many cursors as it can; delete one"
                self._finish(pending, UnavailableError(why))
            case "owned" if pending.owner and not request.wait:
                self._finish(pending, CursorHeldError(request.name, pending.owner))
            case _:  # Another owner, or another claim was faster.
                self._retry_at(pending, self._context.now + _CLAIM_INTERVAL_NS)

    def _on_granted(
        self, pending: PendingClaim, request: ClaimRequest, cursor: Cursor, shard: int
    ) -> None:
        call, lease_ns = pending.call, request.lease_ms * NS_PER_MS
        super().cancel(call)
        for number, former in self._claims.items():
            if former.cursor.name == cursor.name and former.cursor.term < cursor.term:
                self._lose(number, former, cursor)
        claim = self._claims[call] = Claim(cursor, shard, lease_ns, request.reads)
        if request.reads:
            start = RecordId(cursor.position, shard)
            self._subscriptions.start(
                call, SubscribeRequest(request.deadline, start, follow=True, known_rows=True)
            )
        else:
            self._context.complete(call, call)
        self._apply_pause(call, claim, cursor if cursor.is_paused else None)
        self._renew_at = min(self._renew_at, self._context.now + lease_ns // _RENEWALS)
        self._context.set_timer(self._renew_at)

    # --- the state of a claim ---

    def query(self, call: int, request: ClaimQuery) -> None:
        """Return the state of a claim."""
        claim = self._claims.get(request.subscription)
        self._context.complete(call, claim.state if claim is not None else _closed())

    def watch(self, call: int, request: WatchClaimRequest) -> None:
        """Return the state of a claim once it is news to the caller."""
        number, known = request.subscription, request.known
        pending = PendingClaim(call, request.deadline, name=known.name, claim=number, known=known)
        self._add(pending)
        self._notify_watch(pending)

    def _notify(self, number: int) -> None:
        """Complete the watches of a claim to which its state is news."""
        for pending in list(self._pending.values()):
            if pending.claim == number and pending.known is not None:
                self._notify_watch(pending)

    def _notify_watch(self, pending: PendingClaim) -> None:
        claim, known = self._claims.get(pending.claim), pending.known
        if claim is None or known is None:
            self._finish(pending, _closed())
            return
        state = claim.state
        if (state.is_paused, state.pause_at, state.lost) != (
            known.is_paused, known.pause_at, known.lost,
        ):  # fmt: skip
            self._finish(pending, state)

    # --- moves ---

    def commit(self, call: int, request: CommitRequest) -> None:
        """Move a cursor forward, now or soon."""
        claim = self._claims.get(request.subscription)
        error = self._error_of(claim)
        if claim is None or error is not None:
            self._context.complete(call, error)
        elif request.position.gsn < claim.sent:
            allowed = f"gsn {claim.sent} or later, because an earlier commit may be there"
            self._context.complete(call, ConfigError("position", str(request.position), allowed))
        elif request.is_soon:
            self._moves_at = min(self._moves_at, self._context.now + COMMIT_INTERVAL_NS)
            claim.soon = (request.position, request.mark)
            self._context.set_timer(self._moves_at)
            self._context.complete(call, request.position)
        else:
            pending = PendingClaim(call, request.deadline, name=claim.cursor.name)
            self._add(pending)
            move = Move(
                request.subscription,
                claim,
                request.position,
                request.mark,
                lambda result: self._finish(pending, result),
            )
            pending.service_request = self._send_moves([move])

    def _error_of(self, claim: Claim | None) -> Exception | None:
        if claim is None:
            return _closed()
        cursor = claim.cursor
        return CursorLostError(cursor.name, cursor.term, claim.lost) if claim.lost else None

    def _send_moves(self, moves: list[Move]) -> int:
        """Send moves of different claims, at most `MAX_MOVES`; return the request's number."""
        numbered: list[CursorMove] = []
        for move in moves:
            claim, cursor = move.claim, move.claim.cursor
            claim.soon, claim.awaited = None, move
            claim.sent = max(claim.sent, move.position.gsn)
            claim.moves += 1
            numbered.append(
                CursorMove(cursor.name, cursor.term, claim.moves, move.position.gsn, move.mark)
            )

        def on_reply(reply: CursorsMoved) -> None:
            refused = {one.name: one for one in reply.refused}
            for move in moves:
                self._on_moved(move, refused.get(move.claim.cursor.name))

        return self._membership.send_request(
            lambda cluster, number: CursorMoves(cluster, number, numbered), on_reply
        )

    def _on_moved(self, move: Move, refused: RefusedMove | None) -> None:
        if move.claim.awaited is move:
            move.claim.awaited = None
        error = None
        if refused is not None and refused.error in {"stale-term", "no-such-cursor"}:
            self._lose(move.number, move.claim, refused.cursor)
            error = self._error_of(move.claim)
        move.end(refused, error)

    def _send_soon_moves(self) -> None:
        """Send the moves that wait, once the service has answered the last ones."""
        if any(map(self._membership.is_open, self._soon_requests)):
            self._moves_at = self._context.now + COMMIT_INTERVAL_NS
            return
        due = [
            Move(number, claim, *claim.soon, _ignore)
            for number, claim in self._claims.items()
            if claim.soon is not None and not claim.lost
        ]
        self._soon_requests = [
            self._send_moves(due[start : start + MAX_MOVES])
            for start in range(0, len(due), MAX_MOVES)
        ]

    # --- the end ---

    def release(self, call: int, request: ReleaseRequest) -> None:
        """Have the last move confirmed, then end the ownership."""
        number, claim = request.subscription, self._claims.get(request.subscription)
        if claim is None or claim.lost:
            self._forget_lost(number)
            self._context.complete(call, None)
            return
        pending = PendingClaim(call, request.deadline, name=claim.cursor.name)
        self._add(pending)

        def on_moved(result: Any) -> None:
            if call not in self._pending:
                return  # Its deadline has passed.
            if isinstance(result, Exception):
                self._forget_lost(number)
                self._finish(pending, None if claim.lost else result)
                return
            pending.service_request = self._send_release(
                claim.cursor, lambda: self._finish(pending, None)
            )
            self._claims.pop(number, None)
            self._notify(number)

        # A release would overtake a move whose only copy so far was lost.
        last = claim.unconfirmed
        if last is None:
            on_moved(None)
        else:
            self._send_moves([Move(number, claim, *last, on_moved)])

    def _forget_lost(self, number: int) -> None:
        """Forget a lost claim that no subscription keeps."""
        claim = self._claims.get(number)
        if claim is not None and claim.lost and not claim.reads:
            del self._claims[number]
            self._notify(number)

    def _send_release(self, cursor: Cursor, on_end: Callable[[], None]) -> int:
        return self._membership.send_request(
            lambda cluster, number: CursorRelease(cluster, number, cursor.name, cursor.term),
            lambda _reply: on_end(),
        )

    def unsubscribe(self, call: int, request: UnsubscribeRequest) -> None:
        """Close a subscription; end its claim of a cursor, if it has one."""
        pending = self._pending.get(request.subscription)
        if pending is not None:
            # It was closed before it was granted: complete the opening call, too.
            self._finish(pending, pending.call)
        self._drop(request.subscription)
        self._subscriptions.unsubscribe(call, request)

    def _drop(self, number: int) -> None:
        """Send a claim's last move and its release, without waiting."""
        claim = self._claims.pop(number, None)
        if claim is None:
            return
        self._notify(number)
        if claim.lost:
            return
        if claim.soon is not None:
            self._send_moves([Move(number, claim, *claim.soon, _ignore)])
        self._send_release(claim.cursor, lambda: None)

    def end(self, call: int, request: EndClaimsRequest) -> None:
        """End the calls that claim; wait until no claim of theirs can be granted any more."""
        for pending in list(self._pending.values()):
            if pending.request is not None:
                self._finish(pending, ClosedError())
        ending = PendingClaim(call, request.deadline, name="")
        self._add(ending)
        if not self._unwanted:
            self._finish(ending, None)

    def _forget_unwanted(self, call: int) -> None:
        del self._unwanted[call]
        for pending in list(self._pending.values()):
            if not (pending.name or self._unwanted):
                self._finish(pending, None)

    def close(self) -> None:
        """End all ownerships: the client is closed."""
        for number in list(self._claims):
            self._drop(number)

    def _lose(self, number: int, claim: Claim, now: Cursor | None) -> None:
        """Note that a claim ended; `now`: the cursor; None: it was deleted."""
        if claim.lost:
            return
        if now is None:
            claim.lost = "it was deleted"
        elif now.seek != claim.cursor.seek:
            claim.lost = f"its position was set to gsn {now.position}"
        elif now.owner:
            claim.lost = f"{now.owner_text} claimed it"
        else:
            claim.lost = "it was released by an operator"
        reader, error = self._subscriptions.get(number), self._error_of(claim)
        if reader is not None and error is not None:
            reader.pause(0)  # Others may read what it has not returned.
            reader.fail(error)
        self._notify(number)

    # --- renewals ---

    def _renew(self) -> None:
        """Report that this client is alive; learn what happened to its cursors.

        The oldest renewal stays open: the service may take longer than the interval to reply.
        """
        claims = {number: claim for number, claim in self._claims.items() if not claim.lost}
        for renewal in self._renewals[1 if claims else 0 :]:
            self._membership.cancel(renewal)
        del self._renewals[1 if claims else 0 :]
        if not claims:
            self._renew_at = NEVER
            return
        owned = [OwnedTerm(one.cursor.name, one.cursor.term) for one in claims.values()]
        renewal = self._membership.send_request(
            lambda cluster, number: CursorRenewal(cluster, number, self._context.client, owned),
            lambda reply: self._on_renewed(claims, reply),
        )
        self._renewals.append(renewal)
        interval_ns = min(claim.lease_ns for claim in claims.values()) // _RENEWALS
        self._renew_at = self._context.now + interval_ns

    def _on_renewed(self, claims: dict[int, Claim], reply: CursorsRenewed) -> None:
        while self._renewals and self._renewals[0] <= reply.request:
            self._membership.cancel(self._renewals.pop(0))  # An older reply is no news.
        lost = {cursor.name: cursor for cursor in reply.lost}
        paused = {cursor.name: cursor for cursor in reply.paused}
        for number, claim in claims.items():
            name = claim.cursor.name
            if claim.lost:
                continue  # A move was refused meanwhile.
            if name in lost or name in reply.deleted:
                self._lose(number, claim, lost.get(name))
            else:
                self._apply_pause(number, claim, paused.get(name))

    def _apply_pause(self, number: int, claim: Claim, paused: Cursor | None) -> None:
        """Pause or continue a claim, and its subscription."""
        claim.is_paused = paused is not None
        claim.pause_at = paused.pause_at if paused is not None else 0
        reader = self._subscriptions.get(number)
        if reader is not None and paused is not None:
            reader.pause(paused.pause_at)
        elif reader is not None:
            reader.resume()
        self._notify(number)

    def tick(self) -> None:
        """Do the work that is due."""
        super().tick()
        context = self._context
        for call, (number, until) in list(self._unwanted.items()):
            if context.now >= until:
                self._membership.cancel(number)
                self._forget_unwanted(call)
            else:
                context.set_timer(until)
        for number, claim in list(self._claims.items()):
            if claim.reads and self._subscriptions.get(number) is None:
                self._drop(number)  # It was not opened.
        if context.now >= self._renew_at:
            self._renew()
        context.set_timer(self._renew_at)
        if context.now >= self._moves_at:
            self._moves_at = NEVER
            self._send_soon_moves()
        context.set_timer(self._moves_at)

    def cancel(self, call: int) -> None:
        """Cancel a call; a claim whose subscription is not open yet ends with it."""
        self._tail_queries.cancel(call)
        pending = self._pending.get(call)
        if pending is not None and pending.request is not None:
            self._keep_unwanted(pending, pending.request)
        super().cancel(call)
        claim, reader = self._claims.get(call), self._subscriptions.get(call)
        if claim is not None and claim.reads and (reader is None or not reader.is_open):
            self._drop(call)

    def _keep_unwanted(self, pending: PendingClaim, request: ClaimRequest) -> None:
        """Await the reply to a claim whose call ends: the cursor is released if it is granted."""
        if self._membership.is_open(pending.service_request):
            until = self._context.now + request.lease_ms * NS_PER_MS
            self._unwanted[pending.call] = (pending.service_request, until)
            self._context.set_timer(until)
            pending.service_request = 0

    def _result_at_deadline(self, pending: PendingClaim) -> ClaimState | UnavailableError | None:
        if not pending.name:
            return None
        claim = self._claims.get(pending.claim)
        if pending.known is not None and claim is not None:
            return claim.state
        if pending.owner:
            return CursorHeldError(pending.name, pending.owner)
        return DeadlineError(
            f"the membership service of {self._routing} did not confirm the request about the"
            f" cursor {pending.name} before the deadline; try again"
        )

    def check(self) -> None:
        """Assert the invariant."""
        super().check()
        assert len(self._renewals) <= 2
        if self.has_claims:
            assert self._context.next_timer <= self._renew_at, "a renewal would be missed"


def _ignore(_result: Any) -> None:
    """Take the outcome of a move for which no call waits."""


def _closed() -> ClosedError:
    return ClosedError("this cursor", "claim it again to continue")
