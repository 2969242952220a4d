"""The meter: changes are reported within milliseconds, random variation and bursts are not."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import pairwise
from random import Random
from statistics import median
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard.ordering import rate as module
from shard.ordering.rate import REPORT_INTERVAL_NS, SAMPLE_INTERVAL_NS, WINDOWS, Meter, is_unlikely
from shard.replica import Replica
from tests.properties import examples
from tests.world import MS, S, World, calm_world, first_lease, insert
from ziplog import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Time until a new meter has reported the rate.
WARM_UP = 3 * S
HOUR = 3600 * S


@examples(200)
@given(
    st.integers(0, 10_000),
    st.floats(0, 10_000),
    st.floats(0, 0.99),
    st.sampled_from([sigmas * sigmas for _, sigmas in WINDOWS]),
)
def test_what_is_likely_stays_so_if_the_expected_count_is_nearer(
    came: int, expected: float, part: float, squared_sigmas: float
) -> None:
    nearer = expected + (came - expected) * part
    if is_unlikely(came, nearer, squared_sigmas):
        assert is_unlikely(came, expected, squared_sigmas)


class Bench:
    """A meter, with samples after batches and when due, and heartbeats."""

    def __init__(self) -> None:
        self.meter = Meter(0)
        self.records = 0
        self.beat_due = 1 * S
        self.reports: list[tuple[int, int]] = []
        self.samples = 0

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
            self.samples += 1
            rate = self.meter.sample(self.records, now)
            if rate is not None:
                self.reports.append((now, rate))

    def offer(self, random: Random, rate: float, until: int, sizes: tuple[int, ...] = (1,)) -> None:
        """Let units arrive at random, `rate` records a second, from the last time on."""
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
    """Return a meter that has reported the rate."""
    return deepcopy(_steady(seed, rate, sizes))


@cache
def _steady(seed: int, rate: float, sizes: tuple[int, ...]) -> tuple[Bench, Random]:
    bench, random = Bench(), Random(seed)
    bench.offer(random, rate, WARM_UP + random.randrange(1 * S), sizes)
    bench.reports.clear()
    return bench, random


def delay_ms(seed: int, before: int, after: int) -> float:
    """Return the time until a change is reported."""
    bench, random = steady(seed, before)
    began = bench._now
    if after:
        bench.offer(random, after, began + 200 * MS)
    else:
        bench.wait(began + 200 * MS)
    changes = [at - began for at, rate in bench.reports if (rate > before) == (after > before)]
    assert changes, f"{before} -> {after} was not reported"
    return changes[0] / MS


# --- changes ---


@pytest.mark.parametrize(
    ("before", "after", "at_most_ms"),
    [(10_000, 15_000, 18), (10_000, 5_000, 18), (10_000, 0, 14), (10_000, 40_000, 4),
     (1_000, 10_000, 5), (0, 10_000, 12)],
)  # fmt: skip
def test_a_change_is_reported_within_milliseconds(before: int, after: int, at_most_ms: int) -> None:
    seeds = range(9)
    assert median(delay_ms(seed, before or 1, after) for seed in seeds) <= at_most_ms


def test_the_reported_rate_soon_equals_the_rate() -> None:
    bench, random = steady(1, 10_000)
    bench.offer(random, 15_000, bench._now + 100 * MS)
    assert 13_000 < bench.meter.reported < 17_500
    bench.offer(random, 15_000, bench._now + 3 * S)
    assert 14_500 < bench.meter.reported < 15_500, "a heartbeat reports it more exactly"


def test_a_rate_is_reported_at_most_every_five_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, random = steady(1, 10_000)
    # Everything is a change.
    monkeypatch.setattr(module, "WINDOWS", [(length, 0.1) for length, _ in WINDOWS])
    bench.offer(random, 10_000, bench._now + 200 * MS)
    assert min(b - a for (a, _), (b, _) in pairwise(bench.reports)) >= REPORT_INTERVAL_NS
    assert len(bench.reports) > 20


# --- random variation ---


@pytest.mark.parametrize(
    ("rate", "sizes", "seconds"),
    [(10_000, (1,), 20), (1_000, (1,), 60), (10_000, (16,), 60), (64_000, (64,), 60),
     (3_000, (1,) * 30 + (200,), 100)],
)  # fmt: skip
def test_random_variation_is_not_a_change(rate: int, sizes: tuple[int, ...], seconds: int) -> None:
    bench, random = steady(7, rate, sizes)
    bench.offer(random, rate, bench._now + seconds * S, sizes)
    assert len(bench.reports) <= 2, "a false alarm is rare, and harmless"


def test_a_low_rate_is_reported_by_heartbeats_only() -> None:
    bench, random = steady(5, 10)
    bench.offer(random, 10, bench._now + 1 * HOUR // 4)
    assert len(bench.reports) <= 2
    assert 0 <= bench.meter.reported < 30


def regular(period_ms: float, size: int, phase_ms: float = 0.0) -> Bench:
    """Return a meter after seven seconds of batches at regular intervals."""
    bench = Bench()
    at = phase_ms + period_ms
    while at < 7_000:
        bench.batch(int(at * MS), size)
        at += period_ms
    bench._now = int((at - period_ms) * MS)
    return bench


@pytest.mark.parametrize("phase_ms", [0.0, 0.5, 3.3, 7.1])
@pytest.mark.parametrize("size", [10, 100, 300])
@pytest.mark.parametrize("period_ms", [3, 5, 10, 16, 20, 25, 40])
def test_batches_at_regular_intervals_are_one_rate(
    period_ms: int, size: int, phase_ms: float
) -> None:
    bench = regular(period_ms, size, phase_ms)
    assert [rate for at, rate in bench.reports if at > 2 * S] == []
    assert bench.meter.reported == pytest.approx(size * 1_000 / period_ms, rel=0.08)


@pytest.mark.parametrize("period_ms", [5, 10, 20])
def test_the_end_of_regular_batches_is_reported(period_ms: int) -> None:
    bench = regular(period_ms, 100)
    bench.wait(bench._now + 150 * MS)
    changes = [rate for at, rate in bench.reports if at > bench._now]
    assert changes
    assert changes[0] < 25_000 / period_ms
    bench.wait(bench._now + 3 * S)
    assert bench.meter.reported == 0


@pytest.mark.parametrize("period_ms", [5, 10, 20])
def test_more_frequent_batches_are_reported(period_ms: int) -> None:
    bench = regular(period_ms, 100)
    began = bench._now
    for ms in range(100):
        bench.batch(began + (ms + 1) * MS, 100)
    assert bench.reports[-1][1] > 50_000
    assert bench.reports[-1][0] - began < 50 * MS


def test_one_large_unit_is_not_a_rate() -> None:
    """A unit is one arrival, with any number of records."""
    bench, random = steady(2, 1_000)
    bench.batch(bench._now, 100_000)
    bench.offer(random, 1_000, bench._now + 900 * MS)
    assert all(rate < 10_000 for _, rate in bench.reports)
    bench.offer(random, 1_000, bench._now + 5 * S)
    assert 800 < bench.meter.reported < 1_200


def test_one_large_unit_among_many_small_ones_is_not_a_rate() -> None:
    for seed in range(5):
        bench, random = steady(seed, 10_000)
        bench.batch(bench._now, 200)
        bench.offer(random, 10_000, bench._now + 20 * MS)
        assert bench.reports == []


def test_a_change_below_an_eighth_is_reported_by_heartbeats_only() -> None:
    for per_ms, is_reported in ((930, False), (1_070, False), (800, True), (1_200, True)):
        bench = Bench()
        for ms in range(1, 2_500):
            bench.batch(ms * MS, 1_000)
        bench.reports.clear()
        for ms in range(2_500, 2_900):
            bench.batch(ms * MS, per_ms)
        assert bool(bench.reports) is is_reported


def test_one_large_unit_after_a_pause_is_not_a_rate() -> None:
    bench = Bench()
    bench.wait(20 * S)
    bench.batch(20 * S, 100_000)
    bench.batch(20 * S + 2 * MS, 100_000)
    bench.wait(20 * S + 900 * MS)
    assert bench.reports == []


# --- what it costs ---


def test_the_rate_is_sampled_at_most_once_a_millisecond() -> None:
    bench, random = Bench(), Random(1)
    bench.offer(random, 100_000, 1 * S)
    assert bench.samples <= 1 * S // SAMPLE_INTERVAL_NS + 1


def test_windows_hold_no_more_than_they_need() -> None:
    bench, random = Bench(), Random(1)
    bench.offer(random, 5_000, 5 * S)
    for (length, _), window in zip(WINDOWS, bench.meter._windows, strict=True):
        assert len(window) <= 6
        assert bench.meter._last.at - window[0].at >= length
        assert len(window) == 1 or bench.meter._last.at - window[1].at < length


def test_idle_sampling_runs_only_while_the_reported_rate_is_positive() -> None:
    bench, _ = steady(1, 10_000)
    bench.wait(bench._now + 500 * MS)
    assert bench.reports[-1][1] == 0, "the silence was noticed"
    before = bench.samples
    bench.wait(bench._now + HOUR)
    assert bench.samples == before


# --- a server ---


def rates(world: World) -> list[tuple[str, int]]:
    return [(src, m.per_s) for src, _, m in world.sent if isinstance(m, wire.Rate)]


def offer(world: World, count: int, every: int = MS // 10) -> None:
    """Let one record arrive every `every` ns."""
    done = len([None for _, _, m in world.sent if isinstance(m, wire.Insert)]) // 2
    for seq in range(done + 1, done + count + 1):
        for name in ("shard-0-0", "shard-0-1"):
            world.send("c", name, insert(seq, first_incomplete=max(1, seq - 50)))
        world.run(every)


def quiet_world() -> World:
    return calm_world(lease=first_lease(1, epoch_ms=10_000))


def test_the_primary_reports_that_inserts_start_and_stop() -> None:
    world = quiet_world()
    offer(world, 300)
    assert {src for src, _ in rates(world)} == {"shard-0-0"}
    assert 7_000 < rates(world)[-1][1] < 13_000
    world.run(20 * MS)
    assert rates(world)[-1] == ("shard-0-0", 0), "no other timer would have fired"


def test_the_heartbeat_carries_the_rate() -> None:
    world = quiet_world()
    offer(world, 2_500, every=1 * MS)
    beats = [m for _, _, m in world.sent if isinstance(m, wire.Heartbeat)]
    assert all(950 < m.rate_per_s < 1_050 for m in beats[-2:])
    world.run(3 * S)
    beats = [m for _, _, m in world.sent if isinstance(m, wire.Heartbeat)]
    assert [m.rate_per_s for m in beats[-2:]] == [0, 0]


def test_a_leaving_shard_does_not_report_a_pause() -> None:
    world = quiet_world()
    offer(world, 300)
    world.sent.clear()
    primary = world.nodes["shard-0-0"]
    assert isinstance(primary, Replica)
    primary.state.shard_state = "leaving"
    primary.state.last_insert = 2**62  # it is never drained
    world.run(100 * MS)
    assert rates(world) == []
