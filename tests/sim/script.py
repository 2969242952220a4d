"""Scripted scenarios: a cluster in virtual time with control over every frame.

A script creates clients that insert at one shard, delays or loses chosen frames, advances the time
and checks the results. Rule: every frame takes `DELAY_NS` unless a rule of the script changes that,
so message delays can be counted; there are no other faults.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tests.sim.cluster import SimCluster, config_of
from tests.sim.history import History
from tests.sim.operator import Operator
from tests.sim.plan import draw, server_name
from tests.sim.programs import ClientProgram, log_client
from tests.sim.simulated import simulated
from tests.simulator.kernel import US, Kernel, S
from tests.simulator.network import LOST
from tests.simulator.process import Process
from ziplog import policy, wire
from ziplog.client.common.requests import (
    ConnectRequest,
    FetchRequest,
    InsertRequest,
    Preferences,
    ReadRequest,
    SubscribeRequest,
)
from ziplog.core.entries import Place, Skip, decode_body
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shard.state.replica_state import ReplicaState
    from ziplog.client.common.requests import Request
    from ziplog.core.view import Lease
    from ziplog.types import Record

#: Delay of a message.
DELAY_NS: Final = 100 * US
#: Maximum time of any wait.
LONG_NS: Final = 60 * S
_ALL: Final = 1 << 30


class Sent(NamedTuple):
    """A sent frame."""

    at: int
    src: str
    dst: str
    message: Any


class Rule:
    """A rule for the frames of a kind, from one process to another."""

    def __init__(
        self, src: str, dst: str, kind: type, fate: Callable[[], int], count: int | None
    ) -> None:
        self._what: Final = (src, dst, kind)
        self._fate: Final = fate
        #: Number of frames that it still applies to; None: no limit.
        self._left = count
        #: Number of frames that it was applied to.
        self.met = 0

    def decide(self, src: str, dst: str, message: object) -> int | None:
        """Return a frame's delay or `LOST`; None: the rule does not apply."""
        if (src, dst, type(message)) != self._what or self._left == 0:
            return None
        if self._left is not None:
            self._left -= 1
        self.met += 1
        return self._fate()


class Call:
    """A client's call and its result."""

    def __init__(self, began: int) -> None:
        self.began: Final = began
        self.ended = 0
        self.result: Any = None

    @property
    def delays(self) -> int:
        """Its duration in message delays, without the processes' turns."""
        assert self.ended, "the call is open"
        return (self.ended - self.began) // DELAY_NS

    @property
    def gsns(self) -> list[int]:
        """The positions of an insert's result."""
        assert self.ended, "the call is open"
        assert not isinstance(self.result, BaseException), repr(self.result)
        return [rid.gsn for rid in self.result]


