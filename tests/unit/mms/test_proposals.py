"""Commands are proposed once, and again when they must have been lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mms.commands import FinalizeShard, GrantLease, RemoveShard, RetireShard, decode_command
from mms.proposals import RETRY_NS, Proposals
from tests.services import CLUSTER, S
from tests.unit.mms.world import World, config
from ziplog.core.node import Effect, Event, Propose
from ziplog.wire import Remove

if TYPE_CHECKING:
    import pytest


def test_the_same_command_is_proposed_again_only_after_a_delay() -> None:
    proposals, command = Proposals(), RetireShard(3)
    assert proposals.propose(3, command, 0) == [Propose(command.encode())]
    assert proposals.propose(3, command, RETRY_NS - 1) == []
    assert proposals.propose(3, command, RETRY_NS) == [Propose(command.encode())]


def test_another_command_of_the_same_kind_does_not_wait() -> None:
    proposals = Proposals()
    older, newer = RemoveShard(3, 1, 2), RemoveShard(3, 1, 4)
    assert proposals.propose(3, older, 0)
    assert proposals.propose(3, newer, 1) == [Propose(newer.encode())]


def test_kinds_and_shards_do_not_stand_in_for_each_other() -> None:
    proposals = Proposals()
    assert proposals.propose(3, RetireShard(3), 0)
    assert proposals.propose(3, FinalizeShard(3), 0)
    assert proposals.propose(4, RetireShard(4), 0)
    proposals.on_decided(3, FinalizeShard)
    assert proposals.propose(3, RetireShard(3), 1) == []
    assert proposals.propose(4, RetireShard(4), 1) == []


def test_a_decided_or_cleared_command_may_be_proposed_again_at_once() -> None:
    proposals, command = Proposals(), RetireShard(3)
    assert proposals.propose(3, command, 0)
    proposals.on_decided(3, RetireShard)
    assert proposals.propose(3, command, 0)
    proposals.clear()
    assert proposals.propose(3, command, 0)


def test_commit_times_are_measured_again_after_consensus_lost_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ziplog.raft.service_node._MAX_TIMED", 2)
    world = World(config(shards=4)).lead().run(5 * S)
    world.is_cut_off = True
    for shard in range(3):
        world.send(Remove(CLUSTER, shard + 1, shard, 1, 2), b"handler")
    world.proposed.clear()
    world.is_cut_off = False
    world.run(61 * S)
    before = sum(world.service.commit_durations.counts)
    world.run(20 * S)
    assert sum(world.service.commit_durations.counts) > before


def test_leases_are_urgent() -> None:
    world = World(config(shards=4)).lead()
    urgent: list[type] = []
    step = world.service.step

    def recorded(event: Event, now: int) -> list[Effect]:
        effects = step(event, now)
        proposals = [effect for effect in effects if isinstance(effect, Propose)]
        urgent.extend(type(decode_command(one.command)) for one in proposals if one.is_urgent)
        return effects

    world.service.step = recorded  # type: ignore[method-assign]
    world.run(5 * S)
    world.send(Remove(CLUSTER, 1, 0, 1, 2), b"handler")
    world.run(5 * S)
    assert set(urgent) == {GrantLease}
