"""Interrupted rounds, and rounds of several coordinators: the log suffices for a start."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.records import (
    CheckpointBegun,
    CheckpointDone,
    CheckpointPart,
    decode,
    encode,
    is_done,
)
from tests.properties import examples
from tests.unit.logdb.cleaner.rounds import (
    KilledError,
    overwrite,
    records,
    restart,
    run,
)
from tests.unit.logdb.fakelog import (
    OUTCOME_UNKNOWN_IN,
    OUTCOME_UNKNOWN_OUT,
    SILENT_IN,
    SILENT_OUT,
    UNAVAILABLE,
    FakeLog,
    fail,
    fail_inserts,
)
from tests.unit.logdb.small import MS, SMALL, Oracle, Small
from ziplog.client.common.requests import InsertRequest, Request, SyncRequest, TrimRequest
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

_LAST_STEPS = (SyncRequest, TrimRequest)

# --- crashes ---


def kill_after(small: Small, advances: int, *, is_sent: bool) -> None:
    """Let the process end at the so-manieth step of its rounds, before or after its requests."""
    cleaner = small.cleaner
    assert cleaner is not None
    start = cleaner._start
    left = advances

    def mortal(task: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
        nonlocal left
        wanted = next(task)
        while True:
            left -= 1
            if left < 0 and not is_sent:
                raise KilledError
            try:
                result = yield wanted
            except ZiplogError as error:
                result = error
            if left < 0:
                raise KilledError
            try:
                wanted = task.throw(result) if isinstance(result, Exception) else task.send(result)
            except StopIteration:
                return

    cleaner._start = lambda task: start(mortal(task))  # type: ignore[method-assign]


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_crash_at_any_step_of_a_round_loses_nothing(is_sent: bool) -> None:
    advances, crashes = 0, 0
    while True:
        log, rng = FakeLog(seed=14), random.Random(14)
        oracle = Oracle(log)
        oracle.write({b"old": b"stays"})
        overwrite(oracle, rng, 100)
        small = Small(log, "one")
        assert small.cleaner is not None
        kill_after(small, advances, is_sent=is_sent)
        try:
            run(small, oracle, 300)
        except KilledError:
            crashes += 1
        else:
            break
        second = restart(log, oracle, "two", SMALL)
        overwrite(oracle, rng, 30)
        # Its round may start immediately: the dead coordinator's round is older than a minute.
        second.now += 100_000 * MS
        run(second, oracle, 200)
        second.settle()
        oracle.check(second.state)
        assert log.first > 1, "nothing is cleaned after a crash"
        restart(log, oracle, "three")
        advances += 1
    assert crashes > 30
    assert log.first > 1


@examples(80)
@given(st.data())
def test_crashes_and_failures_of_the_log_at_any_time_lose_nothing(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**20))
    rng = random.Random(seed)
    log = FakeLog(seed=seed, shards=rng.randint(1, 4), holes=rng.randint(0, 9))
    oracle = Oracle(log)
    faults = [UNAVAILABLE, OUTCOME_UNKNOWN_IN, OUTCOME_UNKNOWN_OUT, SILENT_IN, SILENT_OUT]
    hasty = msgspec.structs.replace(
        SMALL, other_round_timeout_ns=0, retry_ns=20 * MS, request_timeout_ns=50 * MS
    )
    small = Small(log, "c0", hasty, at_once=rng.random() < 0.5)
    for number in range(data.draw(st.integers(1, 6))):
        overwrite(oracle, rng, rng.randint(1, 60))
        run(small, oracle, rng.randint(0, 60))
        if data.draw(st.booleans()):
            fault = data.draw(st.sampled_from(faults))
            log.faults[:] = [ours(small, fail_inserts(fault, rng.randint(1, 3), rng.randint(0, 9)))]
            run(small, oracle, rng.randint(0, 120))
            log.faults.clear()
        if data.draw(st.booleans()):
            small = Small(log, f"c{number + 1}", hasty, at_once=rng.random() < 0.5)
        elif data.draw(st.booleans()):
            log.is_down = True
            run(small, oracle, rng.randint(0, 30))
            log.is_down = False
    run(small, oracle, 100)
    restart(log, oracle, "last")


def ours(small: Small, fault: Any) -> Any:
    """A fault of what the cleaner inserts."""

    def chooses(request: Request) -> str | None:
        found: str | None = fault(request)
        return found if small.cleaner is not None else None

    return chooses


@pytest.mark.parametrize("kind", [InsertRequest, SyncRequest, TrimRequest])
def test_a_round_refused_by_the_log_is_retried(kind: type[Request]) -> None:
    log, rng = FakeLog(seed=15), random.Random(15)
    oracle, small = Oracle(log), Small(log, "one")
    overwrite(oracle, rng, 120)
    log.faults.append(fail(kind, UNAVAILABLE))
    run(small, oracle, 400)
    assert small.cleaner is not None
    assert small.cleaner.counts.failed == 1
    assert "away" in small.cleaner.counts.reason
    assert log.first == 1
    small.now += SMALL.retry_ns
    overwrite(oracle, rng, 60)
    run(small, oracle, 400)
    assert log.first > 1
    restart(log, oracle, "two")


def log_with_a_checkpoint_and_no_trim() -> tuple[FakeLog, Oracle]:
    """Return the log of a coordinator whose trims got no reply, without further faults."""
    log, rng = FakeLog(seed=16), random.Random(16)
    oracle, small = Oracle(log), Small(log, "one")
    overwrite(oracle, rng, 120)
    log.faults.append(fail(TrimRequest, SILENT_OUT, times=99))
    run(small, oracle, 300)
    log.faults.clear()
    return log, oracle


def test_the_trim_of_a_dead_coordinator_is_completed_by_the_next() -> None:
    log, oracle = log_with_a_checkpoint_and_no_trim()
    assert records(log, CheckpointDone)[-1].trim > 1
    assert log.first == 1
    second = restart(log, oracle, "two")
    second.now += SMALL.retry_ns
    run(second, oracle, 200)
    assert log.first == records(log, CheckpointDone)[-1].trim
    restart(log, oracle, "three")


def test_a_checkpoint_that_lost_a_part_trims_nothing_after_a_restart() -> None:
    """All servers of a shard lost their memory after the round, before its records were synced."""
    log, oracle = log_with_a_checkpoint_and_no_trim()
    (done,) = records(log, CheckpointDone)
    assert done.trim > 1
    log.forget(done.parts[0].gsn)
    second = restart(log, oracle, "two")
    assert second.restored == 0
    second.now += SMALL.retry_ns
    run(second, oracle, 200)
    assert log.first == 1, "what only a damaged checkpoint allows was trimmed"
    restart(log, oracle, "three")


def test_a_restart_trims_once_the_end_of_its_checkpoint_is_on_stable_storage() -> None:
    log, oracle = log_with_a_checkpoint_and_no_trim()
    done = max(rid for rid in map(log.owner, log.gsns) if is_done(log.records[rid.gsn].payload))
    second = restart(log, oracle, "two")
    second.now += SMALL.retry_ns
    run(second, oracle, 200)
    sync, trim = [each for each in second.core.requests if isinstance(each, _LAST_STEPS)]
    assert isinstance(sync, SyncRequest)
    assert isinstance(trim, TrimRequest)
    assert sync.others == (done,)


def test_a_checkpoint_is_completed_once_all_it_needs_is_on_stable_storage() -> None:
    """Its position is the record of another client, perhaps at another shard."""
    log, rng = FakeLog(seed=16), random.Random(16)
    oracle, small = Oracle(log), Small(log, "one")
    overwrite(oracle, rng, 120)
    log.faults.append(fail(SyncRequest, UNAVAILABLE, times=1))
    run(small, oracle, 300)
    assert not records(log, CheckpointDone)
    small.now += SMALL.retry_ns
    run(small, oracle, 300)
    first, second, third = (each for each in small.core.requests if isinstance(each, SyncRequest))
    (done,) = records(log, CheckpointDone)
    assert first.others != second.others == (done.position,)
    assert [done] == [decode(log.records[rid.gsn].payload) for rid in third.others]


# --- several coordinators ---


def step_all(smalls: Iterable[Small], oracle: Oracle, rng: random.Random, turns: int) -> None:
    for _ in range(turns):
        for small in smalls:
            if rng.random() < 0.7:
                run(small, oracle, 1)


@pytest.mark.parametrize("seed", range(5))
def test_only_one_of_several_coordinators_runs_a_round(seed: int) -> None:
    log, rng = FakeLog(seed=seed), random.Random(seed)
    oracle = Oracle(log)
    smalls = [Small(log, f"c{i}", at_once=False) for i in range(3)]
    for _ in range(8):
        overwrite(oracle, rng, 40)
        step_all(smalls, oracle, rng, 150)
    cleaners = [small.cleaner for small in smalls if small.cleaner is not None]
    rounds = sum(cleaner.counts.rounds for cleaner in cleaners)
    dones = [decode(record.payload) for record in oracle.all()]
    assert sum(isinstance(done, CheckpointDone) for done in dones) == rounds >= 3
    assert sum(cleaner.counts.failed for cleaner in cleaners) == 0
    assert log.first > 1
    for small in smalls:
        small.settle()
        oracle.check(small.state)
    # No other coordinator's parts or moves are between a round's first and last record.
    owner = b""
    for record in dones:
        if isinstance(record, CheckpointBegun) and not owner:
            owner = record.coordinator
        elif isinstance(record, CheckpointDone):
            assert record.coordinator == owner
            owner = b""


@examples(60)
@given(st.integers(0, 2**20), st.integers(2, 3))
def test_overlapping_rounds_are_safe(seed: int, count: int) -> None:
    log, rng = FakeLog(seed=seed), random.Random(seed)
    oracle = Oracle(log)
    heedless = msgspec.structs.replace(SMALL, other_round_timeout_ns=0)
    smalls = [Small(log, f"c{i}", heedless, at_once=False) for i in range(count)]
    for _ in range(6):
        overwrite(oracle, rng, 30)
        step_all(smalls, oracle, rng, rng.randint(1, 120))
        # One coordinator is paused in the middle of its work.
        sleeper = rng.choice(smalls)
        overwrite(oracle, rng, 30)
        step_all(
            [small for small in smalls if small is not sleeper], oracle, rng, rng.randint(1, 120)
        )
        restart(log, oracle, "fresh")
    for small in smalls:
        small.settle()
        oracle.check(small.state)
    restart(log, oracle, "last")


def test_the_round_of_a_dead_coordinator_is_waited_for_one_minute() -> None:
    log, rng = FakeLog(seed=17), random.Random(17)
    oracle = Oracle(log)
    log.insert(encode(CheckpointBegun(b"dead----", 0)))
    overwrite(oracle, rng, 120)
    small = Small(log, "one")
    run(small, oracle, 500)
    assert len(records(log, CheckpointBegun)) == 1
    small.now += SMALL.other_round_timeout_ns
    run(small, oracle, 300)
    assert log.first > 1


def test_a_long_round_repeats_its_announcement() -> None:
    log, rng = FakeLog(seed=18), random.Random(18)
    slow = msgspec.structs.replace(SMALL, other_round_timeout_ns=60 * MS, pause_ns=10 * MS)
    oracle = Oracle(log)
    overwrite(oracle, rng, 150)
    first = Small(log, "one", slow)
    while not records(log, CheckpointBegun):
        run(first, oracle, 1)
    second = Small(log, "two", slow)
    while not records(log, CheckpointDone):
        run(first, oracle, 1)
        run(second, oracle, 1)
    begun = records(log, CheckpointBegun)
    assert len(begun) > 2
    assert {each.coordinator for each in begun} == {first.name}
    assert len({each.cut for each in begun}) == 1
    restart(log, oracle, "three")


def test_of_two_concurrent_rounds_the_first_announced_continues() -> None:
    log, rng = FakeLog(seed=22, shards=1, holes=0), random.Random(22)
    oracle, small = Oracle(log), Small(log, "one")
    overwrite(oracle, rng, 120)

    def is_quicker(request: Request) -> None:
        if isinstance(request, InsertRequest):
            log.faults.clear()
            log.sealed = log.tail.gsn
            log.insert(encode(CheckpointBegun(b"quicker-", 0)))
            log.sealed = log.tail.gsn

    log.faults.append(is_quicker)
    run(small, oracle, 300)
    assert small.cleaner is not None
    assert small.cleaner.counts.left == 1
    assert [each.coordinator for each in records(log, CheckpointBegun)] == [b"quicker-", small.name]
    assert not records(log, CheckpointPart)
    small.now += SMALL.other_round_timeout_ns
    run(small, oracle, 300)
    assert small.cleaner.counts.rounds >= 1
    restart(log, oracle, "two")
