"""A shard that has no more positions, through a recovery; and through loss, delay and restarts."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from tests.actors import Client, Service
from tests.checkers import places
from tests.unit.shard.draining import (
    AGAIN,
    BACKUP,
    BOTH,
    LEASE,
    OTHER,
    PRIMARY,
    WITHOUT,
    acks,
    announce,
    last_beat,
    received,
    redirects,
    replica,
    send,
    start,
)
from tests.world import CLUSTER, MS, US, Link, S, World, add_shard, insert, placements, shard_names
from ziplog import wire
from ziplog.core.node import Send
from ziplog.core.view import run_of

if TYPE_CHECKING:
    from tests.actors import Job
    from ziplog.core.message import Message
    from ziplog.core.node import Effect, Event
    from ziplog.core.view import Lease, ShardState

LIMIT = LEASE.stop


def order(world: World, message: Message, *names: str) -> None:
    """Send a message as the failure handler: over the server's own connection."""
    for name in names:
        world.send("fh-0", name, message, reply=True)
    world.run(5 * MS)


def recover(world: World, survivor: str, *others: str, view: int = 2) -> None:
    """Recover the shard until all servers have joined."""
    order(world, wire.Freeze(CLUSTER, 0, view - 1, view, LIMIT, [run_of(LEASE)]), survivor)
    frozen = received(world, wire.Frozen, "fh-0")[-1]
    decided = wire.ViewDecided(
        CLUSTER, 0, view, frozen.server, frozen.incarnation, frozen.last, frozen.digest
    )
    order(world, decided, survivor, *others)
    servers = [replica(world, name).state for name in (survivor, *others)]
    assert world.run_until(lambda: all(state.server_state == "joined" for state in servers), 2 * S)


def seqs(world: World, name: str) -> list[int]:
    return [place.seq for place in places(world, name)]


@pytest.mark.parametrize("placed", ["leaving", "finalized", "parked"])
def test_view_of_a_shard_that_has_left_begins_normally(placed: ShardState) -> None:
    world = start()
    send(world, insert(1))
    announce(world, "leaving", WITHOUT)
    world.restart(BACKUP, clean=False)
    announce(world, "recovering", WITHOUT, to=(BACKUP,))
    recover(world, PRIMARY, BACKUP)
    announce(world, placed, view=2, run=300 * MS)
    for name in (PRIMARY, BACKUP):
        state = replica(world, name).state
        assert (state.server_state, state.view, state.has_no_positions) == ("up", 2, True)
        assert state.is_sealed == (placed != "parked")
        assert last_beat(world, name).is_sealed == state.is_sealed
    send(world, insert(1, view=2), insert(2, view=2))
    assert acks(world)[-1] == (1, 1, [1])
    assert redirects(world) == [(2, 0), (2, 1)]


def test_promise_that_was_not_refused_is_rolled_forward() -> None:
    """The primary refuses; the backup did not receive the decision about its slot, and leads."""
    world = start()
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    announce(world, "leaving", WITHOUT, to=(PRIMARY,))
    send(world, insert(1))
    assert redirects(world) == [(1, 0)]
    ((_, server, gsns),) = acks(world)
    assert server == 1
    world.links.clear()
    world.restart(PRIMARY, clean=False)
    announce(world, "recovering", WITHOUT, to=(PRIMARY,))
    recover(world, BACKUP, PRIMARY)
    announce(world, "finalized", WITHOUT, view=2)
    assert seqs(world, BACKUP) == [1]
    send(world, insert(1, view=2))
    assert [ack for ack in acks(world) if ack[1] == 0] == [(1, 0, gsns)]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_recovery_never_restores_a_unit_that_all_refused(is_restarted: bool) -> None:
    world = start()
    send(world, insert(1), to=(BACKUP,))
    announce(world, "parked", WITHOUT)
    send(world, insert(1), insert(2))
    refused = redirects(world)
    assert {(seq, server) for seq in (1, 2) for server in (0, 1)} <= set(refused)
    if is_restarted:
        world.restart(BACKUP)
    announce(world, "live", AGAIN)
    send(world, insert(1), insert(2), to=(BACKUP,))
    world.restart(PRIMARY, clean=False)
    announce(world, "recovering", WITHOUT, AGAIN, to=(PRIMARY,))
    recover(world, BACKUP, PRIMARY)
    assert seqs(world, BACKUP) == []


