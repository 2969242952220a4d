"""A storm: random inserts, losses, restarts, leases, readers and trims; then quiet and checks.

Everything random comes from one seeded generator, and time is virtual: a seed that fails once
fails always.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

from shard.replica import Replica
from tests.actors import Client, Reader, Service
from tests.checkers import check_always, check_held, check_quiet, check_reader, replicas_of
from tests.world import (
    CLUSTER,
    MS,
    US,
    Link,
    World,
    add_shard,
    first_lease,
    placements,
    shard_names,
)
from ziplog import wire
from ziplog.core.view import LeaseRun, run_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.actors import Job


@dataclass(frozen=True)
class Weather:
    """The fault rates of a storm."""

    shards: int = 2
    f: int = 1
    clients: int = 3
    steps: int = 60
    loss: float = 0.1
    repeats: float = 0.1
    #: The longest delay of a message, in microseconds: what is sent later may arrive earlier.
    delay_us: int = 3000
    epoch_size: int = 24
    epochs: int = 4
    durability: Literal["memory", "disk"] = "memory"
    restarts: bool = True
    trims: bool = False
    #: Share of inserts that are sent once and never retransmitted.
    abandoned: float = 0.1
    flush_us: int = 500


class Storm:
    """One run of a storm."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.weather = weather
        self.random = Random(seed)
        self.is_over = False
        self.world = World(Link(self._delay, self._chance(weather.loss),
                                self._chance(weather.repeats)))  # fmt: skip
        self.world.flush_ns = weather.flush_us * US
        self.service = Service()
        self.world.add("mms-0", self.service)
        for shard in range(weather.shards):
            add_shard(self.world, shard, weather.f, durability=weather.durability)
        self.clients = [Client(f"client-{i}", weather.f) for i in range(weather.clients)]
        for client in self.clients:
            client.on_complete = self._completed(client)
            self.world.add(client.name, client)
        self.readers: list[Reader] = []
        self.trim = 0
        lease = first_lease(weather.shards, epochs=weather.epochs, epoch_size=weather.epoch_size)
        self._commit(run_of(lease), 0)

    def _delay(self) -> int:
        return self.random.randrange(20, 100 if self.is_over else self.weather.delay_us) * US

    def _chance(self, probability: float) -> Callable[[], bool]:
        return lambda: not self.is_over and self.random.random() < probability

    def _completed(self, client: Client) -> Callable[[Job], None]:
        return lambda job: check_held(self.world, client, [job])

    # --- leases ---

    def _commit(self, run: LeaseRun, delay_ns: int) -> None:
        service = self.service
        service.runs.append(run)
        service.begins = self.world.now + delay_ns
        service.announcement = wire.LeaseAnnounced(
            CLUSTER, [run], 0, placements(self.weather.shards, self.weather.f), self.trim
        )
        known = run.first.number - 1
        for name, node in self.world.nodes.items():
            if isinstance(node, Replica):
                message = service.announce(known, self.world.now)
                self.world.send("mms-0", name, message, reply=True)

    def grant(self) -> None:
        """Commit the next lease, or a few equal ones as a run."""
        first = last = self.service.runs[-1].last.following()
        count = self.random.choice((1, 1, 1, 3))
        for _ in range(count - 1):
            last = last.following()
        delay = self.random.choice((0, 0, 10, 40)) * MS
        self._commit(LeaseRun(first, count, last), delay)

    # --- actions ---

    def run(self) -> None:
        """Run the storm, let it settle, and check everything."""
        events = [self.insert] * 12 + [self.burst] * 2 + [self.grant] * 2 + [self.want, self.read]
        events += [self.restart] if self.weather.restarts else []
        events += [self.trim_some] if self.weather.trims else []
        for _ in range(self.weather.steps):
            self.random.choice(events)()
            self.world.run(self.random.choice((0, 0, 100, 1000, 5000)) * US)
            check_always(self.world, self.weather.shards, self.weather.f, self.clients)
        self.settle()
        self.judge()

    def insert(self) -> None:
        random, weather = self.random, self.weather
        client = random.choice(self.clients)
        shard = random.randrange(weather.shards)
        # The successors of an abandoned unit wait for ever.
        mine = [seq for (at, seq), job in client.jobs.items() if at == shard and not job.abandoned]
        predecessor = random.choice([0, 0, mine[-1], random.choice(mine)]) if mine else 0
        servers = range(weather.f + 1)
        to = [s for s in servers if random.random() < 0.8] or [random.choice(servers)]
        client.insert(
            self.world, shard, count=random.choice((1, 1, 1, 2, 4)), after=self._after(),
            predecessor=predecessor, to=to, abandon=random.random() < weather.abandoned,
        )  # fmt: skip

    def burst(self) -> None:
        for _ in range(self.random.randrange(2, 12)):
            self.insert()

    def _after(self) -> int:
        random = self.random
        kind = random.random()
        known = [j.gsns[-1] for c in self.clients for j in c.jobs.values() if j.gsns is not None]
        stop = self.service.runs[-1].last.stop
        if kind < 0.4 and known:
            return random.choice(known)
        if kind < 0.45:
            ahead = random.randrange(2 * self.weather.epoch_size)
            return min(stop - 1, max(known, default=1) + ahead)
        if kind < 0.47:
            return stop + random.randrange(50)  # not assigned yet
        return 0

    def want(self) -> None:
        shard = self.random.randrange(self.weather.shards)
        primary = replicas_of(self.world, shard, self.weather.f)[0]
        gsn = max(1, primary.state.frontier + self.random.randrange(-5, 30))
        message = wire.Want(CLUSTER, shard, self.random.randrange(3), gsn)
        self.world.send("mms-0", shard_names(shard, 0)[0], message)

    def read(self) -> None:
        random, weather = self.random, self.weather
        if len(self.readers) >= 6:
            return
        shard = random.randrange(weather.shards)
        server = random.choice(shard_names(shard, weather.f))
        start = max(1, self.trim, random.choice((1, random.randrange(1, 200))))
        reader = Reader(f"reader-{len(self.readers)}", server, shard, start=start, random=random)
        reader.grant = random.choice((100, 1000, 1 << 20))
        reader.renew_at = self.world.now
        self.readers.append(reader)
        self.world.add(reader.name, reader)

    def restart(self) -> None:
        name = self.random.choice(shard_names(self.random.randrange(self.weather.shards),
                                              self.weather.f))  # fmt: skip
        self.world.restart(name)

    def trim_some(self) -> None:
        """Trim to where every shard is stable, as the service would."""
        weather, world = self.weather, self.world
        frontier = min(
            replicas_of(world, shard, weather.f)[0].state.frontier
            for shard in range(weather.shards)
        )
        self.trim = max(self.trim, self.random.randrange(frontier + 1))
        assert self.service.announcement is not None
        self.service.announcement = wire.LeaseAnnounced(
            CLUSTER, [], 0, self.service.announcement.placements, self.trim
        )
        for shard in range(weather.shards):
            for name in shard_names(shard, weather.f):
                message = self.service.announce(1 << 60, world.now)
                world.send("mms-0", name, message, reply=True)

    # --- the end ---

    def settle(self) -> None:
        """Run without losses: everything must finish, within a bound."""
        self.is_over = True
        for _ in range(60):
            self.world.run(50 * MS)
            if all(c.is_stuck(job) for c in self.clients for job in c.jobs.values()):
                break
            self.grant()
        self.world.run(1100 * MS)
        # Release what an abandoned insert blocks: a no-op up to the end of the leases.
        end = self.service.runs[-1].last.stop - 1
        for shard in range(self.weather.shards):
            self.world.send("mms-0", shard_names(shard, 0)[0], wire.Want(CLUSTER, shard, 1, end))
        for reader in self.readers:
            reader.random, reader.grant = None, 1 << 20
        self.world.run(2500 * MS)

    def judge(self) -> None:
        weather, world = self.weather, self.world
        check_quiet(world, weather.shards, weather.f, self.clients, self.service.runs)
        for shard in range(weather.shards):
            for replica in replicas_of(world, shard, weather.f):
                _check_nothing_left(replica, self.clients)
        for reader in self.readers:
            check_reader(world, reader)
            if reader.trimmed is None:
                frontier = replicas_of(world, reader.shard, weather.f)[0].state.frontier
                assert reader.frontier >= frontier, f"{reader.name} is at {reader.frontier}"
        assert not any(reader.refusals.count("not-ready") for reader in self.readers)


def _check_nothing_left(replica: Replica, clients: list[Client]) -> None:
    """D12: every promise was kept or broken by the primary; no unit waits that could proceed."""
    if replica._backup is not None:
        assert not replica._backup.guesses.promised, "a promise was never decided"
        assert not replica._backup._pending
    open_units = {(c.id, j.seq) for c in clients for j in c.jobs.values() if j.gsns is None}
    for session in replica.state.sessions.by_client.values():
        for unit in session.units.values():
            assert unit.confirmed or (unit.client, unit.seq) in open_units
