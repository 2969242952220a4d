"""Mirrors: each row once and in order, whatever owners, connections and shards do."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logplayer import targets
from logplayer.contract import Batch, Fenced, Rejected, Retry, Task
from logplayer.targets import log_target
from logplayer.targets.log_target import LogTarget
from logplayer.targets.mirror_mark import Mark, choose_shard, writer_id
from tests.unit.logplayer.targets import mirrors
from tests.unit.logplayer.targets.mirrors import (
    FIRST,
    Client,
    Cursor,
    Owner,
    TargetLog,
    batch,
    expected,
    record,
    task,
)
from ziplog.errors import (
    ClusterMismatchError,
    ConfigError,
    NoSuchRecordError,
    OutcomeUnknownError,
    UnavailableError,
)
from ziplog.types import cluster_id
from ziplog.wire import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 24


class Mirror:
    """A task with a target, which is opened, and a cursor that follows it."""

    def __init__(self, log: TargetLog, cursor: Cursor | None = None, **more: Any) -> None:
        self.log, self.cursor = log, cursor or Cursor()
        self.failures: list[str] = []
        self.task = task(self.cursor, **{"term": 1, **more})
        self.target = LogTarget(self.client, None, has_envelope=False)
        self.opened = self.target.open(self.task)
        assert self.opened.position == self.task.position
        self.cursor.position, self.cursor.mark = self.task.position, self.opened.mark
        self.cursor.has_moved = True

    def client(self) -> Client:
        return Client(self.log, self.step)

    def step(self, what: str) -> str:
        if self.failures and self.failures[0].startswith(f"{what}:"):
            return self.failures.pop(0).partition(":")[2]
        return ""

    def batch(self, first: int, stop: int) -> Batch:
        records = [record(number, b"%d" % number) for number in range(first, stop)]
        return msgspec.structs.replace(
            batch(self.task, self.cursor.position, first, stop), records=records
        )

    def deliver(self, first: int, stop: int) -> None:
        given = self.batch(first, stop)
        self.cursor.mark = self.target.deliver(given)
        self.cursor.position = given.stop

    def again(self) -> Mirror:
        """Return another owner's target."""
        return Mirror(self.log, self.cursor)


def payloads(log: TargetLog) -> list[bytes]:
    return [payload for _, payload in log.read()]


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.fixture
def log() -> TargetLog:
    return TargetLog()


def test_rows_have_keys_and_the_order_of_the_source(log: TargetLog) -> None:
    mirror = Mirror(log)
    mirror.deliver(0, 5)
    mirror.deliver(5, 8)
    assert log.read() == [(record(number).key, b"%d" % number) for number in range(8)]
    assert sum(bool(shard.units) for shard in log.shards.values()) == 1
    assert msgspec.msgpack.decode(mirror.cursor.mark, type=Mark).rows == 8


def test_restart_writes_nothing_twice(log: TargetLog) -> None:
    mirror = Mirror(log)
    mirror.deliver(0, 5)
    former = Cursor(mirror.cursor.position, mirror.cursor.mark, has_moved=True)
    mirror.deliver(5, 8)  # The cursor is not moved.
    mirror = Mirror(log, former)
    assert mirror.opened.mark == former.mark, "nothing to commit"
    mirror.deliver(5, 10)
    assert payloads(log) == numbers(10)
    assert log.written() == 10


def test_batch_that_is_in_the_log_already_writes_nothing(log: TargetLog) -> None:
    mirror = Mirror(log)
    former = Cursor(mirror.cursor.position, mirror.cursor.mark, has_moved=True)
    mirror.deliver(0, 8)
    mirror = Mirror(log, former)
    mirror.deliver(0, 3)
    mirror = mirror.again()
    mirror.deliver(3, 9)
    assert (payloads(log), log.written()) == (numbers(9), 9)


@pytest.mark.parametrize("failure", ["insert:lost", "insert:late", "insert:reply", "sync:no"])
def test_failed_batch_is_delivered_again_after_an_open(log: TargetLog, failure: str) -> None:
    mirror = Mirror(log)
    mirror.deliver(0, 2)
    mirror.failures = [failure]
    with pytest.raises((UnavailableError, OutcomeUnknownError)):
        mirror.deliver(2, 5)
    log.flush()
    mark = mirror.cursor.mark
    # The cursor of the claim is behind what this target has done.
    opened = mirror.target.open(mirror.task)
    assert opened == (mirror.cursor.position, mark)
    mirror.deliver(2, 5)
    log.place_late()
    mirror.deliver(5, 7)
    assert payloads(log) == numbers(7)


