"""LogDB benchmarks: computations, key distributions and delayed inserts, without any process."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from logdb_bench import contention, cpu, delayed_inserts, ycsb
from logdb_bench.delayed_inserts import DelayedCore
from logdb_bench.zipfian import ScrambledZipfian, Uniform, Zipfian, fnv_hash, zeta
from metrics import frames
from metrics.closed_loop import Outcome, Tally, merged

import logdb.wire
import ziplog.wire
from ziplog import policy
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import InsertRequest, Preferences, TailRequest
from ziplog.core.entries import Body, Unit
from ziplog.core.node import BatchEnd, Call, Cancelled, Complete, Received, Wakeup
from ziplog.errors import DeadlineError
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import Deliver, TailReply

US = 1000
HOLD = delayed_inserts.SCALOG_US * US


# --- YCSB's distributions ---


def test_zipfian_draws_each_number_as_often_as_it_should() -> None:
    items, draws = 50, 200_000
    zipfian = Zipfian(random.Random(1), items)
    counts = Counter(zipfian.draw() for _ in range(draws))
    assert set(counts) <= set(range(items))
    for number in range(2):  # these are exact
        expected = draws / (number + 1) ** 0.99 / zeta(items)
        assert counts[number] == pytest.approx(expected, rel=0.03)
    # Further ones are approximated, by what Gray et al. give: the sums agree within some percent.
    for upto in (5, 10, 25, 50):
        expected = draws * zeta(upto) / zeta(items)
        assert sum(counts[number] for number in range(upto)) == pytest.approx(expected, rel=0.06)


def test_the_scrambled_generator_has_the_stated_zeta() -> None:
    # The sum to n, and the integral from there on: exact to 1/n^0.99 / 2.
    n, items = 100_000, 10_000_000_000
    rest = (items**0.01 - n**0.01) / 0.01
    assert zeta(n) + rest == pytest.approx(26.46902820178302, abs=1e-4)


def test_scrambled_zipfian_has_the_frequent_numbers_all_over_the_range() -> None:
    items, draws = 1000, 100_000
    scrambled = ScrambledZipfian(random.Random(2), items)
    counts = Counter(scrambled.draw() for _ in range(draws))
    assert set(counts) <= set(range(items))
    (first, most), (second, more) = counts.most_common(2)
    assert (first, second) == (fnv_hash(0) % items, fnv_hash(1) % items)
    # Other numbers are sometimes scrambled to the same keys.
    assert most / draws == pytest.approx(1 / 26.469 + 0.9 / items, rel=0.05)
    assert more / draws == pytest.approx(0.5**0.99 / 26.469 + 0.9 / items, rel=0.05)
    low = sum(count for number, count in counts.items() if number < items / 2)
    assert 0.35 < low / draws < 0.65


def test_the_hash_equals_ycsbs() -> None:
    # The FNV-1a of eight zero bytes is 0xA8C7F832281A39C5, which Java takes for negative.
    assert fnv_hash(0) == 2**64 - 0xA8C7F832281A39C5
    assert all(0 <= fnv_hash(number) < 2**63 for number in range(1000))
    assert len({fnv_hash(number) for number in range(1000)}) == 1000


def test_uniform_draws_all() -> None:
    uniform = Uniform(random.Random(3), 10)
    counts = Counter(uniform.draw() for _ in range(10_000))
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 1.2 * min(counts.values())


# --- inserts that take longer ---


class Script:
    """Stand-in for a client core: returns scripted effects, and records its inputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self.effects: list[Any] = []
        monkeypatch.setattr(ClientCore, "step", self._step)
        monkeypatch.setattr(ClientCore, "next_wakeup", lambda _: None)

    def _step(self, event: Any, _now: int) -> list[Any]:
        self.seen.append(event)
        effects, self.effects = self.effects, []
        return effects

    def answer(self, call: int, result: Any) -> None:
        self.effects.append(Complete(call, result))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def core() -> DelayedCore:
    return DelayedCore(
        bytes(16), ["127.0.0.1:1"], Preferences(policy.random()), wall_offset_us=7_000_000
    )


def insert(core: DelayedCore, call: int, now: int) -> list[Any]:
    return core.step(Call(call, InsertRequest(10**12, [b"x"], RID_GENESIS, None, 0)), now)


def delivered(*called_us: int, src: bytes = b"server") -> Received:
    """Return a delivery of records with these times of their insert calls."""
    encode = msgspec.msgpack.encode
    units = [
        Unit(1, [n + 1], encode(Body(7_000_000 + us if us else 0, None, [b"x"])))
        for n, us in enumerate(called_us)
    ]
    return Received(src, Deliver(1, 0, 1, 0, 1, 1, 99, units))


def test_an_acknowledgement_is_delayed_from_the_call_on(core: DelayedCore, script: Script) -> None:
    assert insert(core, 1, now=5 * US) == []
    script.answer(1, [RecordId(3, 0)])
    assert core.step(BatchEnd(), 200 * US) == []
    assert core.next_wakeup() == 5 * US + HOLD
    assert core.step(Wakeup(), 5 * US + HOLD - 1) == []
    assert core.step(Wakeup(), 5 * US + HOLD) == [Complete(1, [RecordId(3, 0)])]
    assert core.next_wakeup() is None


def test_slow_or_failed_inserts_are_not_delayed(core: DelayedCore, script: Script) -> None:
    for call in (1, 2):
        insert(core, call, now=0)
    failed = DeadlineError("too late")
    script.answer(2, failed)
    assert core.step(BatchEnd(), 100 * US) == [Complete(2, failed)]
    script.answer(1, [RecordId(3, 0)])
    assert core.step(BatchEnd(), HOLD + 1) == [Complete(1, [RecordId(3, 0)])]


