"""The meter: changes are told within milliseconds, chance and bursts are not."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import median
from typing import TYPE_CHECKING

import pytest

from shard.ordering import rate as module
from shard.ordering.rate import REPORT_INTERVAL_NS, SAMPLE_INTERVAL_NS, WINDOWS, Meter
from shard.replica import Replica
from tests.world import MS, S, World, calm_world, first_lease, insert
from ziplog import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

#: As long as it takes until a meter that starts has told the rate.
WARM_UP = 3 * S
HOUR = 3600 * S


class Bench:
    """A meter, and the driver's part: looks behind batches and when it asks, heartbeats."""

    def __init__(self) -> None:
        self.meter = Meter(0)
        self.records = 0
        self.beat_due = 1 * S
        self.told: list[tuple[int, int]] = []
        self.looks = 0

    def batch(self, now: int, records: int) -> None:
        self.wait(now)
        self.records += records
        self._look(now)

    def wait(self, until: int) -> None:
        """Let time pass without arrivals."""
        while (at := min(self.beat_due, self.meter.silence_due or self.beat_due)) < until:
            if at == self.beat_due:
                self.meter.average(self.records, at)
                self.beat_due += 1 * S
            else:
                self._look(at)

    def _look(self, now: int) -> None:
        if now >= self.meter.due:
            self.looks += 1
            rate = self.meter.sample(self.records, now)
            if rate is not None:
                self.told.append((now, rate))

    def offer(self, random: Random, rate: float, until: int, sizes: tuple[int, ...] = (1,)) -> None:
        """Let units arrive by chance, `rate` records a second, from the last time on."""
        for at, size in arrivals(random, rate, self._now, until, sizes):
            self.batch(at, size)
        self.wait(until)
        self._now = until

    _now = 0


def arrivals(
    random: Random, rate: float, start: int, stop: int, sizes: tuple[int, ...]
) -> Iterator[tuple[int, int]]:
    per_ns = rate * len(sizes) / sum(sizes) / S
    at = start + random.expovariate(per_ns)
    while at < stop:
        yield int(at), random.choice(sizes)
        at += random.expovariate(per_ns)


def steady(seed: int, rate: float, sizes: tuple[int, ...] = (1,)) -> tuple[Bench, Random]:
    bench, random = Bench(), Random(seed)
    bench.offer(random, rate, WARM_UP + random.randrange(1 * S), sizes)
    bench.told.clear()
    return bench, random


def delay_ms(seed: int, before: int, after: int) -> float:
    """Return how long it takes until a change is told."""
    bench, random = steady(seed, before)
    began = bench._now
    if after:
        bench.offer(random, after, began + 200 * MS)
    else:
        bench.wait(began + 200 * MS)
    changes = [at - began for at, rate in bench.told if (rate > before) == (after > before)]
    assert changes, f"{before} -> {after} was not told"
    return changes[0] / MS


# --- changes ---


@pytest.mark.parametrize(
    ("before", "after", "at_most_ms"),
    [(10_000, 15_000, 18), (10_000, 5_000, 18), (10_000, 0, 14), (10_000, 40_000, 4),
     (1_000, 10_000, 5), (0, 10_000, 12)],
)  # fmt: skip
def test_a_change_is_told_within_milliseconds(before: int, after: int, at_most_ms: int) -> None:
    seeds = range(9)
    assert median(delay_ms(seed, before or 1, after) for seed in seeds) <= at_most_ms


def test_what_is_told_is_soon_the_rate() -> None:
    bench, random = steady(1, 10_000)
    bench.offer(random, 15_000, bench._now + 100 * MS)
    assert 13_000 < bench.meter.reported < 17_500
    bench.offer(random, 15_000, bench._now + 3 * S)
    assert 14_500 < bench.meter.reported < 15_500, "a heartbeat says it more exactly"


def test_a_rate_is_told_at_most_every_five_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, random = steady(1, 10_000)
    # Everything is a change.
    monkeypatch.setattr(module, "WINDOWS", [(length, 0.1) for length, _ in WINDOWS])
    bench.offer(random, 10_000, bench._now + 200 * MS)
    assert min(b - a for (a, _), (b, _) in pairwise(bench.told)) >= REPORT_INTERVAL_NS
    assert len(bench.told) > 20


# --- chance ---


@pytest.mark.parametrize(
    ("rate", "sizes", "seconds"),
    [(10_000, (1,), 20), (1_000, (1,), 60), (10_000, (16,), 60), (64_000, (64,), 60),
     (3_000, (1,) * 30 + (200,), 100)],
)  # fmt: skip
def test_chance_is_no_change(rate: int, sizes: tuple[int, ...], seconds: int) -> None:
    bench, random = steady(7, rate, sizes)
    bench.offer(random, rate, bench._now + seconds * S, sizes)
    assert len(bench.told) <= 2, "a false alarm is rare, and harmless"