def test_rows_that_are_not_on_disk_are_written_again(log: TargetLog) -> None:
    mirror = Mirror(log)
    mirror.failures = ["sync:no"]
    with pytest.raises(UnavailableError):
        mirror.deliver(0, 5)
    mirror = mirror.again()
    log.lose_memory()
    mirror.deliver(0, 6)
    assert payloads(log) == numbers(6)


def test_loss_of_memory_in_the_middle_of_a_batch_leaves_no_gap(
    log: TargetLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_target, "split_into_row_units", pairs)
    mirror = Mirror(log)
    sync = Client.sync

    def lose_first(client: Client) -> Any:
        monkeypatch.setattr(Client, "sync", sync)
        log.lose_memory()
        return sync(client)

    monkeypatch.setattr(Client, "sync", lose_first)
    with pytest.raises(NoSuchRecordError):
        mirror.deliver(0, 6)
    mirror.target.open(mirror.task)
    mirror.deliver(0, 6)
    assert payloads(log) == numbers(6)


def test_rows_of_a_removed_shard_are_followed_by_those_of_another_one(log: TargetLog) -> None:
    mirror = Mirror(log)
    shard = msgspec.msgpack.decode(mirror.cursor.mark, type=Mark).shard
    mirror.deliver(0, 3)
    log.place(shard, [b"3", b"4"], [b"key"] * 2, mirrors.Origin(writer_id(mirror.task), 0, 3))
    log.leave(shard)
    with pytest.raises(UnavailableError):
        mirror.deliver(3, 8)
    with pytest.raises(Retry, match=f"leaves shard {shard}"):
        mirror.target.open(mirror.task)
    log.finalize()
    opened = mirror.target.open(mirror.task)
    mark = msgspec.msgpack.decode(opened.mark, type=Mark)
    assert (mark.shard, mark.rows, mark.placed) == (1 - shard, 3, 5)
    assert opened.position == mirror.cursor.position
    mirror.cursor.mark = opened.mark
    mirror = mirror.again()
    mirror.deliver(3, 8)
    assert (payloads(log), log.written()) == (numbers(8), 8)


def test_rows_before_a_repetition_count_when_the_shard_is_removed(log: TargetLog) -> None:
    """Another owner was ahead, so the last row that this one wrote is behind further rows."""
    mirror = Mirror(log)
    shard = msgspec.msgpack.decode(mirror.cursor.mark, type=Mark).shard
    log.place(shard, numbers(8), [b"key"] * 8, mirrors.Origin(writer_id(mirror.task), 0, 0))
    mirror.deliver(0, 3)
    log.leave(shard)
    log.finalize()
    mirror = mirror.again()
    assert msgspec.msgpack.decode(mirror.opened.mark, type=Mark).placed == 8
    mirror.deliver(3, 10)
    assert payloads(log) == numbers(10)


def test_log_without_live_shards_is_waited_for(log: TargetLog) -> None:
    for shard in log.shards.values():
        shard.state = "recovering"
    with pytest.raises(Retry, match="no shard of the target log is live"):
        Mirror(log)


def test_shard_that_recovers_is_waited_for(log: TargetLog) -> None:
    mirror = Mirror(log)
    shard = msgspec.msgpack.decode(mirror.cursor.mark, type=Mark).shard
    log.shards[shard].state = "parked"
    assert mirror.again().opened.mark == mirror.opened.mark


def test_tasks_of_a_target_go_round_robin() -> None:
    live = [5, 2, 9]
    chosen = [choose_shard(task(Cursor(), partition=index), live) for index in range(6)]
    assert set(chosen[:3]) == set(live)
    assert chosen[:3] == chosen[3:]


def test_first_shard_may_be_given(log: TargetLog) -> None:
    target = LogTarget(lambda: Client(log), 1, has_envelope=False)
    assert msgspec.msgpack.decode(target.open(task(Cursor())).mark, type=Mark).shard == 1
    target = LogTarget(lambda: Client(log), 7, has_envelope=False)
    with pytest.raises(ConfigError, match="shard is 7; it must be a shard of the target log that"):
        target.open(task(Cursor()))


