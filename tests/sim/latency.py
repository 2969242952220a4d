"""Message delays of inserts and deliveries: `python -m tests.sim.latency`.

One client inserts record after record at random shards, and another one follows the log. Every hop
takes 40 to 60 µs, and nothing else takes time, so only the protocol's delays remain. On real
machines each hop also costs processor time (scripts/bench.py sequential).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

from tests.sim.cluster import SimCluster
from tests.sim.plan import draw
from tests.sim.simulated import simulated
from tests.simulator.kernel import US, Kernel, S
from tests.simulator.network import Conditions
from ziplog.client.common.requests import (
    NEVER,
    ConnectRequest,
    Fetched,
    FetchRequest,
    InsertRequest,
    Request,
    SubscribeRequest,
)
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

_HOP: Final = Conditions(delay_ns=(40 * US, 60 * US))
_LIMIT_NS: Final = 3600 * S


class Pair:
    """A client that inserts and one that follows."""

    def __init__(self, cluster: SimCluster, count: int, think_us: int) -> None:
        self.cluster, self.left, self.think_us = cluster, count, think_us
        self.writer, self.reader = cluster.client("writer-0"), cluster.client("reader-0")
        #: By gsn, in ns: time of an insert's call, its duration, time of its delivery.
        self.called: dict[int, int] = {}
        self.inserted: dict[int, int] = {}
        self.delivered: dict[int, int] = {}
        for client in (self.writer, self.reader):
            client.start()
        self._call(self.writer, ConnectRequest(NEVER), self._connected)

    def _call(self, client: Any, request: Request, then: Callable[[Any], object]) -> None:
        client.program.call(request, then)

    def _connected(self, _limits: object) -> None:
        self._call(self.reader, ConnectRequest(NEVER), self._follow)

    def _follow(self, _limits: object) -> None:
        self._call(self.reader, SubscribeRequest(NEVER, RID_GENESIS, True), self._opened)

    def _opened(self, subscription: int) -> None:
        fetch = FetchRequest(NEVER, subscription, 1000)

        def fetched(some: Fetched) -> None:
            for record in some.records:
                self.delivered[record.rid.gsn] = self.cluster.kernel.now
            self._call(self.reader, fetch, fetched)

        self._call(self.reader, fetch, fetched)
        self._insert()

    def _insert(self) -> None:
        kernel, called = self.cluster.kernel, self.cluster.kernel.now

        def inserted(rids: list[RecordId]) -> None:
            self.called[rids[0].gsn] = called
            self.inserted[rids[0].gsn] = kernel.now - called
            self.left -= 1
            if self.left:
                kernel.after(self.think_us * US, self._insert)

        self._call(self.writer, InsertRequest(NEVER, [b"x" * 100], RID_GENESIS, None, 0), inserted)

    @property
    def is_done(self) -> bool:
        return not self.left and self.called.keys() <= self.delivered.keys()

    @property
    def fast_share(self) -> float:
        counters = self.writer.program.engine.core.counters  # type: ignore[union-attr]
        share: float = counters.fast_path / (counters.fast_path + counters.slow_path)
        return share


def measure(shards: int, think_us: int, count: int = 1500, *, seed: int = 7) -> dict[str, float]:
    """Return the share of the fast path, and p50 and p99 of inserts and deliveries in µs."""
    plan = draw(1)._replace(
        shards=shards, f=1, durability="memory", mms=1, handlers=1, faults=(),
        naps=False, is_raft_real=False, conditions=_HOP,
    )  # fmt: skip
    kernel = Kernel(seed)
    with simulated(kernel):
        cluster = SimCluster(kernel, plan)
        cluster.begin()
        pair = Pair(cluster, count, think_us)
        assert kernel.run_until(lambda: pair.is_done, _LIMIT_NS), cluster.states()
    delays = [pair.delivered[gsn] - called for gsn, called in pair.called.items()]
    found = {"fast": pair.fast_share}
    for name, values in (("insert", sorted(pair.inserted.values())), ("delivery", sorted(delays))):
        found |= {f"{name}_p{p}_us": values[len(values) * p // 100] / US for p in (50, 99)}
    return found


def main() -> None:
    """Print a line for each number of shards."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.latency", description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 6])
    parser.add_argument("--think-us", type=int, default=3000, help="between two inserts")
    arguments = parser.parse_args()
    for shards in arguments.shards:
        found = measure(shards, arguments.think_us)
        figures = ", ".join(f"{name} {value:,.3g}" for name, value in found.items())
        sys.stdout.write(f"{shards} shards: {figures}\n")


if __name__ == "__main__":
    main()
