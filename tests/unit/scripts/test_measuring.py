"""The arithmetic of measurements, against vectors and against the plain way to do it."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import bench
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_bench import failure, reconfigure, sequential
from metrics import noops, tables
from metrics.environment import environment
from metrics.leases import share_of
from metrics.load import Client, Insert, Outcome
from metrics.rounds import alternate, ratio
from metrics.windows import (
    counts,
    distribution,
    longest_pause,
    percentile,
    percentile_ms,
    phases,
    sorted_in,
)

from shard.storage.segment_store import SegmentStore
from ziplog.client.common.lease_map import LeaseMap
from ziplog.core.entries import Place, Skip
from ziplog.core.view import NO_DIGEST, Lease, Member, run_of
from ziplog.segments.entry import Entry

if TYPE_CHECKING:
    from pathlib import Path

times = st.floats(0, 100, allow_nan=False)
EPOCH = 1000


def lease(*weights: int, epochs: int = 4) -> Lease:
    members = tuple(Member(shard, 1, weight) for shard, weight in enumerate(weights))
    return Lease(1, NO_DIGEST, 1, 0, epochs, EPOCH, 10, members)


# --- percentiles and windows ---


@given(st.lists(times, min_size=1), st.floats(0, 100))
def test_a_percentile_is_the_least_value_with_enough_values_not_above(
    values: list[float], percent: float
) -> None:
    found = percentile(values, percent)
    enough = len(values) * percent / 100
    assert found == min(v for v in values if sum(w <= v for w in values) >= enough)


def test_percentiles_of_a_hundred_and_of_nothing() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, p) for p in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([], 50) is None


def test_percentiles_in_milliseconds() -> None:
    assert percentile_ms([0.0012345, 2.5], 50) == 1.234
    assert percentile_ms([0.0012345, 2.5], 99) == 2500
    assert percentile_ms([], 50) is None


@given(st.lists(times))
def test_every_time_in_whole_windows_is_counted_once(values: list[float]) -> None:
    found = counts(values, 10, 40.5, 1)
    assert len(found) == 30
    assert sum(found) == sum(10 <= value < 40 for value in values)


def test_windows_are_half_open_and_keep_their_order() -> None:
    pairs = [(0.0, 1.0), (0.99, 2.0), (1.0, 3.0), (2.5, 4.0), (3.0, 5.0), (-0.01, 6.0)]
    assert sorted_in(pairs, 0, 3, 1) == [[1.0, 2.0], [3.0], [4.0]]
    # In floats, 0.3 / 0.1 is less than 3.
    assert len(sorted_in([], 0, 0.3, 0.1)) == 3


@given(st.lists(times, min_size=1), st.integers(1, 50))
def test_a_distribution_ends_at_one_and_is_true(values: list[float], points: int) -> None:
    found = distribution(values, points)
    assert 1 <= len(found) <= points
    assert found[-1] == (max(values), 1)
    for value, share in found:
        assert sum(v < value for v in values) < share * len(values) + 1e-9
        assert share * len(values) <= sum(v <= value for v in values) + 1e-9


def test_phases_count_from_the_last_start() -> None:
    pairs = [(0.5, 0.0), (1.0, 1.0), (1.25, 2.0), (2.0, 3.0), (2.15, 4.0), (2.9, 5.0)]
    assert phases(pairs, [1.0, 2.0], 0.3, 0.1) == [[1.0, 3.0], [4.0], [2.0]]


# --- rounds ---


def test_targets_alternate_and_each_is_first_equally_often() -> None:
    called: list[str] = []

    def action(name: str, figure: float) -> float:
        called.append(name)
        return figure * len(called)

    figures = {"a": 1.0, "b": 2.0, "c": 3.0}
    found = alternate({name: partial(action, name, n) for name, n in figures.items()}, 5, warm=1)
    rounds = [called[start : start + 3] for start in range(0, len(called), 3)]
    assert Counter(order[0] for order in rounds) == dict.fromkeys("abc", 2)
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    # The first round does not count.
    assert found["a"] == [1.0 * (1 + index) for index, name in enumerate(called) if name == "a"][1:]


def test_a_ratio_is_of_rounds_and_not_of_medians() -> None:
    # The machine is three times slower in the second round: for both.
    assert ratio([1.0, 3.0, 1.0], [2.0, 6.0, 0.25]) == 0.5


# --- a load ---


@given(st.integers(0, 1000), st.integers(1, 5))
def test_clients_insert_at_the_same_times_again_and_within_their_spans(
    seed: int, number: int
) -> None:
    spans = ((1.0, 2.0), (3.0, 3.5))
    client = Client(number, 0.01, "random", spans)
    found = list(client.due(seed))
    assert found == list(client.due(seed))
    assert found == sorted(found)
    assert all(any(start <= at < stop for start, stop in spans) for at in found)
    assert found != list(client.due(seed + 1))


def test_a_load_has_its_rate_from_the_first_moment() -> None:
    firsts = counts(
        (at for n in range(400) for at in Client(n, 0.2, "random", ((0.0, 1.0),)).due(7)),
        0, 1, 0.1,
    )  # fmt: skip
    assert all(150 < count < 250 for count in firsts)
    assert 1900 < sum(firsts) < 2100


def insert(number: int, at: int, gsn: int, shard: int = 0) -> Insert:
    return Insert(number, at - 1, at, at + 2, gsn, shard)


def test_completed_inserts_without_delivery_are_missing() -> None:
    inserts = [insert(0, 10, 5), insert(1, 20, 6), insert(2, 30, -1), insert(3, 40, -1)]
    outcome = Outcome(0, inserts, ["refused"] * 2, {0: 17, 2: 90}, 0, 0.5, 0.4)
    assert outcome.missing == 1
    assert [took for _, took in outcome.insert_s()] == [2e-9, 2e-9]
    # An insert that failed may be in the log nevertheless.
    assert [(i.number, round(took * 1e9)) for i, took in outcome.delivery_s()] == [(0, 7), (2, 60)]


# --- no-ops ---


def after_timeouts_plainly(
    arrivals: list[float], stop: float, per_s: float, epoch_s: float, timeout_s: float
) -> int:
    """One epoch after the other, one position after the other."""
    made = 0
    for epoch in range(math.ceil(stop / epoch_s)):
        begin, end = epoch * epoch_s, (epoch + 1) * epoch_s
        waiting = [at for at in arrivals if begin <= at < end]
        slot = 1
        while True:
            due = begin + slot / per_s + timeout_s
            if waiting and waiting[0] <= due:
                waiting.pop(0)
            elif due < min(end, stop):
                made += 1
            elif not waiting:
                break
            slot += 1
    return made


@given(
    st.lists(st.integers(0, 399)).map(sorted),
    st.sampled_from((4.0, 16.0)),
    st.sampled_from((8.0, 32.0)),
    st.sampled_from((0.0, 0.03125, 1.0)),
)
def test_the_thesis_rule_for_no_ops(
    ticks: list[int], per_s: float, epoch_s: float, timeout_s: float
) -> None:
    # Between the ticks of the expected arrivals, so rounding never decides the order.
    arrivals = [tick / 8 + 0.01 for tick in ticks]
    found = noops.after_timeouts(arrivals, 50, per_s, epoch_s, timeout_s)
    assert found == after_timeouts_plainly(arrivals, 50, per_s, epoch_s, timeout_s)


def test_positions_of_an_idle_shard_and_of_a_punctual_one() -> None:
    assert noops.after_timeouts([], 1.0, per_s=100, epoch_s=1, timeout_s=0.0005) == 99
    punctual = [(index + 0.9) / 100 for index in range(100)]
    assert noops.after_timeouts(punctual, 1.0, per_s=100, epoch_s=1, timeout_s=0) == 0


def test_stored_entries_are_classified(tmp_path: Path) -> None:
    """Weights 1 and 1: shard 0 has the odd positions, from 1 on, in epochs of 1000."""
    store = SegmentStore.open(tmp_path / "segments", flush_interval_ms=0)
    place = Place(b"c" * 16, 1, 1, 0, [5], 0, b"body")
    decisions = [Skip(1, 5), place, Skip(7, 1001), Skip(1001, 1003), Skip(1003, 2500)]
    for fseq, decision in enumerate(decisions, 1):
        store.append(Entry(fseq, 1, decision))
    store.flush()
    store.close()
    leases = LeaseMap()
    leases.extend([run_of(lease(1, 1))])
    entries = noops.stored(tmp_path)
    found = noops.cost(entries, 0, leases.lease_at)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "segments").glob("*.seg"))
    skips = [entry.size for entry in entries if entry.kind == noops.SKIP]
    assert found["all_bytes"] == on_disk
    assert found["bytes"] == sum(skips)
    assert {name: found[name] for name in ("records", "within", "positions", "ends")} == {
        "records": 1,
        "within": 2,  # [1, 5) and [1001, 1003)
        "positions": 3,
        "ends": 2,
    }


# --- steps of a rate ---


def test_a_share_is_relative_to_the_mean_of_the_others() -> None:
    assert share_of(lease(3, 2, 2), 0) == 1.5
    assert share_of(lease(3, 1, 2), 0) == 2
    assert share_of(lease(3), 0) == 1
    assert share_of(lease(3, 1), 7) == 0


def stepped() -> tuple[Outcome, LeaseMap]:
    """A tick is 10 ms. Shard 0 goes from 2:2 to 3:2 with the insert at 130, a step at 100."""
    former = lease(2, 2)
    later = former.following((Member(0, 1, 3), Member(1, 1, 2)))
    leases = LeaseMap()
    leases.extend([run_of(former), run_of(later)])
    ms = 1_000_000
    inserts = [
        insert(tick, tick * 10 * ms, tick + (0 if tick < 13 else former.stop), tick % 2)
        for tick in range(1, 20)
    ]
    seen = {i.number: i.called + i.number * ms for i in inserts}
    return Outcome(0, inserts, [], seen, 0, 0, 0), leases


def test_weights_are_in_force_with_the_first_insert_under_them() -> None:
    outcome, leases = stepped()
    (change,) = sequential._changes(outcome, leases, [(0.0, 0.1, 1.0), (0.1, 0.2, 1.5)])
    assert math.isclose(change["weights_after_ms"], 30)
    assert change["inserts_until_then"] == 2  # at 100 and 120 ms; 110 is of the other shard
    assert change["delivery_until_then"]["count"] == 2
    assert change["delivery_from_then_on"] == {"p50_ms": 16, "p99_ms": 18, "count": 3}


def test_a_missing_change_of_weights_is_not_reported() -> None:
    outcome, leases = stepped()
    early, late = sequential._changes(
        outcome, leases, [(0.0, 0.05, 1.0), (0.05, 0.1, 1.5), (0.1, 0.125, 1.0)]
    )
    assert early["weights_after_ms"] is None
    # The weights never followed the rise, so they did not follow the fall either.
    assert late["weights_after_ms"] is None


def test_spans_that_touch_are_one() -> None:
    assert sequential._joined([(0.0, 1.0), (1.0, 2.0), (3.0, 4.0)]) == ((0.0, 2.0), (3.0, 4.0))


# --- reconfigurations ---


def test_the_lowest_window_of_a_change_is_sought_to_a_second_after_it() -> None:
    windows = [10 - (index == 3) - 2 * (index == 12) - 5 * (index == 17) for index in range(30)]
    events = {"add": (0.35, 0.45)}
    assert reconfigure._lowest(windows, events, "add") == 8
    assert reconfigure._lowest(windows, events, "remove") is None
    assert reconfigure._smooth([1, 3, 5, 7, 9], 2) == [2, 6]


def test_figures_of_a_run() -> None:
    ms = 1_000_000
    inserts = [
        Insert(n, n * 10 * ms, n * 10 * ms, n * 10 * ms + ms, n + 1, n % 2) for n in range(200)
    ]
    outcome = Outcome(0, inserts, [], {i.number: i.done for i in inserts}, 0, 0.5, 0.4)
    found = reconfigure._figures(outcome, {}, seconds=2)
    assert found["windows"]["all"] == [10] * 20
    assert found["windows"]["0"] == [5] * 20
    assert found["lowest_window"] == 10
    assert math.isclose(found["per_s"], 100)
    assert found["insert"]["p50_ms"] == found["delivery"]["p99_ms"] == 1
    assert found["follower_missed"] == 0


# --- what is written down ---


def test_rows_with_the_same_figures_are_a_table() -> None:
    latency = {"p50_ms": 1.5, "windows": [1]}
    rows = [{"clients": 16, "insert": latency, "note": None}, {"clients": 1000, "insert": latency}]
    same = [row | {"note": "x"} for row in rows]
    assert list(tables.lines("log", {"steps": same, "windows": {}, "per_s": 2000.5})) == [
        "log",
        "  steps",
        "     clients  insert p50_ms  note",
        "  1       16          1.500     x",
        "  2     1000          1.500     x",
        "  per_s              2,000.500",
    ]
    assert list(tables.lines("log", {"backup": {"a": None}, "primary": {"a": 1}})) == [
        "log",
        "           a",
        "  backup   -",
        "  primary  1",
    ]


def test_a_wide_table_has_a_line_for_each_figure() -> None:
    rows = {name: {f"figure {n}": n for n in range(20)} for name in ("a", "b")}
    head, *lines = list(tables.lines("log", rows))[1:]
    assert head.split() == ["a", "b"]
    assert [line.split() for line in lines] == [
        ["figure", f"{n}", f"{n}", f"{n}"] for n in range(20)
    ]


def test_figures_are_json_with_one_row_per_line() -> None:
    figures = {
        "a": {"windows": [1, 2, 3], "mean": statistics.mean([1, 2])},
        "b": [{"c": None}],
        "d": {},
    }
    text = bench.as_text(figures)
    assert json.loads(text) == figures
    assert '  "windows": [1, 2, 3],' in text.splitlines()


def test_the_longest_pause_may_last_to_the_end() -> None:
    assert longest_pause([0.5, 2.0, 2.5], 1.0, 3.0) == 1.0
    assert longest_pause([1.1, 1.2], 1.0, 9.0) == pytest.approx(7.8)
    assert longest_pause([0.5], 1.0, 9.0) == longest_pause([], 1.0, 9.0) == 8.0
    assert longest_pause([2.0, 9.5], 1.0, 9.0) == 7.5


def test_a_shard_that_never_returns_has_no_short_pause() -> None:
    inserts = [Insert(n, 0, 0, n * 100_000_000, n, shard) for shard in (0, 1) for n in range(20)]
    outcome = Outcome(0, inserts, [], {}, 0, 0.0, 0.0)
    found = failure._figures(outcome, 6.0)
    assert found["writes_whole_after_s"] == found["readers_wait_s"] == 6.0


def test_figures_of_former_runs_keep_their_run() -> None:
    former = {"commit": "old", "kept": {"L3": {"commit": "older"}}}
    found = bench.run_of(["L1"], ["L1", "L2", "L3"], former)
    assert found["kept"] == {"L2": {"commit": "old"}, "L3": {"commit": "older"}}
    assert "kept" not in bench.run_of(["L1"], ["L1"], former)


@pytest.mark.parametrize("scale", ["0", "-1", "nan", "inf"])
def test_a_scale_is_above_0(monkeypatch: pytest.MonkeyPatch, scale: str) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py", "idle", "--scale", scale])
    with pytest.raises(SystemExit):
        bench.main()


def test_a_run_is_told_from_others_by_its_environment() -> None:
    found = environment()
    assert found["python"] == sys.version
    assert found["cores"] >= 1
    assert found["processor"]
    assert re.fullmatch(r"([0-9a-f]{12,40}\+?)?", found["commit"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", found["date"])
