"""Test doubles of a database's client: the fake cluster of the log, with fake coordinators.

`FakeDatabase` is the fake cluster. What the client sends to a coordinator goes to a
`FakeCoordinator`, which has the real state of the log's content. A test may make it silent, not
ready, dead, or cut off from the log, or reply in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from logdb import records
from logdb import wire as messages
from logdb.client.core import DatabaseCore
from logdb.client.requests import (
    CommitRequest,
    GetRequest,
    OpenRequest,
    PutRequest,
)
from logdb.coordinator.cache import ValueCache
from logdb.coordinator.queries import Queries
from logdb.errors import SnapshotExpired
from logdb.records import KeyRead, TransactionId, Write
from logdb.snapshots import Snapshots
from logdb.state import State
from logdb.values import encode_value
from tests.unit.ziplog.client.fakes import CLIENT, CLUSTER, SERVICE, ClientHarness, FakeCluster, S
from ziplog import wire
from ziplog.core.entries import Body, encode_body
from ziplog.core.node import Received
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ziplog.client.common.requests import Request
    from ziplog.core.message import Message

T = TypeVar("T")

SESSION = b"session1"
MS = 1_000_000


def v(value: Any) -> bytes:
    return encode_value(value)


class DatabaseHarness(ClientHarness):
    """A test harness of one database's core."""

    def __init__(self, coordinators: int = 1) -> None:
        super().__init__()
        names = [f"c{number}:1" for number in range(coordinators)]
        #: The wall clock minus the clock of the core.
        self.wall_offset_ns = 0
        self.core: Any = DatabaseCore(
            CLIENT + SESSION,
            names,
            lambda _p, _k, live: live[0],
            wall_offset_ns=lambda: self.wall_offset_ns,
        )

    def hear(self, coordinator: int, *replies: Any) -> None:
        """Let a coordinator's messages arrive; each passes through the codec."""
        for reply in replies:
            frame = wire.encode(reply)
            self.step(Received(b"coordinator c%d:1" % coordinator, messages.decode(frame)))


