"""What became of calls that were answered without anybody knowing (docs/protocol.md, section 4).

A `Doubt` is shared by the units that were under way when their call ended and by the error that the
user got. Rule: it is told the fate of each unit once, and of units only that are settled; when none
is left, those who asked are answered. Invariant: who waits, waits for a doubt with open units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.errors import OutcomeUnknownError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.client.common.requests import ResolveRequest
    from ziplog.client.common.step_context import Turn


class Doubt:
    """What one call left open. Written by the core only."""

    __slots__ = ("calls", "is_forgotten", "many", "open", "results", "shard")

    def __init__(
        self,
        shard: int,
        results: list[RecordId | None],
        units: Iterable[tuple[int, tuple[int, int]]],
        *,
        many: bool,
    ) -> None:
        """Make one of units that are open: the seq of each, and its payloads [start, stop)."""
        self.shard: Final = shard
        #: The rid of each payload; None: it never will exist, or is not known yet.
        self.results: Final = results
        self.open: Final = dict(units)
        #: It is of an `insert_many`.
        self.many: Final = many
        #: How many calls wait for it.
        self.calls = 0
        #: Servers may have forgotten this client: the fate of what is open will never be known.
        self.is_forgotten = False

    def learn(self, seq: int, gsns: Sequence[int] | None) -> None:
        """Take a unit's fate: its gsns, or None if it never will exist."""
        start, stop = self.open.pop(seq)
        if gsns is not None:
            self.results[start:stop] = [RecordId(gsn, self.shard) for gsn in gsns]

    @property
    def seq(self) -> int:
        """The seq of its first open unit."""
        return next(iter(self.open))

    def error(self, where: str, heard: str) -> OutcomeUnknownError:
        """Return what to raise while some of it is open, with what was heard of its first unit."""
        if self.is_forgotten:
            text = (
                f"an insert was under way at {where}, and the client was idle, or not heard, for so"
                f" long that servers may have forgotten it: it may have happened (seq {self.seq})"
            )
        else:
            text = (
                f"the deadline passed while an insert was under way at {where}: it may have"
                f" happened (seq {self.seq}; {heard}); resolve() waits until that is known"
            )
        error = OutcomeUnknownError(text, shard=self.shard, seq=self.seq, doubt=self)
        if self.many:
            error.results = list(self.results)
        return error


class Doubts:
    """The calls that wait for what is in doubt."""

    def __init__(self, turn: Turn) -> None:
        self._turn: Final = turn
        self._waiting: Final[dict[int, ResolveRequest]] = {}

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def start(self, call: int, request: ResolveRequest) -> None:
        """Take a call."""
        doubt = request.doubt
        if not doubt.open:
            self._turn.complete(call, list(doubt.results))
            return
        self._waiting[call] = request
        doubt.calls += 1
        self._turn.wake_at(request.deadline)

    def cancel(self, call: int) -> None:
        """The user waits no longer."""
        request = self._waiting.pop(call, None)
        if request is not None:
            request.doubt.calls -= 1

    def learned(self, doubt: Doubt, seq: int, gsns: Sequence[int] | None) -> None:
        """Take a unit's fate; answer those who wait if it was the last one."""
        doubt.learn(seq, gsns)
        if doubt.open or not doubt.calls:
            return
        for call in [call for call, r in self._waiting.items() if r.doubt is doubt]:
            self.cancel(call)
            self._turn.complete(call, list(doubt.results))

    def expired(self) -> list[tuple[int, Doubt]]:
        """Return the calls whose deadline has come, which wait no longer, and what they asked."""
        turn, late = self._turn, []
        for call, request in list(self._waiting.items()):
            if turn.now < request.deadline:
                turn.wake_at(request.deadline)
            else:
                self.cancel(call)
                late.append((call, request.doubt))
        return late

    def check(self) -> None:
        """Assert the invariant."""
        for request in self._waiting.values():
            assert request.doubt.open, "somebody waits for what is known"
            assert self._turn.alarm <= request.deadline, "a deadline would be missed"
