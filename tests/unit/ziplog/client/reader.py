"""`Reader`, a client node with one subscription, stepped by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.unit.ziplog.client.fakes import CLUSTER, ClientHarness, lease, placement
from ziplog import wire
from ziplog.client.common.requests import (
    Fetched,
    FetchRequest,
    Progress,
    ProgressRequest,
    SubscribeRequest,
)
from ziplog.core.entries import Body, Unit, encode_body
from ziplog.core.node import BatchEnd
from ziplog.core.units import NEVER
from ziplog.core.view import LeaseRun, run_of
from ziplog.types import RecordId

if TYPE_CHECKING:
    from ziplog.client.reads.shard_stream import ShardStream


class Reader(ClientHarness):
    """A client node with one subscription over two shards that own odd and even gsns."""

    def __init__(
        self,
        start: int = 1,
        *,
        shards: int = 2,
        leases: Any = None,
        replicas: int = 2,
        only: frozenset[int] | None = None,
        known_rows: bool = False,
        skip_writers: tuple[bytes, ...] = (),
    ) -> None:
        super().__init__()
        self.connect(*(placement(s, replicas) for s in range(shards)))
        self._known = [placement(s, replicas) for s in range(4)]
        rid = RecordId(start, 0)
        request = SubscribeRequest(self.until(), rid, True, only, known_rows, skip_writers)
        self.subscription = self.call(request)
        self.give_leases(*(leases or [run_of(lease(range(shards)))]))
        assert self.answers.pop(self.subscription) == self.subscription
        self.opened: dict[int, wire.Subscribe] = {}
        #: The places of the first streams.
        self.where = self.look()

    def give_leases(self, *runs: LeaseRun, trim: int = 0) -> None:
        question = self.take(wire.LeaseQuery)[-1][1]
        self.give(wire.LeaseHistory(CLUSTER, question.request, list(runs), self._known, trim))

    def look(self) -> list[str]:
        """Record the streams that were opened; return their places."""
        opened = self.take(wire.Subscribe)
        self.opened |= {message.shard: message for _, message in opened}
        return [name for name, _ in opened]

    def deliver(self, shard: int, start: int, frontier: int, *units: Any, **fields: Any) -> None:
        made = [u if isinstance(u, Unit) else unit(*u) for u in units]
        number = fields.pop("number", None) or self.opened[shard].subscription
        stable = fields.pop("stable", frontier)
        leases = fields.pop("leases", [])
        view, server = fields.pop("view", 1), fields.pop("server", 0)
        self.give(
            wire.Deliver(
                CLUSTER, shard, view, server, number, start, frontier, made, leases, stable
            )
        )  # fmt: skip

    def learn(self, *placements: Any) -> None:
        self.core._routing.update_placements(placements)
        self.step(BatchEnd())

    def stream(self, shard: int) -> ShardStream:
        return self.core._subscriptions._open[self.subscription]._streams[shard]

    def fetch(self, timeout: int = NEVER, max_records: int = 1000) -> int:
        until = timeout if timeout == NEVER else self.until(timeout)
        return self.call(FetchRequest(until, self.subscription, max_records))

    def gsns(self) -> list[int]:
        """Return the available gsns."""
        call = self.fetch(0)
        self.pass_time(0)
        return [record.rid.gsn for record in self.batch(call).records]

    def batch(self, call: int) -> Fetched:
        batch = self.answers.pop(call)
        assert isinstance(batch, Fetched), batch
        return batch

    def progress(self) -> Progress:
        answer = self.answers.pop(self.call(ProgressRequest(NEVER, self.subscription)))
        assert isinstance(answer, Progress)
        return answer

    @property
    def backlog(self) -> tuple[int, int]:
        return self.core.backlog(self.subscription)


def unit(*gsns: int) -> Unit:
    payloads = [b"%d" % gsn for gsn in gsns]
    return Unit(0, list(gsns), encode_body(Body(0, None, payloads)))
