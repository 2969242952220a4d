"""Several coordinators on a real log, in virtual time, over links that lose and repeat messages."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from logdb import wire
from logdb.coordinator.node import CoordinatorNode, Settings
from tests.cluster import PureCluster
from tests.unit.logdb.harness import MS, SESSION, S, commit
from tests.world import Link, Probe, address, probe
from ziplog.policy import pin

if TYPE_CHECKING:
    from tests.cluster import Client

NAMES = ("kv-0", "kv-1")


class Bench:
    """A cluster, two coordinators, a client of the log, and a probe that asks."""

    def __init__(self, link: Link | None = None) -> None:
        self.cluster = PureCluster(shards=2, link=link)
        self.world = self.cluster.world
        self.world.decode = wire.decode
        for index, name in enumerate(NAMES):
            node = CoordinatorNode(
                b"%016d" % index, [address("mms-0").endpoint], pin(index), now=self.world.now,
                settings=Settings(checkpoints=False),
            )  # fmt: skip
            self.world.add(name, node)
        self.world.add("p", Probe())
        assert self.cluster.run_until(lambda: all(self.node(n).is_ready for n in NAMES), 30 * S)
        self.clients = [self.cluster.client(f"c{index}", pin(index)) for index in range(2)]
        self.requests = 0

    def node(self, name: str) -> CoordinatorNode:
        node = self.world.nodes[name]
        assert isinstance(node, CoordinatorNode)
        return node

    def query(self, name: str, message: Any, kind: type) -> Any:
        """Ask until there is an answer."""
        received = probe(self.world, "p").received
        received.clear()

        def answer() -> Any:
            found = [m for _, _, m in received if isinstance(m, kind)]
            return next((m for m in found if getattr(m, "request", 0) == message.request), None)

        for _ in range(100):
            self.world.send("p", name, message)
            if self.cluster.run_until(lambda: answer() is not None, 100 * MS):
                return answer()
        raise AssertionError(f"{name} never answered")

    def get(self, name: str, *, fresh: bool) -> Any:
        self.requests += 1
        message = wire.Get(0, self.requests, [b"k"], 0, fresh, [], [])
        return self.query(name, message, wire.Got).found[0].entry


def test_every_coordinator_sends_the_same_decision() -> None:
    bench = Bench()
    bench.query("kv-0", wire.Open(0, 1, SESSION), wire.Opened)
    received = probe(bench.world, "p").received
    received.clear()
    rid = bench.clients[0].insert(commit(1, {b"k": b"v"}))
    assert bench.cluster.run_until(lambda: bool(received), 1 * S)
    ((_, _, decided),) = received
    assert (decided.position, decided.outcome) == (rid, "committed")


@pytest.mark.parametrize("seed", range(5))
def test_a_fresh_read_sees_every_decision_sent_by_any_coordinator(seed: int) -> None:
    draw = random.Random(seed)
    link = Link(
        delay=lambda: draw.randrange(10_000, 2 * MS),
        lose=lambda: draw.random() < 0.05,
        repeat=lambda: draw.random() < 0.05,
    )
    bench = Bench(link)
    for number in range(1, 16):
        client: Client = draw.choice(bench.clients)
        client.insert(commit(number, {b"k": b"%d" % number}))
        reporter, reader = draw.sample(NAMES, 2)
        received = bench.get(reporter, fresh=draw.random() < 0.5)
        read = bench.get(reader, fresh=True)
        assert received is None or (read is not None and read.version >= received.version)
    states = [bench.node(name).tailer.state for name in NAMES]
    # The last decision was not sent by any coordinator yet, so a fresh read need not see it.
    assert bench.cluster.run_until(lambda: [s.commits for s in states] == [15, 15], 1 * S)
    assert bench.get(NAMES[0], fresh=True) == bench.get(NAMES[1], fresh=True)
