"""Load test of the membership service: a real service, and thousands of emulated storage servers.

`python -m mms` runs as a separate process, with its consensus, its journal and its sockets. Every
emulated server has TCP connections of its own, sends the heartbeats of a server with readers,
reports a changed rate now and then, and receives leases, most of them as publications. It checks
the chain of leases, and looks up its owner table with every heartbeat. One other process runs all
emulated servers, on another core than the service.

A few servers, evenly spread, are *sampled*: this process reads each of their leases as it arrives,
with the kernel's time, and their epoch clocks are real. It reads the others just before their
heartbeats, several leases at a time, so that no lease wakes thousands of them here.
"""

from __future__ import annotations

import gc
import heapq
import random
import resource
import select
import tempfile
import time
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil
from metrics.cpu import cpu_s, pinned
from metrics.raw_connection import RawConnection, RawSubscription
from metrics.windows import percentile

from shard.state.epoch_clock import EpochClock
from tests.services import cluster_config
from ziplog.config_text import dump
from ziplog.core.units import NS_PER_MS, NS_PER_S
from ziplog.core.view import MANY_MEMBERS, NO_DIGEST, run_of, unfold
from ziplog.deploy.new_shard import free_ports
from ziplog.deploy.supervisor import CLUSTER_FILE, Supervisor
from ziplog.wire import Heartbeat, LeaseAnnounced, Rate, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.core.view import Lease, ShardState

_EPOCH_MS: Final = 10
_RATE_PER_S: Final = 1000
#: Share of the shards that change their rate in a second.
_CHANGING: Final = 0.01
#: Maximum number of sampled servers.
_SAMPLES: Final = 64
#: Number of decoded leases in the cache: most servers receive the same frames.
_KEPT_FRAMES: Final = 64
#: Number of recent leases that the service may still announce.
_KEPT_LEASES: Final = 256
#: A lease that starts earlier than expected by more than this was cut short by new weights.
_EARLY_NS: Final = 5 * NS_PER_MS
#: File descriptors of a process, in addition to one per connection.
_OTHER_FILES: Final = 200
_START_S: Final = 60
_POLL_S: Final = 0.05


def measure(shards: int, seconds: float) -> dict[str, Any]:
    """Run a membership service with emulated servers, all of them at work.

    Args:
        shards: how many; every one is read along.
        seconds: how long to measure, after all hold leases.

    Returns:
        `shards`, `connections`, `seconds`; of the service's process `cpu_share` (of one core) and
        `rss_mib`; per second `heartbeats`, `rates`, `leases` (`early`: those that began at once),
        `announcements` (to one server) and `announced_mib`, `published`: the share that came as
        publications; `jitter_ms` (p50, p99, max): by how much a lease begins, at a sampled server,
        before or after the one before it ends there; `announced_jitter_ms`: the same if it began as
        announced; `spread_ms`: how far apart these servers begin it;
        `late_heartbeats`: the share that this process could not send within 100 ms of their time;
        `lost`: those that found no room; `reconnects`: connections that the service closed.

    Raises:
        RuntimeError: the limit of open files is too low, or the servers do not get a lease.

    """
    _allow_files(shards)
    # As the real servers have it (`ziplog.runtime.driver`): full passes cost more than all else.
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    with (
        tempfile.TemporaryDirectory() as directory,
        _service(shards, Path(directory)) as (watched, port),
        pinned([[watched.pid]]),
    ):
        fleet = Fleet(shards, port)
        try:
            fleet.run_until(lambda server: server.lease is not None, "hold a lease")
            fleet.run(2)  # the epochs of work, and the weights of the first rates
            if shards >= MANY_MEMBERS:
                fleet.run_until(lambda server: bool(server.publisher), "receive publications")
            fleet.counts = dict.fromkeys(fleet.counts, 0)
            fleet.begin()
            used, since = cpu_s([watched]), time.monotonic()
            fleet.run(seconds)
            took = time.monotonic() - since
            return {
                "shards": shards,
                "connections": len(fleet.servers),
                "seconds": round(took, 3),
                "cpu_share": (cpu_s([watched]) - used) / took,
                "rss_mib": watched.memory_info().rss / 2**20,
                **fleet.figures(took),
            }
        finally:
            fleet.close()
            gc.set_threshold(*thresholds)