def test_tombstones_hold_within_one_view() -> None:
    world = start()
    announce(world, "parked", WITHOUT)
    send(world, insert(1))
    world.restart(BACKUP, clean=False)
    announce(world, "recovering", WITHOUT, to=(BACKUP,))
    recover(world, PRIMARY, BACKUP)
    announce(world, "live", AGAIN.following((replace(BOTH[0], view=2), BOTH[1])), AGAIN, view=2)
    for name in (PRIMARY, BACKUP):
        assert not any(
            session.refused for session in replica(world, name).state.sessions.by_client.values()
        )


def test_a_backup_that_missed_that_its_new_view_was_parked_refuses_copies() -> None:
    """The primary refused the unit while the backup heard nothing of the membership service."""
    world = start()
    world.restart(BACKUP, clean=False)
    announce(world, "recovering", WITHOUT, to=(BACKUP,))
    recover(world, PRIMARY, BACKUP)
    announce(world, "parked", WITHOUT, view=2, to=(PRIMARY,))
    send(world, insert(1, view=2), to=(PRIMARY,))
    again = AGAIN.following((replace(BOTH[0], view=2), BOTH[1]))
    announce(world, "live", again, AGAIN, view=2)
    send(world, insert(1, view=2), to=(BACKUP,))
    for _ in range(3):
        send(world, insert(1, view=2))
        world.run(100 * MS)
    assert {server for seq, server in redirects(world) if seq == 1} == {0, 1}


# --- a storm ---


class Mover(Client):
    """A client that gives a unit up once every server has refused it permanently (section 4)."""

    def __init__(self, name: str, f: int) -> None:
        super().__init__(name, f)
        self.refused_by: dict[int, set[int]] = {}

    def _receive(self, message: Any) -> None:
        if not isinstance(message, wire.Refused) or message.code != "redirect":
            super()._receive(message)
            return
        job = self.jobs[message.shard, message.request]
        refused_by = self.refused_by.setdefault(job.seq, set())
        refused_by.add(message.server)
        job.acks.pop(message.server, None)
        if len(refused_by) == self.f + 1:
            assert job.gsns is None, "a complete unit was refused"
            job.refused = "redirect"


class PlacingService(Service):
    """A membership service that also repeats the placement of a shard."""

    shard_state: ShardState = "live"

    def step(self, event: Event, now: int) -> list[Effect]:
        effects = super().step(event, now)
        message = getattr(event, "message", None)
        if (
            not effects
            and isinstance(message, wire.Heartbeat)
            and message.shard_state != self.shard_state
        ):
            return [Send(getattr(event, "src", b""), self.announce(message.lease, now))]
        return effects


