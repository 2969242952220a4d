"""Message delays of inserts, deliveries and appends: `python -m tests.sim.latency`.

One client inserts record after record at random shards, and another one follows the log. With
`--speculate`, it follows by a speculation. With `--append`, one client inserts, or appends, or does
both in turns, or inserts beside another one that appends. Every hop takes 40 to 60 µs, and nothing
else takes time, so only the protocol's delays remain. On real machines each hop also costs
processor time (scripts/bench.py sequential, append). With `--matrix A-B=40 A-C=120 B-C=80`, the
round trips of three regions in ms, the cluster spans them (tests/sim/region_latency).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from tests.sim.cluster import SimCluster, config_of
from tests.sim.plan import draw
from tests.sim.region_latency import WAYS, measure_regions
from tests.sim.simulated import simulated
from tests.simulator.kernel import US, Kernel, S
from tests.simulator.network import Conditions
from ziplog.client.common.requests import (
    ConnectRequest,
    EventsRequest,
    FetchRequest,
    InsertRequest,
    Request,
    SpeculateRequest,
    SubscribeRequest,
)
from ziplog.core.units import NEVER
from ziplog.types import RID_GENESIS, Confirmed, Delivery, Failed, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.simulator.process import Process
    from ziplog.types import Durability, Event, Record

_HOP_NS: Final = (40 * US, 60 * US)
_FETCH: Final = 1000
_LIMIT_NS: Final = 3600 * S


class Pair:
    """A client that inserts and one that follows, or speculates."""

    def __init__(
        self, cluster: SimCluster, count: int, think_us: int, *, speculates: bool = False
    ) -> None:
        self.cluster, self.left, self.think_us = cluster, count, think_us
        self.speculates = speculates
        self.writer = cluster.client("writer-0")
        self.reader = self._new_reader()
        #: By gsn, in ns: time of an insert's call, its duration, times of its early and its final
        #: delivery.
        self.called: dict[int, int] = {}
        self.inserted: dict[int, int] = {}
        self.early: dict[int, int] = {}
        self.delivered: dict[int, int] = {}
        #: Numbers of failures, of the deliveries that they withdrew, and of received events.
        self.failures = self.withdrawn = self._taken = 0
        #: The gsns of deliveries that are not confirmed.
        self._open: deque[int] = deque()
        for client in (self.writer, self.reader):
            client.start()
        self._call(self.writer, ConnectRequest(NEVER), self._connected)

    def _new_reader(self) -> Process:
        return self.cluster.client("reader-0")

    def _call(self, client: Any, request: Request, then: Callable[[Any], object]) -> None:
        client.program.call(request, then)

    def _connected(self, _limits: object) -> None:
        self._call(self.reader, ConnectRequest(NEVER), self._follow)

    def _follow(self, _limits: object) -> None:
        request = SpeculateRequest if self.speculates else SubscribeRequest
        self._call(self.reader, request(NEVER, RID_GENESIS, True), self._opened)

    def _opened(self, subscription: int) -> None:
        self._fetch(subscription)
        self._insert()

    def _fetch(self, subscription: int) -> None:
        def fetched(some: Any) -> None:
            self.on_events(some.events if self.speculates else _final(some.records))
            self._fetch(subscription)

        request: Request = (
            EventsRequest(NEVER, subscription, _FETCH, self._taken)
            if self.speculates
            else FetchRequest(NEVER, subscription, _FETCH)
        )
        self._call(self.reader, request, fetched)

    def on_events(self, events: Sequence[Event]) -> None:
        """Note the times of the next events; a subscription's records are final."""
        now = self.cluster.kernel.now
        for event in events:
            if type(event) is Delivery:
                gsn = event.record.rid.gsn
                self._open.append(gsn)
                if event.speculative:
                    self.early[gsn] = now
            elif type(event) is Confirmed:
                while self._open and self._open[0] <= event.upto.gsn:
                    self.delivered[self._open.popleft()] = now
            elif type(event) is Failed:
                self.failures += 1
                while self._open and self._open[-1] > event.after.gsn:
                    self._open.pop()
                    self.withdrawn += 1
        self._taken += len(events)

    def _insert(self) -> None:
        kernel, called = self.cluster.kernel, self.cluster.kernel.now

        def inserted(rids: list[RecordId]) -> None:
            self.called[rids[0].gsn] = called
            self.inserted[rids[0].gsn] = kernel.now - called
            self.left -= 1
            if self.left:
                kernel.after(self._pause_ns(), self._insert)

        self._call(self.writer, InsertRequest(NEVER, [b"x" * 100], RID_GENESIS, None, 0), inserted)

    def _pause_ns(self) -> int:
        """Return the time from the end of an insert to the next one."""
        return self.think_us * US

    @property
    def is_done(self) -> bool:
        return not self.left and self.called.keys() <= self.delivered.keys()

    @property
    def fast_share(self) -> float:
        counters = self.writer.program.engine.core.counters  # type: ignore[union-attr]
        share: float = counters.fast_path / (counters.fast_path + counters.slow_path)
        return share