def test_a_trickle_is_left_to_the_heartbeats() -> None:
    bench, random = steady(5, 10)
    bench.offer(random, 10, bench._now + 1 * HOUR // 4)
    assert len(bench.told) <= 2
    assert 0 <= bench.meter.reported < 30


def test_one_large_unit_is_no_rate() -> None:
    """It is one arrival, however many records it has."""
    bench, random = steady(2, 1_000)
    bench.batch(bench._now, 100_000)
    bench.offer(random, 1_000, bench._now + 900 * MS)
    assert all(rate < 10_000 for _, rate in bench.told)
    bench.offer(random, 1_000, bench._now + 5 * S)
    assert 800 < bench.meter.reported < 1_200


def test_one_large_unit_among_many_small_ones_is_no_rate() -> None:
    for seed in range(5):
        bench, random = steady(seed, 10_000)
        bench.batch(bench._now, 200)
        bench.offer(random, 10_000, bench._now + 20 * MS)
        assert bench.told == []


def test_less_than_an_eighth_is_left_to_the_heartbeats() -> None:
    for per_ms, is_told in ((930, False), (1_070, False), (800, True), (1_200, True)):
        bench = Bench()
        for ms in range(1, 2_500):
            bench.batch(ms * MS, 1_000)
        bench.told.clear()
        for ms in range(2_500, 2_900):
            bench.batch(ms * MS, per_ms)
        assert bool(bench.told) is is_told


def test_one_large_unit_after_a_pause_is_no_rate() -> None:
    bench = Bench()
    bench.wait(20 * S)
    bench.batch(20 * S, 100_000)
    bench.batch(20 * S + 2 * MS, 100_000)
    bench.wait(20 * S + 900 * MS)
    assert bench.told == []


# --- what it costs ---


def test_it_is_looked_at_no_more_often_than_once_a_millisecond() -> None:
    bench, random = Bench(), Random(1)
    bench.offer(random, 100_000, 1 * S)
    assert bench.looks <= 1 * S // SAMPLE_INTERVAL_NS + 1


def test_windows_hold_no_more_than_they_need() -> None:
    bench, random = Bench(), Random(1)
    bench.offer(random, 5_000, 5 * S)
    for (length, _), window in zip(WINDOWS, bench.meter._windows, strict=True):
        assert len(window) <= 6
        assert bench.meter._last.at - window[0].at >= length
        assert len(window) == 1 or bench.meter._last.at - window[1].at < length


def test_silence_is_waited_for_only_while_a_rate_was_told() -> None:
    bench, _ = steady(1, 10_000)
    bench.wait(bench._now + 500 * MS)
    assert bench.told[-1][1] == 0, "the silence was noticed"
    before = bench.looks
    bench.wait(bench._now + HOUR)
    assert bench.looks == before


# --- a server ---


def rates(world: World) -> list[tuple[str, int]]:
    return [(src, m.per_s) for src, _, m in world.sent if isinstance(m, wire.Rate)]


def offer(world: World, count: int, every: int = MS // 10) -> None:
    """Let records come, one each `every` ns."""
    done = len([None for _, _, m in world.sent if isinstance(m, wire.Insert)]) // 2
    for seq in range(done + 1, done + count + 1):
        for name in ("shard-0-0", "shard-0-1"):
            world.send("c", name, insert(seq, first_incomplete=max(1, seq - 50)))
        world.run(every)


def quiet_world() -> World:
    return calm_world(lease=first_lease(1, epoch_ms=10_000))


def test_the_primary_tells_the_membership_service_that_inserts_come_and_cease() -> None:
    world = quiet_world()
    offer(world, 300)
    assert {src for src, _ in rates(world)} == {"shard-0-0"}
    assert 7_000 < rates(world)[-1][1] < 13_000
    world.run(20 * MS)
    assert rates(world)[-1] == ("shard-0-0", 0), "nothing else would have woken it"


def test_the_heartbeat_says_the_rate() -> None:
    world = quiet_world()
    offer(world, 2_500, every=1 * MS)
    beats = [m for _, _, m in world.sent if isinstance(m, wire.Heartbeat)]
    assert all(950 < m.rate_per_s < 1_050 for m in beats[-2:])
    world.run(3 * S)
    beats = [m for _, _, m in world.sent if isinstance(m, wire.Heartbeat)]
    assert [m.rate_per_s for m in beats[-2:]] == [0, 0]


def test_a_shard_that_leaves_says_nothing_for_a_pause() -> None:
    world = quiet_world()
    offer(world, 300)
    world.sent.clear()
    primary = world.nodes["shard-0-0"]
    assert isinstance(primary, Replica)
    primary._state.shard_state = "leaving"
    primary._state.last_insert = 2**62  # it is never drained
    world.run(100 * MS)
    assert rates(world) == []