class FakeCoordinator:
    """One coordinator that tails the fake cluster's log."""

    def __init__(self, database: FakeDatabase, number: int) -> None:
        self.database = database
        self.number = number
        #: Neither receives nor sends messages.
        self.is_dead = False
        #: Sends no decisions unasked.
        self.is_shy = False
        #: Applies nothing.
        self.is_stuck = False
        self.not_ready = ""
        #: The cluster of its log; a number other than the fake cluster's is a former cluster.
        self.cluster = CLUSTER
        #: Messages of these types get no reply.
        self.silent: set[type] = set()
        self.received: list[Any] = []
        self.restart()

    def restart(self) -> None:
        """Forget everything but what is in the log."""
        self.sessions: set[bytes] = set()
        self.state = State()
        self.snapshots = Snapshots(self.state)
        self.cache = ValueCache(1 << 20)
        base = getattr(self, "_base", self.number << 20) + (1 << 10)
        self._base = base
        self.answers = Queries(self.state, self.snapshots, self.cache, base)
        self.asks: list[Any] = []
        self.waiting: list[Any] = []
        self.decisions: dict[tuple[bytes, int], messages.Decided] = {}

    @property
    def passed(self) -> int:
        return self.state.position.gsn

    def say(self, message: Any) -> None:
        if not self.is_dead:
            named = msgspec.structs.replace(message, cluster=self.cluster)
            self.database.say(self.number, named)

    def follow(self) -> None:
        """Apply the records of the log, and answer waiting requests."""
        if self.is_dead or self.is_stuck:
            return
        for gsn, payload in self.database.sealed():
            if gsn > self.passed:
                self._apply(Record(RecordId(gsn, self.database.shard_of(gsn)), payload, None, 0, 0))
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.answer(message)

    def _apply(self, record: Record) -> None:
        applied = self.state.apply(record)
        if applied is None or applied.outcome == "repeated":
            return
        for key, value in applied.values:
            self.cache.put(key, applied.position.gsn, value)
        session, number = applied.id.session, applied.id.number
        decided = messages.Decided(
            CLUSTER, session, number, applied.position, applied.outcome, applied.conflicts,
            applied.unchanged_since,
        )  # fmt: skip
        self.decisions[session, number] = decided
        if session in self.sessions and not self.is_shy:
            self.say(decided)

    def serve(self, message: Any) -> None:
        if self.is_dead:
            return
        self.received.append(message)
        if type(message) in self.silent:
            return
        if message.cluster not in {0, self.cluster}:
            here = f"this coordinator follows cluster {self.cluster}"
            self.say(messages.Invalid(CLUSTER, message.request, "wrong-cluster", here))
            return
        if self.not_ready:
            self.say(messages.NotReady(CLUSTER, message.request, self.not_ready))
            return
        self.follow()
        self.answer(message)

    def _wanted(self, message: messages.Get | messages.Scan) -> int:
        """Return the position that an answer needs."""
        tail = max((gsn for gsn, _ in self.database.log), default=0) if message.fresh else 0
        return max(tail, message.at_least)

    def answer(self, message: Any) -> None:
        now = self.database.harness.now
        try:
            match message:
                case messages.Open():
                    self.sessions.add(message.session)
                    self.say(
                        messages.Opened(CLUSTER, message.request, [SERVICE], self.state.position)
                    )
                case messages.AwaitDecision():
                    self.sessions.add(message.session)
                    decided = self.decisions.get((message.session, message.number))
                    if decided is None:
                        self.waiting.append(message)
                    else:
                        self.say(decided)
                case messages.Get() | messages.Scan() if self.passed < self._wanted(message):
                    self.waiting.append(message)
                case messages.Get() | messages.Scan():
                    self.say(self.answers.read(CLUSTER, message, now))
                case messages.Validate():
                    self.say(self.answers.validate(CLUSTER, message))
                case messages.Watch():
                    if self.answers.version(message.key) == message.version:
                        self.waiting.append(message)
                    else:
                        self.say(self.answers.watch(CLUSTER, message))
                case messages.TakeSnapshot():
                    self.say(self.answers.take_snapshot(CLUSTER, message, now))
                case messages.DropSnapshot():
                    self.answers.drop_snapshot(message.snapshot)
                case messages.Status():
                    self.say(messages.StatusReply(CLUSTER, message.request, b"{}"))
        except SnapshotExpired as error:
            self.say(messages.Invalid(CLUSTER, message.request, "snapshot-expired", str(error)))


