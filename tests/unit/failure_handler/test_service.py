"""One node of the failure handler: accepted messages, replies and effects."""

from typing import Any

import msgspec
import pytest

from failure_handler.service import FailureHandler
from failure_handler.state import Begin, Decide
from tests.services import CLUSTER, MS, S
from tests.unit.failure_handler.servers import HOP
from tests.unit.failure_handler.world import World, config
from ziplog.core.message import Message
from ziplog.core.node import (
    Committed,
    Halt,
    LeaderChanged,
    Received,
    RecordWire,
    ReportBadMessage,
    Restored,
    Wakeup,
    WireRecorded,
)
from ziplog.core.wire_use import Release, WireRange, WireUse
from ziplog.wire import (
    ClusterInfo,
    Freeze,
    Frozen,
    HandlerHeartbeat,
    Hello,
    NodeInfo,
    NotLeader,
    OrdersQuery,
    Refused,
    Suspect,
)


def suspect(node: str = "shard-0-0", **changes: Any) -> Suspect:
    report = Suspect(
        CLUSTER, node, 0, 1, int(node[-1]), 100, "up", [1], 0, 0, 0, f"directory of {node}"
    )
    return msgspec.structs.replace(report, **changes)


def deliver(world: World, message: Message, src: bytes = b"client") -> None:
    world.step_handler(world.leader, Received(src, message))


def test_it_sends_a_heartbeat_to_the_service_every_second() -> None:
    world = World(config(handlers=3)).live()
    world.sent.clear()
    world.run(5 * S)
    for name in ("fh-0", "fh-1", "fh-2"):
        report = [m for _, src, _, m in world.sent if src == name and type(m) is HandlerHeartbeat]
        assert 4 <= len(report) <= 6
        assert {(m.cluster, m.node, m.pid, m.leader) for m in report} == {
            (CLUSTER, name, 7, name == "fh-0")
        }
    assert {(n["name"], n["state"], n["leader"]) for n in world.status()["failure_handlers"]} == {
        ("fh-0", "up", True), ("fh-1", "up", False), ("fh-2", "up", False)
    }  # fmt: skip
    del world.handlers["fh-1"]
    states = set()
    for _ in range(8):
        world.run(S)
        states.add(world.status()["failure_handlers"][1]["state"])
    assert states == {"up", "suspect", "down"}
    assert world.status()["failure_handlers"][1]["heartbeat_age_ms"] >= 7000
    assert world.status()["failure_handlers"][0]["heartbeat_age_ms"] <= 1000


def test_a_follower_names_the_leader() -> None:
    world = World(config(handlers=3)).live()
    world.sent.clear()
    world.step_handler("fh-1", Received(b"supervisor", OrdersQuery(0, 5)))
    (answer,) = [m for _, _, dst, m in world.sent if dst == "supervisor"]
    assert answer == NotLeader(CLUSTER, 5, "127.0.0.1:7200")
    world.step_handler("fh-1", LeaderChanged("", is_self=False))
    world.step_handler("fh-1", Received(b"supervisor", OrdersQuery(0, 6)))
    assert world.sent[-1][3] == NotLeader(CLUSTER, 6, "")


@pytest.mark.parametrize(
    "changes",
    [
        {"node": "shard-9-0"},
        {"shard": 9},
        {"server": 1},
        {"server": 15},
    ],
    ids=str,
)
def test_a_report_of_a_server_of_another_shard_is_ignored(changes: dict[str, Any]) -> None:
    world = World().live()
    deliver(world, suspect(**changes))
    world.run(2 * S)
    assert world.commands == []
    assert world.complaints


def test_an_unknown_directory_is_ignored_while_the_known_server_reports() -> None:
    world = World().live()
    world.server(0, 0).always_suspects = {1}
    world.until(lambda: bool(world.messages(Suspect)))
    world.run(10 * HOP)
    for _ in range(5):
        deliver(world, suspect(state="limbo", identity="stranger", incarnation=1), b"unknown")
        world.run(30 * MS)
    assert len(world.complaints) == 5
    assert world.decided(Begin)[0].attempt.candidate == 0
    assert not any(dst == "stranger" for _, _, dst, _ in world.sent)


def test_a_server_with_another_data_directory_cannot_begin_a_recovery() -> None:
    world = World().live()
    deliver(world, suspect(identity="another"), b"unknown")
    world.run(S)
    assert world.commands == []


def test_messages_of_another_cluster_or_kind_are_dropped() -> None:
    world = World().live()
    deliver(world, suspect(cluster=CLUSTER + 1))
    deliver(world, Hello(CLUSTER, 1))
    deliver(world, Refused(CLUSTER, 0, 0, 0, 1, "wrong-cluster", "this is another one"), b"mms-0")
    world.run(S)
    assert world.commands == []
    assert len(world.complaints) == 3


