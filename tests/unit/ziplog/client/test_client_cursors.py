"""Claims of cursors: renewals, losses, pauses; and operators' changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.ziplog.client.fakes import CLIENT, CLUSTER, MS, S
from tests.unit.ziplog.client.owner import LEASE_MS, Owner, cursor
from ziplog import wire
from ziplog.client.common.requests import (
    ClaimRequest,
    ClaimState,
    CursorsRequest,
    EditRequest,
    EndClaimsRequest,
    FetchRequest,
    UnsubscribeRequest,
    WatchClaimRequest,
)
from ziplog.client.cursors.claims import COMMIT_INTERVAL_NS
from ziplog.core.node import BatchEnd
from ziplog.core.units import NEVER
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
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId

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


@pytest.mark.parametrize("how", ["cancelled", "closed", "late"])
def test_claim_that_is_granted_after_its_call_ended_is_released(how: str) -> None:
    owner = Owner()
    call = owner.claim(timeout=S)
    if how == "cancelled":
        owner.cancel(call)
    elif how == "closed":
        owner.call(UnsubscribeRequest(NEVER, call))
    else:
        owner.pass_time(2 * S)
        assert isinstance(owner.answers[call], DeadlineError)
    owner.reply(wire.CursorClaim, cursor(term=7))
    ((_, release),) = owner.take(wire.CursorRelease)
    assert (release.name, release.term) == ("x", 7)
    owner.sent.clear()
    owner.pass_time(10 * S)
    assert owner.take(wire.CursorClaim) == owner.take(wire.CursorRenewal) == []


def test_claim_that_is_refused_after_its_call_ended_is_forgotten() -> None:
    owner = Owner()
    owner.cancel(owner.claim())
    owner.reply(wire.CursorClaim, cursor(owner=b"other:9"), "owned")
    owner.sent.clear()
    owner.pass_time(10 * S)
    assert owner.take(wire.CursorClaim) == owner.take(wire.CursorRelease) == []


def test_claim_without_a_reply_is_given_up_a_lease_after_its_call() -> None:
    owner = Owner()
    owner.cancel(owner.claim())
    owner.pass_time(LEASE_MS * MS)
    owner.sent.clear()
    owner.pass_time(10 * S)
    assert owner.take(wire.CursorClaim) == []


def test_end_of_claims_waits_for_their_replies() -> None:
    owner = Owner()
    claims = [owner.claim(), owner.claim(name="y")]
    end = owner.call(EndClaimsRequest(owner.until()))
    assert [type(owner.answers[call]) for call in claims] == [ClosedError, ClosedError]
    (_, first), (_, second) = owner.take(wire.CursorClaim)
    owner.give(wire.CursorReply(CLUSTER, first.request, "owned", cursor(owner=b"other:9")))
    assert end not in owner.answers
    owner.give(wire.CursorReply(CLUSTER, second.request, "", cursor(term=4)))
    assert owner.answers[end] is None
    assert [message.term for _, message in owner.take(wire.CursorRelease)] == [4]


def test_end_of_claims_is_over_at_once_without_any_and_at_its_deadline() -> None:
    owner = Owner()
    owner.own()
    assert owner.answers[owner.call(EndClaimsRequest(owner.until()))] is None
    owner.claim(name="y")
    end = owner.call(EndClaimsRequest(owner.until(S)))
    owner.pass_time(2 * S)
    assert owner.answers[end] is None


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


@pytest.mark.parametrize("is_asked", [True, False])
def test_claim_that_is_closed_before_it_is_granted_ends(is_asked: bool) -> None:
    owner = Owner()
    call = owner.claim(timeout=NEVER, start=RID_GENESIS if is_asked else RID_RECENT)
    if is_asked:
        owner.reply(wire.CursorClaim, cursor(owner=b"other:9"), "owned")
    owner.call(UnsubscribeRequest(NEVER, call))
    assert call in owner.answers
    owner.sent.clear()
    owner.pass_time(2 * S)
    assert owner.take(wire.CursorClaim) == owner.take(wire.Tail) == []
    assert not owner.core.has_claims


def test_claim_ends_with_the_failure_of_its_opening() -> None:
    owner = Owner()
    call = owner.claim(timeout=2 * S)
    owner.reply(wire.CursorClaim, cursor())
    owner.pass_time(3 * S)
    assert isinstance(owner.answers[call], DeadlineError)
    release = owner.take(wire.CursorRelease)[-1][1]
    assert (release.name, release.term) == ("x", 1)
    assert not owner.core.has_claims
    again = owner.claim()
    owner.reply(wire.CursorClaim, cursor(term=2))
    owner.history()
    assert owner.answers[again] == again


def test_claim_without_a_subscription_reads_nothing() -> None:
    owner = Owner()
    call = owner.own_without_reading(position=7, mark=b"m", has_moved=True)
    assert owner.take(wire.LeaseQuery) == []
    assert owner.state(call) == ClaimState(
        "x", 1, RecordId(7, 0), b"m", is_paused=False, lost="", birth=1, has_moved=True
    )
    assert isinstance(owner.answers[owner.call(FetchRequest(NEVER, call, 10))], ClosedError)


# --- renewals ---


def test_owner_renews_three_times_in_a_lease() -> None:
    owner = Owner()
    owner.own()
    for _ in range(6):
        owner.pass_time(S)
        ((_, message),) = owner.take(wire.CursorRenewal)
        assert [(one.name, one.term) for one in message.owned] == [("x", 1)]
        owner.give(wire.CursorsRenewed(CLUSTER, message.request))


def test_replies_that_take_longer_than_the_interval_renew_a_claim() -> None:
    owner = Owner()
    call = owner.own()
    owner.sent.clear()
    owner.pass_time(2500 * MS)
    numbers = {message.request for _, message in owner.take(wire.CursorRenewal)}
    first, last = sorted(numbers)
    owner.give(wire.CursorsRenewed(CLUSTER, first, paused=[cursor(is_paused=True)]))
    assert owner.state(call).is_paused
    owner.give(wire.CursorsRenewed(CLUSTER, last))
    assert not owner.state(call).is_paused


def test_reply_to_an_older_renewal_undoes_no_newer_one() -> None:
    owner = Owner()
    call = owner.own()
    owner.sent.clear()
    owner.pass_time(2500 * MS)
    numbers = {message.request for _, message in owner.take(wire.CursorRenewal)}
    first, last = sorted(numbers)
    owner.give(wire.CursorsRenewed(CLUSTER, last, paused=[cursor(is_paused=True)]))
    owner.give(wire.CursorsRenewed(CLUSTER, first))
    assert owner.state(call).is_paused


def test_two_renewals_are_open_at_most() -> None:
    owner = Owner()
    owner.own()
    owner.pass_time(60 * S)
    membership = owner.core._claims._membership
    numbers = {message.request for _, message in owner.take(wire.CursorRenewal)}
    assert sum(map(membership.is_open, numbers)) == 2


def test_shortest_lease_sets_the_interval_of_the_renewals() -> None:
    owner = Owner()
    owner.own()
    long = owner.call(
        ClaimRequest(owner.until(), "y", RID_GENESIS, "host:1", 60_000, 60, True, False)
    )
    owner.reply(wire.CursorClaim, cursor(term=2, name="y", lease_ms=60_000))
    assert owner.answers[long] == long
    for _ in range(6):
        owner.pass_time(S)
        ((_, message),) = owner.take(wire.CursorRenewal)
        assert [(one.name, one.term) for one in message.owned] == [("x", 1), ("y", 2)]
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


def test_later_claim_of_the_same_client_ends_the_earlier_one() -> None:
    owner = Owner()
    first, second = owner.claim(reads=False), owner.claim(reads=False)
    one, other = (message for _, message in owner.take(wire.CursorClaim)[-2:])
    owner.give(wire.CursorReply(CLUSTER, one.request, "", cursor()))
    owner.commit(first, 6, soon=True)
    owner.give(wire.CursorReply(CLUSTER, other.request, "", cursor(term=2)))
    assert owner.state(first).lost == f"{CLIENT.decode()} claimed it"
    owner.commit(second, 7, soon=True)
    owner.pass_time(COMMIT_INTERVAL_NS)
    assert [[one.term for one in moves] for moves in owner.moves()] == [[2]]
    renewal = owner.take(wire.CursorRenewal)[-1][1]
    assert [owned.term for owned in renewal.owned] == [2]


def test_lost_cursor_can_be_claimed_again() -> None:
    owner = Owner()
    owner.own()
    owner.pass_time(S)
    owner.renewed(deleted=["x"])
    call = owner.claim()
    owner.reply(wire.CursorClaim, cursor(term=3))
    owner.history()
    assert owner.state(call).term == 3


def test_records_that_were_not_returned_before_the_loss_are_not_returned() -> None:
    owner = Owner()
    call = owner.own()
    owner.deliver(5, [5, 6], 20)
    first = owner.answers[owner.call(FetchRequest(NEVER, call, 1))]
    owner.deliver(20, [21], 30)
    assert [record.rid.gsn for record in first.records] == [5]
    owner.pass_time(S)
    commit = owner.commit(call, 6)
    owner.moved(cursor(term=2, owner=b"other:9"), "stale-term")
    assert isinstance(owner.answers[commit], CursorLostError)
    assert isinstance(owner.answers[owner.call(FetchRequest(NEVER, call, 10))], CursorLostError)
    owner.renewed()  # by a former leader
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
    harness = Owner()
    call = harness.call(CursorsRequest(harness.until()))
    first = harness.take(wire.CursorQuery)[-1][1]
    a, b = msgspec.structs.replace(cursor(), name="a"), cursor(owner=b"", is_paused=True)
    harness.give(wire.CursorList(CLUSTER, first.request, [a], [0], True, [True]))
    second = harness.take(wire.CursorQuery)[-1][1]
    assert second.after == "a"
    harness.give(wire.CursorList(CLUSTER, second.request, [b], [4]))
    found = harness.answers[call]
    # The second list has no `silent`: it came from an earlier release.
    assert [(one.name, one.state, one.position, one.is_silent) for one in found] == [
        ("a", "owned", RecordId(5, 0), True), ("x", "paused", RecordId(5, 4), False)
    ]  # fmt: skip


def test_calls_that_the_service_does_not_answer_end_at_their_deadlines() -> None:
    harness = Owner()
    listing = harness.call(CursorsRequest(harness.until(S)))
    change = harness.call(EditRequest(harness.until(S), "x", "seek", RecordId(9, 0)))
    harness.pass_time(S)
    assert "did not send its cursors before the deadline" in str(harness.answers[listing])
    error = str(harness.answers[change])
    assert "did not confirm the request to seek the cursor x" in error
    assert "it may still happen" in error


def test_change_returns_the_cursor() -> None:
    harness = Owner()
    call = harness.call(EditRequest(harness.until(), "x", "seek", RecordId(9, 0)))
    request = harness.reply(wire.CursorEdit, cursor(position=9, owner=b""))
    assert (request.edit, request.position) == ("seek", 9)
    assert harness.answers[call].position == RecordId(9, 0)


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
    harness = Owner()
    call = harness.call(EditRequest(harness.until(), "x", edit, RecordId(9, 0)))
    harness.reply(wire.CursorEdit, None, error)
    assert isinstance(harness.answers[call], expected)