class FakeDatabase(FakeCluster):
    """A fake log, its coordinators, and one client."""

    harness: DatabaseHarness

    def __init__(self, coordinators: int = 1, seed: int = 1, shards: int = 2) -> None:
        super().__init__(DatabaseHarness(coordinators), seed, shards)
        self.coordinators = [FakeCoordinator(self, number) for number in range(coordinators)]
        #: Inserts get no answer, and are not placed.
        self.is_log_silent = False
        #: Inserts are placed, but no ack comes back.
        self.loses_acks = False
        #: Trimmed positions.
        self.gone: set[int] = set()
        self.inserts: list[wire.Insert] = []
        self._others = 0

    @property
    def first(self) -> FakeCoordinator:
        return self.coordinators[0]

    def shard_of(self, gsn: int) -> int:
        return (gsn - 1) % self.shards

    def sealed(self) -> list[tuple[int, bytes]]:
        """Return the log; no later insert is placed between its records."""
        last = max((gsns[-1] for units in self.units.values() for gsns, _ in units), default=0)
        for shard in self.frontiers:
            while self.frontiers[shard] <= last:
                self.frontiers[shard] += self.shards
        return self.log

    def serve(self, name: str, message: Any) -> None:
        if name.startswith("coordinator "):
            self.coordinators[int(name[13])].serve(message)
            return
        if isinstance(message, wire.Insert):
            if name.endswith("r0:1"):
                self.inserts.append(message)
            if self.is_log_silent:
                return
        super().serve(name, message)
        if isinstance(message, wire.Insert):
            for coordinator in self.coordinators:
                self.later(1, coordinator.follow)

    def reply(self, message: Message) -> None:
        if not (self.loses_acks and isinstance(message, wire.InsertAck)):
            super().reply(message)

    def read(self, server: int, message: wire.Read) -> None:
        if message.gsn not in self.gone:
            super().read(server, message)
            return
        self.reply(
            wire.ReadReply(
                CLUSTER, message.shard, self.views[message.shard], server, message.request,
                message.gsn, "trimmed", True, message.gsn + 1,
            )
        )  # fmt: skip

    def say(self, coordinator: int, message: Any) -> None:
        """Let a coordinator's message travel to the client."""
        self.carry(lambda: self.harness.hear(coordinator, message))

    # --- other clients ---

    def append(self, record: records.AnyRecord) -> RecordId:
        """Have another client's record in the log."""
        self.sealed()
        gsn = self.frontiers[0]
        self.frontiers[0] += self.shards
        body = encode_body(Body(0, None, [records.encode(record)]))
        self.units[0].append(([gsn], body))
        for coordinator in self.coordinators:
            self.later(1, coordinator.follow)
        return RecordId(gsn, 0)

    def write(self, key: bytes, value: Any, reads: list[KeyRead] | None = None) -> RecordId:
        """Have another client's transaction in the log."""
        self._others += 1
        began = max((gsn for gsn, _ in self.log), default=0)
        encoded = v(value)
        return self.append(
            records.Commit(
                TransactionId(b"anothers", self._others), began, reads or [], [],
                [Write(key, encoded, None, len(encoded))],
            )
        )  # fmt: skip

    # --- the client ---

    def begin(self, request_type: Callable[..., Request], *args: Any, **kwargs: Any) -> int:
        """Begin a call that has 10 s, or `within` nanoseconds."""
        within = kwargs.pop("within", 10 * S)
        return self.harness.call(request_type(self.harness.until(within), *args, **kwargs))

    def do(self, request_type: Callable[..., Request], *args: Any, **kwargs: Any) -> Any:
        """Make a call, and return its result; raises it if it is an exception."""
        return self.end(self.begin(request_type, *args, **kwargs))

    def end(self, call: int) -> Any:
        result = self.result(call)
        if isinstance(result, Exception):
            raise result
        return result

    def open(self) -> FakeDatabase:
        self.do(OpenRequest)
        self.harness.sent.clear()
        return self

    def put(self, key: bytes, value: Any, **kwargs: Any) -> RecordId:
        rid: RecordId = self.do(PutRequest, {key: v(value)}, **kwargs)
        return rid

    def get(self, *keys: bytes) -> list[bytes | None]:
        values: list[bytes | None] = self.do(GetRequest, list(keys), True).values
        return values

    def increment(self, key: bytes, **kwargs: Any) -> int:
        """Begin to commit a counter's next value, which is read now."""
        found = self.do(GetRequest, [key])
        value = 0 if found.values[0] is None else found.values[0][0]
        reads = [KeyRead(key, found.versions[0])]
        return self.begin(CommitRequest, reads, [], {key: v(value + 1)}, **kwargs)

    def commits(self) -> list[records.Commit]:
        """Return the commit records in the log, in order."""
        decoded = [records.decode(payload) for _, payload in self.log]
        return [record for record in decoded if isinstance(record, records.Commit)]

    def drive(self, steps: Generator[Request, Any, T]) -> T:
        """Answer the requests of a façade's steps."""
        try:
            request = next(steps)
            while True:
                result = self.result(self.harness.call(request))
                if isinstance(result, Exception):
                    request = steps.throw(result)
                else:
                    request = steps.send(result)
        except StopIteration as end:
            found: T = end.value
            return found