def test_a_promise_counts_only_from_the_candidate_and_for_the_newest_attempt() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    world.network = lambda _src, _dst, message: [] if type(message) is Frozen else [HOP]
    world.until(lambda: bool(world.messages(Frozen)))
    (frozen,) = world.messages(Frozen)[:1]
    route = world.server(0, 0).route
    for changed, src in (
        ({"recovery": 1}, route),
        ({"recovery": 3}, route),
        ({"server": 1}, route),
        ({"incarnation": 5}, route),
        ({"shard": 5}, route),
        ({}, b"unknown"),
    ):
        deliver(world, msgspec.structs.replace(frozen, **changed), src)
    world.run(10 * MS)
    assert world.decided(Decide) == []
    deliver(world, frozen, route)
    world.run(10 * MS)
    assert len(world.decided(Decide)) == 1


def test_messages_from_other_senders_are_not_replies_of_the_service() -> None:
    world = World().live()
    world.until(lambda: bool(world.messages(ClusterInfo)))
    info = world.messages(ClusterInfo)[-1]
    before = world.handlers["fh-0"].members.placements.copy()
    worse = msgspec.structs.replace(
        info, placements=[msgspec.structs.replace(p, view=9) for p in info.placements]
    )
    deliver(world, worse)
    # A follower of the service may have old state, and does not list itself first.
    deliver(world, msgspec.structs.replace(worse, mms=["127.0.0.1:1"]), b"mms-0")
    assert world.handlers["fh-0"].members.placements == before
    deliver(world, worse, b"mms-0")
    assert world.handlers["fh-0"].members.placements[0].view == 9
    # And views never decrease.
    deliver(world, info, b"mms-0")
    assert world.handlers["fh-0"].members.placements[0].view == 9


def test_freeze_is_sent_over_the_candidates_last_route_only() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    world.until(lambda: bool(world.messages(Freeze)))
    assert {dst for _, _, dst, m in world.sent if type(m) is Freeze} == {"shard-0-0"}


def test_a_paused_handler_suspects_no_server() -> None:
    world = World(config(f=2)).live()
    world.supervised = False
    world.kill(world.server(0, 2))
    world.until(lambda: world.consensus.shards.get(0) is not None)
    world.until(lambda: world.orders() == ["shard-0-2"], 3 * S)
    handler = world.handlers[world.leader]
    later = world.now + 60 * S
    out = handler.step(Received(b"supervisor", OrdersQuery(CLUSTER, 9)), later)
    (answer,) = [effect.message for effect in out]  # type: ignore[attr-defined]
    assert answer.orders == []


def test_another_result_than_consensus_gave_halts() -> None:
    handler = FailureHandler(config(), "fh-0", pid=1, now=0)
    effects = handler.step(Committed(b"\x91\x05", b"\xa0"), 1)
    assert [type(effect) for effect in effects] == [Halt]


def test_a_snapshot_takes_the_place_of_the_commands() -> None:
    world = World().live()
    world.kill(world.server(0, 0))
    world.until_live(view=2)
    handler = FailureHandler(world.config, "fh-0", pid=1, now=world.now)
    handler.step(Restored(world.consensus.snapshot()), world.now)
    assert handler.state.snapshot() == world.consensus.snapshot()
    handler.check()


def test_before_it_knows_its_cluster_it_ignores_reports_and_queries_the_service() -> None:
    handler = FailureHandler(config(), "fh-0", pid=1, now=0)
    handler.step(LeaderChanged("fh-0", is_self=True), 1)
    assert handler.next_wakeup() == 1
    effects = handler.step(Wakeup(), 1)
    kinds = [type(getattr(effect, "message", None)) for effect in effects]
    assert Hello in kinds
    assert HandlerHeartbeat in kinds
    assert handler.step(Received(b"x", suspect()), 2) == []
    handler.check()


def test_no_message_of_an_unknown_sender_breaks_it() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    world.until(lambda: bool(world.messages(Freeze)))
    handler = world.handlers[world.leader]
    others = [m for _, _, _, m in world.sent if type(m) is not Suspect]
    assert len({type(message) for message in others}) > 6
    for message in others:
        effects = handler.step(Received(b"unknown", message), world.now)
        assert [type(effect) for effect in effects] == [ReportBadMessage]
        handler.check()


def test_it_uses_the_wire_version_that_the_service_reports_once_it_is_recorded() -> None:
    use = WireUse(Release("0.2", WireRange(1, 2)), 1)
    node = FailureHandler(config(), "fh-0", pid=1, now=0, wire_use=use)
    report = NodeInfo(CLUSTER, 0, "membership", "mms-0", "c", "0.2", 1, 2, [], 2)

    def heartbeat(now: int) -> HandlerHeartbeat:
        effects = node.step(Wakeup(), now)
        messages = [getattr(effect, "message", None) for effect in effects]
        return next(each for each in messages if isinstance(each, HandlerHeartbeat))

    assert heartbeat(0) == HandlerHeartbeat(0, "fh-0", 1, False, "0.2", 1, 2, 1)
    assert isinstance(node.step(Received(b"client", report), 1)[0], ReportBadMessage)
    assert node.step(Received(b"mms-0", report), 1) == [RecordWire(2)]
    assert node.step(WireRecorded(2), 1) == []
    assert heartbeat(2 * S).wire == 2
    [halt] = node.step(Received(b"mms-0", msgspec.structs.replace(report, wire=3)), 2 * S)
    assert isinstance(halt, Halt)
    assert "uses wire version 3, but this release (Ziplog 0.2) knows 1 to 2" in halt.reason
