"""Open-loop clients and a follower in separate processes, and the result of every insert.

Each client inserts at a steady pace, or after pauses that are uniform in [0, 2T) (T Fig. 4.6),
whether or not earlier inserts are complete. Rule: a client's inserts follow from its number and the
load's seed, so two loads of the same plan insert at the same times. All processes share the
monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import math
import random
import struct
import time
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psutil

import ziplog
import ziplog.aio
from metrics.cpu import cpu_s
from metrics.windows import counts, percentile_ms
from metrics.workers import Workers, exact_loop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from typing import Self

    from ziplog.policy import Policy

_HEAD: Final = struct.Struct("<Q")
_PROCESSES: Final = 2
#: Between the sign that all are ready and the first insert.
_LEAD_NS: Final = 300_000_000
#: Timeout for the follower's remaining records, in seconds.
_REST_S: Final = 15.0
_TIMEOUT_S: Final = 20.0
#: A client's inserts are numbered from its own number times this.
_NUMBERS: Final = 2**32


@dataclass(frozen=True)
class Client:
    """One open-loop client."""

    #: Unique in the load, from 0.
    number: int
    #: Mean time between two inserts, T.
    pause_s: float
    #: "random", "sticky", "by-key", or a shard's number.
    policy: str
    #: It inserts within these half-open ranges, in seconds from the load's begin.
    spans: tuple[tuple[float, float], ...]
    #: Pauses of T, instead of U(0, 2T).
    is_steady: bool = False

    def due(self, seed: int) -> Iterator[float]:
        """Yield the times of its inserts, in seconds from the start of the load."""
        # A text: `random` makes the same of some different numbers.
        rng = random.Random(f"{seed} {self.number}")  # noqa: S311  only arrival times
        for start, stop in self.spans:
            # The first pause started earlier, so only its remainder counts.
            at = start + 2 * self.pause_s * (1 - math.sqrt(rng.random()))
            while at < stop:
                yield at
                at += self.pause_s if self.is_steady else rng.uniform(0, 2 * self.pause_s)


class Insert(NamedTuple):
    """One insert; times in monotonic nanoseconds."""

    number: int
    #: Planned time, time of the call, and time of its end.
    due: int
    called: int
    done: int
    #: -1: it failed.
    gsn: int
    shard: int


class Outcome(NamedTuple):
    """Result of a load."""

    #: Monotonic nanoseconds.
    begin: int
    inserts: list[Insert]
    #: Errors of failed inserts.
    failed: list[str]
    #: Delivery time of each insert's record at the follower, by the insert's number.
    seen: dict[int, int]
    #: Duplicate and unknown records that it received.
    repeated: int
    #: Share of all cores that was busy, 0 to 1: with anything, and with the cluster and this load.
    busy: float
    busy_here: float

    def seconds(self, at: int) -> float:
        """Return a moment in seconds from the begin."""
        return (at - self.begin) / 1e9

    @property
    def missing(self) -> int:
        """Number of completed inserts that the follower did not receive."""
        return sum(i.gsn >= 0 and i.number not in self.seen for i in self.inserts)

    @property
    def late_s(self) -> list[float]:
        """By how much each call came after its time: this load's own delay."""
        return [(i.called - i.due) / 1e9 for i in self.inserts]

    def health(self) -> dict[str, Any]:
        """Return the figures that show whether a run is valid."""
        return {
            "failed_inserts": len(self.failed),
            "follower_missed": self.missing,
            "calls_late_p99_ms": percentile_ms(self.late_s, 99),
            "cores_busy_share": self.busy,
            "cores_busy_here_share": self.busy_here,
        }

    def insert_s(self) -> Iterator[tuple[Insert, float]]:
        """Yield each completed insert with the duration of the call."""
        return ((i, (i.done - i.called) / 1e9) for i in self.inserts if i.gsn >= 0)

    def windows(self, stop: float, width: float) -> dict[int, list[int]]:
        """Return how many inserts of each shard were completed in each window of [0, stop)."""
        done: dict[int, list[float]] = {}
        for insert, _ in self.insert_s():
            done.setdefault(insert.shard, []).append(self.seconds(insert.done))
        return {shard: counts(done[shard], 0, stop, width) for shard in sorted(done)}

    def delivery_s(self) -> Iterator[tuple[Insert, float]]:
        """Yield each delivered insert with the time from call to delivery."""
        seen = self.seen
        return ((i, (seen[i.number] - i.called) / 1e9) for i in self.inserts if i.number in seen)


