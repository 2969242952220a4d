"""Claims of cursors: moves, renewals, losses, pauses; and operators' changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.unit.ziplog.client.fakes import CLIENT, CLUSTER, MS, Glass, S, lease, placement
from tests.unit.ziplog.client.reader import unit
from ziplog import wire
from ziplog.client.common.requests import (
    NEVER,
    ClaimQuery,
    ClaimRequest,
    ClaimState,
    CommitRequest,
    CursorsRequest,
    EditRequest,
    FetchRequest,
    ReleaseRequest,
    UnsubscribeRequest,
    WatchClaimRequest,
)
from ziplog.client.cursors.claims import COMMIT_INTERVAL_NS
from ziplog.core.cursors import MAX_MOVES, Cursor, CursorMove
from ziplog.core.node import BatchEnd, Closing
from ziplog.core.view import run_of
from ziplog.errors import (
    ClosedError,
    ConfigError,
    CursorHeldError,
    CursorLostError,
    DeadlineError,
    NoSuchRecordError,
    TrimmedError,
    UnavailableError,
)
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire.cursors import RefusedMove

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST = lease([0], size=100)
LEASE_MS = 3000


def cursor(term: int = 1, position: int = 5, owner: bytes = CLIENT, **more: Any) -> Cursor:
    made = Cursor("x", 1, term, position, owner=owner, owner_text=owner.decode())
    return msgspec.structs.replace(made, **more)


class Owner(Glass):
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


# --- claims ---


def test_claim_opens_a_subscription_at_the_position() -> None:
    owner = Owner()
    call = owner.claim(start=RecordId(3, 0))
    request = owner.reply(wire.CursorClaim, cursor(position=7, mark=b"m"))
    assert (request.name, request.start, request.owner, request.lease_ms) == ("x", 3, CLIENT, 3000)
    assert call not in owner.answers
    query = owner.take(wire.LeaseQuery)[-1][1]
    assert query.gsn == 7
    owner.sent.append(("mms:1", query))
    owner.history()
    assert owner.answers[call] == call
    assert owner.state(call) == ClaimState("x", 1, RecordId(7, 0), b"m", False, "", 1)


def test_copies_of_a_claim_have_one_nonce_and_other_claims_another() -> None:
    owner = Owner()
    owner.claim()
    owner.pass_time(2 * S)
    copies = owner.take(wire.CursorClaim)
    assert len(copies) > 1
    assert len({message.nonce for _, message in copies}) == 1
    second = Owner()
    second.call(CursorsRequest(second.until()))
    second.claim()
    assert second.take(wire.CursorClaim)[-1][1].nonce != copies[0][1].nonce


def test_claim_of_an_owned_cursor_waits() -> None:
    owner = Owner()
    call = owner.claim()
    for _ in range(3):
        owner.reply(wire.CursorClaim, cursor(owner=b"somebody"), "owned")
        assert call not in owner.answers
        owner.pass_time(200 * MS)
    owner.reply(wire.CursorClaim, cursor(term=2))
    owner.history()
    assert owner.answers[call] == call


def test_claim_of_an_owned_cursor_ends_at_its_deadline() -> None:
    owner = Owner()
    call = owner.claim(timeout=S)
    owner.reply(wire.CursorClaim, cursor(owner=b"other:9"), "owned")
    owner.pass_time(2 * S)
    error = owner.answers[call]
    assert isinstance(error, CursorHeldError)
    assert (error.name, error.owner) == ("x", "other:9")


def test_claim_that_does_not_wait_ends_at_once() -> None:
    owner = Owner()
    call = owner.claim(wait=False)
    owner.reply(wire.CursorClaim, cursor(owner=b"other:9"), "owned")
    assert isinstance(owner.answers[call], CursorHeldError)


def test_second_claim_by_one_client_is_refused() -> None:
    owner = Owner()
    owner.own()
    call = owner.claim()
    assert isinstance(owner.answers[call], CursorHeldError)
    assert owner.take(wire.CursorClaim) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("trimmed", TrimmedError),
        ("no-such-position", NoSuchRecordError),
        ("full", UnavailableError),
    ],
)
def test_refused_claim(error: str, expected: type[Exception]) -> None:
    owner = Owner()
    call = owner.claim()
    owner.reply(wire.CursorClaim, None, error, trim=9)
    assert isinstance(owner.answers[call], expected)


def test_claim_without_an_answer_ends_at_its_deadline() -> None:
    owner = Owner()
    call = owner.claim(timeout=S)
    owner.pass_time(2 * S)
    assert isinstance(owner.answers[call], DeadlineError)
    assert not isinstance(owner.answers[call], CursorHeldError)


def test_cancelled_claim_is_released_when_it_was_granted() -> None:
    owner = Owner()
    call = owner.claim()
    owner.reply(wire.CursorClaim, cursor())
    owner.cancel(call)
    release = owner.take(wire.CursorRelease)[-1][1]
    assert (release.name, release.term) == ("x", 1)
    assert not owner.core.has_claims


def test_claim_without_a_subscription_reads_nothing() -> None:
    owner = Owner()
    call = owner.own_without_reading(position=7, mark=b"m", has_moved=True)
    assert owner.take(wire.LeaseQuery) == []
    assert owner.state(call) == ClaimState(
        "x", 1, RecordId(7, 0), b"m", is_paused=False, lost="", birth=1, has_moved=True
    )
    assert isinstance(owner.answers[owner.call(FetchRequest(NEVER, call, 10))], ClosedError)


# --- moves ---


@pytest.mark.parametrize("reads", [True, False])
def test_move_is_part_of_the_state(reads: bool) -> None:
    owner = Owner()
    call = owner.own() if reads else owner.own_without_reading()
    assert not owner.state(call).has_moved
    owner.commit(call, 5)
    owner.moved()
    assert owner.state(call).has_moved


def test_commit_returns_once_the_service_confirms_it() -> None:
    owner = Owner()
    call = owner.own()
    move = owner.commit(call, 9, b"m")
    assert move not in owner.answers
    request = owner.moved()
    assert (request.term, request.move, request.position, request.mark) == (1, 1, 9, b"m")
    assert owner.answers[move] == RecordId(9, 0)
    assert owner.state(call)[2:4] == (RecordId(9, 0), b"m")


def test_moves_are_numbered() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 9)
    owner.commit(call, 10)
    assert [[one.move for one in moves] for moves in owner.moves()] == [[1], [2]]


@pytest.mark.parametrize(
    ("error", "now", "reason"),
    [
        ("stale-term", cursor(term=2, owner=b"other:9"), "other:9 claimed it"),
        ("stale-term", cursor(term=2, owner=b"", seek=1, position=3), "set to gsn 3"),
        ("stale-term", cursor(term=2, owner=b""), "released by an operator"),
        ("no-such-cursor", None, "deleted"),
    ],
)
def test_refused_move_ends_the_claim(error: str, now: Cursor | None, reason: str) -> None:
    owner = Owner()
    call = owner.own()
    fetch = owner.call(FetchRequest(NEVER, call, 10))
    move = owner.commit(call, 9)
    owner.moved(now, error)
    for lost in (owner.answers[move], owner.answers[fetch]):
        assert isinstance(lost, CursorLostError)
        assert reason in lost.reason
        assert (lost.name, lost.term) == ("x", 1)
    assert isinstance(owner.answers[owner.commit(call, 10)], CursorLostError)
    assert not owner.core.has_claims


def test_soon_moves_share_a_message() -> None:
    owner = Owner()
    call = owner.own()
    for gsn in (6, 7, 8):
        assert owner.answers[owner.commit(call, gsn, soon=True)] == RecordId(gsn, 0)
    assert owner.moves() == []
    owner.pass_time(COMMIT_INTERVAL_NS)
    assert owner.moves() == [[CursorMove("x", 1, 1, 8, b"")]]


def test_soon_moves_of_all_claims_leave_together() -> None:
    owner = Owner()
    first, second = owner.own(), owner.own_without_reading(name="y")
    owner.commit(first, 6, soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS // 2)
    owner.commit(second, 7, soon=True)
    assert owner.moves() == []
    owner.pass_time(COMMIT_INTERVAL_NS // 2)
    assert [[one.name for one in moves] for moves in owner.moves()] == [["x", "y"]]


def test_message_has_at_most_so_many_moves() -> None:
    owner = Owner()
    for number in range(MAX_MOVES + 1):
        owner.commit(owner.own_without_reading(name=f"c{number}"), 6, soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    assert [len(moves) for moves in owner.moves()] == [MAX_MOVES, 1]


def test_refused_move_ends_only_its_own_claim() -> None:
    owner = Owner()
    first, second = owner.own_without_reading(), owner.own_without_reading(name="y")
    for call in (first, second):
        owner.commit(call, 6, soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    owner.moved(cursor(term=2, owner=b"other:9"), "stale-term")
    assert owner.state(first).lost == "other:9 claimed it"
    assert (owner.state(second).lost, owner.state(second).position) == ("", RecordId(6, 0))


def test_commit_takes_the_place_of_a_soon_move() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, soon=True)
    owner.commit(call, 8)
    owner.moved()
    owner.pass_time(2 * S)
    assert owner.moves() == []


# --- the end ---


def test_release_sends_the_last_move_first() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, soon=True)
    release = owner.call(ReleaseRequest(owner.until(), call))
    assert owner.take(wire.CursorRelease) == []
    owner.moved()
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    assert owner.answers[release] is None
    assert isinstance(owner.answers[owner.commit(call, 7)], ClosedError)


def test_release_overtakes_no_soon_move_that_has_no_reply() -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, b"m", soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    owner.moves()  # They are lost.
    release = owner.call(ReleaseRequest(owner.until(), call))
    assert owner.take(wire.CursorRelease) == []
    assert owner.moved() == CursorMove("x", 1, 2, 6, b"m")
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    assert owner.answers[release] is None


@pytest.mark.parametrize("has_commit", [True, False])
def test_release_repeats_no_move_that_is_confirmed_or_replaced(has_commit: bool) -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, b"former", soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    if has_commit:
        owner.commit(call, 6, b"newer")
    owner.moved()
    owner.call(ReleaseRequest(owner.until(), call))
    assert owner.moves() == []
    assert len(owner.take(wire.CursorRelease)) == 1


def test_release_without_an_answer_ends_at_its_deadline() -> None:
    owner = Owner()
    call = owner.own()
    release = owner.call(ReleaseRequest(owner.until(S), call))
    owner.pass_time(2 * S)
    assert isinstance(owner.answers[release], DeadlineError)


@pytest.mark.parametrize("is_closed", [True, False])
def test_dropped_cursor_is_moved_and_released(is_closed: bool) -> None:
    owner = Owner()
    call = owner.own()
    owner.commit(call, 6, soon=True)
    if is_closed:
        owner.step(Closing())
    else:
        owner.call(UnsubscribeRequest(NEVER, call))
    assert owner.moves()[0][0].position == 6
    assert owner.take(wire.CursorRelease)[0][1].term == 1
    assert not owner.core.has_claims


@pytest.mark.parametrize("is_closed", [True, False])
def test_dropped_claim_without_a_subscription_is_released(is_closed: bool) -> None:
    owner = Owner()
    call = owner.own_without_reading()
    watch = owner.watch(call)
    owner.commit(call, 6, soon=True)
    if is_closed:
        owner.step(Closing())
    else:
        owner.call(UnsubscribeRequest(NEVER, call))
    assert owner.moves()[0][0].position == 6
    assert owner.take(wire.CursorRelease)[0][1].term == 1
    assert isinstance(owner.answers[watch], ClosedError)


def test_late_cancellation_of_a_granted_claim_leaves_it() -> None:
    owner = Owner()
    call = owner.own_without_reading()
    owner.cancel(call)
    assert owner.core.has_claims
    owner.call(ReleaseRequest(owner.until(), call))
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    assert isinstance(owner.answers[owner.call(ClaimQuery(NEVER, call))], ClosedError)


def test_release_forgets_a_lost_claim_without_a_subscription() -> None:
    owner = Owner()
    call = owner.own_without_reading()
    owner.pass_time(S)
    owner.renewed(deleted=["x"])
    assert owner.answers[owner.call(ReleaseRequest(owner.until(), call))] is None
    assert isinstance(owner.answers[owner.call(ClaimQuery(NEVER, call))], ClosedError)


# --- renewals ---


def test_owner_renews_three_times_in_a_lease() -> None:
    owner = Owner()
    owner.own()
    for _ in range(6):
        owner.pass_time(S)
        ((_, message),) = owner.take(wire.CursorRenewal)
        assert [(one.name, one.term) for one in message.owned] == [("x", 1)]
        owner.give(wire.CursorsRenewed(CLUSTER, message.request))


def test_client_without_claims_sends_no_renewals() -> None:
    owner = Owner()
    call = owner.own()
    owner.call(UnsubscribeRequest(NEVER, call))
    owner.reply(wire.CursorRelease, cursor(owner=b""))
    owner.pass_time(10 * S)
    assert owner.take(wire.CursorRenewal) == []


@pytest.mark.parametrize("how", ["lost", "deleted"])
def test_renewal_reports_the_end_of_a_claim(how: str) -> None:
    owner = Owner()
    call = owner.own()
    fetch = owner.call(FetchRequest(NEVER, call, 10))
    owner.pass_time(S)
    changes: dict[str, Any] = (
        {"lost": [cursor(term=2, owner=b"other:9")]} if how == "lost" else {"deleted": ["x"]}
    )
    owner.renewed(**changes)
    assert isinstance(owner.answers[fetch], CursorLostError)
    assert owner.state(call).lost
    owner.pass_time(5 * S)
    assert owner.take(wire.CursorRenewal) == []


def test_lost_cursor_can_be_claimed_again() -> None:
    owner = Owner()
    owner.own()
    owner.pass_time(S)
    owner.renewed(deleted=["x"])
    call = owner.claim()
    owner.reply(wire.CursorClaim, cursor(term=3))
    owner.history()
    assert owner.state(call).term == 3


def test_merged_records_are_returned_before_the_loss() -> None:
    owner = Owner()
    call = owner.own()
    owner.deliver(5, [5, 6], 20)
    first = owner.answers[owner.call(FetchRequest(NEVER, call, 1))]
    owner.deliver(20, [21], 30)
    owner.pass_time(S)
    owner.renewed(deleted=["x"])
    second = owner.answers[owner.call(FetchRequest(NEVER, call, 10))]
    assert [record.rid.gsn for record in first.records + second.records] == [5, 6]
    assert isinstance(owner.answers[owner.call(FetchRequest(NEVER, call, 10))], CursorLostError)


# --- pauses ---


def test_paused_owner_gets_no_records_until_the_pause_ends() -> None:
    owner = Owner()
    call = owner.own()
    owner.deliver(5, [5, 6], 20)
    owner.pass_time(S)
    owner.renewed(paused=[cursor(is_paused=True)])
    assert owner.state(call).is_paused
    fetch = owner.call(FetchRequest(NEVER, call, 10))
    owner.deliver(20, [21, 22], 40)
    assert fetch not in owner.answers
    owner.pass_time(S)
    owner.renewed()
    assert [record.rid.gsn for record in owner.answers[fetch].records] == [5, 6, 21, 22]
    assert not owner.state(call).is_paused


def test_pause_at_a_position_is_exact() -> None:
    owner = Owner()
    call = owner.own(is_paused=True, pause_at=7)
    owner.deliver(5, [5, 6, 7, 8], 20)
    found = owner.answers[owner.call(FetchRequest(NEVER, call, 10))]
    assert [record.rid.gsn for record in found.records] == [5, 6]
    fetch = owner.call(FetchRequest(NEVER, call, 10))
    owner.step(BatchEnd())
    assert fetch not in owner.answers
    owner.pass_time(S)
    owner.renewed()
    owner.step(BatchEnd())
    assert [record.rid.gsn for record in owner.answers[fetch].records] == [7, 8]


def test_watch_reports_the_begin_and_the_end_of_a_pause() -> None:
    owner = Owner()
    call = owner.own_without_reading()
    watch = owner.watch(call)
    owner.pass_time(S)
    owner.renewed()
    assert watch not in owner.answers
    owner.pass_time(S)
    owner.renewed(paused=[cursor(is_paused=True, pause_at=9)])
    state = owner.answers[watch]
    assert (state.is_paused, state.pause_at) == (True, 9)
    watch = owner.watch(call)
    owner.pass_time(S)
    owner.renewed(paused=[cursor(is_paused=True, pause_at=9)])
    assert watch not in owner.answers
    owner.pass_time(S)
    owner.renewed()
    state = owner.answers[watch]
    assert (state.is_paused, state.pause_at) == (False, 0)


def test_watch_reports_a_pause_that_was_there_before() -> None:
    owner = Owner()
    call = owner.own_without_reading(is_paused=True)
    known = owner.state(call)._replace(is_paused=False)
    watch = owner.call(WatchClaimRequest(NEVER, call, known))
    assert owner.answers[watch].is_paused


@pytest.mark.parametrize("how", ["renewal", "move"])
def test_watch_reports_a_loss(how: str) -> None:
    owner = Owner()
    call = owner.own_without_reading()
    watch = owner.watch(call)
    other = cursor(term=2, owner=b"other:9")
    if how == "renewal":
        owner.pass_time(S)
        owner.renewed(lost=[other])
    else:
        owner.commit(call, 9)
        owner.moved(other, "stale-term")
    assert owner.answers[watch].lost == "other:9 claimed it"
    assert isinstance(owner.answers[owner.commit(call, 10)], CursorLostError)


def test_watch_returns_the_state_at_its_deadline() -> None:
    owner = Owner()
    call = owner.own_without_reading()
    watch = owner.watch(call, timeout=500 * MS)
    owner.pass_time(S)
    assert owner.answers[watch] == owner.state(call)


def test_claims_with_and_without_subscriptions_are_renewed_together() -> None:
    owner = Owner()
    owner.own()
    call = owner.call(ClaimRequest(owner.until(), "y", RID_GENESIS, "h", LEASE_MS, 60, True, False))
    owner.reply(wire.CursorClaim, msgspec.structs.replace(cursor(), name="y"))
    assert owner.answers[call] == call
    owner.pass_time(S)
    ((_, message),) = owner.take(wire.CursorRenewal)
    assert [one.name for one in message.owned] == ["x", "y"]


# --- operators ---


def test_list_continues_until_it_is_whole() -> None:
    glass = Owner()
    call = glass.call(CursorsRequest(glass.until()))
    first = glass.take(wire.CursorQuery)[-1][1]
    a, b = msgspec.structs.replace(cursor(), name="a"), cursor(owner=b"", is_paused=True)
    glass.give(wire.CursorList(CLUSTER, first.request, [a], [0], True, [True]))
    second = glass.take(wire.CursorQuery)[-1][1]
    assert second.after == "a"
    glass.give(wire.CursorList(CLUSTER, second.request, [b], [4]))
    found = glass.answers[call]
    # The second list has no `silent`: it came from an earlier release.
    assert [(one.name, one.state, one.position, one.is_silent) for one in found] == [
        ("a", "owned", RecordId(5, 0), True), ("x", "paused", RecordId(5, 4), False)
    ]  # fmt: skip


def test_change_returns_the_cursor() -> None:
    glass = Owner()
    call = glass.call(EditRequest(glass.until(), "x", "seek", RecordId(9, 0)))
    request = glass.reply(wire.CursorEdit, cursor(position=9, owner=b""))
    assert (request.edit, request.position) == ("seek", 9)
    assert glass.answers[call].position == RecordId(9, 0)


@pytest.mark.parametrize(
    ("edit", "error", "expected"),
    [
        ("pause", "no-such-cursor", ConfigError),
        ("delete", "no-such-cursor", type(None)),
        ("create", "exists", ConfigError),
        ("create", "full", UnavailableError),
        ("seek", "no-such-position", NoSuchRecordError),
    ],
)
def test_refused_change(edit: Any, error: str, expected: type) -> None:
    glass = Owner()
    call = glass.call(EditRequest(glass.until(), "x", edit, RecordId(9, 0)))
    glass.reply(wire.CursorEdit, None, error)
    assert isinstance(glass.answers[call], expected)
