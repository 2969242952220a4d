"""A follower forwards the failure handler's repeated requests, and the leader's replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.services import CLUSTER, S
from tests.unit.mms.world import World, config
from ziplog.core.node import LeaderChanged
from ziplog.wire import HandlerHeartbeat, NotLeader, Refused, Reinsert, Reinserted, Remove, Removed

if TYPE_CHECKING:
    from ziplog.core.message import Message

HANDLER, LEADER = b"handler", b"mms-1"
REMOVE = Remove(CLUSTER, 2, 0, 1, 2)
REINSERT = Reinsert(CLUSTER, 2, 0, 2, ["a", "b"], 0)
REMOVED = Removed(CLUSTER, 2, 0, 2, 100, [])
REPLIES = [
    REMOVED,
    Reinserted(CLUSTER, 2, 0, 2),
    Refused(CLUSTER, 0, 1, 0, 2, "wrong-view", "a later recovery has begun"),
]


def follower() -> World:
    """Return a follower that has heard a node of the failure handler."""
    world = World(config(mms=3, handlers=3)).lead().run(5 * S)
    world.step(LeaderChanged("mms-1", is_self=False))
    world.send(HandlerHeartbeat(CLUSTER, "fh-0", 99, True), HANDLER)
    world.sent.clear()
    return world


def to_leader(world: World) -> list[Message]:
    return [message for dst, message in world.sent if dst == LEADER]


@pytest.mark.parametrize("request_", [REMOVE, REINSERT])
def test_a_repeated_request_goes_to_the_leader(request_: Message) -> None:
    world = follower()
    world.send(request_, HANDLER)
    assert to_leader(world) == []  # the leader has it, if it can be reached
    world.send(request_, HANDLER)
    world.send(request_, HANDLER)
    assert to_leader(world) == [request_] * 2
    assert len(world.answers(NotLeader, HANDLER)) == 3


def test_a_later_request_of_the_shard_is_a_first_one() -> None:
    world = follower()
    for request in (REMOVE, REINSERT, Remove(CLUSTER, 3, 0, 2, 3)):
        world.send(request, HANDLER)
    assert to_leader(world) == []


def test_only_requests_of_the_failure_handler_are_forwarded() -> None:
    """A follower that another one wrongly takes for the leader would send the request back."""
    world = follower()
    for _ in range(3):
        world.send(REMOVE, b"another node of the service")
        world.send(Remove(CLUSTER, 2, 77, 1, 2), HANDLER)  # there is no such shard
    assert to_leader(world) == []


def test_without_a_leader_nothing_is_forwarded() -> None:
    world = follower()
    world.step(LeaderChanged("", is_self=False))
    world.send(REMOVE, HANDLER)
    world.send(REMOVE, HANDLER)
    assert [dst for dst, _ in world.sent if dst != HANDLER] == []


@pytest.mark.parametrize("reply", REPLIES)
def test_the_reply_goes_back_to_the_failure_handler(reply: Message) -> None:
    world = follower()
    world.send(REMOVE, HANDLER)
    world.send(REMOVE, HANDLER)
    world.send(reply, LEADER)
    assert world.answers(type(reply), HANDLER) == [reply]


def test_a_late_reply_to_an_older_request_is_dropped() -> None:
    world = follower()
    world.send(Remove(CLUSTER, 3, 0, 1, 3), HANDLER)
    world.send(REMOVED, LEADER)
    world.send(Removed(CLUSTER, 2, 1, 2, 100, []), LEADER)  # nothing was requested for shard 1
    assert world.answers(Removed, HANDLER) == []


def test_a_leader_that_has_changed_redirects_in_vain() -> None:
    world = follower()
    world.send(REMOVE, HANDLER)
    world.send(REMOVE, HANDLER)
    world.sent.clear()
    world.send(NotLeader(CLUSTER, 2, ""), LEADER)
    assert world.sent == []
    assert world.complaints == []


@pytest.mark.parametrize("reply", [*REPLIES, NotLeader(CLUSTER, 2, "")])
def test_a_reply_from_elsewhere_is_dropped(reply: Message) -> None:
    world = follower()
    world.send(REMOVE, HANDLER)
    world.send(reply, b"a client")
    assert world.answers(type(reply), HANDLER) == [
        one for one in [NotLeader(CLUSTER, 2, "127.0.0.1:7001")] if isinstance(reply, NotLeader)
    ]
    assert world.complaints == [
        f"{type(reply).__name__}: the sender is not another node of the service"
    ]
