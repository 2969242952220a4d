"""Delays over regions: inserts of one region, their deliveries in each, and reads.

The cluster has the recommended shape: shard N has its primary in region N and its backup in the
next one. The membership service is in the first region, where one client inserts. A client in each
region follows the log, and afterwards reads stable records. Hops between regions take exactly half
of their round trip, and hops within a region 40 to 60 µs. `python -m tests.sim.latency --matrix`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

from shard.state.round_trips import RoundTrips
from tests.sim.cluster import SimCluster, config_of
from tests.sim.mutation import busy
from tests.sim.regions import REGIONS, Regions
from tests.sim.simulated import simulated
from tests.simulator.kernel import MS, US, Kernel, S
from tests.simulator.network import Conditions
from ziplog.client.common.requests import (
    ConnectRequest,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    Request,
    SubscribeRequest,
)
from ziplog.core import distance
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.simulator.process import Process
    from ziplog.types import RecordId

_NEAR_NS: Final = (40 * US, 60 * US)
_FETCH: Final = 1000
_READS: Final = 20
_LIMIT_NS: Final = 3600 * S
#: Until the first insert: servers have measured the ways to the service and to backups.
_WARM_NS: Final = 2 * S
_ONE_WAY_NS: Final = RoundTrips.one_way_ns


class Way(NamedTuple):
    """How deliveries come about; by default as in production."""

    #: Servers subtract the delay of an announcement from the begin of its lease.
    is_aligned: bool = True
    #: A primary begins leases early by the delay to its backups.
    has_head_start: bool = True
    #: Idle shards end epochs 50 ms apart, as in a local network, so readers wait for hints.
    has_hints: bool = False

    def one_way_ns(self, trips: RoundTrips, peer: bytes) -> int:
        """Return the delay to a node of the service, or to a backup, that a server goes by."""
        counts = self.is_aligned if peer.startswith(b"mms") else self.has_head_start
        return _ONE_WAY_NS(trips, peer) if counts else 0


WAYS: Final = {
    "schedule": Way(),
    "schedule, no head start": Way(has_head_start=False),
    "schedule, leases not aligned": Way(is_aligned=False),
    "hints": Way(has_hints=True),
    "hints, leases not aligned": Way(is_aligned=False, has_hints=True),
}


class Crossing:
    """A client that inserts in the first region, and one in each region that follows."""

    def __init__(self, cluster: SimCluster, count: int, think_ms: int) -> None:
        self.cluster, self.left, self.think_ns = cluster, count, think_ms * MS
        self.writer = cluster.client("writer-0")
        self.readers = [cluster.client(f"reader-{i}") for i in range(len(REGIONS))]
        #: By gsn: its rid; and in ns, when the insert was called, and how long it took.
        self.rids: dict[int, RecordId] = {}
        self.called: dict[int, int] = {}
        self.inserted: dict[int, int] = {}
        #: By region, when a gsn was delivered; and how long reads took.
        self.delivered: list[dict[int, int]] = [{} for _ in REGIONS]
        self.reads: list[list[int]] = [[] for _ in REGIONS]
        #: Shards that were seen parked, and servers that were seen after their last lease.
        self.parked: set[int] = set()
        self.without_lease: set[str] = set()
        self._following = 0
        for index, reader in enumerate(self.readers):
            reader.start()
            self._call(reader, ConnectRequest(NEVER), lambda _, index=index: self._follow(index))
        self.writer.start()
        self._watch()

    def _call(self, client: Process, request: Request, then: Callable[[Any], object]) -> None:
        client.program.call(request, then)  # type: ignore[union-attr]

    def _watch(self) -> None:
        placements = self.cluster.state.placements.values()
        self.parked.update(one.shard for one in placements if one.state == "parked")
        for name in self.cluster.disks if self.called else ():
            state, now = self.cluster.state_of(name), self.cluster.nodes[name].clock()
            if state is not None and (ends := state.clock.ends_at) is not None and ends <= now:
                self.without_lease.add(name)
        self.cluster.kernel.after(20 * MS, self._watch)

    def _follow(self, index: int) -> None:
        def opened(subscription: int) -> None:
            self._fetch(index, subscription)
            self._following += 1
            if self._following == len(self.readers):
                kernel = self.cluster.kernel
                self._call(
                    self.writer,
                    ConnectRequest(NEVER),
                    lambda _: kernel.after(_WARM_NS, self._insert),
                )

        self._call(self.readers[index], SubscribeRequest(NEVER, RID_GENESIS, True), opened)

    def _fetch(self, index: int, subscription: int) -> None:
        def fetched(found: Any) -> None:
            now = self.cluster.kernel.now
            self.delivered[index].update((one.rid.gsn, now) for one in found.records)
            self._fetch(index, subscription)

        self._call(self.readers[index], FetchRequest(NEVER, subscription, _FETCH), fetched)

    def _insert(self) -> None:
        kernel, called = self.cluster.kernel, self.cluster.kernel.now

        def inserted(rids: list[RecordId]) -> None:
            self.rids[rids[0].gsn] = rids[0]
            self.called[rids[0].gsn] = called
            self.inserted[rids[0].gsn] = kernel.now - called
            self.left -= 1
            if self.left:
                # Not in step with the epochs.
                kernel.after(self.think_ns + kernel.random.randrange(10 * MS), self._insert)
            else:
                kernel.after(S, self._read_all)

        self._call(self.writer, InsertRequest(NEVER, [b"x" * 100], RID_GENESIS, None, 0), inserted)

    def _read_all(self) -> None:
        gsns = sorted(self.called)[-_READS:]
        for index in range(len(REGIONS)):
            self._read(index, iter(gsns))

    def _read(self, index: int, gsns: Iterator[int]) -> None:
        gsn = next(gsns, None)
        if gsn is None:
            return
        kernel, began = self.cluster.kernel, self.cluster.kernel.now

        def read(_record: Any) -> None:
            self.reads[index].append(kernel.now - began)
            self._read(index, gsns)

        self._call(self.readers[index], ReadRequest(NEVER, self.rids[gsn]), read)

    @property
    def is_done(self) -> bool:
        count = min(_READS, len(self.called))
        return not self.left and all(
            self.called.keys() <= delivered.keys() and len(reads) == count
            for delivered, reads in zip(self.delivered, self.reads, strict=True)
        )


def cross(
    delays_us: tuple[int, int, int],
    way: Way,
    *,
    count: int = 200,
    think_ms: int = 20,
    seed: int = 7,
    prepare: Callable[[SimCluster], object] = lambda _cluster: None,
) -> Crossing:
    """Run the load, with these one-way delays: between regions 0 and 1, 0 and 2, 1 and 2.

    `prepare` is called with the cluster before it starts.
    """
    shape = tuple((REGIONS[i], REGIONS[(i + 1) % 3]) for i in range(3))
    regions = Regions(delays_us, shape, 0, is_near=True)
    plan = busy(seed, shards=3, regions=regions, conditions=Conditions(delay_ns=_NEAR_NS))
    kernel = Kernel(seed)

    def delay_ns(src: str, dst: str) -> tuple[int, int] | None:
        found = regions.delay_ns(src, dst)
        return found and (found[0], found[0])

    def one_way_ns(trips: RoundTrips, peer: bytes) -> int:
        return way.one_way_ns(trips, peer)

    with simulated(kernel), ExitStack() as stack:
        stack.enter_context(patch.object(RoundTrips, "one_way_ns", one_way_ns))
        if way.has_hints:
            local = distance.idle_epoch_interval_ns(0)
            stack.enter_context(patch.object(distance, "idle_epoch_interval_ns", lambda _: local))
        rtt_ms = max(delays_us) * 2 // 1000
        config = replace(config_of(plan), rtt_ms=rtt_ms, suspicion_ms=max(1000, 4 * rtt_ms))
        cluster = SimCluster(kernel, plan, config)
        cluster.network.delay_of = delay_ns
        prepare(cluster)
        cluster.begin()
        load = Crossing(cluster, count, think_ms)
        assert kernel.run_until(lambda: load.is_done, _LIMIT_NS), cluster.states()
    return load


def measure_regions(
    delays_us: tuple[int, int, int], way: Way, count: int = 200, *, seed: int = 7
) -> dict[str, float]:
    """Return p50 in ms of inserts, and of deliveries and reads in each region."""
    load = cross(delays_us, way, count=count, seed=seed)
    found = {"insert": median(load.inserted.values()) / MS}
    for name, delivered, reads in zip("ABC", load.delivered, load.reads, strict=True):
        delays = [delivered[gsn] - called for gsn, called in load.called.items()]
        found |= {f"delivery_{name}": median(delays) / MS, f"read_{name}": median(reads) / MS}
    return {**found, "parked": len(load.parked)}
