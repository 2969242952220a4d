"""The claims of one cursor: moves, releases, and results that come late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logplayer.claim import Claim
from logplayer.settings import PlayerSettings
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    ClaimState,
    CommitRequest,
    ReleaseRequest,
    WatchClaimRequest,
)
from ziplog.errors import CursorLostError, NoSuchRecordError, UnavailableError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

SETTINGS = PlayerSettings(name="orders", targets=())
STATE = ClaimState("x", 1, RecordId(5, 0), b"m", False, "")


class Calls:
    """Calls of a client, which a test answers."""

    def __init__(self) -> None:
        self.now = 0
        self.effects: list[Any] = []
        self.open: list[tuple[Any, Callable[[Any], None]]] = []

    def call(self, request: Any, on_result: Callable[[Any], None]) -> None:
        self.open.append((request, on_result))

    def take(self, kind: type) -> Callable[[Any], None]:
        """Return what takes the result of the oldest call of a kind."""
        at = next(at for at, (request, _) in enumerate(self.open) if isinstance(request, kind))
        return self.open.pop(at)[1]

    def moves(self) -> list[int]:
        """Return the positions of the moves under way."""
        return [one.position.gsn for one, _ in self.open if isinstance(one, CommitRequest)]

    @property
    def releases(self) -> int:
        return sum(isinstance(request, ReleaseRequest) for request, _ in self.open)


class Listener:
    """Notes what a claim reports."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None if name == "wake" else self.seen.append(name)


def held(number: int = 1) -> tuple[Claim, Calls, Listener]:
    calls, listener = Calls(), Listener()
    claim = Claim(calls, "x", "host", SETTINGS, listener)  # type: ignore[arg-type]
    grant(claim, calls, number)
    return claim, calls, listener


def grant(claim: Claim, calls: Calls, number: int, state: Any = STATE) -> None:
    claim.claim(RID_GENESIS)
    calls.take(ClaimRequest)(number)
    calls.take(ClaimQuery)(state)


def move(claim: Claim, gsn: int) -> None:
    claim.move(gsn, b"m")
    claim.expedite()
    claim.poll(0)


def test_claim_that_is_lost_before_its_state_is_known_is_refused() -> None:
    calls, listener = Calls(), Listener()
    claim = Claim(calls, "x", "host", SETTINGS, listener)  # type: ignore[arg-type]
    grant(claim, calls, 1, STATE._replace(lost="another owner claimed it"))
    assert (claim.state, listener.seen) == (None, ["on_refused"])


def test_one_move_is_under_way_and_a_release_waits_for_it_and_for_the_next_one() -> None:
    claim, calls, listener = held()
    move(claim, 6)
    move(claim, 7)
    claim.release()
    assert (calls.moves(), calls.releases) == ([6], 0)
    calls.take(CommitRequest)(RecordId(6, 0))
    assert (calls.moves(), calls.releases) == ([7], 0)
    calls.take(CommitRequest)(RecordId(7, 0))
    assert calls.releases == 1
    calls.take(ReleaseRequest)(None)
    assert listener.seen[-1] == "on_released"


def test_move_below_the_one_under_way_is_not_sent() -> None:
    """The target opened anew at an older state; the service would refuse the move."""
    claim, calls, _ = held()
    move(claim, 12)
    claim.move(9, b"")
    calls.take(CommitRequest)(RecordId(12, 0))
    assert claim.committed == 12
    assert claim.is_settled
    claim.release()
    calls.take(ReleaseRequest)(None)
    assert calls.moves() == []


def test_move_that_failed_does_not_replace_a_later_one() -> None:
    claim, calls, _ = held()
    move(claim, 6)
    claim.move(7, b"m")
    calls.take(CommitRequest)(UnavailableError("no leader"))
    claim.expedite()
    claim.poll(0)
    assert calls.moves() == [7]


def test_cursor_counts_as_moved_from_its_first_move_on() -> None:
    claim, _, _ = held()
    assert not claim.has_moved
    move(claim, 6)
    assert claim.has_moved


def test_cursor_does_not_count_as_moved_by_a_move_that_was_refused() -> None:
    claim, calls, _ = held()
    move(claim, 6)
    calls.take(CommitRequest)(NoSuchRecordError(RecordId(6, 0), "no shard owns it yet"))
    assert not claim.has_moved


def test_release_follows_the_refusal_of_a_move_beyond_the_log() -> None:
    claim, calls, listener = held()
    move(claim, 6)
    claim.release()
    calls.take(CommitRequest)(NoSuchRecordError(RecordId(6, 0), "no shard owns it yet"))
    assert listener.seen[-1] == "on_beyond_log"
    assert calls.releases == 1


def test_move_that_failed_is_sent_again() -> None:
    claim, calls, _ = held()
    move(claim, 6)
    calls.take(CommitRequest)(UnavailableError("no leader"))
    claim.expedite()
    claim.poll(0)
    assert calls.moves() == [6]


def test_results_of_a_former_claim_change_nothing() -> None:
    claim, calls, listener = held(1)
    move(claim, 6)
    moved, watched = calls.take(CommitRequest), calls.take(WatchClaimRequest)
    claim.lose("an operator released it")
    assert listener.seen == ["on_claimed", "on_claim_lost"]
    grant(claim, calls, 2, STATE._replace(term=3))
    move(claim, 8)
    moved(CursorLostError("x", 1, "it has another term"))
    watched(STATE._replace(lost="it has another term"))
    assert claim.is_held
    assert not claim.is_settled
    assert listener.seen[2:] == ["on_claimed"]


def test_late_end_of_a_former_release_ends_no_later_one() -> None:
    claim, calls, listener = held(1)
    claim.release()
    former = calls.take(ReleaseRequest)
    claim.lose("an operator released it")
    grant(claim, calls, 2, STATE._replace(term=3))
    move(claim, 8)
    claim.release()
    former(None)
    assert claim.state is not None
    assert listener.seen[-1] == "on_claimed"
