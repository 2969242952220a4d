"""Test doubles of a client: a harness of its node, and an in-memory cluster.

`ClientHarness` steps the node, and keeps what it sent and completed. It checks the node's
invariants after each step, or less often while many calls are open.

`FakeCluster` plays the membership service and the shards on a simple model of the log; its network
loses, duplicates and reorders messages at random.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec

from ziplog import wire
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import (
    ConnectRequest,
    Fetched,
    FetchRequest,
    InsertRequest,
    Preferences,
    Request,
    SubscribeRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.core.entries import Unit, decode_body
from ziplog.core.node import (
    AskArchive,
    BatchEnd,
    Broadcast,
    Call,
    Cancelled,
    Complete,
    FailCalls,
    Received,
    Send,
    Wakeup,
)
from ziplog.core.units import NEVER
from ziplog.core.view import NO_DIGEST, Lease, LeaseRun, Member, Placement, Replica, run_of
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.common.requests import Policy
    from ziplog.core.message import Message
    from ziplog.core.node import Effect
    from ziplog.errors import OutcomeUnknownError

MS = 1_000_000
S = 1_000_000_000
CLUSTER = 7
SERVICE = "mms:1"
CLIENT = b"c" * 16


def endpoint(shard: int, server: int) -> str:
    return f"s{shard}r{server}:1"


def placement(
    shard: int, replicas: int = 2, view: int = 1, state: Any = "live", regions: Sequence[str] = ()
) -> Placement:
    names = [endpoint(shard, i) for i in range(replicas)]
    labels = regions or [""] * replicas
    servers = tuple(Replica(n, n, region=one) for n, one in zip(names, labels, strict=True))
    return Placement(shard, view, state, servers)


def lease(shards: Sequence[int] = (0,), number: int = 1, base: int = 1, size: int = 1000) -> Lease:
    members = tuple(Member(shard, 1, 1) for shard in shards)
    return Lease(number, NO_DIGEST, base, number - 1, 1, size, 10, members)


def info(
    request: int,
    placements: Sequence[Placement],
    leases: Sequence[LeaseRun],
    limits: wire.Limits | None = None,
    service: str = SERVICE,
) -> wire.ClusterInfo:
    return wire.ClusterInfo(
        CLUSTER, request, "fake", "memory", [service], list(placements), list(leases), 0,
        limits or wire.Limits(),
    )  # fmt: skip


class ClientHarness:
    """A test harness of one client node: stepped by hand in virtual time, its effects kept."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        endpoints: Sequence[str] = (SERVICE,),
        region: str = "",
        min_regions: int = 0,
    ) -> None:
        chosen = policy or (lambda _p, _k, live: live[0])
        self.core = ClientCore(CLIENT, endpoints, Preferences(chosen, region, min_regions))
        self.now = 5 * S
        #: (name, message) of every sent message that no test has taken.
        self.sent: list[tuple[str, Any]] = []
        self.answers: dict[int, Any] = {}
        self.connected: list[str] = []
        self.failures: list[Exception] = []
        #: The requests to archives that no test has taken.
        self.asked: list[AskArchive] = []
        self._steps = self._calls = 0
        #: Deliver all events by `step`, where a client's engine uses `step_call` and `step_ack`.
        self.by_events = False

    def _effects(self, event: Any) -> list[Effect]:
        """Step the node as its engine does."""
        core = self.core
        if not self.by_events:
            match event:
                case Call(number, request):
                    return core.step_call(number, request, self.now)
                case Received(src, wire.InsertAck() as message):
                    return core.step_ack(src, message, self.now)
        return core.step(event, self.now)

    def step(self, event: Any) -> None:
        for effect in self._effects(event):
            match effect:
                case Send(dst, message):
                    self.sent.append((dst.decode(), message))
                case Broadcast(dsts, message):
                    self.sent += [(dst.decode(), message) for dst in dsts]
                case Complete(call, result):
                    assert call not in self.answers, "a call was completed twice"
                    self.answers[call] = result
                case FailCalls(error):
                    self.failures.append(error)
                case AskArchive():
                    self.asked.append(effect)
                case _:
                    self.connected.append(type(effect).__name__ + " " + effect.name.decode())  # type: ignore[attr-defined]
        # A check takes time in proportion to the open calls.
        self._steps += 1
        if self._steps % (1 + (self._calls - len(self.answers)) // 64) == 0:
            self.core.check()

    def call(self, request: Request) -> int:
        self._calls += 1
        number = self._calls
        self.step(Call(number, request))
        return number

    def cancel(self, call: int) -> None:
        self.step(Cancelled(call))

    def give(self, *messages: Message) -> None:
        """Deliver messages as one batch; each passes through the codec."""
        for message in messages:
            self.step(Received(b"server", wire.decode(wire.encode(message))))
        self.step(BatchEnd())

    def pass_time(self, duration: int) -> None:
        """Advance the time, with a wakeup at each timer of the node."""
        end = self.now + duration
        while (due := self.core.next_wakeup()) is not None and due <= end:
            self.now = max(self.now, due)
            self.step(Wakeup())
        self.now = end

    def take(self, kind: type) -> list[tuple[str, Any]]:
        """Return and remove the sent messages of this kind."""
        found = [item for item in self.sent if isinstance(item[1], kind)]
        self.sent = [item for item in self.sent if not isinstance(item[1], kind)]
        return found

    def connect(
        self,
        *placements: Placement,
        leases: Sequence[LeaseRun] | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        """Connect, with these placements."""
        call = self.call(ConnectRequest(self.until()))
        self.inform(*placements, leases=leases, limits=limits)
        assert isinstance(self.answers.pop(call), wire.Limits)

    def inform(
        self,
        *placements: Placement,
        leases: Sequence[LeaseRun] | None = None,
        limits: wire.Limits | None = None,
    ) -> None:
        """Reply to the open `Hello` request."""
        asked = self.take(wire.Hello)
        shards = [p.shard for p in placements]
        known = [run_of(lease(shards))] if leases is None and shards else leases or ()
        self.give(info(asked[-1][1].request, placements, known, limits))

    def list_shards(self, *placements: Placement) -> None:
        """Reply to the lease queries that no test has taken."""
        runs = [run_of(lease([p.shard for p in placements]))]
        for _, asked in self.take(wire.LeaseQuery):
            self.give(wire.LeaseHistory(CLUSTER, asked.request, runs, list(placements), 0))

    def until(self, timeout: int = 10 * S) -> int:
        return self.now + timeout

    def insert(
        self,
        *payloads: bytes,
        after: RecordId = RID_GENESIS,
        key: bytes | None = None,
        timeout: int = 10 * S,
    ) -> int:
        return self.call(InsertRequest(self.until(timeout), list(payloads), after, key, 0))


def ack(
    insert: wire.Insert, server: int, gsns: Sequence[int], counter: int = 1, **fields: Any
) -> wire.InsertAck:
    """Return a server's ack of an insert."""
    confirmed = server == 0
    made = wire.InsertAck(
        CLUSTER, insert.shard, insert.view, server, 1, insert.seq, counter, confirmed, list(gsns),
        copy=insert.copy,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def refused(
    message: Any, server: int, code: wire.RefusalCode, request: int | None = None
) -> wire.Refused:
    """Return a server's refusal; one for lack of room carries its promise."""
    is_insert = isinstance(message, wire.Insert)
    number = message.seq if is_insert else request or message.request
    copies = message.copy if is_insert and code in {"full", "no-space"} else 0
    return wire.Refused(CLUSTER, message.shard, message.view, server, number, code, copies=copies)


def pinned(_payload: bytes, _key: bytes | None, _live: Any) -> int:
    return 0


def connected(policy: Any = None) -> ClientHarness:
    harness = ClientHarness(policy)
    harness.connect(placement(0), placement(1))
    return harness


def learn(harness: ClientHarness, view: int = 1, state: str = "recovering", shard: int = 0) -> None:
    """Deliver a shard's view and state."""
    harness.core._inserts.take_over_plain()  # As each step does.
    harness.core._routing.update_placements([placement(shard, view=view, state=state)])
    harness.step(BatchEnd())


def sent(harness: ClientHarness) -> list[wire.Insert]:
    """Return and remove the inserts that were sent to primaries."""
    return [m for name, m in harness.take(wire.Insert) if name.endswith("r0:1")]


def resolve(harness: ClientHarness, error: OutcomeUnknownError, timeout: int = 10 * S) -> int:
    outcome: Any = error.doubt
    return harness.call(ResolveRequest(harness.until(timeout), outcome))


class FakeCluster:
    """A log of a few shards that own positions in turn, and an unreliable network.

    Each shard places units at its next positions. A backup may first ack a wrong guess. A placed
    unit is stable at once. `frontier` moves with inserts and on `Want`.
    """

    def __init__(
        self, harness: ClientHarness, seed: int, shards: int = 2, replicas: int = 2
    ) -> None:
        self.harness = harness
        self.service = SERVICE
        self.trim = 0
        self.random = random.Random(seed)
        self.shards, self.replicas = shards, replicas
        self.lease = lease(range(shards), size=shards * 1_000_000)
        self.placed: dict[tuple[int, int], list[int]] = {}
        self.units: dict[int, list[tuple[list[int], bytes]]] = {s: [] for s in range(shards)}
        self.frontiers = dict(enumerate(range(1, shards + 1)))
        self.guessed: set[tuple[int, int]] = set()
        #: Copies at backups of units that are not placed yet.
        self.early: dict[tuple[int, int], dict[int, wire.Insert]] = {}
        #: Each shard's view, and its state at the membership service.
        self.views = dict.fromkeys(range(shards), 1)
        self.states: dict[int, Any] = dict.fromkeys(range(shards), "live")
        #: The error of shard changes; "": they succeed.
        self.refusal: Any = ""
        #: By the number of a subscription at a server: (shard, server, sent so far, credit).
        self.streams: dict[int, list[int]] = {}
        self.counter = itertools.count(1)
        #: The share of messages that are lost, and that arrive twice.
        self.loss = self.repetition = 0.0
        self.in_flight: list[tuple[int, int, Callable[[], object]]] = []

    # --- the network ---

    def carry(self, deliver: Callable[[], None]) -> None:
        copies = 2 if self.random.random() < self.repetition else 1
        for _ in range(copies):
            if self.random.random() >= self.loss:
                at = self.harness.now + self.random.randrange(10_000, 2 * MS)
                self.in_flight.append((at, next(self.counter), deliver))

    def later(self, ms: int, act: Callable[[], object]) -> None:
        """Schedule an action after a duration."""
        self.in_flight.append((self.harness.now + ms * MS, next(self.counter), act))

    def run(self, done: Callable[[], bool], within: int = 300 * S) -> None:
        """Advance the time until `done`."""
        end = self.harness.now + within
        while not done():
            assert self.harness.now < end, "the run did not finish"
            sent, self.harness.sent = self.harness.sent, []
            for name, message in sent:
                self.carry(lambda name=name, message=message: self.serve(name, message))  # type: ignore[misc]
            due = self.harness.core.next_wakeup()
            times = [item[0] for item in self.in_flight] + ([due] if due is not None else [])
            assert times, "no event is scheduled"
            self.harness.now = max(self.harness.now, min(times))
            ready = sorted(item for item in self.in_flight if item[0] <= self.harness.now)
            self.in_flight = [item for item in self.in_flight if item[0] > self.harness.now]
            for _, _, deliver in ready:
                deliver()
            self.harness.step(BatchEnd())
            if due is not None and due <= self.harness.now:
                self.harness.step(Wakeup())

    def reply(self, message: Message) -> None:
        frame = wire.encode(message)
        self.carry(lambda: self.harness.step(Received(b"server", wire.decode(frame))))

    # --- the servers ---

    def serve(self, name: str, message: Any) -> None:
        """Handle a message at a server."""
        server = int(name[3]) if name != SERVICE else 0
        match message:
            case wire.Hello():
                leases = [run_of(self.lease)]
                self.reply(info(message.request, self.placements(), leases, service=self.service))
            case wire.LeaseQuery():
                runs = [run_of(self.lease)]
                self.reply(
                    wire.LeaseHistory(CLUSTER, message.request, runs, self.placements(), self.trim)
                )
            case wire.Trim():
                self.trim = message.gsn
                self.reply(wire.TrimReply(CLUSTER, message.request, self.trim))
            case wire.StatusQuery():
                self.reply(wire.StatusReply(CLUSTER, message.request, b'{"cluster": "fake"}'))
            case wire.ChangeShard():
                number, shard = message.request, message.shard
                self.reply(wire.ShardChanged(CLUSTER, number, shard, self.refusal))
            case wire.Insert():
                self.insert(server, message)
            case wire.Locate():
                self.locate(server, message)
            case wire.Sync():
                self.sync(message)
            case wire.Tail():
                last = max((gsns[-1] for gsns, _ in self.units[message.shard]), default=0)
                self.reply(
                    wire.TailReply(
                        CLUSTER, message.shard, self.views[message.shard], server,
                        message.request, last, self.frontiers[message.shard],
                        last if last < message.below else 0,
                    )
                )  # fmt: skip
            case wire.Outline():
                self.outline(server, message)
            case wire.Subscribe():
                self.streams[message.subscription] = [
                    message.shard, server, message.start, message.credit,
                ]  # fmt: skip
                self.deliver(message.subscription)
            case wire.Credit():
                self.renew(message, server)
            case wire.Unsubscribe():
                self.streams.pop(message.subscription, None)
            case wire.Want():
                while self.frontiers[message.shard] <= message.gsn:
                    self.frontiers[message.shard] += self.shards
                self.push(message.shard)
            case wire.Read():
                self.read(server, message)

    def placements(self) -> list[Placement]:
        """Return the placements."""
        return [
            placement(shard, self.replicas, self.views[shard], self.states[shard])
            for shard in range(self.shards)
        ]

    def locate(self, server: int, message: wire.Locate) -> None:
        """Return a unit's `Located` reply; as in the protocol, `absent` only in a later view."""
        view, gsns = self.views[message.shard], self.placed.get((message.shard, message.seq))
        verdict: Any = "absent" if message.view < view else "pending"
        if gsns is not None:
            verdict = "present"
        self.reply(
            wire.Located(
                CLUSTER, message.shard, view, server, message.client, message.seq, verdict,
                gsns or [],
            )
        )  # fmt: skip

    def sync(self, message: wire.Sync) -> None:
        durable = self.frontiers[message.shard]
        view = self.views[message.shard]
        if durable > message.gsn:
            self.reply(wire.Synced(CLUSTER, message.shard, view, message.request, durable))

    def insert(self, server: int, message: wire.Insert) -> None:
        if message.view != self.views[message.shard]:
            self.reply(
                msgspec.structs.replace(
                    refused(message, server, "wrong-view"), view=self.views[message.shard]
                )
            )
            return
        key = (message.shard, message.seq)
        if key not in self.placed:
            if server:
                self.early.setdefault(key, {})[server] = message
                return
            if message.predecessor and (message.shard, message.predecessor) not in self.placed:
                return
            gsn = self.frontiers[message.shard]
            while gsn <= message.after:
                gsn += self.shards
            stop = gsn + message.count * self.shards
            self.placed[key] = list(range(gsn, stop, self.shards))
            self.frontiers[message.shard] = stop
            self.units[message.shard].append((self.placed[key], message.body))
            self.push(message.shard)
            for backup, copy in self.early.pop(key, {}).items():
                self.insert(backup, copy)
        gsns = self.placed[key]
        if server and key not in self.guessed and self.random.random() < 0.3:
            self.guessed.add(key)
            gsns = [gsn + self.shards for gsn in gsns]
            self.reply(ack(message, server, gsns, next(self.counter)))
            gsns = self.placed[key]
        self.reply(ack(message, server, gsns, next(self.counter), confirmed=True))

    def read(self, server: int, message: wire.Read) -> None:
        if all(message.gsn not in gsns for gsns, _ in self.units[message.shard]):
            self.reply(
                wire.ReadReply(
                    CLUSTER, message.shard, self.views[message.shard], server,
                    message.request, message.gsn, "not-yet",
                    stable=False,
                )
            )  # fmt: skip
        for gsns, data in self.units[message.shard]:
            if message.gsn in gsns:
                body = decode_body(data, len(gsns))
                self.reply(
                    wire.ReadReply(
                        CLUSTER, message.shard, self.views[message.shard], server,
                        message.request, message.gsn, "record",
                        self.random.random() < 0.5, 0, 0, body.timestamp_us,
                        body.key_of(gsns.index(message.gsn)),
                        body.payloads[gsns.index(message.gsn)],
                    )
                )  # fmt: skip

    def push(self, shard: int) -> None:
        for number, stream in self.streams.items():
            if stream[0] == shard:
                self.deliver(number)

    def renew(self, message: wire.Credit, server: int) -> None:
        stream = self.streams.get(message.subscription)
        if stream is None or self.random.random() < self.loss / 5:
            self.streams.pop(message.subscription, None)
            number = message.subscription
            self.reply(refused(message, server, "unknown-subscription", number))
            return
        stream[3] = max(stream[3], message.credit)
        self.deliver(message.subscription)

    def outline(self, server: int, message: wire.Outline) -> None:
        """Return all units of the range as one step."""
        units = [u for u in self.units[message.shard] if message.start <= u[0][0] < message.stop]
        size = sum(len(body) for _, body in units)
        steps = [wire.Step(units[-1][0][-1] + 1, size)] if units else []
        self.reply(
            wire.Outlined(
                CLUSTER, message.shard, self.views[message.shard], server, message.request,
                self.trim, steps, 9000 + server,
            )
        )  # fmt: skip

    def deliver(self, number: int) -> None:
        """Send as far as the credit allows, from the end of the last message."""
        shard, server, sent, credit = self.streams[number]
        if sent < self.trim:
            view = self.views[shard]
            self.reply(wire.Trimmed(CLUSTER, shard, view, number, self.trim))
            return
        frontier = max(self.frontiers[shard], sent)
        units: list[Unit] = []
        for gsns, body in self.units[shard]:
            if gsns[-1] >= sent:
                credit -= len(body) + 64
                if credit < 0:
                    frontier = max(gsns[0], sent)
                    break
                units.append(Unit(0, gsns, body))
        self.streams[number] = [shard, server, frontier, credit]
        self.reply(
            wire.Deliver(
                CLUSTER, shard, self.views[shard], server, number, sent, frontier, units,
                [run_of(self.lease)], max(self.frontiers[shard], frontier),
            )
        )  # fmt: skip

    # --- expected results ---

    @property
    def log(self) -> list[tuple[int, bytes]]:
        """All records by gsn."""
        return sorted(
            (gsn, payload)
            for units in self.units.values()
            for gsns, body in units
            for gsn, payload in zip(gsns, decode_body(body, len(gsns)).payloads, strict=True)
        )

    def result(self, call: int) -> Any:
        """Run until a call is completed; return its result."""
        self.run(lambda: call in self.harness.answers)
        return self.harness.answers.pop(call)

    def fetch_all(self, subscription: int) -> list[Record]:
        """Fetch until the end of a subscription."""
        records: list[Record] = []
        while True:
            batch = self.result(self.harness.call(FetchRequest(NEVER, subscription, 7)))
            assert isinstance(batch, Fetched), batch
            records += batch.records
            if batch.ended:
                return records

    def subscribe(
        self, start: RecordId = RID_GENESIS, *, follow: bool = False, known_rows: bool = False
    ) -> int:
        until = self.harness.until(60 * S)
        request = SubscribeRequest(until, start, follow, known_rows=known_rows)
        number = self.result(self.harness.call(request))
        assert isinstance(number, int), number
        return number