def _allow_files(connections: int) -> None:
    wanted = 2 * connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise RuntimeError(f"{wanted} open files are needed, {hard} are allowed: see ulimit -Hn")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --- the service -------------------------------------------------------------------------------


@contextmanager
def _service(shards: int, directory: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run the real thing; yields its process and its port."""
    own = list(free_ports(2, "127.0.0.1"))
    # No process listens at the servers' ports.
    ports = chain(own, (port for port in count(1024) if port not in own))
    config = cluster_config(shards, f=0, ports=ports, data_dir=directory, epoch_ms=_EPOCH_MS)
    (directory / CLUSTER_FILE).write_text(dump(config))
    with Supervisor(directory) as nodes:
        nodes.start("mms-0")
        while "event=started" not in nodes.log_tail("mms-0"):
            if not nodes.is_running("mms-0"):
                raise RuntimeError(f"the membership service {nodes.how_it_ended('mms-0')}")
            time.sleep(_POLL_S)
        yield psutil.Process(nodes.pid("mms-0")), own[0]


# --- the servers -------------------------------------------------------------------------------


class Server:
    """An emulated storage server, the only one of its shard."""

    def __init__(self, shard: int, connection: RawConnection, *, is_sampled: bool) -> None:
        self.shard, self.connection = shard, connection
        self.clock: Final = EpochClock(shard) if is_sampled else None
        self.publications: RawSubscription | None = None
        #: The endpoint of the publication that brought the last lease, if it was one.
        self.publisher = ""
        #: The state of its shard in the last placement that it received.
        self.shard_state: ShardState | Literal[""] = ""
        self.cluster = 0
        #: The last lease that it holds, and when that begins as announced, in ns since 1970.
        self.lease: Lease | None = None
        self.begins = 0
        self.rate = _RATE_PER_S

    def heartbeat(self, now: int) -> bytes:
        """Return the frame of its next heartbeat."""
        lease, frontier = self.lease, 0
        if lease is not None:
            epoch = max(now - self.begins - 2 * _EPOCH_MS * NS_PER_MS, 0) // (
                lease.epoch_ms * NS_PER_MS
            )
            base = lease.base + min(epoch, lease.epochs - 1) * lease.epoch_size
            frontier = lease.next_owned(self.shard, base)
        return encode(
            Heartbeat(
                self.cluster, f"shard-{self.shard}-0", "127.0.0.1:1", self.shard, int(bool(lease)),
                1, 1, "up" if lease else "starting", True, self.rate, frontier, frontier,
                lease.number if lease else 0, lease.digest if lease else NO_DIGEST, 0, 0, 0,
                f"directory {self.shard}", self.shard_state, True, publisher=self.publisher,
            )
        )  # fmt: skip


class Fleet:
    """All emulated servers."""

    def __init__(self, shards: int, port: int) -> None:
        self.servers: Final[list[Server]] = []
        names = ("heartbeats", "rates", "announcements", "bytes", "early", "late", "lost")
        self.counts = dict.fromkeys((*names, "published", "reconnects"), 0)
        self._port: Final = port
        self._chance = random.Random(shards)  # noqa: S311 - a load, no secret
        self._held: dict[bytes, LeaseAnnounced] = {}
        self._leases: dict[int, Lease] = {}
        self._jitter: list[int] = []
        self._announced_jitter: list[int] = []
        #: By lease number: its first and last start at a sampled server, and their number.
        self._begins: dict[int, list[int]] = {}
        self._poll: Final = select.epoll()
        self._by_fd: Final[dict[int, tuple[Server, RawConnection | RawSubscription]]] = {}
        step = -(-shards // _SAMPLES)
        for shard in range(shards):
            connection = RawConnection("127.0.0.1", port)
            server = Server(shard, connection, is_sampled=not shard % step)
            self.servers.append(server)
            self._watch(server, connection)
        self._samples: Final = len(self._by_fd)
        # As shard/membership/heartbeat.py has it: primaries four times a second, if not many.
        self._period: Final = min(NS_PER_S, NS_PER_S // 4 * max(shards, 1000) // 1000)
        self._change_at = now = time.time_ns()
        spread = NS_PER_S // len(self.servers)
        #: Heap of the times of each server's next heartbeat.
        self._due = [(now + index * spread, index) for index in range(len(self.servers))]

    def _watch(self, server: Server, source: RawConnection | RawSubscription) -> None:
        if server.clock is not None:
            self._by_fd[source.fileno()] = server, source
            self._poll.register(source.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Close all connections."""
        self._poll.close()
        for server in self.servers:
            server.connection.close()
            if server.publications is not None:
                server.publications.close()

    def begin(self) -> None:
        """Reset all measurements."""
        self._jitter.clear()
        self._announced_jitter.clear()
        self._begins.clear()

    def run(self, seconds: float) -> None:
        """Run for `seconds`."""
        stop = time.time_ns() + int(seconds * NS_PER_S)
        while (now := time.time_ns()) < stop:
            self._beat(now)
            self._change(now)
            pause = min(self._due[0][0], self._change_at) - time.time_ns()
            self._listen(max(pause, 0))

    def run_until(self, condition: Callable[[Server], bool], what: str) -> None:
        """Run until all servers meet a condition."""
        for _ in range(_START_S):
            self.run(1)
            if all(map(condition, self.servers)):
                return
        missing = sum(not condition(server) for server in self.servers)
        raise RuntimeError(f"after {_START_S} s, {missing} of the servers do not {what}")

    def _reconnect(self, server: Server, source: RawConnection | RawSubscription) -> None:
        """Replace a connection that the service closed: this process was late to read it."""
        self.counts["reconnects"] += 1
        self._by_fd.pop(source.fileno(), None)
        source.close()
        if source is server.connection:
            server.connection = RawConnection("127.0.0.1", self._port)
            self._watch(server, server.connection)
        else:
            server.publications, server.publisher = None, ""

    def _send(self, server: Server, frame: bytes) -> bool:
        try:
            return server.connection.send(frame)
        except ConnectionError:
            return False  # The next poll finds the end of the connection.

    def _listen(self, pause_ns: int) -> None:
        for fd, _ in self._poll.poll(pause_ns / NS_PER_S, 512):
            self._read(*self._by_fd[fd])

    def _read(self, server: Server, source: RawConnection | RawSubscription) -> None:
        try:
            self._take(server, source)
        except ConnectionError:
            self._reconnect(server, source)

    def _beat(self, now: int) -> None:
        due = self._due
        while due[0][0] <= now:
            at, index = heapq.heappop(due)
            server = self.servers[index]
            if server.clock is None:
                self._read(server, server.connection)
                if server.publications is not None:
                    self._read(server, server.publications)
            frame = server.heartbeat(now)
            self.counts["heartbeats" if self._send(server, frame) else "lost"] += 1
            self.counts["late"] += now - at > 100 * NS_PER_MS
            heapq.heappush(due, (max(at + self._pause(), now - NS_PER_S), index))

    def _pause(self) -> int:
        """Return the time to a server's next heartbeat, up to a tenth more or less than the period.

        The service announces new weights once a second. A server that always read its connections
        between a direct announcement and its publication would never hold a lease by publication.
        """
        return int(self._period * self._chance.uniform(0.9, 1.1))

    def _change(self, now: int) -> None:
        """Change the rates of some shards, in sequence."""
        while self._change_at <= now:
            self._change_at += int(NS_PER_S / (_CHANGING * len(self.servers)))
            server = self._chance.choice(self.servers)
            if server.lease is not None:
                # Up by a half, or back.
                server.rate = _RATE_PER_S * 5 // 2 - server.rate
                frame = encode(Rate(server.cluster, server.shard, 1, server.rate))
                self.counts["rates" if self._send(server, frame) else "lost"] += 1

    def _take(self, server: Server, source: RawConnection | RawSubscription) -> None:
        came, frames = source.receive()
        for frame in frames:
            self.counts["announcements"] += 1
            self.counts["bytes"] += len(frame)
            self.counts["published"] += source is server.publications
            message = self._held.get(frame) or self._decode(frame)
            lease = self._lease_of(message) if message is not None else None
            if message is None:
                continue
            if message.publisher and server.publications is None:
                host, _, port = message.publisher.rpartition(":")
                server.publications = RawSubscription(host, int(port))
                self._watch(server, server.publications)
            for placement in message.placements:
                server.shard_state = placement.state
            if lease is not None:
                self._hold(server, lease, message, came)

    def _lease_of(self, message: LeaseAnnounced) -> Lease | None:
        """Return the last announced lease; computed when the first server receives it."""
        if not message.steps:
            return message.runs[-1].last if message.runs else None
        number = message.after + sum(step.count for step in message.steps)
        if number not in self._leases:
            last = max((one for one in self._leases if one < number), default=0)
            runs = unfold(self._leases[last], message.after, message.steps) if last else []
            if not runs:
                return None  # through leases that the service never announced, or forgotten ones
            assert runs[-1].last.digest == message.digest, "no chain"
            self._leases[number] = runs[-1].last
            self._leases.pop(number - _KEPT_LEASES, None)
        return self._leases[number]

    def _decode(self, frame: bytes) -> LeaseAnnounced | None:
        message = decode(frame)
        if not isinstance(message, LeaseAnnounced):
            return None
        for run in message.runs:
            assert self._leases.setdefault(run.last.number, run.last) == run.last, "two leases"
        if message.runs or message.steps:
            if len(self._held) >= _KEPT_FRAMES:
                self._held.pop(next(iter(self._held)))
            self._held[frame] = message
        return message

    def _hold(self, server: Server, lease: Lease, message: LeaseAnnounced, came: int) -> None:
        before = server.lease
        if message.is_publication and (before is None or lease.number < before.number):
            return
        if before is None or lease.number > before.number or message.is_publication:
            server.publisher = message.publisher if message.is_publication else ""
        if before is not None and lease.number <= before.number:
            return
        begins = came + message.starts_in_us * 1000
        if server.clock is not None:
            is_scheduled = message.starts_in_us > 0
            if before is not None and lease.number == before.number + 1:
                ends = server.begins + before.epochs * before.epoch_ms * NS_PER_MS
                if is_scheduled or begins >= ends - _EARLY_NS:
                    self._announced_jitter.append(abs(begins - ends))
            self._begin(server.clock, lease, begins, came, is_scheduled=is_scheduled)
        server.cluster, server.lease, server.begins = message.cluster, lease, begins

    def _begin(
        self, clock: EpochClock, lease: Lease, begins: int, came: int, *, is_scheduled: bool
    ) -> None:
        """Pass a lease to a sampled server's clock, as `LeaseUpdates` does, and time its begin."""
        runs, before, ends = [run_of(lease)], clock.last, clock.ends_at
        if is_scheduled:
            begins = clock.begin_of(runs, begins)
        skip_to = lease.base if before is None or lease.number > before.number + 1 else 0
        clock.announce(runs, begins, came, skip_to)
        if before is None or ends is None or lease.number > before.number + 1:
            return
        if not is_scheduled and begins < ends - _EARLY_NS:
            self.counts["early"] += 1
        else:
            self._jitter.append(abs(begins - ends))
        ends_of = self._begins.setdefault(lease.number, [begins, begins, 0])
        ends_of[0], ends_of[1] = min(ends_of[0], begins), max(ends_of[1], begins)
        ends_of[2] += 1

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return the measurements, over `seconds`."""
        counts, samples = self.counts, self._samples
        spread = [last - first for first, last, heard in self._begins.values() if heard == samples]
        return {
            "heartbeats": counts["heartbeats"] / seconds,
            "rates": counts["rates"] / seconds,
            "leases": len(self._begins) / seconds,
            "early": counts["early"] / samples / seconds,
            "announcements": counts["announcements"] / seconds,
            "published": counts["published"] / max(counts["announcements"], 1),
            "announced_mib": counts["bytes"] / seconds / 2**20,
            "jitter_ms": _percentiles(self._jitter),
            "announced_jitter_ms": _percentiles(self._announced_jitter),
            "spread_ms": _percentiles(spread),
            "late_heartbeats": counts["late"] / max(counts["heartbeats"], 1),
            "lost": counts["lost"],
            "reconnects": counts["reconnects"],
        }


def _percentiles(values: list[int]) -> dict[str, float]:
    """Return the median and the high percentiles in ms, of times in ns."""
    return {
        name: (percentile(values, percent) or 0) / NS_PER_MS
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
    }