class Storm:
    """Inserts at one shard, which is parked, returns, and finally leaves."""

    def __init__(self, seed: int, f: int) -> None:
        self.random = random = Random(seed)
        self.f, self.is_over = f, False
        self.world = World(Link(
            lambda: random.randrange(20, 100 if self.is_over else 4000) * US,
            lambda: not self.is_over and random.random() < 0.15,
            lambda: not self.is_over and random.random() < 0.1,
        ))  # fmt: skip
        self.service = PlacingService()
        self.world.add("mms-0", self.service)
        add_shard(self.world, 0, f, durability=random.choice(("memory", "memory", "disk")))
        self.world.flush_ns = random.choice((0, 500, 5000)) * US
        self.clients = [Mover(f"client-{i}", f) for i in range(2)]
        for client in self.clients:
            self.world.add(client.name, client)
        self.commit(replace(LEASE, epoch_size=64, epochs=4), "live")

    def commit(self, lease: Lease | None, placed: ShardState) -> None:
        service, world = self.service, self.world
        mine, other = placements(2, self.f)
        placements_sent = [replace(mine, state=placed), other]
        if lease is not None:
            service.runs.append(run_of(lease))
            service.begins = world.now + self.random.choice((0, 0, 5, 20)) * MS
        service.shard_state = placed
        service.announcement = wire.LeaseAnnounced(CLUSTER, [], 0, placements_sent, 0)
        known = service.runs[-1].last.number - 1
        for name in shard_names(0, self.f):
            world.send("mms-0", name, service.announce(known, world.now), reply=True)

    def next_lease(self, *, within: bool) -> Lease:
        return self.service.runs[-1].last.following(BOTH if within else OTHER)

    def insert(self) -> None:
        client = self.random.choice(self.clients)
        mine = [seq for (_, seq), job in client.jobs.items() if not job.refused]
        predecessor = self.random.choice((0, 0, mine[-1])) if mine else 0
        servers = range(self.f + 1)
        to = [s for s in servers if self.random.random() < 0.7] or [0]
        client.insert(
            self.world, 0, count=self.random.choice((1, 1, 3)), predecessor=predecessor, to=to
        )

    def turn(self) -> None:
        """Park the shard, return it, or continue."""
        if self.service.shard_state == "parked":
            self.commit(self.next_lease(within=True), "live")
        else:
            within = self.random.random() < 0.4
            self.commit(self.next_lease(within=within), "live" if within else "parked")

    def run(self) -> None:
        for _ in range(80):
            chance = self.random.random()
            if chance < 0.1:
                self.turn()
            elif chance < 0.14:
                self.world.restart(self.random.choice(shard_names(0, self.f)))
            else:
                self.insert()
            self.world.run(self.random.choice((0, 100, 1000, 6000)) * US)
        if self.service.shard_state == "parked":
            self.turn()
        self.commit(None, "leaving")
        self.world.run(self.random.choice((0, 5, 50)) * MS)
        self.insert()
        self.commit(self.next_lease(within=False), "leaving")
        self.insert()
        self.world.run(5 * MS)
        self.is_over = True
        self.world.run(6 * S)
        self.judge()

    def judge(self) -> None:
        logs = [places(self.world, name) for name in shard_names(0, self.f)]
        assert not self.world.halts
        assert all(log == logs[0] for log in logs)
        placed = {(place.client, place.seq): place.gsns for place in logs[0]}
        assert len(placed) == len(logs[0]), "a unit is at two places"
        for client in self.clients:
            for job in client.jobs.values():
                self.judge_job(client, job, placed.get((client.id, job.seq)))
        for name in shard_names(0, self.f):
            state = replica(self.world, name).state
            assert state.is_sealed, f"{name} is not sealed"
            assert not any(
                unit.gsns is None
                for session in state.sessions.by_client.values()
                for unit in session.units.values()
            )

    def judge_job(self, client: Mover, job: Job, gsns: list[int] | None) -> None:
        assert job.is_over, f"{client.name} never gets an outcome of {job.seq}"
        if job.refused:
            assert gsns is None, f"{job.seq} of {client.name} was refused by all, and is at {gsns}"
        else:
            assert gsns == job.gsns


@pytest.mark.parametrize("f", [0, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_every_unit_is_placed_once_or_refused_by_all(seed: int, f: int) -> None:
    Storm(seed, f).run()


def test_storms_place_units_and_refuse_units() -> None:
    """The storms above reach both ends: units are placed, and units are refused by all."""
    storms = [Storm(seed, 1) for seed in range(3)]
    for storm in storms:
        storm.run()
    jobs = [job for s in storms for client in s.clients for job in client.jobs.values()]
    assert sum(bool(job.refused) for job in jobs) > 20
    assert sum(bool(job.gsns) for job in jobs) > 20
