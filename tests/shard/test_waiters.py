"""Who waits at a primary: places are bounded, and shared fairly (docs/protocol.md, section 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shard.ordering import waiters
from shard.ordering.waiters import _Requests
from tests.shard.test_primary import PRIMARY, alone, report
from tests.world import CLUSTER, MS, Probe, World, calm_world, insert, probe
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


def test_a_sync_of_what_is_not_decided_is_refused_and_takes_no_place() -> None:
    world = calm_world()
    world.nodes["stranger"] = Probe()
    send(world, "c", [insert(1)])
    send(world, "stranger", syncs(NEVER_GIVEN, waiters.MAX_WAITERS + 100))
    refused = probe(world, "stranger").of(wire.Refused)
    assert {one.code for one in refused} == {"not-stable"}
    assert len(refused) == waiters.MAX_WAITERS + 100
    send(world, "c", syncs(1, 1))
    world.run(50 * MS)
    assert [one.request for one in probe(world).of(wire.Synced)] == [1]


@pytest.mark.parametrize("kind", ["sync", "want"])
def test_a_stranger_with_many_requests_leaves_places_for_others(kind: str) -> None:
    world = alone()
    send(world, "c", [insert(1)])
    many, one = syncs(1, waiters.MAX_WAITERS + 100), syncs(1, 1)
    if kind == "want":
        wants = [wire.Want(CLUSTER, 0, number + 1, 1) for number in range(len(many))]
        send(world, "stranger", wants)
        send(world, "c", [wire.Want(CLUSTER, 0, 1, 1)])
    else:
        send(world, "stranger", many)
        send(world, "c", one)
    assert not probe(world).of(wire.Synced)
    assert not probe(world).of(wire.Frontier)
    world.send("shard-0-1", PRIMARY, report(2, 2))
    world.run(50 * MS)
    answer = wire.Synced if kind == "sync" else wire.Frontier
    assert [found.request for found in probe(world).of(answer)] == [1]
    answered = len(probe(world, "stranger").of(answer))
    assert answered == waiters.MAX_WAITERS - 1


def test_places_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "MAX_WAITERS", 4)
    requests = _Requests()
    assert all(requests.add(b"a", number, 10) for number in range(4))
    assert requests.add(b"a", 3, 11), "a repetition takes no other place"
    assert not requests.add(b"a", 4, 10)
    assert requests.add(b"b", 0, 10)
    assert requests.add(b"b", 1, 10)
    assert not requests.add(b"b", 2, 10), "two and two are fair"
    assert requests.add(b"c", 0, 10)
    assert len(requests) == 4
    assert sorted(requests.pop_below(11)) == [(b"b", 0, 10), (b"b", 1, 10), (b"c", 0, 10)]
    assert list(requests.pop_below(12)) == [(b"a", 3, 11)]
    assert len(requests) == 0
    assert not requests._gsns
