"""Clients that wait at a primary: bounded, and shared fairly (docs/protocol.md, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shard.ordering import waiters
from shard.ordering.waiters import _Requests
from tests.unit.shard.test_primary import BACKUP, PRIMARY, alone, primary_of, report
from tests.world import CLUSTER, MS, Link, Probe, World, calm_world, insert, probe
from ziplog import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.core.message import Message

NEVER_GIVEN = 2**62


def send(world: World, src: str, messages: Sequence[Message]) -> None:
    world.nodes.setdefault(src, Probe())
    for message in messages:
        world.send(src, PRIMARY, message)
    world.run(1 * MS)


def syncs(gsn: int, count: int, first: int = 1) -> list[wire.Sync]:
    return [wire.Sync(CLUSTER, 0, 1, first + number, gsn) for number in range(count)]


def test_a_sync_of_an_undecided_position_is_refused_and_takes_no_slot() -> None:
    world = calm_world()
    world.nodes["other"] = Probe()
    send(world, "c", [insert(1)])
    send(world, "other", syncs(NEVER_GIVEN, waiters.MAX_WAITERS + 100))
    refused = probe(world, "other").of(wire.Refused)
    assert {one.code for one in refused} == {"not-stable"}
    assert len(refused) == waiters.MAX_WAITERS + 100
    send(world, "c", syncs(1, 1))
    world.run(50 * MS)
    assert [one.request for one in probe(world).of(wire.Synced)] == [1]


def test_a_sync_after_a_restart_of_the_primary_needs_no_further_insert() -> None:
    """The backup reported to the former process that the record is on its disk."""
    world = calm_world()
    world.flush_ns = 40 * MS
    for name in (PRIMARY, BACKUP):
        world.send("c", name, insert(1))
    stream = primary_of(world)._state.stream
    assert world.run_until(lambda: 0 < stream.stable == stream.last)
    assert not stream.durable
    world.links[BACKUP, PRIMARY] = Link(lose=lambda: True)
    world.restart(PRIMARY)
    world.run(60 * MS)
    world.links.clear()
    send(world, "c", syncs(1, 1))
    world.run(60 * MS)
    assert [one.request for one in probe(world).of(wire.Synced)] == [1]


@pytest.mark.parametrize("kind", ["sync", "want"])
def test_a_client_with_many_requests_leaves_room_for_others(kind: str) -> None:
    world = alone()
    send(world, "c", [insert(1)])
    many, one = syncs(1, waiters.MAX_WAITERS + 100), syncs(1, 1)
    if kind == "want":
        wants = [wire.Want(CLUSTER, 0, number + 1, 1) for number in range(len(many))]
        send(world, "other", wants)
        send(world, "c", [wire.Want(CLUSTER, 0, 1, 1)])
    else:
        send(world, "other", many)
        send(world, "c", one)
    assert not probe(world).of(wire.Synced)
    assert not probe(world).of(wire.Frontier)
    world.send("shard-0-1", PRIMARY, report(2, 2))
    world.run(50 * MS)
    answer = wire.Synced if kind == "sync" else wire.Frontier
    assert [found.request for found in probe(world).of(answer)] == [1]
    answered = len(probe(world, "other").of(answer))
    assert answered == waiters.MAX_WAITERS - 1


def test_room_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "MAX_WAITERS", 4)
    requests = _Requests()
    assert all(requests.add(b"a", number, 10) for number in range(4))
    assert requests.add(b"a", 3, 11), "a repetition takes no further room"
    assert not requests.add(b"a", 4, 10)
    assert requests.add(b"b", 0, 10)
    assert requests.add(b"b", 1, 10)
    assert not requests.add(b"b", 2, 10), "two and two are fair"
    assert requests.add(b"c", 0, 10)
    assert requests.count == 4
    assert sorted(requests.pop_below(11)) == [(b"b", 0, 10), (b"b", 1, 10), (b"c", 0, 10)]
    assert list(requests.pop_below(12)) == [(b"a", 3, 11)]
    assert requests.count == 0
    assert not requests._gsns
