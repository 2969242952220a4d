"""The calculations of the benchmark of players."""

from __future__ import annotations

from typing import TYPE_CHECKING

from player_bench.copies import in_batches
from player_bench.measure import MEASUREMENTS, measure
from player_bench.records import (
    HEAD_BYTES,
    KEY_BYTES,
    Applied,
    Part,
    delays_ms,
    delays_of,
    head,
    over,
    p99_windows,
    part,
    payload,
    worst,
)
from player_bench.timing import Deliveries

from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    import pytest

MS = 1_000_000


def test_every_key_of_a_record_belongs_to_one_target() -> None:
    totals = [0] * 5
    for number in range(1000):
        whole = payload(number, 10, 55, targets=5)
        found = [part(whole, target) for target in range(5)]
        keys = [0 if data is None else (len(data) - HEAD_BYTES) // KEY_BYTES for data in found]
        assert sum(keys) == 10
        totals = [sum(both) for both in zip(totals, keys, strict=True)]
    assert min(totals) > 0.8 * max(totals)


def test_part_of_a_record_has_its_head_and_the_keys_of_the_target() -> None:
    record = Record(RecordId(7, 0), payload(3, 10, 55, targets=30), None, 0, 0)
    parts = [Part(target)(record) for target in range(30)]
    found = [one for one in parts if one is not None]
    assert [head(one.payload) for one in found] == [(3, 55)] * len(found)
    assert sum(len(one.payload) - HEAD_BYTES for one in found) == 10 * KEY_BYTES
    assert {one.rid for one in found} == {record.rid}
    assert len(found) <= 10


def test_delays_are_from_the_dispatch_of_a_record() -> None:
    applied = [Applied(1, 10, 30), Applied(2, 20, 60), Applied(3, 30, 90)]
    assert delays_of({1: 25, 3: 40}, applied) == [(10, 5), (30, 50)]


def test_figures_of_delays() -> None:
    found = delays_ms([MS, 2 * MS, 3 * MS, 10 * MS])
    assert found == {"mean_ms": 4.0, "p50_ms": 2.0, "p99_ms": 10.0, "count": 4}
    assert delays_ms([]) == {"mean_ms": None, "p50_ms": None, "p99_ms": None, "count": 0}


def test_windows_go_by_the_time_of_the_insert() -> None:
    delays = [(99, 1 * MS), (100, 2 * MS), (109, 5 * MS), (120, 3 * MS), (130, 9 * MS)]
    windows = p99_windows(delays, 100, 130, 10)
    assert windows == [5.0, None, 3.0]
    assert worst(windows) == 5.0
    assert worst([None]) is None


def test_ratio_of_a_missing_figure_is_missing() -> None:
    assert over(3.0, 2.0) == 1.5
    assert over(None, 2.0) is over(3.0, None) is over(3.0, 0.0) is None


def test_rate_counts_from_the_first_step_to_the_last() -> None:
    steps = Deliveries()
    steps.note(10.0, 11.0, 300)
    steps.note(12.0, 14.0, 100)
    assert steps.per_s() == 100
    assert list(in_batches([(1,), (2,), (3,), (4,)], [3, 1])) == [[(1,), (2,), (3,)], [(4,)]]


def test_measurements_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def act(*names: str) -> object:
        return lambda scale: ran.extend(names) or {name: {"scale": scale} for name in names}

    both, alone = act("L1", "L3"), act("L9")
    for name in list(MEASUREMENTS):
        monkeypatch.delitem(MEASUREMENTS, name)
    for name, of in (("L1", both), ("L3", both), ("L9", alone)):
        monkeypatch.setitem(MEASUREMENTS, name, of)
    assert measure(0.5, ["L3"]) == {"L1": {"scale": 0.5}, "L3": {"scale": 0.5}}
    assert list(measure(1.0)) == ["L1", "L3", "L9"]
    assert ran == ["L1", "L3", "L1", "L3", "L9"]