class Load:
    """Clients and a follower of a cluster, from `with` on. For one thread."""

    def __init__(
        self,
        endpoint: str,
        clients: Sequence[Client],
        *,
        seed: int,
        size: int = 4096,
    ) -> None:
        """Prepare `clients`, spread over two processes, with payloads of `size` bytes (from 8)."""
        shares = [tuple(clients[index::_PROCESSES]) for index in range(_PROCESSES)]
        self._clients: Final = Workers(
            _insert, [(endpoint, share, seed, size) for share in shares if share]
        )
        self._follower: Final = Workers(_follow, [(endpoint,)])
        self._warm_ups: Final = len(clients)
        self._begin = 0
        self._cpu = _cpu_times()

    def __enter__(self) -> Self:
        """Wait until the follower follows and every client has inserted once."""
        try:
            self._follower.receive()
            self._clients.receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        self._clients.__exit__()
        self._follower.__exit__()

    def begin(self) -> int:
        """Let the clients begin soon; returns when, in monotonic nanoseconds."""
        self._begin = time.monotonic_ns() + _LEAD_NS
        self._clients.send(self._begin)
        self.sleep_until(0)
        self._cpu = _cpu_times()
        return self._begin

    def sleep_until(self, seconds: float) -> None:
        """Sleep until `seconds` after the start."""
        time.sleep(max(seconds + (self._begin - time.monotonic_ns()) / 1e9, 0))

    def finish(self) -> Outcome:
        """Wait until the clients are through, and the follower has had all of it, or 15 s."""
        inserts: list[Insert] = []
        failed: list[str] = []
        for index, pipe in enumerate(self._clients.pipes):
            rows, errors = pipe.recv()
            if not index:
                busy = _busy(self._cpu)
            inserts += [Insert(*row) for row in rows]
            failed += errors
        self._follower.send(sum(i.gsn >= 0 for i in inserts) + self._warm_ups)
        ((seen, repeated),) = self._follower.receive()
        return Outcome(self._begin, inserts, failed, seen, repeated, *busy)


def _cpu_times() -> tuple[float, float, float]:
    """Return CPU seconds: of all cores, the busy ones, and those of our processes."""
    times = psutil.cpu_times()
    here = psutil.Process()
    own = cpu_s([here, *here.children(recursive=True)])
    return sum(times), sum(times) - times.idle - times.iowait, own


def _busy(before: tuple[float, float, float]) -> tuple[float, float]:
    total, busy, own = (now - then for now, then in zip(_cpu_times(), before, strict=True))
    return busy / max(total, 1e-9), own / max(total, 1e-9)


# --- clients ---


def _insert(
    endpoint: str, clients: Sequence[Client], seed: int, size: int, pipe: Connection
) -> None:
    with asyncio.Runner(loop_factory=exact_loop) as runner:
        pipe.send(runner.run(_drive(endpoint, clients, seed, size, pipe)))


def _policy(name: str) -> Policy:
    policies = {
        "random": ziplog.policy.random,
        "sticky": ziplog.policy.sticky,
        "by-key": ziplog.policy.by_key_hash,
    }
    return policies[name]() if name in policies else ziplog.policy.pin(int(name))


def _turns(client: Client, seed: int) -> Iterator[tuple[float, Client, int]]:
    return ((at, client, seq) for seq, at in enumerate(client.due(seed)))


async def _drive(
    endpoint: str, clients: Sequence[Client], seed: int, size: int, pipe: Connection
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Connect all clients, wait for the start, run all inserts; return results and errors."""
    filler = random.Random(seed).randbytes(size - _HEAD.size)  # noqa: S311  only bytes
    logs = {}
    for client in clients:
        logs[client.number] = log = await ziplog.aio.connect(endpoint, timeout=_TIMEOUT_S)
        log.set_policy(_policy(client.policy))
        await log.insert_after(_HEAD.pack(2**63) + filler)
    gc.freeze()
    pipe.send("ready")
    begin = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

    rows: list[tuple[int, ...]] = []
    errors: list[str] = []
    clock = time.monotonic_ns

    def done(number: int, due: int, called: int, future: asyncio.Future[ziplog.RecordId]) -> None:
        error = future.exception()
        if error is not None:
            errors.append(f"{type(error).__name__}: {error}")
            rows.append((number, due, called, clock(), -1, -1))
        else:
            rid = future.result()
            rows.append((number, due, called, clock(), rid.gsn, rid.shard))

    turns = heapq.merge(*(_turns(client, seed) for client in clients), key=itemgetter(0))
    for at, client, seq in turns:
        due = begin + int(at * 1e9)
        await asyncio.sleep(max(due - clock(), 0) / 1e9)
        number = client.number * _NUMBERS + seq
        called = clock()
        future = logs[client.number].insert_nowait(
            _HEAD.pack(number) + filler,
            key=f"{client.number}-{seq % 16}" if client.policy == "by-key" else None,
        )
        future.add_done_callback(partial(done, number, due, called))
    for log in logs.values():
        with contextlib.suppress(ziplog.ZiplogError):  # `done` has it
            await log.flush()
    await asyncio.sleep(0)
    for log in logs.values():
        await log.close()
    return rows, errors


# --- the follower ---


def _follow(endpoint: str, pipe: Connection) -> None:
    seen: dict[int, int] = {}
    repeated = 0
    warm_ups = 0
    expected: int | None = None
    until = float("inf")
    with (
        ziplog.connect(endpoint, timeout=_TIMEOUT_S) as log,
        log.subscribe(ziplog.RID_GENESIS) as subscription,
    ):
        pipe.send("ready")
        while (expected is None or len(seen) + warm_ups < expected) and time.monotonic() < until:
            records = subscription.fetch(timeout=0.1)
            now = time.monotonic_ns()
            for record in records:
                (number,) = _HEAD.unpack_from(record.payload)
                if number == 2**63:
                    warm_ups += 1
                elif number in seen:
                    repeated += 1
                else:
                    seen[number] = now
            if expected is None and pipe.poll():
                expected, until = pipe.recv(), time.monotonic() + _REST_S
    pipe.send((seen, repeated))