def test_envelope_keeps_what_the_source_knew(log: TargetLog) -> None:
    target = LogTarget(lambda: Client(log), None, has_envelope=True)
    opened = target.open(task(Cursor()))
    assert opened.position == FIRST
    target.deliver(batch(task(Cursor()), FIRST, 4, 5))
    ((key, payload),) = log.read()
    one = record(4)
    assert key == one.key
    assert msgspec.msgpack.decode(payload) == [
        one.rid.gsn, one.rid.shard, one.epoch, one.timestamp_us, one.payload
    ]  # fmt: skip


def test_record_that_is_too_large_is_rejected_before_anything_is_sent(log: TargetLog) -> None:
    mirror = Mirror(log)
    given = msgspec.structs.replace(
        mirror.batch(0, 2), records=[record(0, b"0"), record(1, bytes(1001))]
    )
    with pytest.raises(Rejected, match="payload has 1001 bytes") as caught:
        mirror.target.deliver(given)
    assert (caught.value.index, log.written()) == (1, 0)


def test_limits_are_those_of_the_beginning(log: TargetLog) -> None:
    mirror = Mirror(log)
    log.limits = Limits(max_payload_bytes=5000)
    mirror = mirror.again()
    given = msgspec.structs.replace(mirror.batch(0, 1), records=[record(0, bytes(1001))])
    with pytest.raises(Rejected):
        mirror.target.deliver(given)


def test_steps_without_records_need_no_log(log: TargetLog) -> None:
    mirror = Mirror(log)
    mirror.deliver(0, 2)
    mark = mirror.cursor.mark
    mirror.failures = ["insert:lost", "sync:no"]
    mirror.deliver(2, 2)
    assert (mirror.cursor.mark, mirror.failures) == (mark, ["insert:lost", "sync:no"])


def test_batch_that_is_not_the_next_one_is_fenced(log: TargetLog) -> None:
    mirror = Mirror(log)
    mirror.cursor.position += 10
    with pytest.raises(Fenced):
        mirror.deliver(1, 2)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"cluster": mirrors.TARGET}, "is the log that it would mirror"),
        ({"seek": 1}, "was sought.*ziplog cursor delete orders/copy/0.*cursor create"),
        ({"has_moved": True}, "has moved to gsn 100 without a mirror's mark"),
        ({"has_moved": True, "mark": b"\x93abc"}, "without a mirror's mark"),
    ],
)
def test_what_cannot_be_a_mirror_fails(log: TargetLog, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LogTarget(lambda: Client(log), None, has_envelope=False).open(task(Cursor(), **more))


def test_another_log_in_the_place_of_the_mirror_is_refused(log: TargetLog) -> None:
    mirror = Mirror(log)
    with pytest.raises(ConfigError, match="is not the one that orders/copy/0 has filled so far"):
        Mirror(TargetLog(number=8), mirror.cursor)


def test_client_of_a_former_cluster_is_replaced(log: TargetLog) -> None:
    former = Client(log, Mock(side_effect=ClusterMismatchError("7", "8", "127.0.0.1:1")))
    clients = [Client(TargetLog(number=8)), former]
    target = LogTarget(clients.pop, None, has_envelope=False)
    with pytest.raises(ClusterMismatchError):
        target.open(task(Mirror(log).cursor))
    assert former.is_closed
    with pytest.raises(ConfigError, match="is not the one that orders/copy/0 has filled so far"):
        target.open(task(Mirror(log).cursor))


def test_cursor_that_was_created_again_has_another_writer() -> None:
    first = task(Cursor())
    ids = {
        writer_id(msgspec.structs.replace(first, **{name: value}))
        for name, value in [("birth", 1), ("birth", 2), ("partition", 1), ("cluster", 3)]
    }
    assert len(ids) == 4
    assert writer_id(msgspec.structs.replace(first, term=9, seek=3)) == writer_id(first)


def test_writers_of_a_mirror_follow_from_its_name() -> None:
    one = task(Cursor())
    name = f"{cluster_id(one.cluster)}/{one.player}/{one.target}"
    (found,) = targets.log("back", "127.0.0.1:1", not_from=[name]).skip_writers
    for more in ({}, {"partition": 3}, {"birth": 9}, {"term": 7, "seek": 2}):
        assert writer_id(msgspec.structs.replace(one, **more)).startswith(found)
    for more in ({"cluster": 8}, {"player": "order"}, {"target": "copies"}):
        assert not writer_id(msgspec.structs.replace(one, **more)).startswith(found)
    assert targets.log("back", "127.0.0.1:1").skip_writers == ()


@pytest.mark.parametrize("name", ["orders/copy", "7/orders/copy", f"{7:032X}/orders/copy/0", 7])
def test_names_of_mirrors_are_checked(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"target back: not_from is .*CLUSTER/PLAYER/TARGET"):
        targets.log("back", "127.0.0.1:1", not_from=[name])


def test_check_connects_and_closes(log: TargetLog) -> None:
    client = Client(log)
    LogTarget(lambda: client, None, has_envelope=False).check()
    assert client.is_closed


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"order": "none"}, "order is 'none'"), ({"partitions": 2}, "partitions is 2"),
        ({"shard": 1, "order": "key"}, "shard is 1"), ({"shard": -1}, "shard is -1"),
        ({"envelope": 1}, "envelope is 1"), ({"timeout_s": 0}, "timeout_s is 0"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"target copy: {text}; it must be "):
        targets.log("copy", "127.0.0.1:1", **more)


