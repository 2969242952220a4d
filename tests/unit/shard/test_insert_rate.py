"""Limits of each client's insert rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shard.ordering.insert_rate import BURST_NS, MAX_PAUSE_NS, InsertRate
from shard.replica import Replica
from shard.state.sessions import Session
from tests.world import MS, US, calm_world, insert
from ziplog.core.node import Pause, Received, SettingsChanged
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from tests.world import World

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def admitted(rate: InsertRate, records: int, size: int, gap_ns: int, seconds: int) -> int:
    """Return the records that a client inserts in a time; it tries again every `gap_ns`."""
    session, now, done, free_at = Session(b"c", 0), 0, 0, 0
    while now < seconds * NS_PER_S:
        if now >= free_at:
            done += records
            pause = rate.on_admitted(session, b"r", records, size, now)
            free_at = pause.until if pause is not None else now
        now += gap_ns
    return done


@pytest.mark.parametrize("records", [1, 10, 100])
def test_a_client_gets_its_rate_and_no_more(records: int) -> None:
    rate = InsertRate(1000, 0)
    done = admitted(rate, records, 100, 100_000, 10)
    assert 10_000 - records <= done <= 10_000 + 1000 * BURST_NS // NS_PER_S + records


def test_bytes_are_limited_too() -> None:
    done = admitted(InsertRate(0, 1_000_000), 1, 4096, 100_000, 10)
    assert done * 4096 == pytest.approx(10_000_000, rel=0.03)
    both = admitted(InsertRate(100, 1_000_000), 1, 4096, 100_000, 10)
    assert both == pytest.approx(1000, rel=0.03), "the lower limit counts"


def test_a_client_below_its_rate_is_never_paused() -> None:
    rate, session = InsertRate(1000, 0), Session(b"c", 0)
    for now in range(0, NS_PER_S, MS):
        assert rate.on_admitted(session, b"r", 1, 100, now) is None


def test_a_burst_is_admitted_and_a_pause_is_short() -> None:
    rate, session = InsertRate(1000, 0), Session(b"c", 0)
    assert rate.on_admitted(session, b"r", 100, 0, 0) is None
    assert rate.on_admitted(session, b"r", 50, 0, 0) == Pause(b"r", 50 * MS)
    assert rate.on_admitted(session, b"r", 10**6, 0, 0) == Pause(b"r", MAX_PAUSE_NS)


def test_without_a_limit_nothing_is_counted() -> None:
    rate, session = InsertRate(0, 0), Session(b"c", 0)
    assert not rate.is_limited
    assert rate.on_admitted(session, b"r", 10**9, 10**12, 5) is None


def limited_world(inserts_per_s: int) -> World:
    world = calm_world()
    for name in (BACKUP, PRIMARY):
        node = world.nodes[name]
        assert isinstance(node, Replica)
        node.step(SettingsChanged(1000, inserts_per_s), world.now)
    return world


def pauses(world: World, name: str, seq: int) -> list[Pause]:
    """Return the pauses that an insert causes at a server."""
    effects = world.nodes[name].step(Received(b"\0c", insert(seq)), world.now)
    return [effect for effect in effects if isinstance(effect, Pause)]


def test_both_servers_pause_a_client_that_is_too_fast() -> None:
    world = limited_world(1)
    for name in (BACKUP, PRIMARY):
        assert pauses(world, name, 1) == [Pause(b"\0c", world.now + NS_PER_S - BURST_NS)]
    for name in (BACKUP, PRIMARY):
        assert pauses(world, name, 1) == [], "a copy of the insert costs nothing"


def test_limited_inserts_take_no_short_path() -> None:
    def taken(world: World) -> int:
        before = world.plain_inserts
        for seq in range(1, 20):
            for name in (BACKUP, PRIMARY):
                world.send("c", name, insert(seq, first_incomplete=seq))
            world.run(300 * US)
        return world.plain_inserts - before

    assert taken(calm_world()) > 0
    assert taken(limited_world(1_000_000)) == 0
    assert taken(limited_world(0)) > 0
