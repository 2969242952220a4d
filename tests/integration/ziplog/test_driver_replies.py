"""What the driver replies without a step of its node: counters, and what the node is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.integration.ziplog.driver_world import (
    World,
)
from ziplog import wire
from ziplog.core.node import (
    BatchEnd,
    Received,
)

if TYPE_CHECKING:
    from ziplog.runtime.driver import Driver


def report(driver: Driver, request: int) -> wire.Metrics:
    """Return the counters of a driver, as values without units."""
    counters = {
        "timed": sum(driver.iterations.counts),
        "acks": sum(driver.short_acks.counts),
    }
    return wire.Metrics(1, request, [wire.Value(*item) for item in counters.items()], [])


def test_metrics_are_reported_without_a_step_of_the_node() -> None:
    world = World(report=report)
    world.transport.incoming.append((b"\0monitor", wire.encode(wire.MetricsQuery(0, 9))))
    world.run()
    values = [wire.Value("timed", 0), wire.Value("acks", 0)]
    assert world.story == [(b"\0monitor", wire.Metrics(1, 9, values, []))]
    assert world.node.events == [BatchEnd()]


def info(request: int, role: str = "storage") -> wire.NodeInfo:
    return wire.NodeInfo(1, request, role, "s", "c", "0.1", 1, 1, ["h:1"])


@pytest.mark.parametrize(
    ("src", "frame", "replies"),
    [
        (b"\0client", wire.encode(wire.NodeInfoQuery(0, 9)), [info(9)]),
        (b"\0client", wire.encode(wire.Hello(0, 9)), [info(9)]),
        (b"\0client", msgspec.msgpack.encode([(wire.VERSION + 1) * 256 + 42, 0, 9]), [info(0)]),
        (b"\0client", msgspec.msgpack.encode([wire.VERSION * 256 + 255, 0, 9]), [info(0)]),
        # Not a message of any version, and a peer that this node connected to.
        (b"\0client", b"GET / HTTP/1.1", []),
        (b"peer", msgspec.msgpack.encode([(wire.VERSION + 1) * 256 + 42, 0, 9]), []),
    ],
)
def test_a_node_describes_itself_to_strangers(
    src: bytes, frame: bytes, replies: list[wire.NodeInfo]
) -> None:
    world = World(describe=info)
    world.transport.incoming.append((src, frame))
    world.run()
    assert world.story == [(src, reply) for reply in replies]
    assert not [event for event in world.node.events if isinstance(event, Received)]


def test_a_membership_node_replies_to_hello_itself() -> None:
    world = World(describe=lambda request: info(request, "membership"))
    world.transport.incoming.append((b"\0client", wire.encode(wire.Hello(0, 9))))
    world.run()
    assert Received(b"\0client", wire.Hello(0, 9)) in world.node.events
