"""What is under way at one shard: calls cut into units, and units that are not settled.

Rule: seqs are given in the order of sending, from 1, and never used again. Invariant: `unsettled`
is in the order of seqs, and `bytes` is what its bodies hold. See docs/protocol.md, section 4.
"""

from __future__ import annotations

from collections import deque
from operator import lt
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.client.requests import NEVER
from ziplog.client.search import Search
from ziplog.types import RecordId

if TYPE_CHECKING:
    from ziplog.client.doubt import Doubt
    from ziplog.client.requests import InsertRequest
    from ziplog.client.routing import Route
    from ziplog.errors import ZiplogError
    from ziplog.wire import Insert, InsertAck

_MS: Final = 1_000_000
#: A unit holds at most so many records and (unless it is a single one) bytes.
UNIT_RECORDS: Final = 256
UNIT_BYTES: Final = 256 * 1024
#: Bytes that may be unsettled at a shard; a unit goes out if there is room for some of it.
LANE_BYTES: Final = 4 * 1024 * 1024
#: Patience before a unit is sent again: `_PATIENCE_FACTOR` times the recent p99, within limits.
MIN_PATIENCE_NS: Final = 20 * _MS
MAX_PATIENCE_NS: Final = 500 * _MS
_PATIENCE_FACTOR: Final = 8
#: Latencies from which the p99 is taken.
_SAMPLES: Final = 64
_SINGLE: Final = ((0, 1),)


class Batch:
    """One call: its payloads, cut into units."""

    __slots__ = ("call", "cuts", "gsns", "open", "previous", "request", "sent", "shard")

    def __init__(self, call: int, request: InsertRequest) -> None:
        self.call: Final = call
        self.request: Final = request
        #: The payloads [start, stop) of each unit.
        self.cuts: Final = cut(request.payloads) if len(request.payloads) > 1 else _SINGLE
        #: Where each unit is; None while that is not known.
        self.gsns: list[list[int] | None] = [None] * len(self.cuts)
        #: Units without gsns.
        self.open = len(self.cuts)
        #: The shard that the policy chose last; -1 before it was asked.
        self.shard = -1
        #: Units that were sent, and the seq of the last of them.
        self.sent = 0
        self.previous = 0

    @property
    def rids(self) -> list[RecordId]:
        """The rids of a batch without open units."""
        shard = self.shard
        return [RecordId(gsn, shard) for gsns in self.gsns if gsns is not None for gsn in gsns]

    @property
    def many(self) -> bool:
        """Whether the user gave a list."""
        return self.request.many or len(self.request.payloads) > 1

    @property
    def results(self) -> list[RecordId | None]:
        """The rid of each payload, as far as it is known."""
        results: list[RecordId | None] = []
        for (start, stop), gsns in zip(self.cuts, self.gsns, strict=True):
            known = [RecordId(gsn, self.shard) for gsn in gsns or ()]
            results += known or [None] * (stop - start)
        return results


