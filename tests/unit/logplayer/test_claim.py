"""One claimed cursor of a player: which moves it sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

from logplayer.claim import Claim
from logplayer.settings import PlayerSettings
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    ClaimState,
    CommitRequest,
    ReleaseRequest,
)
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.requests import Request


class Calls:
    """The log's calls, which a test answers."""

    def __init__(self) -> None:
        self.now = 0
        self.effects: list[Any] = []
        self.open: list[tuple[Request, Callable[[Any], None]]] = []

    def call(self, request: Request, then: Callable[[Any], None]) -> None:
        self.open.append((request, then))

    def answer(self, kind: type, result: Any) -> Any:
        """Answer the first call of a kind; return its request."""
        found = next(one for one in self.open if isinstance(one[0], kind))
        self.open.remove(found)
        found[1](result)
        return found[0]


def test_a_move_below_the_one_under_way_is_not_sent() -> None:
    """The target opened anew at an older state; the service would refuse the move."""
    calls = Calls()
    claim = Claim(cast("Any", calls), "x", "me", PlayerSettings(name="p", targets=()), MagicMock())
    claim.claim(RID_GENESIS)
    calls.answer(ClaimRequest, 7)
    calls.answer(ClaimQuery, ClaimState("x", 1, RecordId(5, 0), b"", False, ""))
    claim.move(12, b"")
    claim.expedite()
    claim.poll(0)
    claim.move(9, b"")
    calls.answer(CommitRequest, RecordId(12, 0))
    assert claim.committed == 12
    assert claim.is_settled
    claim.release()
    calls.answer(ReleaseRequest, None)
    assert not any(isinstance(request, CommitRequest) for request, _ in calls.open)
