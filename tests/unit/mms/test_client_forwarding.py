"""A follower forwards the requests that clients repeat, and the leader's replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from mms.client_forwarding import MAX_FORWARDED
from tests.services import CLUSTER, S
from tests.unit.mms.world import World, config
from ziplog.core.node import LeaderChanged
from ziplog.wire import (
    ChangeRegion,
    ChangeShard,
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
    FinishUpgrade,
    LeaseHistory,
    LeaseQuery,
    NotLeader,
    Refused,
    StatusQuery,
    StatusReply,
    Trim,
)
from ziplog.wire.cursors import CursorMove, OwnedTerm

if TYPE_CHECKING:
    from ziplog.core.message import Message

CLIENT, OTHER, LEADER = b"\0client", b"\0other client", b"mms-1"
NUMBER = 2**40 + 1
#: Clients do not reach it.
FIRST_NUMBER = 2**62
QUERY = LeaseQuery(CLUSTER, NUMBER, 1)
FORWARDED = [
    QUERY,
    StatusQuery(CLUSTER, NUMBER),
    CursorClaim(CLUSTER, NUMBER, "c", b"o" * 16, "", b"n" * 16, 0, 1000, 0),
    CursorMoves(CLUSTER, NUMBER, [CursorMove("c", 1, 5, 0, b"")]),
    CursorRelease(CLUSTER, NUMBER, "c", 1),
    CursorEdit(CLUSTER, NUMBER, "c", "pause", b"n" * 16, 0, 0),
    CursorRenewal(CLUSTER, NUMBER, b"o" * 16, [OwnedTerm("c", 1)]),
    CursorQuery(CLUSTER, NUMBER),
]
HISTORY = LeaseHistory(CLUSTER, 0, [], [], 1, [], [])
REPLIES = [
    HISTORY,
    StatusReply(CLUSTER, 0, {}),
    CursorReply(CLUSTER, 0, "owned", None, 0, 1),
    CursorsMoved(CLUSTER, 0, []),
    CursorsRenewed(CLUSTER, 0, [], [], []),
    CursorList(CLUSTER, 0, [], [], False, []),
    Refused(CLUSTER, 0, 0, 0, 0, "full", "256 requests are already waiting"),
]


def follower() -> World:
    world = World(config(mms=3)).lead().run(5 * S)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.sent.clear()
    return world


def to_leader(world: World) -> list[Any]:
    return [message for dst, message in world.sent if dst == LEADER]


def numbered(message: Message, number: int) -> Message:
    return msgspec.structs.replace(message, request=number)


@pytest.mark.parametrize("request_", FORWARDED, ids=lambda one: type(one).__name__)
def test_the_third_copy_and_later_ones_go_to_the_leader(request_: Message) -> None:
    world = follower()
    world.send(request_, CLIENT)
    world.send(request_, CLIENT)
    assert to_leader(world) == []
    world.send(request_, CLIENT)
    world.send(request_, CLIENT)
    one, other = to_leader(world)
    assert one == other == numbered(request_, one.request)
    assert one.request >= FIRST_NUMBER
    assert len(world.answers(NotLeader, CLIENT)) == 4


@pytest.mark.parametrize("reply", REPLIES, ids=lambda one: type(one).__name__)
def test_the_reply_goes_back_with_the_number_of_the_request(reply: Message) -> None:
    world = follower()
    for _ in range(3):
        world.send(QUERY, CLIENT)
    (forwarded,) = to_leader(world)
    world.send(numbered(reply, forwarded.request), LEADER)
    world.send(numbered(reply, forwarded.request + 1), LEADER)
    assert world.answers(type(reply), CLIENT) == [numbered(reply, NUMBER)]
    assert world.complaints == []


def test_clients_with_equal_numbers_get_their_own_replies() -> None:
    world = follower()
    for src in [CLIENT, OTHER] * 3:
        world.send(QUERY, src)
    one, other = to_leader(world)
    world.send(numbered(HISTORY, other.request), LEADER)
    assert world.answers(LeaseHistory, CLIENT) == []
    assert world.answers(LeaseHistory, OTHER) == [numbered(HISTORY, NUMBER)]
    world.send(numbered(HISTORY, one.request), LEADER)
    assert world.answers(LeaseHistory, CLIENT) == [numbered(HISTORY, NUMBER)]


@pytest.mark.parametrize(
    "request_",
    [
        Trim(CLUSTER, NUMBER, 1),
        ChangeShard(CLUSTER, NUMBER, 1, "remove"),
        ChangeRegion(CLUSTER, NUMBER, "eu", True),
        FinishUpgrade(CLUSTER, NUMBER, 2),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_could_be_refused_and_then_fulfilled_is_not_forwarded(request_: Message) -> None:
    world = follower()
    for _ in range(9):
        world.send(request_, CLIENT)
    assert to_leader(world) == []


def test_a_forwarded_request_is_not_forwarded_again() -> None:
    """Two followers may each take the other one for the leader."""
    world = follower()
    for _ in range(9):
        world.send(numbered(QUERY, FIRST_NUMBER + 1), b"\0another node")
    assert to_leader(world) == []
    assert len(world.answers(NotLeader, b"\0another node")) == 9


def test_without_a_leader_nothing_is_forwarded() -> None:
    world = follower()
    world.step(LeaderChanged("", is_self=False))
    for _ in range(9):
        world.send(QUERY, CLIENT)
    assert {dst for dst, _ in world.sent} == {CLIENT}


def test_the_requests_that_came_last_are_kept() -> None:
    world = follower()
    for number in range(NUMBER, NUMBER + MAX_FORWARDED):
        world.send(numbered(QUERY, number), CLIENT)
        world.send(numbered(QUERY, number), CLIENT)
    world.send(QUERY, CLIENT)
    (forwarded,) = to_leader(world)
    world.send(numbered(QUERY, NUMBER + MAX_FORWARDED), CLIENT)
    world.send(numbered(QUERY, NUMBER + 1), CLIENT)  # It was forgotten: this is a first copy.
    assert to_leader(world) == [forwarded]
    world.send(numbered(HISTORY, forwarded.request), LEADER)
    assert world.answers(LeaseHistory, CLIENT) == [numbered(HISTORY, NUMBER)]


@pytest.mark.parametrize("reply", REPLIES, ids=lambda one: type(one).__name__)
def test_a_reply_from_elsewhere_is_dropped(reply: Message) -> None:
    world = follower()
    for _ in range(3):
        world.send(QUERY, CLIENT)
    (forwarded,) = to_leader(world)
    world.send(numbered(reply, forwarded.request), OTHER)
    assert world.answers(type(reply), CLIENT) == []
    assert world.complaints == [
        f"{type(reply).__name__}: the sender is not another node of the service"
    ]
