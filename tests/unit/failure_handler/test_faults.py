"""Any process may die at any time of a recovery, and messages may be lost, late and duplicated."""

import random

import pytest

from failure_handler.state import Begin, Finish
from tests.services import MS, S
from tests.unit.failure_handler.servers import HOP, FakeServer
from tests.unit.failure_handler.world import PHASES, World, config, reach, storm
from ziplog.core.message import Message
from ziplog.wire import Freeze, LeaseAnnounced, Suspect


def survivor(world: World) -> FakeServer:
    return world.server(0, world.consensus.shards[0].attempt.candidate)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("f", [1, 2])
def test_the_survivor_dies(phase: str, f: int) -> None:
    world = World(config(f=f)).live()
    assert world.insert("one")
    world.kill(world.server(0, f))
    reach(world, phase)
    world.kill(survivor(world) if world.commands else world.server(0, 0))
    world.run(S)
    world.until_live()
    assert world.insert("two")
    world.run(10 * S)
    assert world.is_live()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("f", [1, 2])
def test_all_servers_die(phase: str, f: int) -> None:
    world = World(config(f=f)).live()
    assert world.insert("one")
    world.kill(world.server(0, 0))
    reach(world, phase)
    world.kill(*world.servers)
    world.run(S)
    world.until_live()
    assert world.insert("two")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("handlers", [1, 3])
def test_another_leader_continues_the_recovery(phase: str, handlers: int) -> None:
    world = World(config(handlers=handlers)).live()
    assert world.insert("one")
    world.kill(world.server(0, 0))
    reach(world, phase)
    before = len(world.decided(Begin))
    world.fail_over()
    world.until_live(limit=10 * S)
    assert world.insert("two")
    # It continues the attempt that it found.
    assert len(world.decided(Begin)) == max(before, 1)
    world.run(5 * S)
    assert len(world.decided(Finish)) == 1
    assert world.orders() == []


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("copies", [[HOP, HOP, 5 * MS, S], [350 * MS], [90 * MS, 2 * S]])
def test_messages_that_come_late_and_twice_change_nothing(phase: str, copies: list[int]) -> None:
    world = World().live()
    assert world.insert("one")
    world.kill(world.server(0, 0))
    reach(world, phase)
    world.network = lambda _src, _dst, _message: copies
    world.until_live(limit=30 * S)
    world.network = lambda _src, _dst, _message: [HOP]
    world.run(5 * S)
    world.until_live(limit=30 * S)
    assert world.insert("two")


@pytest.mark.parametrize(
    "kind", ["Suspect", "Remove", "Removed", "Freeze", "Frozen", "ViewDecided", "Reinsert",
             "Reinserted", "LeaseAnnounced"],
)  # fmt: skip
def test_the_first_message_of_each_kind_is_lost(kind: str) -> None:
    world = World().live()
    assert world.insert("one")
    lost: list[Message] = []

    def network(_src: str, _dst: str, message: Message) -> list[int]:
        if type(message).__name__ == kind and len(lost) < 3:
            lost.append(message)
            return []
        return [HOP]

    world.kill(world.server(0, 1))
    world.network = network
    world.until_live(view=2, limit=10 * S)
    assert lost
    assert len(world.decided(Begin)) == 1


@pytest.mark.parametrize("seed", range(30))
def test_a_storm_of_everything(seed: int) -> None:
    generator = random.Random(seed)
    world = World(config(shards=2, f=generator.choice([0, 1, 2]), handlers=3)).live()
    world.network = storm(seed)
    for number in range(12):
        world.insert(f"{number}", flush=generator.random() < 0.8)
        choice = generator.random()
        if choice < 0.5:
            server = generator.choice(world.servers)
            # At most f servers may lose their disks.
            may_be_wiped = world.config.f > 0 and world.is_live(server.shard)
            world.kill(server, wiped=may_be_wiped and generator.random() < 0.2)
        elif choice < 0.7:
            world.fail_over()
        elif choice < 0.8:
            generator.choice(world.servers).always_suspects = {0}
        world.run(generator.randrange(2 * S))
    world.network = lambda _src, _dst, _message: [HOP]
    for server in world.servers:
        server.always_suspects.clear()
    world.run(3 * S)
    for shard in range(2):
        world.until_live(shard, limit=120 * S)


def test_a_joined_server_that_missed_the_start_of_its_view_is_not_forgotten() -> None:
    world = World().live()
    world.kill(world.server(0, 1))
    reach(world, "joined")
    waits = world.server(0, 1).name
    world.network = lambda _src, dst, message: (
        [] if type(message) is LeaseAnnounced and dst == waits else [HOP]
    )
    reach(world, "finished")
    world.supervised = False
    world.kill(world.server(0, 0))
    # Its announcement is lost: it keeps its state, and suspects the other one.
    world.until(lambda: len(world.decided(Begin)) == 2, 10 * S)
    assert world.server(0, 1).state == "joined"
    world.network = lambda _src, _dst, _message: [HOP]
    world.server(0, 0).restart()
    world.until_live(limit=10 * S)


def test_a_shard_out_of_service_is_recovered_though_all_its_servers_are_up() -> None:
    world = World(config(shards=2)).live()
    server = world.server(0, 0)
    # One suspicion, which is withdrawn; then the handler loses the route to the server.
    server.always_suspects = {1}
    reach(world, "begun")
    server.always_suspects = set()
    world.network = lambda _src, _dst, message: [] if type(message) is Freeze else [HOP]
    world.run(S)
    world.fail_over()
    world.network = lambda _src, _dst, _message: [HOP]
    world.until_live(limit=5 * S)
    last = world.mms.state.last
    assert last is not None
    assert [member.shard for member in last.members] == [0, 1]


def test_slow_candidates_do_not_replace_each_other_for_ever() -> None:
    world = World(config(f=2)).live()
    assert world.insert("one")
    world.network = lambda _src, _dst, _message: [800 * MS]  # a promise takes more than a second
    world.kill(world.server(0, 2))
    world.until(lambda: world.is_live() and len(world.decided(Finish)) == 1, 20 * S)
    assert len(world.decided(Begin)) <= 3
    assert world.insert("two")


def test_a_candidate_whose_reports_come_in_bursts_has_time_to_promise() -> None:
    world = World(config(f=2)).live()
    assert world.insert("one")

    def network(src: str, _dst: str, message: Message) -> list[int]:
        """Deliver reports of each server every 1.5 s, those of two servers in turn."""
        if not isinstance(message, Suspect):
            return [300 * MS]
        phase = 750 * MS if src == "shard-0-1" else 0
        return [1500 * MS - (world.now + phase) % (1500 * MS)]

    world.network = network
    world.kill(world.server(0, 2))
    world.until(lambda: world.is_live() and len(world.decided(Finish)) == 1, 60 * S)
    assert world.insert("two")


@pytest.mark.parametrize("f", [1, 2])
def test_suspicions_from_before_the_end_of_a_recovery_begin_no_other_one(f: int) -> None:
    """Servers are far from all others: they hear that the others have joined 3 s after it."""
    world = World(config(f=f)).live()
    far = dict.fromkeys((server.name for server in world.servers), 3 * S)
    world.network = lambda src, dst, _message: [far.get(src, far.get(dst, HOP))]
    world.kill(world.server(0, 1))
    reach(world, "joined", 80 * S)
    for server in world.servers:
        server.always_suspects = {one.index for one in world.servers}
    world.at(3 * S, lambda: [server.always_suspects.clear() for server in world.servers])
    begun = len(world.decided(Begin))
    world.run(30 * S)
    assert world.is_live()
    assert len(world.decided(Begin)) == begun