def test_target_stores_positions_as_its_repetitions_have_no_effect() -> None:
    spec = targets.log("copy", "127.0.0.1:1", order="key", partitions=4)
    assert (spec.stores_position, spec.partitions) == (True, 4)
    with pytest.raises(ConfigError):
        targets.log("copy", "nowhere")


# --- any order of steps, failures and deaths of several owners ---


def pairs(payloads: list[bytes], _keys: object = None) -> list[tuple[int, int]]:
    """Split payloads into units of two."""
    return [(at, min(at + 2, len(payloads))) for at in range(0, len(payloads), 2)]


ORDERS = ["", "", "", "", "", "", "", "", "lazy", "lost", "late", "reply", "die"]


def story(choose: Callable[[int], int]) -> None:
    """Let owners copy a log in an order that `choose` determines, and check the mirror."""
    log, cursor = TargetLog(), Cursor()
    owners: list[Owner] = []

    checked = [-1]

    def check() -> None:
        if checked[0] == log.changes:
            return
        checked[0], found = log.changes, log.read()
        assert found == expected(COUNT)[: len(found)], "a row is missing, there twice, or misplaced"

    def add_owner() -> None:
        if len(owners) < 5:
            owners.append(Owner(cursor, log, COUNT, 1 + choose(6)))

    def leave() -> None:
        live = [number for number, shard in log.shards.items() if shard.state == "live"]
        if len(live) > 1:
            log.leave(live[choose(len(live))])

    rare = [
        add_owner, add_owner, leave, leave, log.finalize, log.finalize, log.place_late,
        log.lose_memory, log.flush, log.flush, log.add_shard,
    ]  # fmt: skip
    try:
        add_owner()
        for _ in range(40 + choose(160)):
            act = choose(20)
            if act == 0:
                rare[choose(len(rare))]()
            else:
                # The last owners run most of the time.
                at = max(choose(len(owners)), choose(len(owners)))
                for _ in range(1 + choose(4)):
                    owners[at].resume(ORDERS[choose(len(ORDERS))])
                    check()
            check()
        last = Owner(cursor, log, COUNT, 4)
        owners.append(last)
        log.finalize()
        for one in reversed(owners):  # Those that stood still wake up at the end.
            for _ in range(400):
                if one.has_ended:
                    break
                one.resume()
                log.flush()
                check()
            assert one.has_ended
            log.place_late()
            check()
        assert log.read() == expected(COUNT)
    finally:
        for one in owners:
            one.end()


@given(st.integers(0, 2**32))
def test_any_order_of_steps_keeps_each_row_once_and_in_order(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_target, "split_into_row_units", pairs)
        story(random.Random(seed).randrange)


def number_from_each_claim(target: LogTarget, opened: Any, _task: Task) -> Any:
    """Break a rule: the rows are numbered from the claim on."""
    mark = target._mark
    assert mark is not None
    if not hasattr(target, "is_renumbered"):
        target.is_renumbered = True  # type: ignore[attr-defined]
        target._mark = msgspec.structs.replace(mark, rows=0, placed=0)
        target._placed = 0
    return opened


