"""The moves of cursors at the leader, on their way through consensus.

    request: moves --> gathered --> proposed together --committed--> reply

Moves that arrive within `_INTERVAL_NS` share one command, and each has its own outcome. A request
is answered once all of its moves are decided, with those that were refused. Copies of a request
are requests of their own, and their moves count once.

Invariant: each move without an outcome is counted. See docs/protocol.md, section 19.2.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, cast

from mms.commands import MoveCursors
from ziplog.core.cursors import MAX_MOVES
from ziplog.core.node import Propose, Send
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.wire import CursorsMoved
from ziplog.wire.cursors import RefusedMove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mms.commands import Refusal
    from mms.state import ClusterState
    from ziplog.core.cursors import CursorError, CursorMove
    from ziplog.core.node import Effect
    from ziplog.wire import CursorMoves

#: Interval between two commands.
_INTERVAL_NS: Final = 50 * NS_PER_MS
#: Time after which an uncommitted command counts as lost. The client repeats its request. A commit
#: on slow disks takes seconds: a shorter time would forget every request just before its outcome.
LOST_NS: Final = 10 * NS_PER_S


class _Request:
    """A request, and the outcomes of its moves so far."""

    __slots__ = ("left", "refused", "request", "src")

    def __init__(self, src: bytes, message: CursorMoves) -> None:
        #: The route back to the client, and the number of its request.
        self.src: Final = src
        self.request: Final = message.request
        #: Number of moves without an outcome.
        self.left = len(message.moves)
        self.refused: Final[list[RefusedMove]] = []


class _Pending:
    """A proposed command; for each of its moves, the requests that wait for the outcome."""

    __slots__ = ("proposed_at", "requests")

    def __init__(self, requests: list[list[_Request]], now: int) -> None:
        self.proposed_at: Final = now
        self.requests: Final = requests


class PendingMoves:
    """The requested moves without an outcome."""

    def __init__(self, state: ClusterState, at_us: Callable[[int], int]) -> None:
        """`at_us`: returns Unix time in microseconds, of a time in monotonic nanoseconds."""
        self._state: Final = state
        self._at_us: Final = at_us
        #: Not proposed yet: the requests of each move.
        self._gathered: Final[dict[CursorMove, list[_Request]]] = {}
        self._pending: Final[dict[bytes, _Pending]] = {}
        self._next_at = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, src: bytes, message: CursorMoves) -> None:
        """Gather the moves of a request."""
        request = _Request(src, message)
        for move in message.moves:
            self._gathered.setdefault(move, []).append(request)
        self._count += len(message.moves)

    def propose(self, now: int) -> list[Effect]:
        """Propose gathered moves, if a command is due."""
        if not self._gathered or now < self._next_at:
            return []
        self._next_at = now + _INTERVAL_NS
        moves = list(islice(self._gathered, MAX_MOVES))
        encoded = MoveCursors(moves, self._at_us(now)).encode()
        self._forget(encoded)
        self._pending[encoded] = _Pending([self._gathered.pop(move) for move in moves], now)
        return [Propose(encoded)]

    def propose_before_release(self, name: str, term: int, now: int) -> list[Effect]:
        """Propose what was gathered, if it has a move of a cursor that is about to be released."""
        effects: list[Effect] = []
        while any((move.name, move.term) == (name, term) for move in self._gathered):
            self._next_at = now
            effects += self.propose(now)
        return effects

    def on_decided(
        self, encoded: bytes, moves: Iterable[CursorMove], refusals: Sequence[Refusal]
    ) -> list[Effect]:
        """Note the outcomes of a command's moves; answer the requests that have all of theirs."""
        effects: list[Effect] = []
        waiting = self._forget(encoded)
        for move, refusal, requests in zip(moves, refusals, waiting, strict=False):
            for request in requests:
                request.left -= 1
                if refusal:
                    request.refused.append(self._refused(move.name, refusal))
                if not request.left:
                    reply = CursorsMoved(self._state.cluster, request.request, request.refused)
                    effects.append(Send(request.src, reply))
        return effects

    def _refused(self, name: str, refusal: Refusal) -> RefusedMove:
        # A refusal of a move is one that the reply knows.
        error = cast("CursorError", refusal)
        return RefusedMove(name, error, self._state.cursors.get(name))

    def _forget(self, encoded: bytes) -> list[list[_Request]]:
        """Remove a pending command; return the requests of each of its moves."""
        pending = self._pending.pop(encoded, None)
        requests = pending.requests if pending is not None else []
        self._count -= sum(map(len, requests))
        return requests

    def forget_lost(self, now: int) -> None:
        """Forget the commands that were not committed in time."""
        lost = [one for one, each in self._pending.items() if now >= each.proposed_at + LOST_NS]
        for encoded in lost:
            self._forget(encoded)

    def next_wakeup(self) -> int | None:
        """Return when the next command is due; None: none is."""
        return self._next_at if self._gathered else None

    def _waiting(self) -> list[list[_Request]]:
        pending = [some for each in self._pending.values() for some in each.requests]
        return [*self._gathered.values(), *pending]

    def abandon(self) -> list[tuple[bytes, int]]:
        """Forget all requests; return the route and the number of each."""
        every = {(one.src, one.request): None for some in self._waiting() for one in some}
        self._gathered.clear()
        self._pending.clear()
        self._count = 0
        return list(every)

    def check(self) -> None:
        """Assert the invariant."""
        assert self._count == sum(map(len, self._waiting()))
