"""A test harness of one coordinator: on a log in memory, stepped by hand in virtual time.

Its messages pass through the codec; its invariants are checked after every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from logdb import wire
from logdb.coordinator.node import CoordinatorNode, Settings
from logdb.records import Commit, KeyRead, RangeRead, TransactionId, Write, encode
from tests.unit.logdb.fakelog import UNAVAILABLE, FakeCore, FakeLog, fail
from ziplog.client.common.requests import FetchRequest
from ziplog.core.node import BatchEnd, Halt, LogWarning, Received, Send, Wakeup
from ziplog.policy import pin
from ziplog.types import RID_GENESIS
from ziplog.wire import encode as encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logdb.coordinator.log_tailer import LogTailer
    from ziplog.core.node import Effect, Event
    from ziplog.types import RecordId

MS = 1_000_000
S = 1_000_000_000
CLUSTER = 7
SESSION = b"session1"
ROUTE = b"route"


class Core(FakeCore):
    """A fake client core with a cluster number."""

    cluster = CLUSTER
    endpoints = ("mms:1", "mms:2")


def commit(
    number: int,
    writes: dict[bytes, bytes | None],
    *,
    reads: Sequence[tuple[bytes, int]] = (),
    ranges: Sequence[RangeRead] = (),
    session: bytes = SESSION,
    began: int = 0,
) -> bytes:
    """Return the payload of a commit record with small writes; None: delete the key."""
    made = [Write(key, value, None, len(value or b"")) for key, value in writes.items()]
    known = [KeyRead(key, version) for key, version in reads]
    return encode(Commit(TransactionId(session, number), began, known, list(ranges), made))


def waiter_count(tailer: LogTailer) -> int:
    """Return the number of waiters of a tailer."""
    return len(tailer._unsent) + len(tailer._requested) + len(tailer._waiters)


class CoordinatorHarness:
    """One coordinator, and the log that it tails."""

    def __init__(
        self, log: FakeLog | None = None, *, at_once: bool = True, **settings: Any
    ) -> None:
        self.log = log or FakeLog(seed=1)
        self.core = Core(self.log, at_once=at_once)
        self.now = 5 * S
        #: What was sent, to which route.
        self.sent: list[tuple[bytes, Any]] = []
        self.warnings: list[str] = []
        self.halts: list[str] = []
        self.requests = 0
        settings.setdefault("checkpoints", False)
        with mock.patch("logdb.coordinator.node.ClientCore", return_value=self.core):
            self.node = CoordinatorNode(
                b"c" * 16, ["mms:1"], pin(0), now=self.now, settings=Settings(**settings)
            )

    @classmethod
    def ready(cls, *payloads: bytes, **options: Any) -> CoordinatorHarness:
        """Return a harness that has replayed a log with these payloads."""
        harness = cls(**options)
        for payload in payloads:
            harness.log.insert(payload, after=harness.log.tail)
        harness.poll()
        assert harness.node.is_ready
        return harness

    def step(self, event: Event) -> list[Effect]:
        effects = self.node.step(event, self.now)
        for effect in effects:
            match effect:
                case Send(route, message):
                    self.sent.append((route, wire.decode(encode_message(message))))
                case LogWarning(text):
                    self.warnings.append(text)
                case Halt(reason):
                    self.halts.append(reason)
                case _:
                    raise AssertionError(f"a coordinator orders {effect}")
        self.node.check()
        return effects

    def poll(self, turns: int = 4) -> None:
        """Run as many steps as may be needed."""
        for _ in range(turns):
            self.step(Wakeup())
            self.step(BatchEnd())

    def pass_time(self, duration: int) -> None:
        """Let time pass, with wake-ups when they are due, at most 100 ms apart."""
        end = self.now + duration
        while self.now < end:
            due = self.node.next_wakeup()
            later = min(end, self.now + 100 * MS)
            self.now = later if due is None else max(min(later, due), self.now + 1)
            self.step(Wakeup())
            self.step(BatchEnd())

    def lose(self) -> None:
        """Make the subscription fail, so that it restarts a second later."""
        self.log.faults.append(fail(FetchRequest, UNAVAILABLE))
        self.step(BatchEnd())
        assert not self.node.is_ready
        self.log.faults.clear()

    def deliver(self, message: wire.ClientRequest, route: bytes = ROUTE) -> None:
        """Deliver a request, as the last event of its batch."""
        self.step(Received(route, wire.decode(encode_message(message))))
        self.step(BatchEnd())

    def pop_sent(self, route: bytes = ROUTE) -> list[Any]:
        """Return the messages sent to a route since the last call."""
        found = [message for to, message in self.sent if to == route]
        self.sent = [item for item in self.sent if item[0] != route]
        return found

    def query(self, message: wire.ClientRequest, route: bytes = ROUTE) -> Any:
        """Return the single reply to a request, which must come immediately."""
        self.pop_sent(route)
        self.deliver(message, route)
        (answer,) = self.pop_sent(route)
        return answer

    def request(self) -> int:
        self.requests += 1
        return self.requests

    def open(self, session: bytes = SESSION, route: bytes = ROUTE) -> Any:
        return self.query(wire.Open(CLUSTER, self.request(), session), route)

    def get(self, *keys: bytes, fresh: bool = False, at_least: int = 0, **fields: Any) -> wire.Get:
        """Return a request for keys."""
        reads = [KeyRead(key, version) for key, version in fields.get("reads", ())]
        return wire.Get(
            CLUSTER, self.request(), list(keys), at_least, fresh, reads,
            fields.get("ranges", []), fields.get("snapshot", 0),
        )  # fmt: skip

    def scan(self, start: bytes, stop: bytes | None, limit: int, **fields: Any) -> wire.Scan:
        """Return a request for a range."""
        reads = [KeyRead(key, version) for key, version in fields.get("reads", ())]
        return wire.Scan(
            CLUSTER, self.request(), start, stop, limit, fields.get("at_least", 0),
            fields.get("fresh", False), reads, [], fields.get("snapshot", 0),
        )  # fmt: skip

    def insert(self, payload: bytes, after: RecordId = RID_GENESIS) -> RecordId:
        """Insert a record at the end of the log."""
        (rid,) = self.log.insert(payload, after=max(after, self.log.tail))
        return rid
