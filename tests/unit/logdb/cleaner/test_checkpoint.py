"""A written checkpoint is found again, and no invalid one is accepted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.cleaner import checkpoint
from logdb.cleaner.checkpoint import PartEncoder, find_checkpoint
from logdb.errors import NoCheckpointError
from logdb.records import (
    CheckpointDone,
    CheckpointPart,
    Decision,
    Entry,
    count_entries,
    decode,
    encode,
)
from tests.properties import examples
from tests.unit.logdb.fakelog import UNAVAILABLE, FakeLog, fail
from ziplog.client.common.requests import (
    FetchRequest,
    ReadRequest,
    Request,
    SubscribeRequest,
    TailRequest,
)
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import Wakeup
from ziplog.errors import UnavailableError
from ziplog.types import RecordId

ME = b"writer--"


def search(log: FakeLog, *, at_once: bool = True) -> Any:
    """What a coordinator finds that starts now."""
    core = log.core(at_once=at_once)
    calls = LogTasks(core, 0)
    ends: list[Any] = []
    calls.run(find_checkpoint(), ends.append)
    for _ in range(10_000):
        if ends:
            break
        calls.step(Wakeup(), 1)
    (found,) = ends
    assert not core.subscriptions, "a subscription was left open"
    return found


def rows(keys: int) -> list[tuple[bytes, Entry]]:
    return [(b"key-%04d" % i, Entry(i + 1, RecordId(i + 1, 0), 10)) for i in range(keys)]


def write(
    log: FakeLog,
    changes: dict[str, Any] | None = None,
    *,
    keys: int = 20,
    position: RecordId | None = None,
) -> CheckpointDone:
    """Put a checkpoint into the log as a cleaner does."""
    position = position or log.tail
    parts = PartEncoder(200)
    payloads = [*parts.add(rows(keys)), *parts.finish([], [(1, 10, 5)])]
    rids = [log.insert(payload, after=position)[0] for payload in payloads]
    fields: dict[str, Any] = {
        "coordinator": ME, "position": position, "floor": 0, "parts": rids,
        "checksum": parts.checksum, "keys": parts.keys, "horizon": 0, "first_foreign": 0,
        "records": 1, "trim": 0,
    }  # fmt: skip
    done = CheckpointDone(**(fields | (changes or {})))
    log.insert(encode(done), after=max(rids))
    return done


def fill(log: FakeLog, count: int) -> None:
    for i in range(count):
        log.insert(b"other %d" % i)


# --- writing ---


@given(
    st.lists(st.binary(max_size=30), unique=True, max_size=60),
    st.integers(0, 40),
    st.integers(40, 400),
)
def test_parts_hold_all_entries_in_order_and_have_the_requested_size(
    keys: list[bytes], decided: int, part_bytes: int
) -> None:
    entries = [(key, Entry(2**62 + 1, RecordId(2**62 + 3, 2**30), 2**30)) for key in sorted(keys)]
    decisions = [
        Decision(ME, n + 1, RecordId(2**62 + n, 2**30), n % 2 == 0) for n in range(decided)
    ]
    stretches = [(2**62 + n, 2**40, -(2**33)) for n in range(decided)]
    parts = PartEncoder(part_bytes)
    payloads: list[bytes] = []
    for start in range(0, len(entries), 7):
        payloads += parts.add(entries[start : start + 7])
    payloads += parts.finish(decisions, stretches)
    decoded = [decode(payload) for payload in payloads]
    assert all(isinstance(part, CheckpointPart) for part in decoded)
    assert [row for part in decoded for row in part.entries] == entries  # type: ignore[union-attr]
    assert [each for part in decoded for each in part.decisions] == decisions  # type: ignore[union-attr]
    assert [each for part in decoded for each in part.segments] == stretches  # type: ignore[union-attr]
    assert parts.keys == len(entries)
    assert parts.bytes == sum(map(len, payloads))
    assert all(len(payload) <= part_bytes + 30 + 50 for payload in payloads)


# --- finding ---


def test_an_empty_log_and_one_without_a_checkpoint_are_replayed_from_the_beginning() -> None:
    log = FakeLog()
    assert search(log) is None
    fill(log, 50)
    assert search(log) is None


@pytest.mark.parametrize("at_once", [True, False])
def test_the_last_checkpoint_is_found_with_its_parts_in_order(at_once: bool) -> None:
    log = FakeLog(seed=3)
    fill(log, 20)
    write(log, keys=5)
    fill(log, 20)
    last = write(log, keys=150)
    fill(log, 20)
    done, parts = search(log, at_once=at_once)
    assert done == last
    assert [row for part in parts for row in part.entries] == rows(150)


def test_parts_are_decoded_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeLog(seed=3)
    fill(log, 3)
    done = write(log, keys=50)
    _, parts = search(log)
    decoded: list[bytes] = []

    def counted(payload: bytes) -> Any:
        decoded.append(payload)
        return decode(payload)

    monkeypatch.setattr(checkpoint, "decode", counted)
    assert len(done.parts) > 3
    for count in range(len(done.parts)):
        assert len(decoded) == count
        next(parts)
    assert next(parts, None) is None


@given(st.binary(max_size=40), st.integers(0, 40), st.integers(0, 200))
def test_count_entries_returns_the_number_of_entries(noise: bytes, keys: int, cut: int) -> None:
    whole = encode(CheckpointPart(rows(keys), [Decision(ME, 1, RecordId(2, 0), True)], [(1, 2, 3)]))
    assert count_entries(whole) == keys
    part = decode(whole[:cut] + noise)
    if isinstance(part, CheckpointPart):
        assert count_entries(whole[:cut] + noise) == len(part.entries)
    assert count_entries(noise) is None
    assert (
        count_entries(encode(CheckpointDone(ME, RecordId(1, 0), 0, [], 0, 0, 0, 0, 0, 0))) is None
    )


def test_a_checkpoint_far_before_the_tail_is_found_in_few_searches() -> None:
    log = FakeLog(seed=4, step=1 << 30)
    fill(log, 10)
    done = write(log)
    fill(log, 3000)
    core = log.core()
    ends: list[Any] = []
    LogTasks(core, 0).run(find_checkpoint(), ends.append)
    assert ends[0][0] == done
    looks = [request for request in core.requests if type(request).__name__ == "SubscribeRequest"]
    assert len(looks) < 20


def _lose_part(log: FakeLog, done: CheckpointDone) -> None:
    """A crash of a whole shard: the position is a no-op now."""
    log.forget(done.parts[1].gsn)


def _change_part(log: FakeLog, done: CheckpointDone) -> None:
    rid = done.parts[1]
    part = decode(log.records[rid.gsn].payload)
    assert isinstance(part, CheckpointPart)
    other = CheckpointPart([(key + b"!", entry) for key, entry in part.entries], [], [])
    _replace(log, rid, encode(other))


def _make_foreign(log: FakeLog, done: CheckpointDone) -> None:
    _replace(log, done.parts[0], b"nonsense")


def _replace(log: FakeLog, rid: RecordId, payload: bytes) -> None:
    import msgspec  # noqa: PLC0415 - used nowhere else

    log.records[rid.gsn] = msgspec.structs.replace(log.records[rid.gsn], payload=payload)


@pytest.mark.parametrize("damage", [_lose_part, _change_part, _make_foreign])
def test_a_damaged_checkpoint_is_skipped_for_an_earlier_one(damage: Any) -> None:
    log = FakeLog(seed=5)
    fill(log, 10)
    good = write(log)
    fill(log, 10)
    bad = write(log, keys=40)
    assert search(log)[0] == bad
    damage(log, bad)
    assert search(log)[0] == good
    damage(log, good)
    assert search(log) is None


@pytest.mark.parametrize("changes", [{"keys": 19}, {"checksum": 1}, {"parts": []}])
def test_a_checkpoint_with_a_wrong_count_is_skipped(changes: dict[str, Any]) -> None:
    log = FakeLog(seed=6)
    fill(log, 10)
    write(log, changes)
    assert search(log) is None


def test_a_checkpoint_at_a_trimmed_position_is_skipped() -> None:
    log = FakeLog(seed=7)
    fill(log, 10)
    slow = log.tail
    fill(log, 10)
    log.sealed = log.tail.gsn
    quick = write(log, keys=30)
    late = write(log, keys=40, position=slow)
    assert min(late.parts).gsn > quick.position.gsn
    assert search(log)[0] == late
    log.trim(quick.position.gsn)
    assert search(log)[0] == quick


def test_a_trimmed_log_without_a_checkpoint_is_refused() -> None:
    log = FakeLog(seed=8)
    fill(log, 30)
    done = write(log)
    fill(log, 10)
    log.trim(done.parts[0].gsn + 1)
    error = search(log)
    assert isinstance(error, NoCheckpointError)
    assert error.first.gsn == log.first
    assert "no complete checkpoint" in str(error)


def test_a_trim_during_the_search_leads_to_its_checkpoint() -> None:
    log = FakeLog(seed=9)
    fill(log, 30)
    write(log)
    fill(log, 30)
    newer: list[CheckpointDone] = []

    def overtakes(request: Request) -> None:
        """While the parts of the first are read, a second one is made, and the log trimmed."""
        if isinstance(request, ReadRequest) and not newer:
            log.sealed = log.tail.gsn
            newer.append(write(log, keys=33))
            log.trim(newer[0].position.gsn)

    log.faults.append(overtakes)
    assert search(log)[0] == newer[0]


def test_an_unreadable_checkpoint_is_neither_skipped_nor_replayed_without() -> None:
    log = FakeLog(seed=10)
    fill(log, 30)
    first = write(log)
    fill(log, 10)
    log.trim(first.position.gsn)
    log.lost.add(first.parts[1].gsn)
    error = search(log)
    assert isinstance(error, UnavailableError)
    assert error.retriable
    log.lost.clear()
    assert search(log)[0] == first


@pytest.mark.parametrize("kind", [TailRequest, SubscribeRequest, FetchRequest])
def test_an_unavailable_log_ends_the_search_with_its_error(kind: type[Request]) -> None:
    log = FakeLog()
    fill(log, 3)
    log.faults.append(fail(kind, UNAVAILABLE))
    assert isinstance(search(log), UnavailableError)


@examples(150)
@given(st.data())
def test_the_last_complete_checkpoint_of_any_log_is_found(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**20))
    rng = random.Random(seed)
    log = FakeLog(seed=seed, shards=rng.randint(1, 4), step=rng.choice([1, 1 << 10, 1 << 26]))
    fill(log, 5)
    written: list[CheckpointDone] = []
    for action in data.draw(
        st.lists(st.sampled_from(["fill", "write", "old", "lose"]), max_size=12)
    ):
        if action == "fill":
            fill(log, rng.randint(1, 30))
        elif action in {"write", "old"}:
            # A subscriber has passed each position.
            log.sealed = log.tail.gsn
            old = written[0].position if action == "old" and written else None
            written.append(write(log, keys=rng.randint(0, 30), position=old))
        elif written:
            victim = rng.choice(written).parts
            log.forget(rng.choice(victim).gsn)
    if data.draw(st.booleans()) and len(log.gsns) > 1:
        log.trim(rng.choice(log.gsns))

    def is_whole(done: CheckpointDone) -> bool:
        return all(rid.gsn in log.records for rid in [*done.parts, done.position])

    dones = [decode(log.records[gsn].payload) for gsn in log.gsns]
    whole = [done for done in dones if isinstance(done, CheckpointDone) and is_whole(done)]
    found = search(log, at_once=data.draw(st.booleans()))
    if whole:
        assert found[0] == whole[-1]
    elif log.first > 1:
        assert isinstance(found, NoCheckpointError)
    else:
        assert found is None


def test_the_checkpoints_tried_in_one_search_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_MAX_TRIED", 3)
    log = FakeLog(seed=11)
    fill(log, 5)
    write(log)
    for _ in range(4):
        write(log, {"checksum": 1})
    assert search(log) is None
