"""Scripted nodes for the world: a client that inserts and retries, a subscribing reader.

They are much simpler than the real ones, and independent of them, so they can check results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from tests.world import CLUSTER, MS, shard_names
from ziplog import wire
from ziplog.core.entries import Body, decode_body, encode_body
from ziplog.core.node import Effect, Event, Received, Send, Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

    from tests.world import World
    from ziplog.core.view import LeaseRun


@dataclass
class Job:
    """One unit that a client inserts."""

    shard: int
    seq: int
    after: int
    predecessor: int
    count: int
    body: bytes
    #: The newest ack of each server.
    acks: dict[int, wire.InsertAck] = field(default_factory=dict)
    gsns: list[int] | None = None
    #: Every backup had guessed its slots right.
    fast: bool = False
    refused: str = ""
    #: Its client does not retransmit it.
    abandoned: bool = False
    retry_at: int = 0

    @property
    def is_over(self) -> bool:
        return self.gsns is not None or bool(self.refused)


class Client:
    """Inserts units, each with one identity, until all replicas agree on its slots (D8)."""

    def __init__(self, name: str, f: int, *, retry_ns: int = 20 * MS) -> None:
        self.name = name
        self.id = name.encode().rjust(16, b".")
        self.f = f
        self.retry_ns = retry_ns
        #: All jobs, by shard and seq.
        self.jobs: dict[tuple[int, int], Job] = {}
        #: The jobs that are not over, and perhaps some that are.
        self._open: list[Job] = []
        self._next_seq: dict[int, int] = {}
        self.out: list[Effect] = []
        self.stopped = False
        #: Called with each job when it is completed.
        self.on_complete: Callable[[Job], None] = lambda _job: None

    def insert(
        self,
        world: World,
        shard: int,
        *,
        count: int = 1,
        after: int = 0,
        predecessor: int = 0,
        to: Iterable[int] | None = None,
        abandon: bool = False,
        payload: bytes = b"",
    ) -> Job:
        """Send a new unit, at first to the servers `to` only."""
        seq = self._next_seq.get(shard, 1)
        self._next_seq[shard] = seq + 1
        payloads = [payload or b"%s/%d/%d/%d" % (self.name.encode(), shard, seq, i)
                    for i in range(count)]  # fmt: skip
        body = encode_body(Body(seq, None, payloads))
        job = Job(shard, seq, after, predecessor, count, body, abandoned=abandon)
        job.retry_at = world.now + self.retry_ns
        self.jobs[shard, seq] = job
        self._open.append(job)
        servers = range(self.f + 1) if to is None else to
        for server in servers:
            world.send(self.name, shard_names(shard, self.f)[server], self._message(job))
        return job

    def is_stuck(self, job: Job) -> bool:
        """Whether a job cannot progress: it is over, or waits for an abandoned predecessor."""
        if job.is_over or job.abandoned:
            return True
        before = self.jobs.get((job.shard, job.predecessor))
        return before is not None and before.gsns is None and self.is_stuck(before)

    def _open_jobs(self) -> list[Job]:
        """Return the jobs that are not over, in the order in which they began."""
        self._open = [job for job in self._open if job.gsns is None and not job.refused]
        return self._open

    def first_incomplete(self, shard: int) -> int:
        """Return the lowest seq without an outcome. A client never forgets an abandoned one."""
        open_seqs = [job.seq for job in self._open_jobs() if job.shard == shard]
        return min(open_seqs, default=self._next_seq.get(shard, 1))

    def _message(self, job: Job) -> wire.Insert:
        return wire.Insert(
            CLUSTER, job.shard, 1, self.id, job.seq, self.first_incomplete(job.shard),
            job.predecessor, job.after, job.count, job.body,
        )  # fmt: skip

    def step(self, event: Event, now: int) -> list[Effect]:
        if isinstance(event, Received):
            self._receive(event.message)
        elif isinstance(event, Wakeup) and not self.stopped:
            for job in self._open_jobs():
                if not job.abandoned and now >= job.retry_at:
                    job.retry_at = now + self.retry_ns
                    for name in shard_names(job.shard, self.f):
                        self.out.append(Send(name.encode(), self._message(job)))
        out, self.out = self.out, []
        return out

    def _receive(self, message: Any) -> None:
        if isinstance(message, wire.InsertAck):
            job = self.jobs[message.shard, message.seq]
            known = job.acks.get(message.server)
            if known is not None and known.counter >= message.counter:
                return
            if known is not None and known.gsns != message.gsns:
                assert not known.confirmed, "a confirmed unit moved"
                assert message.confirmed, "a promise moved"
            job.acks[message.server] = message
            gsns = message.gsns
            if len(job.acks) == self.f + 1 and all(a.gsns == gsns for a in job.acks.values()):
                assert job.gsns in (None, gsns), "a completed unit moved"
                if job.gsns is None:
                    job.gsns = gsns
                    job.fast = not any(a.confirmed for s, a in job.acks.items() if s)
                    self.on_complete(job)
        elif isinstance(message, wire.Refused):
            job = self.jobs[message.shard, message.request]
            final = message.server == 0 and message.code in ("no-such-position", "too-large")
            if final and not job.is_over:
                job.refused = message.code

    def next_wakeup(self) -> int | None:
        if self.stopped:
            return None
        due = [job.retry_at for job in self._open_jobs() if not job.abandoned]
        return min(due, default=None)

    def check(self) -> None:
        pass


class Reader:
    """Subscribes to one shard at one server, and never passes a gap (D44)."""

    KIND: ClassVar[wire.StreamKind] = "units"
    MESSAGE: ClassVar[type[wire.Deliver | wire.Early]] = wire.Deliver

    def __init__(
        self, name: str, server: str, shard: int, *, start: int = 1, random: Random | None = None
    ) -> None:
        self.name, self.server, self.shard = name, server, shard
        self.id = name.encode().rjust(16, b".")
        self.random = random
        self.frontier = self.start = start
        self.delivered: list[tuple[int, bytes]] = []
        self._checked = 0
        self.leases: list[LeaseRun] = []
        self.trimmed: int | None = None
        self.refusals: list[str] = []
        self.number = 0
        self.credit = 0
        self.used = 0
        #: Credit that each renewal grants, in bytes.
        self.grant = 1 << 20
        self.renew_at = 0
        self.stopped = False

    def step(self, event: Event, now: int) -> list[Effect]:
        dst = self.server.encode()
        if isinstance(event, Received):
            if self._is_lost(event.message):
                return [Send(dst, self._subscribe())]
        elif isinstance(event, Wakeup) and self.trimmed is None and not self.stopped:
            self.renew_at = now + (self.random.randrange(1, 20) if self.random else 5) * MS
            if not self.number:
                return [Send(dst, self._subscribe())]
            more = self.random.choice((0, 1, 200, self.grant)) if self.random else self.grant
            self.credit += more
            credit = wire.Credit(CLUSTER, self.shard, 1, self.id, self.number, self.credit)
            return [Send(dst, credit)]
        return []

    def _subscribe(self) -> wire.Subscribe:
        self.number += 1
        self.credit, self.used = self.grant, 0
        return wire.Subscribe(
            CLUSTER, self.shard, 1, self.id, self.number, self.frontier, self.credit, self.KIND
        )

    def _is_lost(self, message: Any) -> bool:
        """Handle a message; return whether the subscription must restart."""
        if isinstance(message, wire.Refused) and message.request == self.number:
            self.refusals.append(message.code)
            return message.code == "unknown-subscription"
        if isinstance(message, wire.Trimmed) and message.subscription == self.number:
            self.trimmed = message.first
        if not isinstance(message, self.MESSAGE) or message.subscription != self.number:
            return False
        if message.start != self.frontier:
            return message.start > self.frontier
        assert message.frontier >= message.start, "a frontier went back"
        for unit in message.units:
            body = decode_body(unit.body, len(unit.gsns))
            rows = zip(unit.gsns, body.payloads, strict=True)
            self.delivered += [row for row in rows if row[0] >= self.start]
            self.used += len(unit.body) + 64
            assert unit.gsns[-1] < message.frontier
        if message.units:
            # The last unit sent may exceed the credit.
            before = self.used - len(message.units[-1].body) - 64
            assert before <= self.credit, f"{before} bytes were sent, {self.credit} allowed"
        self.frontier = message.frontier
        self._add_leases(message.leases)
        if message.frontier > message.start:
            assert self.frontier <= self.leases[-1].last.stop, "a lease was passed"
        return False

    def _add_leases(self, runs: list[LeaseRun]) -> None:
        for run in runs:
            if self.leases and run.last.number <= self.leases[-1].last.number:
                continue
            last = self.leases[-1].last if self.leases else None
            if last is not None and run.first.number > last.number:
                assert run.first.predecessor == last.digest, "the leases are no chain"
            self.leases.append(run)

    def next_wakeup(self) -> int | None:
        return None if self.trimmed is not None or self.stopped else self.renew_at

    def check(self) -> None:
        """Check that delivered records never change."""
        gsns = [gsn for gsn, _ in self.delivered[max(self._checked - 1, 0) :]]
        assert all(a < b for a, b in pairwise(gsns)), "not in gsn order"
        self._checked = len(self.delivered)


class EarlyReader(Reader):
    """Gets what a primary has decided."""

    KIND = "early"
    MESSAGE = wire.Early


class Service:
    """The membership service: answers lease queries, repeats announcements on heartbeats."""

    def __init__(self) -> None:
        self.runs: list[LeaseRun] = []
        self.announcement: wire.LeaseAnnounced | None = None
        self.heartbeats: dict[str, wire.Heartbeat] = {}
        #: Begin time of the last lease.
        self.begins = 0
        self.silent = False

    def step(self, event: Event, now: int) -> list[Effect]:
        if not isinstance(event, Received) or self.silent:
            return []
        message = event.message
        if isinstance(message, wire.Heartbeat):
            self.heartbeats[message.node] = message
            if self.runs and message.lease < self.runs[-1].last.number:
                return [Send(event.src, self.announce(message.lease, now))]
        elif isinstance(message, wire.LeaseQuery):
            runs = [run for run in self.runs if message.gsn < run.last.stop]
            trim = self.announcement.trim if self.announcement else 0
            return [Send(event.src, wire.LeaseHistory(CLUSTER, message.request, runs, [], trim))]
        return []

    def announce(self, known: int, now: int) -> wire.LeaseAnnounced:
        assert self.announcement is not None
        runs = [run for run in self.runs if run.last.number > known]
        delay_us = max(self.begins - now, 0) // 1000
        return wire.LeaseAnnounced(
            CLUSTER, runs, delay_us, self.announcement.placements, self.announcement.trim
        )

    def next_wakeup(self) -> int | None:
        return None

    def check(self) -> None:
        pass
