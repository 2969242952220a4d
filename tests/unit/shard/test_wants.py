"""Wants: a primary decides the positions that readers wait for (docs/protocol.md, section 7)."""

from __future__ import annotations

import pytest

from tests.checkers import decided
from tests.unit.shard.test_primary import PRIMARY, alone, primary_of, report, send
from tests.world import CLUSTER, MS, calm_world, first_lease, grant, insert, probe
from ziplog import wire
from ziplog.core.entries import Skip
from ziplog.core.view import run_of


def test_want_on_an_idle_shard_is_answered_when_stable() -> None:
    world = calm_world(shards=2)
    send(world, wire.Want(CLUSTER, 0, 9, 6))
    assert [e.decision for e in decided(world, PRIMARY)] == [Skip(1, 7)]
    assert [(a.request, a.frontier) for a in probe(world).of(wire.Frontier)] == [(9, 7)]
    send(world, wire.Want(CLUSTER, 0, 10, 6))
    assert len(decided(world, PRIMARY)) == 1
    assert [a.request for a in probe(world).of(wire.Frontier)] == [9, 10]


def test_want_waits_for_the_backup() -> None:
    world = alone()
    want = wire.Want(CLUSTER, 0, 9, 6)
    send(world, want, want, want)
    assert not probe(world).of(wire.Frontier)
    send(world, report(1))
    assert len(probe(world).of(wire.Frontier)) == 1, "a repeated want counts once"


def test_want_beyond_the_leases_decides_nothing() -> None:
    world = calm_world()
    send(world, wire.Want(CLUSTER, 0, 9, 2**62))
    assert decided(world, PRIMARY) == []
    assert not primary_of(world)._waiters
    grant(world, first_lease(1).following(), 1)
    world.run(50 * MS)
    assert primary_of(world)._state.stream.end < 2**40


def test_want_in_the_next_lease_waits_for_that_lease() -> None:
    first = first_lease(1, epoch_ms=10_000)
    world = calm_world(lease=first)
    wanted = first.stop + 5
    send(world, wire.Want(CLUSTER, 0, 0, wanted))
    assert decided(world, PRIMARY) == []
    grant(world, first.following(), 1)
    world.run(1 * MS)
    assert [e.decision for e in decided(world, PRIMARY)] == [Skip(1, wanted + 1)]


def test_want_between_the_leases_held_ends_in_the_newest_one() -> None:
    """A server that was away does not hold the leases between, so it places nothing there."""
    first = first_lease(1, epoch_size=1 << 12)
    world = calm_world(lease=first)
    send(world, insert(1))
    newest = first
    for _ in range(5):
        newest = newest.following()
    cut = wire.LeaseAnnounced(CLUSTER, [run_of(newest)], 60_000, [], 0, is_cut=True)
    world.send("mms-0", PRIMARY, cut, reply=True)
    world.run(2 * MS)
    send(world, wire.Want(CLUSTER, 0, 9, first.stop + 5))
    send(world, insert(2))
    assert primary_of(world)._state.stream.last_record == newest.base


@pytest.mark.parametrize("beyond", [10, 2**61])
def test_farther_want_does_not_outlive_the_next_leases(beyond: int) -> None:
    first = first_lease(1, epochs=1, epoch_ms=10_000)
    world = calm_world(lease=first)
    length = first.stop - first.base
    send(world, wire.Want(CLUSTER, 0, 0, first.stop + length + beyond))
    second = first.following()
    grant(world, second, 1)
    grant(world, second.following(), 1)
    world.run(1 * MS)
    assert primary_of(world)._state.stream.end <= second.stop
