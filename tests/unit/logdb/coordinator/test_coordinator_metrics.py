"""The lag of a coordinator, the durations of commits, and what stops its cleaner."""

from __future__ import annotations

from logdb.coordinator.metrics import CoordinatorMetrics
from tests.unit.logdb.fakelog import FakeLog
from tests.unit.logdb.harness import CoordinatorHarness, S, commit
from tests.unit.logdb.histories import FOREIGN, UNREADABLE

#: The wall clock minus the clock of the harness, in ns.
OFFSET = 1_000_000 * S


def insert(log: FakeLog, number: int, at_ns: int) -> None:
    """Insert a transaction's record at a wall time."""
    payload = commit(number, {b"k": b"v"})
    log.insert(payload, after=log.tail, timestamp_us=at_ns // 1000)


def test_the_lag_is_the_age_of_what_was_not_applied() -> None:
    log = FakeLog(seed=1)
    insert(log, 1, OFFSET)
    harness = CoordinatorHarness(log)
    metrics = CoordinatorMetrics(harness.node)

    def collect() -> dict[str, float]:
        values, _ = metrics.collect(harness.now, harness.now + OFFSET)
        return {value.name: value.value for value in values}

    harness.poll()
    assert collect()["logdb_lag_seconds"] == 0
    assert collect()["logdb_ready"] == 1
    insert(log, 2, OFFSET)
    assert collect()["logdb_lag_seconds"] == 0, "it is behind since this snapshot"
    harness.now += 3 * S
    assert collect()["logdb_lag_seconds"] == 3
    insert(log, 3, OFFSET)
    assert collect()["logdb_lag_seconds"] == 3
    harness.poll()
    assert collect()["logdb_lag_seconds"] == 0
    harness.lose()
    assert set(collect()) == {"logdb_ready", "logdb_lag_seconds"}


def test_a_commit_is_timed_from_its_insertion_once_the_wall_clock_is_known() -> None:
    log = FakeLog(seed=1)
    insert(log, 1, OFFSET)
    harness = CoordinatorHarness(log)
    harness.poll()
    insert(log, 2, OFFSET)
    harness.poll()
    assert sum(harness.node.tailer.commit_durations.counts) == 0, "the wall clock is unknown"
    metrics = CoordinatorMetrics(harness.node)
    assert metrics.collect(harness.now, harness.now + OFFSET)[1]
    harness.lose()
    harness.pass_time(2 * S)
    assert harness.node.is_ready
    _, (durations,) = metrics.collect(harness.now, harness.now + OFFSET)
    assert sum(durations.counts) == 0, "the records were replayed"
    insert(log, 3, harness.now + OFFSET - S // 2)
    harness.poll()
    _, (durations,) = metrics.collect(harness.now, harness.now + OFFSET)
    assert durations.name == "logdb_commit_duration_seconds"
    assert (sum(durations.counts), durations.sum_ns) == (1, S // 2)


def test_only_an_unreadable_record_stops_the_cleaner() -> None:
    harness = CoordinatorHarness.ready()
    metrics = CoordinatorMetrics(harness.node)

    def is_stopped() -> float:
        values, _ = metrics.collect(harness.now, harness.now + OFFSET)
        return next(value.value for value in values if value.name == "logdb_cleaner_stopped")

    harness.insert(FOREIGN[1])
    harness.poll()
    assert harness.node.tailer.state.first_foreign
    assert is_stopped() == 0
    harness.insert(UNREADABLE)
    harness.poll()
    assert is_stopped() == 1