class Stage:
    """The cluster, its clients, and the rules for frames."""

    def __init__(self, kernel: Kernel, shards: int, f: int, epoch_ms: int, mms: int) -> None:
        plan = draw(1)._replace(
            shards=shards, f=f, durability="memory", mms=mms, handlers=1, naps=False, faults=()
        )
        self.kernel: Final = kernel
        self.cluster: Final = SimCluster(kernel, plan, replace(config_of(plan), epoch_ms=epoch_ms))
        self.network: Final = self.cluster.network
        self.operator: Final = Operator(self.cluster, History(seed=kernel.now))
        #: All frames since the cluster was whole, in order.
        self.sent: Final[list[Sent]] = []
        self._rules: Final[list[Rule]] = []
        self.cluster.begin()
        self.network.on_carry = self._carry

    # --- frames ---

    def _carry(self, src: str, dst: str, frame: bytes) -> int:
        message = wire.decode(frame)
        self.sent.append(Sent(self.kernel.now, src, dst, message))
        for rule in self._rules:
            if (fate := rule.decide(src, dst, message)) is not None:
                return fate
        return DELAY_NS

    def lose(self, src: str, dst: str, kind: type, count: int | None = None) -> Rule:
        """Lose the next `count` messages of a kind; None: all, until `heal`."""
        return self._rule(Rule(src, dst, kind, lambda: LOST, count))

    def delay(self, src: str, dst: str, kind: type, by_ns: int, count: int | None = None) -> Rule:
        """Delay messages of a kind."""
        return self._rule(Rule(src, dst, kind, lambda: DELAY_NS + by_ns, count))

    def hold(self, src: str, dst: str, kind: type, until: int, count: int | None = None) -> Rule:
        """Hold messages of a kind until a time, in their order."""
        return self._rule(Rule(src, dst, kind, lambda: max(until - self.kernel.now, 0), count))

    def _rule(self, rule: Rule) -> Rule:
        self._rules.append(rule)
        return rule

    def heal(self, *rules: Rule) -> None:
        """Drop some rules; without arguments, all."""
        for rule in rules or tuple(self._rules):
            self._rules.remove(rule)

    def messages(self, src: str, dst: str, kind: type) -> list[Any]:
        """Return the messages of a kind from one process to another, in order."""
        return [s.message for s in self.sent if (s.src, s.dst, type(s.message)) == (src, dst, kind)]

    # --- time ---

    @property
    def now(self) -> int:
        """Virtual time, in nanoseconds."""
        return self.kernel.now

    def run(self, duration_ns: int) -> None:
        """Advance the time."""
        self.kernel.run(duration_ns)

    def until(self, condition: Callable[[], object], within_ns: int = LONG_NS) -> None:
        """Advance the time until a condition holds."""
        assert self.kernel.run_until(condition, within_ns), self.cluster.states()

    def fresh_epoch(self) -> int:
        """Advance to a new epoch at all servers; return its first position."""
        names = self.cluster.plan.servers

        def bases() -> set[int]:
            """Return the start positions of the servers' current epochs, each by its own clock."""
            return {
                self.state(name).clock.current_epoch_base(self.cluster.nodes[name].clock())
                for name in names
            }

        used = max(self.state(name).stream.end for name in names)
        before = max(bases())
        self.until(lambda: len(bases()) == 1 and min(bases()) > max(used, before))
        return bases().pop()

    # --- servers' state ---

    def state(self, name: str) -> ReplicaState:
        """Return a storage server's state."""
        found = self.cluster.state_of(name)
        assert found is not None, f"{name} is down"
        return found

    def log(self, name: str) -> dict[int, bytes]:
        """Return a server's decided records by position; each position once."""
        records: dict[int, bytes] = {}
        for decision in self.decisions(name):
            if type(decision) is Place:
                assert decision.body is not None
                payloads = decode_body(decision.body, len(decision.gsns)).payloads
                for gsn, payload in zip(decision.gsns, payloads, strict=True):
                    assert gsn not in records, f"{name} has {gsn} twice"
                    records[gsn] = payload
        return records

    def decisions(self, name: str) -> list[Any]:
        """Return all of a server's decisions, in order."""
        server = self.cluster.server(name)
        assert server is not None, f"{name} is down"
        server.driver.store_waiting_entries()
        return [entry.decision for entry in server.store.read_after(0, _ALL)]

    def no_ops(self, name: str) -> list[tuple[int, int]]:
        """Return a server's decided no-op ranges [start, stop)."""
        return [(d.start, d.stop) for d in self.decisions(name) if type(d) is Skip]

    def guesses(self, name: str) -> dict[bytes, list[int]]:
        """Return a backup's promised and undecided positions, by payload."""
        replica = self.cluster.replica(name)
        assert replica is not None, f"{name} is down"
        backup = replica._backup
        assert backup is not None, f"{name} is not a backup"
        return {
            decode_body(unit.body, unit.count).payloads[0]: list(gsns)
            for unit in backup.guesses.promised.values()
            if (gsns := unit.gsns) is not None
        }

    def lease_at(self, gsn: int) -> Lease:
        """Return the lease of a position."""
        lease = self.cluster.state.lease_at(gsn)
        assert lease is not None, f"no lease has position {gsn}"
        return lease

    def settle(self, shard: int = 0) -> dict[int, bytes]:
        """Wait until the cluster is whole and all replicas are equal; return their log."""
        names = [server_name(shard, index) for index in range(self.cluster.plan.f + 1)]

        def is_settled() -> bool:
            if not self.cluster.is_whole():
                return False
            streams = [self.state(name).stream for name in names]
            return all(s.stable == s.last == streams[0].last for s in streams)

        self.until(is_settled)
        first, *others = names
        for other in others:
            assert self.log(first) == self.log(other)
            assert self.decisions(first) == self.decisions(other)
        return self.log(first)


