"""Cursors at the leader of the membership service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mms import cursors
from mms.commands import (
    ClaimCursor,
    EditCursor,
    MoveCursors,
    decode_command,
)
from tests.services import CLUSTER, MS, S
from tests.unit.mms.world import World, config
from ziplog.core.cursors import MAX_MOVES, Cursor, CursorMove
from ziplog.core.node import LeaderChanged
from ziplog.wire import (
    CursorClaim,
    CursorEdit,
    CursorList,
    CursorMoves,
    CursorQuery,
    CursorRelease,
    CursorRenewal,
    CursorReply,
    CursorsMoved,
    CursorsRenewed,
    NotLeader,
    Refused,
    Trim,
    TrimReply,
)
from ziplog.wire.cursors import MAX_LISTED, OwnedTerm

if TYPE_CHECKING:
    import pytest

ALICE, BOB = b"a" * 16, b"b" * 16


class Cursors(World):
    """A service with two shards, and clients of cursors."""

    def __init__(self, mms: int = 1) -> None:
        super().__init__(config(mms=mms))
        self.requests = 0
        self.lead().run(S)

    def ask(self, kind: Any, *fields: Any, src: bytes = b"client") -> int:
        self.requests += 1
        self.send(kind(CLUSTER, self.requests, *fields), src)
        return self.requests

    def claim(self, owner: bytes = ALICE, nonce: bytes = b"1", **more: Any) -> int:
        options: dict[str, Any] = {"start": 0, "lease_ms": 1000, "hold_s": 60} | more
        return self.ask(CursorClaim, "x", owner, owner.decode(), nonce, *options.values())

    def move(self, *moves: CursorMove) -> int:
        return self.ask(CursorMoves, list(moves))

    def moved(self) -> dict[int, list[tuple[str, str]]]:
        """Return the refused moves of each request that was answered."""
        self.run(200 * MS)
        replies = self.answers(CursorsMoved)
        return {one.request: [(each.name, each.error) for each in one.refused] for one in replies}

    def reply(self, request: int) -> CursorReply:
        self.run(100 * MS)
        (reply,) = [one for one in self.answers(CursorReply) if one.request == request]
        return reply

    def granted(self, owner: bytes = ALICE, nonce: bytes = b"1", **more: Any) -> Cursor:
        reply = self.reply(self.claim(owner, nonce, **more))
        assert reply.error == ""
        assert reply.cursor is not None
        return reply.cursor

    def renew(self, owner: bytes, *owned: tuple[str, int]) -> CursorsRenewed:
        request = self.ask(CursorRenewal, owner, [OwnedTerm(*one) for one in owned])
        (reply,) = [one for one in self.answers(CursorsRenewed) if one.request == request]
        return reply


def test_reply_to_a_claim_waits_for_consensus() -> None:
    world = Cursors()
    request = world.claim()
    assert world.answers(CursorReply) == []
    reply = world.reply(request)
    assert (reply.error, reply.cursor and reply.cursor.owner) == ("", ALICE)


def test_moves_have_the_times_of_a_wall_clock_that_was_corrected() -> None:
    world = Cursors()
    world.granted()
    world.wall_offset_ns, started = 10**9 * S, world.now
    request = world.move(CursorMove("x", 1, 1, 10, b""))
    assert world.moved() == {request: []}
    (cursor,) = world.service.state.cursors.in_order()
    assert 10**9 * S + started <= 1000 * cursor.moved_us <= 10**9 * S + world.now


def test_owned_cursor_is_refused_until_its_owner_was_silent_for_its_lease() -> None:
    world = Cursors()
    world.granted()
    for _ in range(5):
        world.run(500 * MS)
        world.renew(ALICE, ("x", 1))
        reply = world.reply(world.claim(BOB, b"2"))
        assert (reply.error, reply.cursor and reply.cursor.owner_text) == ("owned", ALICE.decode())
    world.run(S)
    assert world.granted(BOB, b"2").term == 2


def test_a_former_leader_does_not_refuse_a_claim() -> None:
    world = Cursors(mms=3)
    world.granted(lease_ms=60_000)
    world.is_cut_off = True  # another node leads, the cursor is released, and the claim granted
    asked = world.claim(BOB, b"2")
    world.run(S)
    assert [one for one in world.answers(CursorReply) if one.request == asked] == []
    world.step(LeaderChanged("mms-1", is_self=False))
    assert [one.request for one in world.answers(NotLeader)] == [asked]


def test_a_client_that_waits_for_a_cursor_costs_one_barrier() -> None:
    world = Cursors()
    world.granted(lease_ms=60_000)
    for _ in range(20):
        assert world.reply(world.claim(BOB, b"2")).error == "owned"
    assert world.commands().count("Barrier") == 1


def test_claims_and_moves_are_signs_of_life() -> None:
    world = Cursors()
    world.run(5 * S)
    world.granted()
    assert world.reply(world.claim(BOB, b"2")).error == "owned"
    for number in range(1, 4):
        world.run(700 * MS)
        world.move(CursorMove("x", 1, number, 10 * number, b""))
        world.run(100 * MS)
        assert world.reply(world.claim(BOB, b"2")).error == "owned"


def test_lease_of_the_present_owner_counts() -> None:
    world = Cursors()
    world.granted(lease_ms=5000)
    world.renew(ALICE, ("x", 1))
    world.run(4 * S)
    assert world.reply(world.claim(BOB, b"2", lease_ms=1000)).error == "owned"
    world.run(S)
    assert world.granted(BOB, b"3", lease_ms=1000).term == 2


def test_new_leader_counts_every_owner_as_heard() -> None:
    world = Cursors(mms=3)
    world.granted()
    world.run(10 * S)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.step(LeaderChanged("mms-0", is_self=True))
    assert world.reply(world.claim(BOB, b"2")).error == "owned"
    world.run(S)
    assert world.granted(BOB, b"3").term == 2


def test_repeated_claim_is_answered_with_the_same_term() -> None:
    world = Cursors()
    assert world.granted().term == 1
    assert world.granted().term == 1
    assert world.commands().count("ClaimCursor") == 1


def test_late_copy_of_a_claim_that_ended_owns_nothing() -> None:
    world = Cursors()
    world.granted()
    world.reply(world.ask(CursorRelease, "x", 1))
    world.reply(world.claim())
    assert world.service.state.cursors.in_order()[0].state == "free"
    assert world.granted(BOB, b"2").term == 2


def test_copies_of_a_pending_claim_share_a_proposal() -> None:
    world = Cursors()
    world.claim()
    world.claim()
    world.run(100 * MS)
    assert len(world.answers(CursorReply)) == 2
    assert world.commands().count("ClaimCursor") == 1


def test_claim_is_not_refused_while_a_copy_may_be_granted() -> None:
    """The owner is heard again while consensus decides the claim."""
    world = Cursors()
    term = world.granted().term
    world.run(1500 * MS)
    world.delay = 3 * S
    request = world.claim(BOB, b"2")
    for _ in range(3):
        world.run(800 * MS)
        world.renew(ALICE, ("x", term))
        world.send(CursorClaim(CLUSTER, request, "x", BOB, "bob", b"2", 0, 1000, 60))
    world.run(2 * S)
    outcomes = {one.error for one in world.answers(CursorReply) if one.request == request}
    assert outcomes == {""}
    (cursor,) = world.service.state.cursors.in_order()
    assert cursor.owner == BOB
    assert world.commands().count("ClaimCursor") == 2, "none was proposed while the owner is heard"


def test_refused_claim_takes_the_cursor_from_no_later_owner() -> None:
    """Two clients claim the cursor of a silent owner; the slower one repeats its claim."""
    world = Cursors()
    world.granted(lease_ms=1000)
    world.run(1500 * MS)
    world.delay = 3 * S
    first = world.claim(BOB, b"2", lease_ms=200)
    world.run(2 * S)
    second = world.claim(b"c" * 16, b"3", lease_ms=200)
    world.run(1500 * MS)
    world.delay = S // 10
    world.send(CursorClaim(CLUSTER, second, "x", b"c" * 16, "c", b"3", 0, 200, 60))
    world.run(5 * S)
    outcomes = {one.request: one.error for one in world.answers(CursorReply)}
    assert (outcomes[first], outcomes[second]) == ("", "owned")
    (cursor,) = world.service.state.cursors.in_order()
    assert cursor.owner == BOB


def test_moves_that_come_together_share_a_command() -> None:
    world = Cursors()
    world.granted()
    requests = [world.move(CursorMove("x", 1, n, 10 * n, b"%d" % n)) for n in range(1, 6)]
    assert world.moved() == {request: [] for request in requests}
    assert world.commands().count("MoveCursors") == 2
    cursor = world.service.state.cursors.get("x")
    assert cursor is not None
    assert (cursor.position, cursor.mark) == (50, b"5")


def test_each_move_of_a_command_has_its_own_outcome() -> None:
    world = Cursors()
    world.granted()
    world.move(CursorMove("x", 1, 1, 10, b""))
    stale = world.move(CursorMove("x", 7, 1, 20, b""))
    both = world.move(CursorMove("y", 1, 1, 20, b""), CursorMove("x", 1, 2, 20, b""))
    moved = world.moved()
    assert (moved[stale], moved[both]) == ([("x", "stale-term")], [("y", "no-such-cursor")])


def test_later_move_that_is_refused_takes_no_earlier_one_with_it() -> None:
    world = Cursors()
    world.granted()
    world.move(CursorMove("x", 1, 1, 10, b""))
    done = world.move(CursorMove("x", 1, 2, 50, b"done"))
    back = world.move(CursorMove("x", 1, 3, 20, b""))
    beyond = world.move(CursorMove("x", 1, 4, 10**15, b""))
    moved = world.moved()
    assert moved[done] == []
    assert (moved[back], moved[beyond]) == ([("x", "goes-back")], [("x", "no-such-position")])
    cursor = world.service.state.cursors.get("x")
    assert cursor is not None
    assert (cursor.position, cursor.mark) == (50, b"done")


def test_copies_of_a_move_that_come_together_are_one() -> None:
    world = Cursors()
    world.granted()
    world.move(CursorMove("x", 1, 1, 10, b""))
    copies = [world.move(CursorMove("x", 1, 2, 20, b"")) for _ in range(3)]
    moved = world.moved()
    assert [moved[one] for one in copies] == [[], [], []]
    commands = [one for one in map(decode_command, world.log) if isinstance(one, MoveCursors)]
    assert [len(one.moves) for one in commands] == [1, 1]


def test_request_whose_moves_are_in_two_commands_is_answered_once() -> None:
    world = Cursors()
    world.granted()
    world.move(CursorMove("x", 1, 1, 10, b""))
    names = [f"c{number}" for number in range(MAX_MOVES)]
    large = world.move(*(CursorMove(name, 1, 1, 20, b"") for name in names))
    last = world.move(CursorMove("c0", 1, 1, 20, b""), CursorMove("x", 1, 2, 20, b""))
    moved = world.moved()
    assert world.commands().count("MoveCursors") == 3
    assert moved[large] == [(name, "no-such-cursor") for name in names]
    assert moved[last] == [("c0", "no-such-cursor")]
    assert [one.request for one in world.answers(CursorsMoved)].count(last) == 1


def test_refused_move_comes_with_the_cursor() -> None:
    world = Cursors()
    world.granted()
    world.move(CursorMove("x", 7, 1, 20, b""))
    world.run(200 * MS)
    ((refused,),) = [one.refused for one in world.answers(CursorsMoved)]
    assert refused.cursor == world.service.state.cursors.get("x")


def test_renewal_reports_lost_deleted_and_paused_cursors() -> None:
    world = Cursors()
    world.granted()
    assert world.renew(ALICE, ("x", 1)) == CursorsRenewed(CLUSTER, world.requests)
    world.reply(world.ask(CursorEdit, "x", "pause", b"p", 6))
    (paused,) = world.renew(ALICE, ("x", 1)).paused
    assert paused.pause_at == 6
    world.reply(world.ask(CursorEdit, "x", "seek", b"s", 3))
    (lost,) = world.renew(ALICE, ("x", 1)).lost
    assert (lost.position, lost.seek) == (3, 1)
    world.reply(world.ask(CursorEdit, "x", "delete", b"d"))
    assert world.renew(ALICE, ("x", 1)).deleted == ["x"]


def test_former_leader_reports_no_loss_of_a_claim_that_it_has_not_seen() -> None:
    world = Cursors()
    world.granted()
    for name in ("x", "y"):
        reply = world.renew(ALICE, (name, 2))
        assert (reply.lost, reply.deleted) == ([], [])


def test_cursor_that_its_owner_does_not_name_is_free_after_its_lease() -> None:
    world = Cursors()
    world.granted()
    for _ in range(3):
        world.run(500 * MS)
        world.renew(ALICE, ("y", 1))
    assert world.granted(BOB, b"2").term == 2


def test_released_cursor_is_free_at_once() -> None:
    world = Cursors()
    world.granted()
    world.reply(world.ask(CursorRelease, "x", 1))
    assert world.granted(BOB, b"2").term == 2


def test_move_that_came_before_a_release_counts() -> None:
    world = Cursors()
    world.granted()
    moves = [world.move(CursorMove("x", 1, number, 10 * number, b"")) for number in (1, 2)]
    release = world.ask(CursorRelease, "x", 1)
    assert world.moved() == {move: [] for move in moves}
    assert world.reply(release).error == ""
    assert world.granted(BOB, b"2").position == 20


def test_list_is_answered_behind_a_barrier_in_parts() -> None:
    world = Cursors()
    names = [f"c{number:04}" for number in range(MAX_LISTED + 1)]
    for name in names:
        world.ask(CursorEdit, name, "create", b"1", 1, 60)
    world.run(S)
    world.ask(CursorQuery)
    assert world.answers(CursorList) == []
    world.run(100 * MS)
    (first,) = world.answers(CursorList)
    assert [one.name for one in first.cursors] == names[:MAX_LISTED]
    assert first.has_more
    world.ask(CursorQuery, names[MAX_LISTED - 1])
    world.run(100 * MS)
    rest = world.answers(CursorList)[1]
    assert ([one.name for one in rest.cursors], rest.has_more) == (names[MAX_LISTED:], False)
    assert rest.shards == [world.service.state.lease_at(1).owner(1)]  # type: ignore[union-attr]


def test_list_names_owners_that_were_silent_for_their_lease() -> None:
    world = Cursors()
    world.granted(lease_ms=1000)
    world.ask(CursorEdit, "free", "create", b"1", 1, 60)
    for at, silent in ((300 * MS, False), (S, True)):
        world.run(at)
        world.ask(CursorQuery)
        world.run(100 * MS)
        found = world.answers(CursorList)[-1]
        assert dict(zip([one.name for one in found.cursors], found.silent, strict=True)) == {
            "free": False,
            "x": silent,
        }


def test_hold_of_an_unused_cursor_lapses() -> None:
    world = Cursors()
    world.granted(hold_s=60)
    for _ in range(3):
        world.run(40 * S)
        world.renew(ALICE, ("x", 1))
    assert world.service.state.cursors.in_order()[0].is_holding
    world.run(63 * S)
    assert not world.service.state.cursors.in_order()[0].is_holding
    assert world.granted(BOB, b"2").is_holding


def test_holds_that_lapse_together_are_proposed_once_and_some_at_a_time() -> None:
    """Consensus drops other commands, as leases, while too many are pending."""
    world = Cursors()
    names = [f"c{number}" for number in range(cursors.MAX_LAPSES + 10)]
    for name in names:
        world.ask(CursorEdit, name, "create", name.encode(), 1, 60)
    world.run(59 * S)
    world.delay = 5 * S
    world.run(5 * S)
    lapses = [one for _, one in world.proposed if isinstance(decode_command(one), EditCursor)]
    assert len(lapses) == cursors.MAX_LAPSES
    world.run(20 * S)
    assert not any(one.is_holding for one in world.service.state.cursors.in_order())
    lapses = [one for one in world.log if isinstance(decode_command(one), EditCursor)]
    assert len(lapses) == 2 * len(names)


def test_new_leader_counts_every_cursor_as_used() -> None:
    world = Cursors(mms=3)
    world.granted(hold_s=60)
    for _ in range(3):
        world.run(40 * S)
        world.step(LeaderChanged("mms-1", is_self=False))
        world.step(LeaderChanged("mms-0", is_self=True))
    assert world.service.state.cursors.in_order()[0].is_holding
    world.run(70 * S)
    assert not world.service.state.cursors.in_order()[0].is_holding


def test_renewal_of_a_released_claim_reports_its_end() -> None:
    world = Cursors()
    term = world.granted().term
    world.reply(world.ask(CursorRelease, "x", term))
    assert [one.name for one in world.renew(ALICE, ("x", term)).lost] == ["x"]


def test_trim_of_held_records_is_refused_at_once_and_names_the_cursor() -> None:
    world = Cursors()
    world.granted(start=3)
    for server in world.servers:
        server.frontier = 10
    world.ask(Trim, 7)
    world.run(2 * S)
    (reply,) = world.answers(TrimReply)
    assert (reply.error, reply.held_by, reply.held_at) == ("not-stable", "x", 3)
    assert reply.held_owner == ALICE.decode()
    world.ask(Trim, 7, True)
    world.run(2 * S)
    assert world.answers(TrimReply)[1].error == ""
    assert world.service.state.trim == 7


def test_former_leader_redirects_what_waits() -> None:
    world = Cursors(mms=3)
    world.is_cut_off = True
    asked = [world.claim(), world.move(*(CursorMove(name, 1, 1, 10, b"") for name in "xy"))]
    world.step(LeaderChanged("mms-1", is_self=False))
    assert [one.request for one in world.answers(NotLeader)] == asked
    world.ask(CursorQuery)
    assert len(world.answers(NotLeader)) == 3


def test_number_of_waiting_requests_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "MAX_WAITING", 2)
    world = Cursors()
    world.is_cut_off = True
    for number in range(4):
        world.ask(CursorEdit, f"c{number}", "create", b"1", 1, 60)
    assert [one.code for one in world.answers(Refused)] == ["full", "full"]


def test_commands_take_only_a_part_of_the_places_for_proposals() -> None:
    """Consensus drops other commands, as leases, while too many are pending."""
    world = Cursors()
    world.delay = 5 * S
    many = cursors.MAX_COMMANDS + 10
    for _ in range(3):
        for number in range(many):
            fields = (f"c{number}", ALICE, "a", b"%d" % number, 0, 1000, 60)
            world.send(CursorClaim(CLUSTER, number, *fields))
        world.run(S)
    claims = [one for _, one in world.proposed if isinstance(decode_command(one), ClaimCursor)]
    assert len(claims) == cursors.MAX_COMMANDS
    assert {one.request for one in world.answers(Refused)} == set(range(many - 10, many))
    world.run(5 * S)
    granted = [one.request for one in world.answers(CursorReply) if not one.error]
    assert granted == list(range(many - 10))


def test_each_move_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "MAX_WAITING", 2)
    world = Cursors()
    world.is_cut_off = True
    world.move(CursorMove("x", 1, 1, 10, b""))
    full = world.move(*(CursorMove(name, 1, 1, 10, b"") for name in "xy"))
    world.move(CursorMove("y", 1, 1, 10, b""))
    assert [(one.request, one.code) for one in world.answers(Refused)] == [(full, "full")]
    world.service.check()


def test_lost_command_is_forgotten() -> None:
    world = Cursors()
    world.is_cut_off = True
    world.claim()
    world.move(CursorMove("x", 1, 1, 10, b""))
    world.proposed.clear()
    world.is_cut_off = False
    world.run(12 * S)
    assert len(world.service._cursors) == 0
    assert world.granted().term == 1


def test_requests_outlive_a_slow_commit() -> None:
    world = Cursors()
    world.is_cut_off = True
    claim = world.claim()
    world.run(5 * S)
    world.is_cut_off = False
    assert world.reply(claim).error == ""
    world.is_cut_off = True
    move = world.move(CursorMove("x", 1, 0, 10, b""))
    world.run(5 * S)
    world.is_cut_off = False
    assert list(world.moved()) == [move]


def test_status_has_the_cursors() -> None:
    world = Cursors()
    world.granted(start=3)
    (cursor,) = world.status()["cursors"]
    assert (cursor["name"], cursor["state"], cursor["gsn"]) == ("x", "owned", 3)


def test_a_late_copy_of_a_refused_trim_changes_nothing() -> None:
    world = Cursors()
    term = world.granted(start=3).term
    for server in world.servers:
        server.frontier = 10
    world.run(S)
    trim = Trim(CLUSTER, 77, 7)
    world.send(trim)
    world.run(20 * MS)
    world.reply(world.ask(CursorRelease, "x", term))
    world.reply(world.ask(CursorEdit, "x", "delete", b"1", 0, 60))
    world.send(trim)
    world.run(2 * S)
    first, copy = world.answers(TrimReply)
    assert (first.held_by, copy) == ("x", first)
    assert world.service.state.trim == 0
    world.send(Trim(CLUSTER, 78, 7))
    world.run(2 * S)
    assert world.service.state.trim == 7
