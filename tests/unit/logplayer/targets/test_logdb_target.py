"""LogDB: position and effect change in one transaction; docs/player.md, section 8.

tests/integration/logplayer/test_logdb_target.py has a real database.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import logdb
from logplayer import targets
from logplayer.contract import Fenced, Opened, Rejected, RejectedRecord, Retry, Task
from logplayer.targets.logdb_target import LogdbTarget, PutRecords
from tests.properties import examples
from tests.unit.logplayer.targets.databases import GSNS, batch, record, task
from ziplog.errors import (
    ConfigError,
    DeadlineError,
    OutcomeUnknownError,
    RecordTooLargeError,
    UnavailableError,
)
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ziplog.types import Record

R = TypeVar("R")

KEY = b"\0player\0orders\0warehouse\x000"
#: Maximum bytes of a value, and of the keys of a transaction.
LARGEST = 1000


class FakeDatabase:
    """A database in memory: a commit counts only if what it read is unchanged."""

    def __init__(self) -> None:
        #: Values and their versions.
        self.data: dict[bytes, tuple[bytes | None, int]] = {}
        self.commits = 0
        #: What becomes of the next commits.
        self.faults: list[str] = []
        #: Commits that may still appear.
        self.late: list[FakeTransaction] = []
        self.cluster = 8
        self.is_closed = False

    def run(self, function: Callable[[FakeTransaction], R]) -> R:
        while True:
            transaction = FakeTransaction(self)
            try:
                result = function(transaction)
            except Exception as error:
                if not transaction.is_valid() and not isinstance(error, RecordTooLargeError):
                    continue
                raise
            fault = self.faults.pop(0) if self.faults else ""
            if fault == "unavailable":
                raise UnavailableError("no coordinator")
            if fault == "late":
                self.late.append(transaction)
            elif fault != "never" and not transaction.commit():
                continue
            if fault:
                raise OutcomeUnknownError("it may have happened", shard=0, seq=1)
            return result

    def appear(self) -> None:
        """Let the log show the late commits."""
        late, self.late = self.late, []
        for transaction in late:
            transaction.commit()

    def status(self) -> dict[str, Any]:
        return {"cluster": cluster_id(self.cluster)}

    def close(self) -> None:
        self.is_closed = True

    def get(self, key: bytes) -> Any:
        value = self.data.get(key, (None, 0))[0]
        return None if value is None else msgspec.msgpack.decode(value)

    @property
    def position(self) -> int:
        found: int = self.get(KEY)[5]
        return found


class FakeTransaction:
    """A transaction of it."""

    def __init__(self, database: FakeDatabase) -> None:
        self._database = database
        self._reads: dict[bytes, int] = {}
        self._writes: dict[bytes, bytes | None] = {}

    def get(self, key: bytes) -> Any:
        value, version = self._database.data.get(key, (None, 0))
        self._reads[key] = version
        value = self._writes.get(key, value)
        return None if value is None else msgspec.msgpack.decode(value)

    def scan(self, *, prefix: str) -> Iterator[tuple[bytes, Any]]:
        for key in sorted(self._database.data):
            if key.startswith(prefix.encode()):
                yield key, self.get(key)

    def put(self, key: bytes | str, value: Any) -> None:
        encoded = msgspec.msgpack.encode(value)
        name = key.encode() if isinstance(key, str) else key
        size = sum(map(len, self._writes)) + len(name)
        if max(len(encoded), size) > LARGEST:
            raise RecordTooLargeError(max(len(encoded), size), LARGEST, "value")
        self._writes[name] = encoded

    def delete(self, key: bytes) -> None:
        self._writes[key] = None

    def is_valid(self) -> bool:
        data = self._database.data
        return all(data.get(key, (None, 0))[1] == at for key, at in self._reads.items())

    def commit(self) -> bool:
        if not self.is_valid():
            return False
        self._database.commits += 1
        for key, value in self._writes.items():
            self._database.data[key] = (value, self._database.commits)
        return True


@pytest.fixture
def database() -> FakeDatabase:
    return FakeDatabase()


def made(database: FakeDatabase, apply: Any = None, *, is_mapped: bool = False) -> LogdbTarget:
    chosen = apply or PutRecords("payload", tombstones=False)
    connect: Any = lambda: database  # noqa: E731 - it stands for `logdb.connect`
    return LogdbTarget(connect, chosen, is_mapped=is_mapped)


def opened(
    database: FakeDatabase, term: int = 1, apply: Any = None, **more: Any
) -> tuple[LogdbTarget, Task]:
    target = made(database, apply)
    of = task(term, **more)
    target.open(of)
    return target, of


# --- batches ---


def test_key_gets_the_payload(database: FakeDatabase) -> None:
    target, of = opened(database)
    target.deliver(batch(of, 1, 4, [record(1, b"a", b"x"), record(2, b"b"), record(3, b"c", b"x")]))
    target.deliver(batch(of, 4, 5, []))
    assert [database.get(key) for key in (b"x", b"k")] == [b"c", b"b"]
    assert database.get(KEY) == [cluster_id(7), 1, 1, 1, 0, 5]


@pytest.mark.parametrize(
    ("value", "payload", "expected"),
    [
        ("payload", b"\xff", b"\xff"), ("text", "ä".encode(), "ä"),
        ("json", b'{"a": [1]}', {"a": [1]}),
    ],
)  # fmt: skip
def test_value_is_converted(
    database: FakeDatabase, value: Any, payload: bytes, expected: object
) -> None:
    target, of = opened(database, apply=PutRecords(value, tombstones=False))
    target.deliver(batch(of, 1, 4, [record(1, payload)]))
    assert database.get(b"k") == expected


def test_tombstone_deletes(database: FakeDatabase) -> None:
    target, of = opened(database, apply=PutRecords("json", tombstones=True))
    target.deliver(batch(of, 1, 3, [record(1, b"1")]))
    target.deliver(batch(of, 3, 4, [record(3, b"")]))
    assert database.get(b"k") is None


@pytest.mark.parametrize(
    ("value", "bad", "why"),
    [
        ("payload", record(2, b"x", None), "no key"),
        ("text", record(2, b"\xff"), "not text"),
        ("json", record(2, b"{"), "not json"),
    ],
)
def test_record_that_cannot_be_stored_is_rejected(
    database: FakeDatabase, value: Any, bad: Record, why: str
) -> None:
    target, of = opened(database, apply=PutRecords(value, tombstones=False))
    with pytest.raises(Rejected, match=why) as caught:
        target.deliver(batch(of, 1, 4, [record(1, b"1"), bad]))
    assert caught.value.index == 1
    assert database.position == 1
    assert database.get(b"k") is None


def test_batch_that_does_not_fit_is_rejected_as_a_whole(database: FakeDatabase) -> None:
    """The player then halves it."""
    target, of = opened(database)
    with pytest.raises(Rejected, match="does not fit") as caught:
        target.deliver(batch(of, 1, 4, [record(1), record(2, bytes(LARGEST))]))
    assert caught.value.index is None
    assert database.position == 1


def test_rejected_records_are_kept_with_the_batch(database: FakeDatabase) -> None:
    target, of = opened(database)
    large = RejectedRecord(record(3, bytes(LARGEST)), "too large")
    target.deliver(batch(of, 1, 4, [record(1)], [RejectedRecord(record(2, b"x"), "bad"), large]))
    dead = {key: database.get(key) for key in database.data if key.startswith(b"\0dead\0")}
    assert sorted(dead) == [
        b"\0dead\0orders\0warehouse\x00%019d\x00%d" % pair for pair in ((2, 0), (3, 1))
    ]
    first, second = (dead[key] for key in sorted(dead))
    assert (first["why"], first["payload"], first["key"]) == ("bad", b"x", b"k")
    assert (second["why"], second["payload"]) == ("too large", None)


def test_function_applies_records_in_the_transaction(database: FakeDatabase) -> None:
    def apply(transaction: Any, records: Sequence[Record]) -> None:
        for one in records:
            if one.payload == b"bad":
                raise Rejected("bad")
            transaction.put(b"sum", (transaction.get(b"sum") or 0) + one.rid.gsn)

    target, of = opened(database, apply=apply)
    target.deliver(batch(of, 1, 4))
    with pytest.raises(Rejected):
        target.deliver(batch(of, 4, 9, [record(5), record(8, b"bad")]))
    assert (database.get(b"sum"), database.position) == (6, 4)


def test_apply_runs_again_if_another_client_changes_what_it_has_read(
    database: FakeDatabase,
) -> None:
    sums: list[int] = []

    def apply(transaction: Any, records: Sequence[Record]) -> None:
        before = transaction.get(b"sum") or 0
        if not sums:  # Another client adds to the sum before the first attempt commits.
            database.run(lambda other: other.put(b"sum", 100))
        sums.append(before)
        transaction.put(b"sum", before + len(records))

    target, of = opened(database, apply=apply)
    target.deliver(batch(of, 1, 4))
    assert sums == [0, 100]
    assert (database.get(b"sum"), database.position) == (103, 4)


# --- whose database it is ---


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cluster": 9}, "the player's cluster is"),
        ({"birth": 2}, "a former cursor"),
        ({"partitions": 2}, "has 2 partitions, but 1 in the database"),
        ({"partition": 1, "partitions": 2}, "has 2 partitions, but 1 in the database"),
    ],
)
def test_position_of_another_cursor_is_refused(
    database: FakeDatabase, change: dict[str, Any], problem: str
) -> None:
    opened(database)
    with pytest.raises(ConfigError, match=problem):
        made(database).open(task(2, **change))


def test_emptied_database_fails_the_task_until_a_seek(database: FakeDatabase) -> None:
    with pytest.raises(ConfigError, match="ziplog cursor seek orders/warehouse/0 genesis"):
        made(database).open(task(2, position=4, has_moved=True))
    assert made(database).open(task(3, position=2, seek=1)) == Opened(2)


def test_another_database_at_the_same_endpoints_is_found(database: FakeDatabase) -> None:
    databases: list[Any] = [FakeDatabase(), database]
    target = LogdbTarget(databases.pop, PutRecords("payload", tombstones=False), is_mapped=False)
    target.open(task())
    database.faults = ["unavailable"]
    with pytest.raises(Retry):
        target.open(task(has_moved=True))
    assert database.is_closed
    with pytest.raises(ConfigError, match="the database is empty, or another one"):
        target.open(task(has_moved=True))


def test_seek_counts_once(database: FakeDatabase) -> None:
    target, of = opened(database)
    target.deliver(batch(of, 1, 9))
    assert made(database).open(task(2, position=3, seek=1)) == Opened(3)
    target, of = made(database), task(3, position=3, seek=1)
    target.open(of)
    target.deliver(batch(of, 3, 6))
    assert made(database).open(task(4, position=3, seek=1)) == Opened(6)


def test_older_state_from_before_a_seek_fails_the_task_until_a_seek(database: FakeDatabase) -> None:
    """The cursor was sought to 8, and moved to 15; then a backup from before that came back."""
    target, of = opened(database)
    target.deliver(batch(of, 1, 4))
    with pytest.raises(ConfigError, match=r"position 4 .*from before the last seek.* 15"):
        made(database).open(task(3, position=15, seek=1, has_moved=True))
    assert made(database).open(task(4, position=4, seek=2)) == Opened(4)
    assert made(database).open(task(5, position=15, seek=2, has_moved=True)) == Opened(4)


def test_log_of_the_player_is_refused_without_a_map(database: FakeDatabase) -> None:
    database.cluster = 7
    with pytest.raises(ConfigError, match="is on the log that the player reads"):
        made(database).open(task())
    assert made(database, is_mapped=True).open(task()) == Opened(1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"coordinators": "nowhere"}, {"apply": 5}, {"value": "xml"}, {"timeout_s": 0},
        {"apply": print, "tombstones": True}, {"timeout_s": "x"},
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        targets.logdb("t", **arguments)


def test_database_that_is_absent_is_retried() -> None:
    spec = targets.logdb("t", "127.0.0.1:1", timeout_s=0.05)
    with pytest.raises(Retry):
        spec.connect().open(task())


def test_closed_target_is_opened_again(database: FakeDatabase) -> None:
    target, of = opened(database)
    target.close()
    assert database.is_closed
    with pytest.raises(Retry):
        target.deliver(batch(of, 1, 4))
    assert target.open(of) == Opened(1)


@pytest.mark.parametrize("error", [logdb.TransactionAborted([b"k"]), DeadlineError("late")])
def test_other_failures_are_retried(database: FakeDatabase, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    target, of = opened(database, apply=fail)
    with pytest.raises(Retry):
        target.deliver(batch(of, 1, 4))


# --- owners and unknown outcomes ---


def test_former_owner_is_fenced(database: FakeDatabase) -> None:
    former, of = opened(database)
    former.deliver(batch(of, 1, 4))
    successor, later = opened(database, 2, position=4, has_moved=True)
    with pytest.raises(Fenced, match="term 2 and position 4"):
        former.deliver(batch(of, 4, 9))
    with pytest.raises(Fenced, match="later term 2"):
        former.open(of)
    successor.deliver(batch(later, 4, 9))
    with pytest.raises(Fenced, match="position 9"):
        successor.deliver(batch(later, 4, 9))
    assert database.position == 9


@pytest.mark.parametrize("term", [1, 2])
def test_late_commit_has_no_effect_after_an_open(database: FakeDatabase, term: int) -> None:
    target, of = opened(database)
    database.faults = ["late"]
    with pytest.raises(Retry, match="unknown"):
        target.deliver(batch(of, 1, 4))
    assert target.open(task(term, has_moved=True)) == Opened(1)
    database.appear()
    assert database.position == 1
    assert database.get(b"k") is None


steps = st.tuples(
    st.sampled_from(["claim", "open", "deliver", "deliver", "appear"]),
    st.integers(0, 1),
    st.sampled_from(["", "", "unavailable", "done", "late", "never"]),
)


def count(transaction: Any, records: Sequence[Record]) -> None:
    for one in records:
        key = b"gsn%019d" % one.rid.gsn
        transaction.put(key, (transaction.get(key) or 0) + 1)


class Owner:
    """A process that believes to own the task."""

    def __init__(self, database: FakeDatabase) -> None:
        self.target = made(database, count)
        self.task = task(0)
        self.at: int | None = None

    def open(self) -> None:
        self.at = None
        with suppress(Fenced, Retry):
            self.at = self.target.open(self.task).position

    def deliver(self) -> None:
        if self.at is None:
            return
        at, self.at = self.at, None
        stop = next((gsn for gsn in GSNS if gsn >= at + 2), at + 1) + 1
        with suppress(Fenced, Retry):
            self.target.deliver(batch(self.task, at, stop))
            self.at = stop


@examples(100)
@given(plan=st.lists(steps, max_size=20))
def test_any_order_of_steps_keeps_position_and_effects_equal(
    plan: list[tuple[str, int, str]],
) -> None:
    database = FakeDatabase()
    owners, term = [Owner(database), Owner(database)], 0
    owners[0].open()
    owners[1].task = task(-1)  # not claimed yet
    for what, number, fault in plan:
        owner, database.faults = owners[number], [fault] if fault else []
        if what == "claim":
            term += 1
            owner.task = task(term)
        if what == "appear":
            database.appear()
        elif what == "deliver":
            owner.deliver()
        else:
            owner.open()
        position = database.position
        applied = {int(key[3:]): database.get(key) for key in database.data if key[:3] == b"gsn"}
        assert applied == {gsn: 1 for gsn in GSNS if gsn < position}
        newest = max(owners, key=lambda one: one.task.term)
        assert newest.at in {None, position}
