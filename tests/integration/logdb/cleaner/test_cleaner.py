"""Cleaning rounds: wherever a round stops, the log suffices for a start and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from logdb.cleaner.cleaner import Cleaner
from logdb.cleaner.relocation import MAX_MOVES
from logdb.decisions import Decisions
from logdb.log_usage import LogUsage
from logdb.records import (
    CheckpointBegun,
    CheckpointDone,
    CheckpointPart,
    Moved,
    Value,
    Write,
    decode,
    encode,
    is_foreign,
    value_at,
)
from logdb.snapshots import SnapshotCursor
from logdb.state import State
from tests.unit.logdb.cleaner.rounds import (
    NEVER_DUE,
    overwrite,
    records,
    restart,
    run,
)
from tests.unit.logdb.fakelog import (
    UNAVAILABLE,
    FakeLog,
)
from tests.unit.logdb.histories import UNREADABLE
from tests.unit.logdb.small import SMALL, Oracle, S, Small
from ziplog.client.common.requests import InsertRequest, Request, SyncRequest, TrimRequest
from ziplog.core.units import NEVER
from ziplog.types import RecordId
from ziplog.wire import Limits

# --- one round ---


def test_a_round_moves_live_values_writes_a_checkpoint_and_trims() -> None:
    log, rng = FakeLog(seed=1), random.Random(1)
    oracle, small = Oracle(log), Small(log, "one")
    oracle.write({b"old": b"stays"})
    overwrite(oracle, rng, 120)
    run(small, oracle, 200)
    assert small.cleaner is not None
    counts = small.cleaner.counts
    assert counts.rounds >= 1
    assert counts.failed == counts.left == 0
    assert log.first == counts.trimmed > 1
    entry = small.state.versions.get(b"old")
    assert entry is not None
    assert entry.version < log.first <= entry.place.gsn
    restarted = restart(log, oracle, "two")
    assert restarted.restored >= log.first


def test_the_order_is_begun_moved_synced_done_synced_trimmed() -> None:
    log, rng = FakeLog(seed=2), random.Random(2)
    oracle, small = Oracle(log), Small(log, "one")
    overwrite(oracle, rng, 120)
    synced_at_trim: list[int] = []
    log.faults.append(
        lambda request: (
            synced_at_trim.append(log.synced) if isinstance(request, TrimRequest) else None
        )
    )
    run(small, oracle, 200)
    order: list[str] = []
    for request in small.core.requests:
        if isinstance(request, InsertRequest):
            order += [type(decode(payload)).__name__ for payload in request.payloads]
        elif isinstance(request, (SyncRequest, TrimRequest)):
            order.append(type(request).__name__)
    kinds = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    steps = [
        "CheckpointBegun",
        "Moved",
        "CheckpointPart",
        "SyncRequest",
        "CheckpointDone",
        "SyncRequest",
        "TrimRequest",
    ]
    rounds = [kinds[at : at + 7] for at in range(len(kinds)) if kinds[at] == "CheckpointBegun"]
    trimming = [each for each in rounds if "TrimRequest" in each]
    assert trimming
    assert all(each == [step for step in steps if step in each] for each in trimming)
    (done,) = records(log, CheckpointDone)[:1]
    assert max(done.parts).gsn <= synced_at_trim[0]


def test_no_round_is_due_early() -> None:
    log, rng = FakeLog(seed=3), random.Random(3)
    oracle, small = Oracle(log), Small(log, "one")
    overwrite(oracle, rng, 10)
    run(small, oracle, 500)
    assert not records(log, CheckpointBegun)


def test_a_round_is_due_for_dead_bytes_though_there_are_few_records() -> None:
    log = FakeLog(seed=4)
    often = msgspec.structs.replace(SMALL, every_records=10**9)
    oracle, small = Oracle(log), Small(log, "one", often)
    for _ in range(30):
        oracle.write({b"k": b"x" * 400})
        run(small, oracle, 30)
    assert log.first > 1
    assert log.bytes < 6000
    restart(log, oracle, "two")


@pytest.mark.parametrize("every", [0, 1])
def test_the_records_of_a_round_do_not_trigger_the_next(every: int) -> None:
    log = FakeLog(seed=23)
    oracle, small = (
        Oracle(log),
        Small(log, "one", msgspec.structs.replace(SMALL, every_records=every)),
    )
    oracle.write({b"k": b"v"})
    run(small, oracle, 2_000)
    assert len(records(log, CheckpointDone)) == 1
    assert small.cleaner is not None
    assert small.cleaner.next_wakeup() == NEVER


def test_bytes_that_cannot_be_freed_do_not_trigger_endless_rounds() -> None:
    """An unreadable record stands first: only the due checkpoints are made."""
    log = FakeLog(seed=5)
    log.insert(UNREADABLE)
    oracle, small = Oracle(log), Small(log, "one")
    for _ in range(200):
        oracle.write({b"k": b"x" * 400})
        run(small, oracle, 5)
    assert log.first == 1
    assert 1 <= len(records(log, CheckpointDone)) <= 5
    assert not records(log, Moved)
    restart(log, oracle, "two")


def test_an_unreadable_record_stops_the_cut_and_the_log_before_it_is_trimmed() -> None:
    log, rng = FakeLog(seed=6), random.Random(6)
    oracle, small = Oracle(log), Small(log, "one", NEVER_DUE)
    overwrite(oracle, rng, 100)
    small.settle()
    (unreadable,) = log.insert(UNREADABLE)
    overwrite(oracle, rng, 30)
    small = Small(log, "two")
    run(small, oracle, 300)
    assert 1 < log.first <= unreadable.gsn
    assert unreadable.gsn in log.records
    restart(log, oracle, "three")


def foreign_records(log: FakeLog) -> list[tuple[bytes, bytes | None, int]]:
    """Return payload, key and time of the foreign records in the log, in order."""
    found = [log.records[gsn] for gsn in log.gsns if gsn >= log.first]
    return [(r.payload, r.key, r.timestamp_us) for r in found if is_foreign(r.payload)]


@pytest.mark.parametrize("seed", range(6))
def test_foreign_records_are_copied_in_order_before_the_log_is_trimmed(seed: int) -> None:
    log, rng = FakeLog(seed=seed), random.Random(seed)
    oracle, small = Oracle(log), Small(log, "one")
    inserted = [(b"first", b"key", 7), (b"second", None, 8), (b"", None, 9)]
    last = RecordId(0, 0)
    for payload, key, time_us in inserted:
        (last,) = log.insert(payload, after=last, key=key, timestamp_us=time_us)
    for _ in range(6):
        overwrite(oracle, rng, 60)
        run(small, oracle, 200)
    assert log.first > last.gsn
    assert foreign_records(log) == inserted, "each is in the log once"
    assert small.cleaner is not None
    counts = small.cleaner.counts
    assert 3 <= counts.copied <= 3 * counts.rounds
    restart(log, oracle, "two")


def test_foreign_records_alone_trigger_no_round() -> None:
    log = FakeLog(seed=3)
    oracle, small = (
        Oracle(log),
        Small(log, "one", msgspec.structs.replace(SMALL, every_records=10**9)),
    )
    for _ in range(40):
        log.insert(b"x" * 400)
        run(small, oracle, 5)
    assert log.first == 1
    assert not records(log, CheckpointBegun)


def test_a_failed_copy_fails_the_round_and_a_later_round_copies_all() -> None:
    log, rng = FakeLog(seed=4), random.Random(4)
    oracle, small = Oracle(log), Small(log, "one")
    (foreign,) = log.insert(b"not ours")
    failed: list[Request] = []

    def fail_first_copy(request: Request) -> str | None:
        is_copy = isinstance(request, InsertRequest) and request.payloads == [b"not ours"]
        if is_copy and not failed:
            failed.append(request)
            return UNAVAILABLE
        return None

    log.faults.append(fail_first_copy)
    overwrite(oracle, rng, 120)
    run(small, oracle, 100)
    assert failed
    assert log.first <= foreign.gsn, "the log was trimmed before its record was copied"
    small.now += 20 * S
    run(small, oracle, 300)
    assert log.first > foreign.gsn
    assert foreign_records(log)[-1] == (b"not ours", None, 0)
    restart(log, oracle, "two")


def test_a_value_that_no_moved_record_can_hold_stops_the_cut() -> None:
    log, rng = FakeLog(seed=7), random.Random(7)
    oracle, small = Oracle(log), Small(log, "one")
    overwrite(oracle, rng, 5)
    oracle.write({b"big": b"x" * 970}, inline=False)
    overwrite(oracle, rng, 200)
    log.limits = Limits(max_payload_bytes=1000)
    run(small, oracle, 300)
    big = small.state.versions.get(b"big")
    assert big is not None
    assert small.state.horizon > big.version, "the cut was to be behind it"
    assert big.place.gsn == big.version == log.first
    restart(log, oracle, "two")


def test_an_unmoved_place_prevents_the_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdb.cleaner.cleaning_round.moves_from", lambda *_: [])
    log, rng = FakeLog(seed=8), random.Random(8)
    oracle, small = Oracle(log), Small(log, "one")
    oracle.write({b"old": b"stays"})
    overwrite(oracle, rng, 120)
    run(small, oracle, 300)
    assert records(log, CheckpointDone)
    assert log.first == 1
    restart(log, oracle, "two")


def test_a_commit_that_refers_to_a_value_before_the_cut_expires() -> None:
    """Its value was inserted long ago, and the round has passed it: nothing may refer to it."""
    log, rng = FakeLog(seed=9), random.Random(9)
    oracle, small = Oracle(log), Small(log, "one")
    (value,) = log.insert(encode(Value(b"late", b"value")))
    overwrite(oracle, rng, 120)
    while small.state.horizon <= value.gsn:
        run(small, oracle, 1)
    late = oracle.commit([Write(b"late", None, value, 5)], RecordId(log.sealed, 0))
    run(small, oracle, 300)
    assert log.first > value.gsn
    decision = small.state.decisions.outcome(decode_id(oracle, late))
    assert decision is not None
    assert not decision.committed
    assert small.state.versions.get(b"late") is None
    restart(log, oracle, "two")


def decode_id(oracle: Oracle, rid: RecordId) -> Any:
    record = decode(oracle.payload(rid.gsn))
    return record.id  # type: ignore[union-attr]


def test_a_value_overwritten_during_its_move_keeps_its_new_state() -> None:
    log, rng = FakeLog(seed=21), random.Random(21)
    oracle, small = Oracle(log), Small(log, "one")
    for key in (b"old", b"gone", b"stays"):
        oracle.write({key: b"as it was"})
    overwrite(oracle, rng, 120)

    def overtakes(request: Request) -> None:
        if isinstance(request, InsertRequest) and isinstance(decode(request.payloads[0]), Moved):
            log.sealed = log.tail.gsn
            oracle.write({b"old": b"as it is", b"gone": None})
            log.sealed = log.tail.gsn
            log.faults.clear()

    log.faults.append(overtakes)
    run(small, oracle, 300)
    assert log.first > 1
    restart(log, oracle, "two")
    for key, value in {b"old": b"as it is", b"gone": None, b"stays": b"as it was"}.items():
        entry = small.state.versions.get(key)
        read = None if entry is None else log.records[entry.place.gsn]
        assert value == (None if read is None else value_at(decode(read.payload), key))


# --- small steps ---


def test_a_step_processes_at_most_one_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, rng = FakeLog(seed=10), random.Random(10)
    oracle, small = Oracle(log), Small(log, "one", at_once=False)
    for i in range(200):
        oracle.write({b"key-%03d" % i: rng.randbytes(20)})
    overwrite(oracle, rng, 100)
    walked: list[int] = []
    rows = SnapshotCursor.rows

    def counts(cursor: SnapshotCursor, count: int) -> Any:
        walked.append(count)
        return rows(cursor, count)

    monkeypatch.setattr(SnapshotCursor, "rows", counts)
    most = 0
    for _ in range(3000):
        walked.clear()
        run(small, oracle, 1)
        assert sum(walked) <= SMALL.slice_keys
        inserts = [each for each in small.core.pending.values() if isinstance(each, InsertRequest)]
        most = max(most, len(inserts))
    assert small.cleaner is not None
    assert small.cleaner.counts.rounds >= 1
    # One slice of the cursor may fill several parts.
    assert 1 < most <= SMALL.inserts + SMALL.slice_keys
    restart(log, oracle, "two")


def test_the_moves_of_a_record_are_bounded() -> None:
    log = FakeLog(seed=11)
    wide = msgspec.structs.replace(SMALL, part_bytes=10**6, slice_keys=500, inserts=8)
    oracle, small = Oracle(log), Small(log, "one", wide)
    for i in range(2 * MAX_MOVES):
        oracle.write({b"key-%03d" % i: b"v"})
    for _ in range(200):
        oracle.write({b"hot": b"x" * 500})
    run(small, oracle, 400)
    moved = records(log, Moved)
    assert moved
    assert max(len(each.moves) for each in moved) <= MAX_MOVES
    restart(log, oracle, "two")


def test_records_are_at_most_half_of_the_payload_limit() -> None:
    log, rng = FakeLog(seed=12), random.Random(12)
    log.limits = Limits(max_payload_bytes=400)
    large = msgspec.structs.replace(SMALL, part_bytes=2000)
    oracle, small = Oracle(log), Small(log, "one", large)
    overwrite(oracle, rng, 150)
    run(small, oracle, 400)
    assert small.cleaner is not None
    assert small.cleaner.counts.rounds >= 1
    assert small.cleaner.counts.failed == 0
    restart(log, oracle, "two")


def test_a_closed_cleaner_leaves_no_call_open() -> None:
    for turns in range(1, 60):
        log, rng = FakeLog(seed=13), random.Random(13)
        oracle, small = Oracle(log), Small(log, "one")
        overwrite(oracle, rng, 100)
        run(small, oracle, turns)
        if small.cleaner is None:
            continue
        small.cleaner.close()
        assert not small.state.on_change
        assert len(small.core.subscriptions) <= 1
        before = len(small.core.requests)
        small.cleaner.step(small.now + 10**12)
        assert len(small.core.requests) == before
        assert not small.cleaner.is_busy


# --- space ---


#: The bounds of docs/logdb.md, divided by at least 100.
_DEAD = 300_000


def scaled_state() -> State:
    return State(decisions=Decisions(650), log_usage=LogUsage(32_768, _DEAD))


@pytest.mark.parametrize("value_bytes", [20, 200, 2000])
def test_space_and_copies_are_bounded_while_everything_is_overwritten(value_bytes: int) -> None:
    log, rng = FakeLog(seed=19), random.Random(19)
    scaled = msgspec.structs.replace(
        SMALL, every_records=1_000, min_dead_bytes=_DEAD, part_bytes=16_384, slice_keys=500
    )
    oracle = Oracle(log, scaled_state)
    small = Small(log, "one", scaled, make_state=scaled_state)
    keys = [b"key-%04d" % i for i in range(1500)]
    most = 0
    for turn in range(2_000):
        for _ in range(10):
            key = keys[min(int(rng.expovariate(1 / 300)), len(keys) - 1)]
            oracle.write({key: rng.randbytes(value_bytes)})
        run(small, oracle, 3)
        if turn > 1000 and turn % 10 == 0:
            most = max(most, log.bytes)
    cleaner = small.cleaner
    assert cleaner is not None
    counts = cleaner.counts
    copied = counts.moved_bytes + counts.checkpoint_bytes
    written = log.inserted_bytes - copied
    live = small.state.log_usage.moving_bytes
    checkpoint_bytes = counts.checkpoint_bytes / counts.rounds
    print(value_bytes, most / live, copied / written, counts)  # noqa: T201
    # Dead bytes may equal live bytes, or the minimum for a round. Until the trim, moved values
    # exist twice. The last checkpoint and those that no cut has passed add to it.
    assert most < 3 * live + 3 * _DEAD + 4 * checkpoint_bytes
    # A record costs at most its key's share of a checkpoint, and one copy of a live value.
    assert copied < written
    assert counts.rounds > 4
    assert counts.failed == 0
    small.settle()
    oracle.check(small.state)
    restarted = Small(log, "two", NEVER_DUE, make_state=scaled_state)
    restarted.settle()
    oracle.check(restarted.state)


def test_the_cleaner_is_idle_when_nothing_is_due() -> None:
    log = FakeLog(seed=20)
    small = Small(log, "one")
    cleaner = small.cleaner
    assert isinstance(cleaner, Cleaner)
    run(small, Oracle(log), 300)
    assert cleaner.next_wakeup() == NEVER
    assert not any(isinstance(each, InsertRequest) for each in small.core.requests)
    assert not records(log, CheckpointPart)
