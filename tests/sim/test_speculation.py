"""Speculation in virtual time: the delay of early delivery, and runs that end a primary's view."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.sim.latency import Pair, World, measure, measure_speculation, run_in
from tests.sim.misspeculation import speculators
from tests.sim.mutants_of_speculation import lost_decisions
from tests.sim.mutation import LAN, busy
from tests.sim.speculators import Promises
from tests.simulator.kernel import MS, US
from ziplog.types import Confirmed, Delivery, Event, Failed, Record, RecordId


@pytest.mark.parametrize(("shards", "hops"), [(1, 2), (2, 2.8), (6, 3.3)])
def test_early_delivery_takes_one_delay_less(shards: int, hops: float) -> None:
    """With 1,500 records: 103, 133 and 158 µs early; 154, 182 and 211 µs final."""
    found = measure_speculation(shards, think_us=3000, count=300)
    plain = measure(shards, think_us=3000, count=300)
    assert found["early_share"] > 0.95
    assert found["failures"] == 0
    assert hops * 40 <= found["early_p50_us"] <= hops * 60
    assert found["early_p50_us"] <= found["confirmed_p50_us"] - 40
    assert found["confirmed_p50_us"] <= 1.08 * plain["delivery_p50_us"]


def test_early_delivery_does_not_wait_for_the_disk() -> None:
    """An insert follows the one before it, so it finds no flush under way."""
    flush_ns = 3 * MS
    early: list[int] = []
    for seed in (7, 8, 9):
        world = World(2, durability="disk", flush_ns=flush_ns)
        load = run_in(world, lambda cluster: Pair(cluster, 60, 8_000, speculates=True), seed)
        called = load.called.items()
        early += [load.early[gsn] - since for gsn, since in called if gsn in load.early]
        final = [load.delivered[gsn] - since for gsn, since in called]
        assert flush_ns <= median(final) <= flush_ns + 5 * 60 * US + MS
        assert min(load.inserted.values()) >= flush_ns
    assert len(early) > 150
    assert median(early) <= flush_ns / 10


def test_nothing_fails_without_faults() -> None:
    plans = [busy(seed, shards=2, conditions=LAN, speculators=2) for seed in (1, 2)]
    found = [one for plan in plans for one in speculators(plan)]
    assert sum(one.early for one in found) > 0
    assert sum(one.failures for one in found) == 0


def test_lost_decisions_are_withdrawn() -> None:
    found = [one for seed in (8, 9, 10, 13) for one in speculators(lost_decisions(seed))]
    assert sum(one.failures for one in found) > 0
    assert sum(one.early for one in found) > 100


def record(gsn: int) -> Record:
    return Record(RecordId(gsn, 0), b"", None, 0, 0)


def deliver(gsn: int) -> Delivery:
    return Delivery(record(gsn), speculative=True)


@pytest.mark.parametrize(
    ("rule", "events"),
    [
        ("W1", [deliver(2), deliver(2)]),
        ("W1", [deliver(2), Confirmed(RecordId(3, 0)), deliver(3)]),
        ("W2", [Confirmed(RecordId(3, 0)), Confirmed(RecordId(3, 0))]),
        ("W3", [deliver(2), deliver(4), Confirmed(RecordId(3, 0)), Failed(RecordId(2, 0))]),
        ("W4", [deliver(2), Failed(RecordId(2, 0))]),
    ],
    ids=str,
)
def test_broken_promises_are_found(rule: str, events: Any) -> None:
    with pytest.raises(AssertionError, match=f"{rule}: x"):
        Promises("x").add(events)


def test_kept_promises_are_not() -> None:
    promises = Promises("x")
    events: list[Event] = [deliver(2), deliver(4), deliver(6), Confirmed(RecordId(2, 0))]
    assert promises.add(events) == [record(2)]
    assert promises.add([Failed(RecordId(3, 0)), deliver(5)]) == []
    assert promises.add([Confirmed(RecordId(5, 0))]) == [record(5)]
    assert (promises.early, promises.failures, promises.open) == (4, 1, [])
    assert promises.withdrawn == 2