def _final(records: Sequence[Record]) -> list[Event]:
    """Return the events of a subscription's records."""
    events: list[Event] = [Delivery(record, speculative=False) for record in records]
    return [*events, Confirmed(records[-1].rid)] if records else events


class Loop:
    """A client that inserts or appends, one record after the other; `kinds` take turns."""

    def __init__(
        self,
        cluster: SimCluster,
        name: str,
        kinds: Sequence[str],
        count: int,
        think_us: int,
        jitter_us: int = 0,
    ) -> None:
        self.kernel, self.client = cluster.kernel, cluster.client(name)
        self.left, self.think_us, self.jitter_us = count, think_us, jitter_us
        #: The durations of each kind, in ns.
        self.took: dict[str, list[int]] = {kind: [] for kind in kinds}
        self.turns = itertools.cycle(kinds)
        self.client.start()
        self._call(ConnectRequest(NEVER), lambda _limits: self._next())

    def _call(self, request: Request, then: Callable[[Any], object]) -> None:
        self.client.program.call(request, then)  # type: ignore[union-attr]

    def _next(self) -> None:
        kind, called = next(self.turns), self.kernel.now

        def returned(_rids: list[RecordId]) -> None:
            self.took[kind].append(self.kernel.now - called)
            self.left -= 1
            if self.left:
                jitter = self.kernel.random.randrange(self.jitter_us) if self.jitter_us else 0
                self.kernel.after((self.think_us + jitter) * US, self._next)

        sealed = kind == "append"
        request = InsertRequest(NEVER, [b"x" * 100], RID_GENESIS, None, 0, sealed=sealed)
        self._call(request, returned)

    @property
    def is_done(self) -> bool:
        return not self.left


class _Load(Protocol):
    @property
    def is_done(self) -> bool: ...


LoadT = TypeVar("LoadT", bound=_Load)


class World(NamedTuple):
    """The cluster and the network of a load."""

    shards: int = 1
    #: Minimum and maximum time of a hop.
    hop_ns: tuple[int, int] = _HOP_NS
    durability: Durability = "memory"
    #: Time of a flush at level `disk`.
    flush_ns: int = 0
    is_raft_real: bool = False
    lag_fix: bool = True
    #: `rtt_ms` in the cluster file.
    rtt_ms: int = 0


def run_load(
    shards: int, begin: Callable[[SimCluster], LoadT], seed: int, *, is_raft_real: bool = False
) -> LoadT:
    """Run a load on a cluster until it is done; `is_raft_real`: it may start a `RaftGroup`."""
    return run_in(World(shards, is_raft_real=is_raft_real), begin, seed)


def run_in(world: World, begin: Callable[[SimCluster], LoadT], seed: int) -> LoadT:
    """Run a load on a cluster until it is done."""
    plan = draw(1)._replace(
        shards=world.shards, f=1, durability=world.durability, mms=1, handlers=1, faults=(),
        naps=False, is_raft_real=False, conditions=Conditions(delay_ns=world.hop_ns),
    )  # fmt: skip
    kernel = Kernel(seed)
    with simulated(kernel, is_raft_real=world.is_raft_real):
        config = replace(config_of(plan), lag_fix=world.lag_fix, rtt_ms=world.rtt_ms)
        cluster = SimCluster(kernel, plan, config)
        for disk in cluster.disks.values() if world.flush_ns else ():
            disk.latency_ns, disk.delays_frames = world.flush_ns, True
        cluster.begin()
        load = begin(cluster)
        assert kernel.run_until(lambda: load.is_done, _LIMIT_NS), cluster.states()
    return load


