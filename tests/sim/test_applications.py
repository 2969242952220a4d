"""Applications in virtual time: the latency that their kinds of reading add, by construction."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from tests.sim.applications import Consumer, run_application
from tests.sim.disturbed_applications import Changing, Killed, Straggling
from tests.sim.latency import run_in
from tests.sim.speculation import Bench, parser
from tests.simulator.kernel import MS, US, Kernel
from ziplog.types import Confirmed, Delivery, Failed, Record, RecordId

if TYPE_CHECKING:
    from ziplog.types import Event


def bench(*options: str) -> Bench:
    return Bench(parser().parse_args(["--count", "150", *options]))


@pytest.fixture(scope="module")
def memory() -> dict[str, Any]:
    one = bench()
    return one.compare(one.world(), 1.5)


@pytest.fixture(scope="module")
def disk() -> dict[str, Any]:
    one = bench()
    return one.compare(one.world("disk"), 1.5)


def test_a_speculation_delivers_one_hop_earlier(memory: dict[str, Any]) -> None:
    """With 1,000 records the ratios of delivery are 2.45, 3.44 and 1.40, of output 1.58, 1.78."""
    means = {kind: memory[kind]["mean_ms"] for kind in ("gate", "subscribe", "speculate")}
    assert 0.2 <= means["subscribe"]["delivery"] - means["speculate"]["delivery"] <= 0.4
    assert memory["delivery_gate/subscribe"] >= 2.2
    assert memory["delivery_gate/speculate"] >= 3.0
    assert memory["output_gate/subscribe"] >= 1.5
    assert memory["output_gate/speculate"] >= 1.65


def test_an_early_delivery_does_not_wait_for_flushes(disk: dict[str, Any]) -> None:
    """With 1,000 records and a flush of 3 ms the ratios are 4.55 and 1.35."""
    assert disk["delivery_subscribe/speculate"] >= 3.5
    assert 1.25 <= disk["output_subscribe/speculate"] <= 1.4
    assert disk["speculate"]["mean_ms"]["wait"] >= 1.5


def test_parts_add_up(memory: dict[str, Any], disk: dict[str, Any]) -> None:
    for figures in (memory, disk):
        for kind in ("gate", "subscribe", "speculate"):
            means = figures[kind]["mean_ms"]
            assert means["compute"] == 1.5
            assert sum(means.values()) <= 1.2 * figures[kind]["output"]["p50_ms"]


def test_a_speculating_reader_does_not_slow_inserts(
    memory: dict[str, Any], disk: dict[str, Any]
) -> None:
    for figures in (memory, disk):
        assert 0.95 <= figures["insert_subscribe/speculate"] <= 1.05


def test_a_long_computation_hides_the_delivery() -> None:
    one = bench("--pause-ms", "1")
    found = one.compare(one.world(), 50)
    assert 0.93 <= found["output_gate/speculate"] <= 1.07


@pytest.mark.nightly
def test_nothing_fails_while_shards_come_and_go() -> None:
    one = bench()
    setting = one.setting(one.world(), "speculate")
    load = run_in(setting.world, partial(Changing, setting=setting), 7)
    assert [change.refused for change in load.operator.changes] == [None] * len(Changing.CHANGES)
    assert load.failures == 0
    assert len(load.early) > 500


def test_a_parked_shard_delays_no_early_delivery() -> None:
    one = bench()
    setting = one.setting(one.world(shards=3), "speculate")
    load = run_in(setting.world, partial(Straggling, setting=setting), 7)
    p50s = {name: median(took) / MS for name, took in load.deliveries().items()}
    assert p50s["before"] < 1.2
    assert p50s["late"] > 100
    assert p50s["parked"] < 1.2
    assert load.failures == 0


@pytest.mark.nightly
def test_what_a_dead_primary_decided_alone_is_undone() -> None:
    one = bench()
    setting = one.setting(one.world(shards=1), "speculate")
    begin = partial(Killed, setting=setting, is_alone=True)
    loads = [run_in(setting.world, begin, seed) for seed in range(1, 7)]
    assert all(load.killed_at < load.confirmed_at for load in loads)
    assert sum(load.withdrawn for load in loads) > 0


def test_equal_seeds_give_equal_figures() -> None:
    one = bench()
    setting = one.setting(one.world(), "speculate")
    assert run_application(setting, 50, 3).took() == run_application(setting, 50, 3).took()


def deliver(gsn: int) -> Delivery:
    return Delivery(Record(RecordId(gsn, 0), b"", None, 0, 0), speculative=True)


def test_a_consumer_computes_one_batch_at_a_time_and_holds_its_output() -> None:
    kernel = Kernel(1)
    consumer, start = Consumer(kernel, 100 * US), kernel.now
    steps: list[tuple[int, list[Event]]] = [
        (0, [deliver(1)]),
        (10, [deliver(2), deliver(3), Confirmed(RecordId(1, 0))]),
        (150, [deliver(4)]),
        (170, [Failed(RecordId(2, 0))]),
        (180, [deliver(3), Confirmed(RecordId(3, 0))]),
    ]
    for at_us, events in steps:
        kernel.at(start + at_us * US, partial(consumer.add, events))
    kernel.run(MS)
    begun = {gsn: (at - start) // US for gsn, at in consumer.began.items()}
    emitted = {gsn: (at - start) // US for gsn, at in consumer.emitted.items()}
    assert begun == {1: 0, 2: 100, 3: 200}
    assert emitted == {1: 100, 2: 200, 3: 300}
    assert consumer.undone == 1