class Unit:
    """One unit that was sent."""

    __slots__ = (
        "acks", "asked", "batch", "copies", "doubt", "first_sent", "index", "is_lost", "is_slow",
        "is_suspect", "message", "pause", "refusals", "replicas", "retry_at", "verdict",
    )  # fmt: skip

    def __init__(self, batch: Batch, index: int, message: Insert, route: Route, now: int) -> None:
        #: None once its call was answered: then it is doubtful.
        self.batch: Batch | None = batch
        #: What its call's error asks about, if it has one.
        self.doubt: Doubt | None = None
        self.index: Final = index
        self.message = message
        self.first_sent: Final = now
        self.retry_at = NEVER
        self.pause = 0
        #: The newest ack of each replica, all of the message's view.
        self.acks: dict[int, InsertAck] = {}
        self.replicas = len(route.names)
        #: A backup changed its word, or waited for the primary's.
        self.is_slow = False
        #: How many copies each replica was sent, in all views, and how many each refused.
        self.copies = 1
        self.refusals: dict[int, int] = {}
        #: A server of a later view than the message's told that it is nowhere.
        self.is_lost = False
        #: A server that refused it may have left the view: others may know what became of it.
        self.is_suspect = False
        #: How often servers were asked for it.
        self.asked = 0
        #: How its call ends unless a server holds the unit after all.
        self.verdict: ZiplogError | None = None

    def admits(self, gsns: list[int]) -> bool:
        """Whether servers may put it there."""
        return (
            len(gsns) == self.message.count
            and gsns[0] > self.message.after
            and (len(gsns) == 1 or all(map(lt, gsns, gsns[1:])))
        )

    @property
    def is_absent(self) -> bool:
        """Whether no server can have taken it: every copy was refused, or came too late."""
        return self.is_lost or (
            not self.acks
            and all(self.refusals.get(s, 0) >= self.copies for s in range(self.replicas))
        )

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for its fate."""
        return self.batch is not None or (self.doubt is not None and self.doubt.calls > 0)

    def reroute(self, view: int, replicas: int) -> None:
        """From now on it is sent in this view; acks of the former one no longer count."""
        self.message = replace(self.message, view=view)
        self.replicas = replicas
        self.acks.clear()
        self.verdict = None
        self.is_suspect = False


class Lane:
    """What this client has under way at one shard."""

    __slots__ = (
        "avoid_until", "bytes", "highest", "latencies", "next_seq", "patience", "queue", "search",
        "shard", "unsettled",
    )  # fmt: skip

    def __init__(self, shard: int) -> None:
        self.shard: Final = shard
        self.next_seq = 1
        #: By seq, in order.
        self.unsettled: dict[int, Unit] = {}
        #: What the bodies of the unsettled units hold.
        self.bytes = 0
        #: Calls with units that were not sent yet; they take turns.
        self.queue: deque[Batch] = deque()
        self.latencies: list[int] = []
        self.patience = MIN_PATIENCE_NS
        self.avoid_until = 0
        #: The last gsn where this client has a record, of each view that it inserted in since it
        #: last synced.
        self.highest: dict[int, int] = {}
        self.search: Final = Search()

    @property
    def done_below(self) -> int:
        """The lowest seq that is not settled."""
        return next(iter(self.unsettled), self.next_seq)

    def measure(self, latency: int) -> None:
        """Learn how long an insert takes here."""
        self.latencies.append(latency)
        if len(self.latencies) == _SAMPLES:
            p99 = sorted(self.latencies)[-2]
            self.patience = min(max(_PATIENCE_FACTOR * p99, MIN_PATIENCE_NS), MAX_PATIENCE_NS)
            self.latencies.clear()

    def settle(self, unit: Unit) -> None:
        """Forget a unit whose fate is known."""
        del self.unsettled[unit.message.seq]
        self.bytes -= len(unit.message.body)

    def of(self, batch: Batch) -> list[Unit]:
        """Return a batch's units that are not settled."""
        return [unit for unit in self.unsettled.values() if unit.batch is batch]

    def check(self, window: int) -> None:
        """Assert the invariant; no seq is farther than `window` from the lowest open one."""
        seqs = list(self.unsettled)
        assert all(map(lt, seqs, seqs[1:])), "seqs are out of order"
        assert self.next_seq - self.done_below <= window, "servers would refuse this"
        assert self.bytes == sum(len(unit.message.body) for unit in self.unsettled.values())
        for unit in self.unsettled.values():
            assert all(ack.view == unit.message.view for ack in unit.acks.values())


def cut(payloads: list[bytes]) -> list[tuple[int, int]]:
    """Cut payloads into units [start, stop): bounded in records and, but for one record, bytes."""
    cuts: list[tuple[int, int]] = []
    start = size = 0
    for index, payload in enumerate(payloads):
        size += len(payload)
        if index > start and (size > UNIT_BYTES or index - start == UNIT_RECORDS):
            cuts.append((start, index))
            start, size = index, len(payload)
    cuts.append((start, len(payloads)))
    return cuts