class Client:
    """A client that inserts at one shard; None: at the first shard that accepts records."""

    def __init__(self, stage: Stage, name: str, shard: int | None = 0) -> None:
        self._stage: Final = stage
        self.name: Final = name
        choose = _first if shard is None else policy.pin(shard)

        def start(process: Process) -> ClientProgram:
            endpoints = [node.endpoint for node in stage.cluster.config.mms]
            return log_client(process, endpoints, Preferences(choose))

        self.process: Final = Process(stage.network, name, None, start)
        self.process.start()
        self.wait(self.begin(ConnectRequest(self.process.clock() + LONG_NS)))

    @property
    def program(self) -> ClientProgram:
        """Its program."""
        assert isinstance(self.process.program, ClientProgram)
        return self.process.program

    @property
    def paths(self) -> tuple[int, int]:
        """Numbers of its fast-path and slow-path inserts."""
        counters = self.program.engine.core.counters
        return counters.fast_path, counters.slow_path

    def begin(self, request: Request) -> Call:
        """Start a call."""
        call = Call(self._stage.now)

        def answered(result: Any) -> None:
            call.ended, call.result = self._stage.now, result

        self.program.call(request, answered)
        return call

    def wait(self, call: Call) -> Call:
        """Advance the time until a call has succeeded."""
        self._stage.until(lambda: call.ended)
        assert not isinstance(call.result, BaseException), repr(call.result)
        return call

    def insert(self, *payloads: bytes, after: int = 0) -> Call:
        """Start an insert of records as one unit."""
        deadline = self.process.clock() + LONG_NS
        rid = RecordId(after, 0) if after else RID_GENESIS
        return self.begin(InsertRequest(deadline, list(payloads), rid, None, 0, many=True))

    def append(self, *payloads: bytes, after: int = 0, within_ns: int = LONG_NS) -> Call:
        """Start an append of records as one unit."""
        deadline = self.process.clock() + within_ns
        rid = RecordId(after, 0) if after else RID_GENESIS
        return self.begin(
            InsertRequest(deadline, list(payloads), rid, None, 0, many=True, sealed=True)
        )

    def read(self, gsn: int, shard: int = 0) -> bytes:
        """Return the record at a position."""
        deadline = self.process.clock() + LONG_NS
        payload: bytes = self.wait(
            self.begin(ReadRequest(deadline, RecordId(gsn, shard)))
        ).result.payload
        return payload

    def send_again(self, insert: wire.Insert, server: str, view: int) -> None:
        """Send another copy of an insert to one server, in a view."""
        transport = self.process.transport
        assert transport is not None
        endpoint = self._stage.cluster.nodes[server].endpoint
        (name,) = [n for n, c in transport._connections.items() if c.endpoint == endpoint]
        transport.send(name, wire.encode(msgspec.structs.replace(insert, view=view)))


def _first(_payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
    return min(live)


class Reader(Client):
    """A client that follows the log from a position on."""

    def __init__(self, stage: Stage, name: str, start: int) -> None:
        super().__init__(stage, name)
        #: The received records, in order.
        self.delivered: Final[list[tuple[int, bytes]]] = []
        request = SubscribeRequest(self.process.clock() + LONG_NS, RecordId(start, 0), follow=True)
        self._number: Final = self.wait(self.begin(request)).result
        self._fetch()

    def _fetch(self) -> None:
        request = FetchRequest(self.process.clock() + LONG_NS, self._number, 100)
        self.program.call(request, self._fetched)

    def _fetched(self, result: Any) -> None:
        assert not isinstance(result, BaseException), repr(result)
        records: list[Record] = result.records
        self.delivered.extend((record.rid.gsn, record.payload) for record in records)
        self._fetch()

    def until(self, count: int) -> list[tuple[int, bytes]]:
        """Advance the time until it has received `count` records; return all received ones."""
        self._stage.until(lambda: len(self.delivered) >= count)
        return self.delivered

    @property
    def position(self) -> int:
        """The position up to which all records were delivered."""
        subscriptions = self.program.engine.core._subscriptions
        return subscriptions._open[self._number].position


@contextmanager
def stage(
    *, shards: int = 1, f: int = 1, epoch_ms: int = 1000, seed: int = 1, mms: int = 1
) -> Iterator[Stage]:
    """Yield a whole cluster with f+1 servers per shard to a script.

    Epochs last a second by default, so an idle and a busy cluster have the same leases, and a
    script knows its epoch.
    """
    kernel = Kernel(seed)
    with simulated(kernel):
        yield Stage(kernel, shards, f, epoch_ms, mms)