def quantiles_us(name: str, values: Iterable[int]) -> dict[str, float]:
    """Return the p50 and the p99 of durations in ns."""
    ordered = sorted(values)
    return {f"{name}_p{p}_us": ordered[len(ordered) * p // 100] / US for p in (50, 99)}


def measure(shards: int, think_us: int, count: int = 1500, *, seed: int = 7) -> dict[str, float]:
    """Return the share of the fast path, and p50 and p99 of inserts and deliveries in µs."""
    pair = run_load(shards, lambda cluster: Pair(cluster, count, think_us), seed)
    delays = [pair.delivered[gsn] - called for gsn, called in pair.called.items()]
    return {
        "fast": pair.fast_share,
        **quantiles_us("insert", pair.inserted.values()),
        **quantiles_us("delivery", delays),
    }


def measure_far(
    shards: int, think_us: int, hop_ms: int, rtt_ms: int, count: int = 300, *, seed: int = 7
) -> dict[str, float]:
    """Measure with long hops: p50 and p99 in ms, and all frames sent for each record."""
    frames = 0

    def begin(cluster: SimCluster) -> Pair:
        def watch(_src: str, _dst: str, _frame: bytes) -> None:
            nonlocal frames
            frames += 1

        cluster.network.on_frame = watch
        return Pair(cluster, count, think_us)

    hop_ns = hop_ms * 1000 * US
    pair = run_in(World(shards, (hop_ns, hop_ns), rtt_ms=rtt_ms), begin, seed)
    delays = [pair.delivered[gsn] - called for gsn, called in pair.called.items()]
    found = quantiles_us("insert", pair.inserted.values()) | quantiles_us("delivery", delays)
    in_ms = {name.replace("_us", "_ms"): value / 1000 for name, value in found.items()}
    return {"fast": pair.fast_share, **in_ms, "frames": frames / count}


def measure_speculation(
    shards: int, think_us: int, count: int = 1500, *, seed: int = 7
) -> dict[str, float]:
    """Return p50 and p99 of early and final deliveries in µs, and the share of the early ones."""
    load = run_load(shards, lambda cluster: Pair(cluster, count, think_us, speculates=True), seed)
    early = [load.early[gsn] - called for gsn, called in load.called.items() if gsn in load.early]
    final = [load.delivered[gsn] - called for gsn, called in load.called.items()]
    return {
        "early_share": len(early) / len(final),
        "failures": load.failures,
        **quantiles_us("early", early),
        **quantiles_us("confirmed", final),
    }


def measure_appends(
    shards: int, think_us: int, count: int = 1500, *, seed: int = 7
) -> dict[str, float]:
    """Return p50 and p99 of inserts and appends in µs, and the p50s as multiples of an insert's."""

    def took(*kinds: str, beside: Sequence[str] = ()) -> dict[str, list[int]]:
        def begin(cluster: SimCluster) -> Loop:
            if beside:
                Loop(cluster, "writer-1", beside, 2 * count, think_us)
            return Loop(cluster, "writer-0", kinds, count * len(kinds), think_us)

        return run_load(shards, begin, seed).took

    durations = {
        "insert": took("insert")["insert"],
        "append": took("append")["append"],
        "append_in_turns": took("insert", "append")["append"],
        "insert_beside": took("insert", beside=["append"])["insert"],
    }
    found: dict[str, float] = {}
    for name, values in durations.items():
        found |= quantiles_us(name, values)
        found[f"{name}_ratio"] = found[f"{name}_p50_us"] / found["insert_p50_us"]
    return found


def _round_trip(text: str) -> tuple[str, int]:
    pair, _, value = text.partition("=")
    return "-".join(sorted(pair.split("-"))), int(value)


def _print_regions(round_trips: dict[str, int]) -> None:
    """Print a line for each way of delivery."""
    try:
        one, two, three = (round_trips[pair] * 500 for pair in ("A-B", "A-C", "B-C"))
    except KeyError as error:
        raise SystemExit(f"--matrix has no round trip of {error}") from None
    for name, way in WAYS.items():
        _print(name, measure_regions((one, two, three), way))


def _print(name: str, found: dict[str, float]) -> None:
    figures = ", ".join(f"{key} {value:,.4g}" for key, value in found.items())
    sys.stdout.write(f"{name}: {figures}\n")
    sys.stdout.flush()


def main() -> None:
    """Print a line for each number of shards, or for each way of delivery over regions."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.latency", description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 6])
    parser.add_argument("--think-us", type=int, default=3000, help="between two inserts")
    parser.add_argument("--append", action="store_true", help="appends beside inserts")
    parser.add_argument("--speculate", action="store_true", help="early delivery")
    parser.add_argument(
        "--hop-ms", type=int, help="time of each hop, in ms, in place of 40 to 60 µs"
    )
    parser.add_argument("--rtt-ms", type=int, default=0, help="in the cluster file")
    parser.add_argument(
        "--matrix", type=_round_trip, nargs=3, metavar="A-B=MS", help="three regions"
    )
    arguments = parser.parse_args()
    if arguments.matrix:
        _print_regions(dict(arguments.matrix))
        return
    measured = measure_speculation if arguments.speculate else measure
    for shards in arguments.shards:
        think_us = arguments.think_us
        if arguments.hop_ms:
            found = measure_far(shards, think_us, arguments.hop_ms, arguments.rtt_ms)
        else:
            found = (measure_appends if arguments.append else measured)(shards, think_us)
        _print(f"{shards} shards", found)


if __name__ == "__main__":
    main()