def test_other_responses_are_not_delayed(core: DelayedCore, script: Script) -> None:
    script.answer(1, RecordId(9, 0))
    assert core.step(Call(1, TailRequest(10**12)), 0) == [Complete(1, RecordId(9, 0))]
    reply = Received(b"server", TailReply(1, 0, 1, 0, 1, 5, 6))
    core.step(reply, 0)
    assert script.seen[-1] is reply


def test_acknowledgements_come_in_the_order_of_the_calls(core: DelayedCore, script: Script) -> None:
    insert(core, 1, now=0)
    insert(core, 2, now=50 * US)
    for call in (2, 1):
        script.answer(call, [RecordId(call, 0)])
    core.step(BatchEnd(), 100 * US)
    assert [effect.id for effect in core.step(Wakeup(), HOLD + 49 * US)] == [1]
    assert [effect.id for effect in core.step(Wakeup(), HOLD + 50 * US)] == [2]


def test_a_cancelled_insert_is_forgotten(core: DelayedCore, script: Script) -> None:
    insert(core, 1, now=0)
    core.step(Cancelled(1), 10 * US)
    assert core._called == {}
    assert core.next_wakeup() is None
    assert isinstance(script.seen[-1], Cancelled)


def test_a_delivery_is_delayed_from_the_insert_call_on(core: DelayedCore, script: Script) -> None:
    event = delivered(100, 150)
    core.step(event, 300 * US)
    assert script.seen == []
    # The last record of the message counts.
    assert core.next_wakeup() == 150 * US + HOLD
    core.step(Wakeup(), 150 * US + HOLD)
    assert script.seen == [event, Wakeup()]
    assert core.next_wakeup() is None


def test_a_servers_messages_stay_in_order_and_others_pass(
    core: DelayedCore, script: Script
) -> None:
    first, second = delivered(100), delivered()
    other = delivered(src=b"other")
    for event in (first, second, other):
        core.step(event, 300 * US)
    assert script.seen == [other]
    core.step(Wakeup(), 100 * US + HOLD)
    assert script.seen == [other, first, second, Wakeup()]


def test_old_records_and_records_without_a_time_pass_at_once(
    core: DelayedCore, script: Script
) -> None:
    old, timeless = delivered(100), delivered(0)
    core.step(old, 100 * US + HOLD)
    core.step(timeless, 100 * US + HOLD)
    assert script.seen == [old, timeless]


def test_different_clocks_delay_nothing_longer_than_an_insert(
    core: DelayedCore, script: Script
) -> None:
    core.step(delivered(10**9), 300 * US)
    assert core.next_wakeup() == 300 * US + HOLD


# --- figures ---


def outcome(done_us: list[int], aborted: int, seconds: float = 2.0, cpu_s: float = 0.5) -> Outcome:
    return Outcome(seconds, {"transaction": Tally(done_us, aborted)}, len(done_us), cpu_s)


def test_tallies_add_up() -> None:
    both = merged([{"a": Tally([1, 2], 1)}, {"a": Tally([3], 0), "b": Tally([], 2)}])
    assert both == {"a": Tally([1, 2, 3], 1), "b": Tally([], 2)}
    of = Outcome(2.0, both, 3, 0.1).all.figures(2.0)
    assert of == {
        "per_s": 1.5, "abort_share": 0.5, "p50_us": 2, "p99_us": 3, "count": 3, "aborted": 3,
    }  # fmt: skip


def test_a_point_is_the_median_of_its_rounds() -> None:
    rounds = [outcome([100] * 10, 0), outcome([300] * 30, 10), outcome([200] * 20, 20)]
    assert contention.point(rounds) == {
        "per_s": 10, "abort_share": 0.25, "p50_us": 200, "p99_us": 200, "client_us": 25_000,
    }  # fmt: skip


def test_a_point_without_commits_has_no_latency() -> None:
    found = contention.point([outcome([], 4)])
    assert (found["per_s"], found["abort_share"], found["p50_us"]) == (0, 1, None)


def test_workloads_report_each_kind_of_operation() -> None:
    one = {"read": Tally([10, 20], 0), "update": Tally([30], 0)}
    two = {"read": Tally([20, 30], 0)}
    found = ycsb.figures([Outcome(1.0, tallies, 0, 0.0) for tallies in (one, two)])
    assert found["all"]["per_s"] == 2.5
    assert found["read"] == {"per_s": 2, "p50_us": 15, "p99_us": 25, "aborted": 0}
    assert found["update"]["per_s"] == 1


def test_the_table_of_system_calls_is_read() -> None:
    lines = [
        "% time     seconds  usecs/call     calls    errors syscall",
        "------ ----------- ----------- --------- --------- ----------------",
        " 61.22    0.000300           2       150           poll",
        " 38.78    0.000190           1       120         7 recvfrom",
        "------ ----------- ----------- --------- --------- ----------------",
        "100.00    0.000490           1       270         7 total",
    ]
    assert cpu.system_calls(lines) == {"poll": 150, "recvfrom": 120}


def test_frames_are_counted_by_kind() -> None:
    assert frames.kind(ziplog.wire.encode(logdb.wire.Open(1, 2, bytes(8)))) == "Open"
    assert frames.kind(ziplog.wire.encode(delivered().message)) == "Deliver"
    assert frames.kind(b"") == frames.kind(b"\x93\xcd\xff\xff") == "unknown"