def commit_no_mark(_target: LogTarget, opened: Any, task: Task) -> Any:
    """Break a rule: a new shard is not committed before its first row."""
    return opened._replace(mark=task.mark or opened.mark)


def send_in_parallel(
    target: LogTarget, payloads: list[bytes], keys: list[bytes | None], shard: int, row: int
) -> int:
    """Break a rule: a unit is sent before the one before it is in the log."""
    units, gsn = pairs(payloads), 0
    for start, stop in units:
        try:
            gsn = target._connected().insert_rows(
                payloads[start:stop], keys=keys[start:stop], shard=shard, writer=target._writer,
                batch=0, row=row + start,
            )[-1].gsn  # fmt: skip
        except (UnavailableError, OutcomeUnknownError):
            if stop == len(payloads):
                raise
    target._connected().sync()
    return gsn


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def broken(function: Callable[[pytest.MonkeyPatch], None]) -> Any:
    BROKEN[function.__name__] = function
    return function


def opened_by(patch: pytest.MonkeyPatch, change: Callable[[LogTarget, Any, Task], Any]) -> None:
    original = LogTarget.open
    patch.setattr(LogTarget, "open", lambda self, task: change(self, original(self, task), task))


@broken
def rows_are_numbered_from_each_claim(patch: pytest.MonkeyPatch) -> None:
    opened_by(patch, number_from_each_claim)


@broken
def rows_are_pipelined(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogTarget, "_insert", send_in_parallel)


@broken
def new_shard_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    opened_by(patch, commit_no_mark)


@broken
def former_shard_is_not_searched(patch: pytest.MonkeyPatch) -> None:
    find = LogTarget._find_placed

    def find_none(self: LogTarget, log: Any, after: int, stop: int | None) -> int:
        return self._placed if stop is None else find(self, log, after, stop)

    patch.setattr(LogTarget, "_find_placed", find_none)


@broken
def shard_is_left_before_it_is_finalized(patch: pytest.MonkeyPatch) -> None:
    cluster = Client.cluster

    def hasty(self: Client) -> Any:
        document = cluster(self)
        for shard in document["shards"]:
            shard["state"] = shard["state"].replace("leaving", "finalized")
        return document

    patch.setattr(Client, "cluster", hasty)


@broken
def rows_in_memory_count(patch: pytest.MonkeyPatch) -> None:
    find = LogTarget._find_placed

    def find_all(self: LogTarget, log: Any, after: int, stop: int | None) -> int:
        return find(self, log, after, stop and mirrors.END)

    patch.setattr(LogTarget, "_find_placed", find_all)


@broken
def rows_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Client, "sync", lambda _self: None)


@broken
def rejected_records_are_found_only_among_those_that_are_sent(patch: pytest.MonkeyPatch) -> None:
    check, deliver = log_target._check_sizes, LogTarget.deliver
    first = [0]

    def note(self: LogTarget, batch: Batch) -> bytes:
        assert self._mark is not None
        first[0] = max(self._placed - self._mark.rows, 0)
        return deliver(self, batch)

    def check_some(payloads: Any, keys: Any, mark: Mark) -> None:
        try:
            check(payloads, keys, mark)
        except Rejected as error:
            if error.index is None or error.index >= first[0]:
                raise

    patch.setattr(LogTarget, "deliver", note)
    patch.setattr(log_target, "_check_sizes", check_some)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_target, "split_into_row_units", pairs)
        # It would end some runs before a reader of the mirror gets anything wrong.
        patch.setattr(LogTarget, "_check_last", lambda *_: None)
        BROKEN[name](patch)
        for seed in range(3000):
            try:
                story(random.Random(seed).randrange)
            except AssertionError:
                return
    raise AssertionError(f"no run has found that {name}")


def test_writer_without_birth_hides_the_rows_of_a_new_cursor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cursor that was deleted and created again makes a second copy."""

    def copy_twice() -> list[bytes]:
        log = TargetLog()
        for birth in (1, 2):
            Mirror(log, birth=birth).deliver(0, 3)
        return payloads(log)

    assert copy_twice() == numbers(3) * 2
    one = writer_id(task(Cursor()))
    monkeypatch.setattr(log_target, "writer_id", lambda _task: one)
    assert copy_twice() == numbers(3)
