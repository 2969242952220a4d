"""Shards join and leave while leaders change, and messages are lost, delayed or duplicated."""

import random

import pytest

from tests.services import CLUSTER, MS, S
from tests.unit.mms.reconfiguration import HANDLER, drained, is_settled, servers_of
from tests.unit.mms.world import World, config
from ziplog.core.view import fingerprint
from ziplog.wire import ChangeShard, Reinsert, Remove, ShardChanged


class Storm:
    """Random requests, while leaders change, and messages are lost, delayed or duplicated."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(config(shards=3, epoch_ms=20), delay=5 * MS).lead().run(3 * S)
        self.replicas = {shard: self.world.add_servers(shard) for shard in (3, 4, 5)}
        self.asked: dict[int, ChangeShard] = {}
        self.recoveries = dict.fromkeys(range(6), 1)

    def run(self, steps: int) -> None:
        choose = self.random
        for _ in range(steps):
            what = choose.choice(
                [self.question, self.repeat, self.lead, self.deafen, self.drain, self.seal,
                 self.fail, self.recover, self.commit_late]
            )  # fmt: skip
            what()
            self.world.run(choose.choice([MS, 7 * MS, 200 * MS, S]))
            self.check()
        self.heal()

    def question(self) -> None:
        shard = self.random.randrange(6)
        what = self.random.choice(["add", "remove", "finalize"])
        replicas = self.replicas.get(shard, []) if what == "add" else []
        request = 100 + len(self.asked)
        message = ChangeShard(CLUSTER, request, shard, what, replicas)  # type: ignore[arg-type]
        self.asked[request] = message
        if self.random.random() < 0.7:
            self.world.send(message)

    def repeat(self) -> None:
        for message in self.asked.values():
            if self.random.random() < 0.5:
                self.world.send(message)

    def lead(self) -> None:
        """Make another node the leader; the former one's proposals are lost or delayed."""
        late = [command for _, command in self.world.proposed]
        self.world.start()
        if self.random.random() < 0.5:
            self.world.proposed = [(self.world.now + 40 * MS, command) for command in late]
        self.world.lead()

    def commit_late(self) -> None:
        """Commit an old command a second time."""
        command = self.random.choice(self.world.log)
        self.world.proposed.append((self.world.now + MS, command))
        self.world.proposed.sort()

    def deafen(self) -> None:
        server = self.random.choice(self.world.servers)
        server.is_disconnected = not server.is_disconnected

    def drain(self) -> None:
        drained(self.world, self.random.choice([s.shard for s in self.world.servers]))

    def seal(self) -> None:
        state = self.world.service.state
        for shard, retired in state.retired.items():
            for server in servers_of(self.world, shard):
                if retired.limit and self.random.random() < 0.7:
                    server.frontier = max(server.frontier, retired.limit)
                    server.sealed = True

    def fail(self) -> None:
        shard = self.random.choice(list(self.world.service.state.placements))
        placement = self.world.service.state.placements[shard]
        self.recoveries[shard] = max(self.recoveries[shard], placement.view) + 1
        number = self.recoveries[shard]
        self.world.send(Remove(CLUSTER, number, shard, placement.view, number), HANDLER)

    def recover(self) -> None:
        for shard, one in self.world.service.state.recovering.items():
            prints = [fingerprint(server.identity) for server in servers_of(self.world, shard)]
            for server in servers_of(self.world, shard):
                server.view = one.recovery
            self.world.send(Reinsert(CLUSTER, 5, shard, one.recovery, prints, 0), HANDLER)

    def check(self) -> None:
        """Assert that no shard is a member after its limit, and that replies are true."""
        state = self.world.consensus
        state.check()
        for shard, retired in state.retired.items():
            held = [run for run in state.runs if run.last.view_of(shard) is not None]
            end = held[-1].last.stop if held else 0
            assert not retired.limit or end <= retired.limit
            assert retired.limit or end == state.runs[-1].last.stop
        for answer in self.world.answers(ShardChanged):
            asked = self.asked[answer.request]
            retired = state.retired.get(asked.shard)
            if asked.change == "add":
                assert answer.error or asked.shard in state.placements
                assert answer.error != "retired" or retired is not None
            elif not answer.error:
                assert retired is not None
                assert retired.limit
                assert asked.change == "remove" or retired.is_finalized

    def heal(self) -> None:
        """Without faults, every request gets a reply."""
        world = self.world
        for server in world.servers:
            server.is_disconnected = False
        for _ in range(30):
            self.recover()
            self.seal()
            for message in self.asked.values():
                world.send(message)
            world.run(S)
            for shard, retired in world.service.state.retired.items():
                if retired.limit:
                    is_settled(world, shard)
        self.check()
        answered = {answer.request for answer in world.answers(ShardChanged)}
        assert answered == self.asked.keys()
        for server in world.servers:
            placement = world.service.state.placements.get(server.shard)
            assert server.placed == (placement.state if placement is not None else "")


@pytest.mark.parametrize("seed", range(12))
def test_in_any_storm_replies_are_true_and_no_shard_owns_positions_after_its_limit(
    seed: int,
) -> None:
    Storm(seed).run(60)
