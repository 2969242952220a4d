"""An owner of cursors: a client of one shard whose messages a test answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tests.unit.ziplog.client.fakes import CLIENT, CLUSTER, ClientHarness, S, lease, placement
from tests.unit.ziplog.client.reader import unit
from ziplog import wire
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    ClaimState,
    CommitRequest,
    WatchClaimRequest,
)
from ziplog.core.cursors import Cursor, CursorMove
from ziplog.core.units import NEVER
from ziplog.core.view import run_of
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire.cursors import RefusedMove

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST = lease([0], size=100)
LEASE_MS = 3000


def cursor(term: int = 1, position: int = 5, owner: bytes = CLIENT, **more: Any) -> Cursor:
    made = Cursor("x", 1, term, position, owner=owner, owner_text=owner.decode())
    return msgspec.structs.replace(made, **more)


class Owner(ClientHarness):
    """A client of one shard that claims the cursor "x"."""

    def __init__(self) -> None:
        super().__init__()
        self.connect(placement(0), leases=[run_of(FIRST)])

    def claim(
        self,
        *,
        start: RecordId = RID_GENESIS,
        wait: bool = True,
        timeout: int = 10 * S,
        reads: bool = True,
        name: str = "x",
    ) -> int:
        deadline = self.until(timeout)
        return self.call(ClaimRequest(deadline, name, start, "host:1", LEASE_MS, 60, wait, reads))

    def reply(self, kind: type, cursor: Cursor | None = None, error: Any = "", **more: Any) -> Any:
        """Answer the last request of a kind; return the request."""
        request = self.take(kind)[-1][1]
        self.give(wire.CursorReply(CLUSTER, request.request, error, cursor, **more))
        return request

    def moved(self, now: Cursor | None = None, error: Any = "") -> CursorMove:
        """Answer the last moves; return the first one."""
        request = self.take(wire.CursorMoves)[-1][1]
        move: CursorMove = request.moves[0]
        refused = [RefusedMove(move.name, error, now)] if error else []
        self.give(wire.CursorsMoved(CLUSTER, request.request, refused))
        return move

    def moves(self) -> list[list[CursorMove]]:
        """Return the moves of each message that was sent."""
        return [message.moves for _, message in self.take(wire.CursorMoves)]

    def history(self) -> None:
        query = self.take(wire.LeaseQuery)[-1][1]
        self.give(wire.LeaseHistory(CLUSTER, query.request, [run_of(FIRST)], [placement(0)], 0))
        for name, asked in self.take(wire.Outline):  # The rows before its position are trimmed.
            server = int(name[3])
            self.give(wire.Outlined(CLUSTER, 0, 1, server, asked.request, asked.start, []))

    def own(self, position: int = 5, **more: Any) -> int:
        """Claim the cursor, and open its subscription."""
        call = self.claim()
        self.reply(wire.CursorClaim, cursor(position=position, **more))
        self.history()
        assert self.answers[call] == call
        return call

    def own_without_reading(self, **more: Any) -> int:
        """Claim the cursor without a subscription."""
        call = self.claim(reads=False, name=more.get("name", "x"))
        self.reply(wire.CursorClaim, cursor(**more))
        assert self.answers[call] == call
        return call

    def watch(self, call: int, timeout: int = 60 * S) -> int:
        """Wait for news of a claim."""
        return self.call(WatchClaimRequest(self.until(timeout), call, self.state(call)))

    def state(self, call: int) -> ClaimState:
        found = self.answers[self.call(ClaimQuery(NEVER, call))]
        assert isinstance(found, ClaimState)
        return found

    def deliver(self, start: int, gsns: Sequence[int], frontier: int) -> None:
        stream = next(m for _, m in reversed(self.sent) if isinstance(m, wire.Subscribe))
        self.give(
            wire.Deliver(
                CLUSTER, 0, 1, 0, stream.subscription, start, frontier, [unit(*gsns)], [], frontier
            )
        )  # fmt: skip

    def commit(self, call: int, gsn: int, mark: bytes = b"", *, soon: bool = False) -> int:
        return self.call(CommitRequest(self.until(), call, RecordId(gsn, 0), mark, soon))

    def renewed(self, **changes: Any) -> None:
        """Answer the last renewal."""
        request = self.take(wire.CursorRenewal)[-1][1]
        self.give(wire.CursorsRenewed(CLUSTER, request.request, **changes))
