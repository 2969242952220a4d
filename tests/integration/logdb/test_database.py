"""The blocking client with a real log and real coordinators."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import logdb
import ziplog
from logdb import wire
from tests.waiting import wait_until
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def db(coordinator: logdb.Coordinator) -> Iterator[logdb.Database]:
    with logdb.connect(coordinator.endpoint) as db:
        with db.transaction() as t:
            for key, _ in db.scan(b""):
                t.delete(key)
        yield db


# --- single reads and writes ---


def test_single_reads_and_writes(db: logdb.Database) -> None:
    assert db.get("k") is None
    assert db.get("k", default=0) == 0
    assert not db.exists("k")
    first = db.put("k", {"a": [1, 2.5, None, b"\x00", "é"]})
    assert db.get("k") == {"a": [1, 2.5, None, b"\x00", "é"]}
    assert db.get(b"k") == db.get("k")
    assert db.exists("k")
    assert db.delete("k") > first
    assert db.get("k", default="gone") == "gone"


def test_several_at_once(db: logdb.Database) -> None:
    assert db.multi_put({}) is None
    assert db.multi_get([]) == []
    rid = db.multi_put({"a": 1, b"b": 2, "c": None})
    assert isinstance(rid, ziplog.RecordId)
    assert db.multi_get(["c", "b", "absent", "a"], default="-") == [None, 2, "-", 1]
    assert db.exists("c")
    assert db.test_and_multi_put({"a": 1, "absent": None}, {"a": 5, "d": 6})
    assert not db.test_and_multi_put({"a": 1}, {"a": 7})
    assert db.multi_get(["a", "d"]) == [5, 6]


def test_large_values(db: logdb.Database) -> None:
    values = {f"large{number}": bytes([number]) * 300_000 for number in range(4)}
    db.multi_put(values | {"small": 1})
    assert db.multi_get(list(values)) == list(values.values())
    largest = (1 << 20) - 5 - 64 - 5
    db.put("large", b"x" * largest)
    assert len(db.get("large")) == largest
    with pytest.raises(ziplog.RecordTooLargeError):
        db.put("large", b"x" * (largest + 1))
    with pytest.raises(ziplog.RecordTooLargeError):
        db.put("k" * 1025, 1)
    with pytest.raises(logdb.UnsupportedValueError):
        db.put("k", object())
    with pytest.raises(TypeError):
        db.get(5)  # type: ignore[arg-type]


def test_scans(db: logdb.Database) -> None:
    db.multi_put({f"a{number:04}": number for number in range(2500)} | {b"b\xff": 1})
    assert [value for _, value in db.scan(prefix="a")] == list(range(2500))
    assert list(db.scan("a0010", "a0012")) == [("a0010", 10), ("a0011", 11)]
    assert list(db.scan(b"a2499")) == [(b"a2499", 2499), (b"b\xff", 1)]
    assert list(db.scan("a2499"))[-1] == ("b\udcff", 1)
    assert len(list(db.scan(limit=1500))) == 1500
    # A scan that is left early releases its snapshot.
    rows = db.scan()
    assert next(rows) == ("a0000", 0)
    rows.close()  # type: ignore[attr-defined]
    assert next(rows, None) is None
    wait_until(lambda: db.status()["snapshots"] == 0, "the snapshot is dropped")
    rows = db.scan()
    assert next(rows) == ("a0000", 0)
    del rows
    gc.collect()
    wait_until(lambda: db.status()["snapshots"] == 0, "that of a scan that was collected, too")
    kept = db.snapshot()
    del kept
    gc.collect()
    wait_until(lambda: db.status()["snapshots"] == 0, "and a snapshot that was collected")


# --- transactions ---


def test_a_transaction(db: logdb.Database) -> None:
    with db.transaction() as t:
        assert t.get("k", default=0) == 0
        t.put("k", 1)
        t.delete("old")
        assert t.get("k") == 1
        assert t.multi_get(["k", "old"], default="-") == [1, "-"]
        assert t.exists("k")
        assert db.get("k") is None
        assert t.status == "open"
        assert t.position is None
    assert t.status == "committed"
    assert isinstance(t.position, ziplog.RecordId)
    assert db.get("k") == 1
    with pytest.raises(logdb.TransactionClosed):
        t.get("k")
    with pytest.raises(logdb.TransactionClosed):
        t.put("k", 2)


def test_an_exception_rolls_back(db: logdb.Database) -> None:
    with pytest.raises(ZeroDivisionError), db.transaction() as t:  # noqa: PT012 - it ends by it
        t.put("k", 1)
        raise ZeroDivisionError
    assert t.status == "rolled back"
    with db.transaction() as t:
        t.put("k", 1)
        t.rollback()
    assert db.get("k") is None
    t = db.transaction()
    try:
        t.put("k", 2)
        t.commit()
    finally:
        t.rollback()
    assert (t.status, db.get("k")) == ("committed", 2)


def test_a_conflict(db: logdb.Database) -> None:
    db.put("k", 1)
    t = db.transaction()
    with pytest.raises(logdb.TransactionAborted) as caught, t:  # noqa: PT012 - its end raises
        t.put("k", t.get("k") + 1)
        db.put("k", 10)
    assert caught.value.conflicts == [b"k"]
    assert caught.value.retriable
    assert t.status == "aborted"
    assert db.get("k") == 10


def test_a_conflicting_read_ends_the_transaction(db: logdb.Database) -> None:
    db.multi_put({"a": 1, "b": 1})
    t = db.transaction()
    assert t.get("a") == 1
    db.multi_put({"a": 2, "b": 2})
    with pytest.raises(logdb.TransactionAborted):
        t.get("b")
    assert t.status == "aborted"


def test_a_scan_in_a_transaction(db: logdb.Database) -> None:
    db.multi_put({"a1": 1, "a2": 2, "b": 3})
    with db.transaction() as t:
        t.put("a3", 3)
        t.delete("a1")
        assert list(t.scan(prefix="a")) == [("a2", 2), ("a3", 3)]
        t.put("sum", sum(value for _, value in t.scan(prefix="a")))
    assert db.get("sum") == 5
    with pytest.raises(logdb.TransactionAborted), db.transaction() as t:  # noqa: PT012 - its end
        t.put("sum", sum(value for _, value in t.scan(prefix="a")))
        db.put("a4", 4)


def test_run_retries_until_it_commits(db: logdb.Database) -> None:
    attempts = 0

    def increment(t: logdb.Transaction, overtaken: int) -> int:
        nonlocal attempts
        attempts += 1
        value: int = t.get("k", default=0) + 1
        if attempts <= overtaken:
            db.put("k", 10 * attempts)
        t.put("k", value)
        return value

    assert db.run(lambda t: increment(t, 2), 10) == 21
    assert attempts == 3
    attempts = 0
    with pytest.raises(logdb.TransactionAborted):
        db.run(lambda t: increment(t, 9), retries=2)
    assert attempts == 3


def test_transactional_functions(db: logdb.Database) -> None:
    @db.transactional
    def move(t: logdb.Transaction, source: str, target: str, *, amount: int) -> int:
        """Move an amount."""
        t.put(source, t.get(source) - amount)
        t.put(target, t.get(target, default=0) + amount)
        return amount

    @db.transactional(retries=0)
    def fails(t: logdb.Transaction) -> None:
        t.put("k", 1)
        raise KeyError

    db.put("a", 10)
    assert move("a", "b", amount=3) == 3
    assert move.__doc__ == "Move an amount."
    assert db.multi_get(["a", "b"]) == [7, 3]
    with pytest.raises(KeyError):
        fails()
    assert not db.exists("k")


def test_run_commits_under_contention(db: logdb.Database) -> None:
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(30):
                db.run(lambda t: t.put("n", t.get("n", default=0) + 1), timeout=60)
        except logdb.TransactionAborted as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert db.get("n") == 240


def test_run_retries_an_error_caused_by_an_outdated_read(
    db: logdb.Database,
) -> None:
    db.put("stale", 0)
    seen: list[int] = []

    def work(t: logdb.Transaction) -> None:
        seen.append(t.get("stale"))
        t.put("stale", 9)
        if seen == [0]:
            db.put("stale", 1)
        raise KeyError(seen[-1])

    with pytest.raises(KeyError, match="1"):
        db.run(work)
    assert seen == [0, 1]
    assert db.get("stale") == 1


def test_validate_checks_reads_before_the_commit(db: logdb.Database) -> None:
    db.put("checked", 0)
    t = db.transaction()
    assert t.get("checked") == 0
    t.validate()
    db.put("checked", 1)
    with pytest.raises(logdb.TransactionAborted):
        t.validate()
    with pytest.raises(logdb.TransactionClosed):
        t.validate()


def test_run_ends_at_its_timeout(db: logdb.Database) -> None:
    attempts = 0

    def overtaken(t: logdb.Transaction) -> None:
        nonlocal attempts
        attempts += 1
        t.get("k")
        db.put("k", attempts)
        t.put("k", -1)

    with pytest.raises(logdb.TransactionAborted):
        db.run(overtaken, timeout=2)
    assert attempts > 1
    with pytest.raises(ziplog.ConfigError):
        db.run(overtaken, timeout=-1)
    with pytest.raises(ziplog.ConfigError):
        db.transactional(retries=-1)


def test_threads_share_a_database(db: logdb.Database) -> None:
    """Each of many increments takes effect, once."""

    def work() -> None:
        for _ in range(20):
            db.run(lambda t: t.put("n", t.get("n", default=0) + 1), retries=1000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert db.get("n") == 80


def test_a_coroutine_function_is_refused_and_writes_nothing(db: logdb.Database) -> None:
    """It would return at once, and nothing would await it."""

    @db.transactional
    async def put(t: logdb.Transaction) -> None:
        t.put("k", 1)

    with pytest.raises(TypeError, match=r"coroutine function; use logdb\.aio"):
        put()
    assert db.get("k") is None


# --- snapshots and watches ---


def test_a_snapshot(db: logdb.Database) -> None:
    rid = db.multi_put({"a": 1, "b": 2})
    with db.snapshot() as snapshot:
        assert rid is not None
        assert snapshot.position >= rid
        assert str(snapshot.position) in repr(snapshot)
        db.put("a", 10)
        db.delete("b")
        db.put("c", 3)
        assert snapshot.get("a") == 1
        assert snapshot.multi_get(["b", "c"], default="-") == [2, "-"]
        assert snapshot.exists("b")
        assert list(snapshot.scan()) == [("a", 1), ("b", 2)]
    with pytest.raises(ziplog.ClosedError):
        snapshot.get("a")
    assert list(db.scan()) == [("a", 10), ("c", 3)]


def test_a_watch(db: logdb.Database) -> None:
    seen: list[Any] = []
    with logdb.connect(db.status()["endpoint"]) as other:

        def watch() -> None:
            with other.watch("k", default="absent") as values:
                for value in values:
                    seen.append(value)
                    if value == "last":
                        return

        thread = threading.Thread(target=watch)
        thread.start()
        wait_until(lambda: seen == ["absent"], "the present state is seen")
        db.put("k", 1)
        wait_until(lambda: 1 in seen, "a change is seen")
        db.put("k", "last")
        thread.join()
        assert seen == ["absent", 1, "last"]
        values = other.watch("k", timeout=2)
        assert next(values) == "last"
        assert values.version > 0
        with pytest.raises(ziplog.DeadlineError, match="'k' did not change"):
            next(values)
        db.put("k", 5)
        assert next(values) == 5
        values.close()
        assert list(values) == []


def test_a_watch_is_closed_by_another_thread(db: logdb.Database) -> None:
    values = db.watch("never")
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.extend(values))
    thread.start()
    wait_until(lambda: seen == [None], "the present state is seen")
    wait_until(lambda: db._engine.core._watch_handles, "it waits")
    values.close()
    thread.join(20)
    assert not thread.is_alive()
    assert seen == [None]
    values.close()
    other = db.watch("other")
    db.close()
    other.close()


# --- coordinators come and go ---


def test_another_coordinator_takes_over(log: ziplog.Log) -> None:
    with (
        logdb.Coordinator(log) as one,
        logdb.Coordinator(log) as other,
        logdb.connect([one.endpoint, other.endpoint]) as db,
    ):
        rid = db.put("k", 1)
        # The first of the two, unless that was silent for a moment.
        first = db.status()["endpoint"]
        (one if one.endpoint == first else other).close()
        t = db.transaction()
        assert t.get("k") == 1
        t.put("k", 2)
        t.commit()
        assert t.position is not None
        assert t.position > rid
        assert db.get("k") == 2
        assert db.status()["endpoint"] != first
        db.delete("k")


def test_a_restarted_coordinator_is_used_again(log: ziplog.Log) -> None:
    coordinator = logdb.Coordinator(log)
    with logdb.connect(coordinator.endpoint) as db:
        db.put("k", 1)
        port = int(coordinator.endpoint.rpartition(":")[2])
        coordinator.close()
        with logdb.Coordinator(log, port=port):
            assert db.get("k") == 1
            db.put("k", 2)
            assert db.get("k") == 2
            db.delete("k")


def test_no_coordinator(log: ziplog.Log) -> None:
    with pytest.raises(ziplog.UnavailableError):
        logdb.connect("127.0.0.1:1", timeout=0.2)
    with pytest.raises(ziplog.ConfigError, match=r"coordinators is .* of a coordinator"):
        logdb.connect("nonsense")
    coordinator = logdb.Coordinator(log)
    with logdb.connect(coordinator.endpoint) as db:
        db.put("k", 1)
        coordinator.close()
        with pytest.raises(ziplog.DeadlineError):
            db.get("k", timeout=0.5)
        with pytest.raises(ziplog.UnavailableError, match="nothing was written"):
            db.put("k", 2, timeout=0.5)
        transaction = db.transaction(timeout=5)
        transaction.put("k", 3)
        with pytest.raises(ziplog.DeadlineError, match="nothing was written"):
            transaction.commit()
        assert transaction.status == "open"
        with logdb.Coordinator(log, port=int(coordinator.endpoint.rpartition(":")[2])):
            transaction.commit()
            assert (transaction.status, db.get("k")) == ("committed", 3)


def test_a_commit_without_a_reported_decision_resolves_later(log: ziplog.Log) -> None:
    coordinator = logdb.Coordinator(log)
    port = int(coordinator.endpoint.rpartition(":")[2])
    with logdb.connect(coordinator.endpoint) as db:
        db.put("k", 1)
        # One sign of life and then silence: the record gets into the log.
        db._engine.core._coordinators._last_reply[db._engine.core._coordinators._current] = 2**62
        coordinator.close()
        with pytest.raises(ziplog.OutcomeUnknownError) as caught:
            db.put("k", 2, timeout=0.5)
        with logdb.Coordinator(log, port=port):
            rid = caught.value.resolve()
            assert isinstance(rid, ziplog.RecordId)
            assert log.read_record(rid).payload
            assert db.get("k") == 2


# --- the rest ---


def test_a_local_database(log: ziplog.Log) -> None:
    before = threading.active_count()
    with logdb.local(log) as db:
        assert threading.active_count() == before + 1
        db.put("k", 1)
        assert db.get("k") == 1
        assert repr(db).startswith("<logdb.Database at 127.0.0.1:")
    assert threading.active_count() == before
    with pytest.raises(ziplog.ClosedError):
        db.get("k")
    db.close()


def test_stats(db: logdb.Database) -> None:
    before = db.stats()
    db.put("k", 1)
    after = db.stats()
    assert after["commits"] == before["commits"] + 1
    # The acks may come after the decision.
    assert after["inserts"] >= before["inserts"]
    assert after["protocol_errors"] == 0


def test_close_during_a_call(coordinator: logdb.Coordinator) -> None:
    db = logdb.connect(coordinator.endpoint)
    failures: list[Exception] = []

    def watch() -> None:
        values = db.watch("never", timeout=60)
        try:
            next(values)
            next(values)
        except ziplog.ClosedError as error:
            failures.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    wait_until(lambda: db._engine.core._coordinators._queries, "it watches")
    t = db.transaction()
    t.put("k", 1)
    db.close()
    thread.join()
    assert len(failures) == 1
    with pytest.raises(ziplog.ClosedError):
        t.commit()


class Counted:
    """What a client sends and receives."""

    def __init__(self, db: logdb.Database) -> None:
        engine = db._engine._shared.engine
        self.sent: list[str] = []
        self.received: list[str] = []
        self._send, self._handle = engine.transport.send, engine.handle
        engine.transport.send = self.send  # type: ignore[method-assign]
        engine.handle = self.handle  # type: ignore[method-assign]

    def send(self, dst: bytes, frame: bytes) -> bool:
        self.sent.append(type(wire.decode(frame)).__name__)
        return self._send(dst, frame)

    def handle(self, src: bytes, frame: bytes) -> None:
        self.received.append(type(wire.decode(frame)).__name__)
        self._handle(src, frame)


def test_messages_of_each_call(db: logdb.Database, coordinator: logdb.Coordinator) -> None:
    """A put is one insert and one decision; a read one question; their sum is a transaction.

    A client that writes alone needs no question in a transaction.
    """
    db.put("k", 1)
    counted = Counted(db)

    def count(call: Any) -> tuple[list[str], set[str]]:
        # A busy machine may retransmit, or probe, and the reply may be late: the minimum counts.
        best: tuple[list[str], set[str]] | None = None
        for _ in range(20):
            counted.sent.clear()
            counted.received.clear()
            call()
            seen = counted.sent.copy(), set(counted.received)
            best = min(best or seen, seen, key=lambda both: (len(both[0]), len(both[1])))
        assert best is not None
        return best

    def increment(t: logdb.Transaction) -> None:
        t.put("k", t.get("k") + 1)

    sent, received = count(lambda: db.put("k", 1))
    assert sent == ["Insert"] * 2
    # The acks may come after the decision.
    assert {"Decided"} <= received <= {"InsertAck", "Decided"}
    assert count(lambda: db.get("k"))[0] == ["Get"]
    assert count(lambda: db.run(increment))[0] == ["Insert", "Insert"]
    with logdb.connect(coordinator.endpoint) as other:

        def increment_beside_another() -> None:
            other.put("other", 1)
            db.run(increment)

        increment_beside_another()
        assert count(increment_beside_another)[0] == ["Get", "Insert", "Insert"]


def test_a_database_starts_no_thread(coordinator: logdb.Coordinator) -> None:
    before = threading.active_count()
    with logdb.connect(coordinator.endpoint) as db:
        db.put("k", time.time())
        assert threading.active_count() == before


def test_a_bank(tmp_path: Path) -> None:
    """What is moved about is neither lost nor made."""
    with Cluster(tmp_path / "bank", shards=1) as cluster, cluster.connect() as log:  # noqa: SIM117
        with logdb.local(log) as db:
            db.multi_put({f"account{number}": 100 for number in range(5)})

            def move(t: logdb.Transaction, source: str, target: str) -> None:
                t.put(source, t.get(source) - 10)
                t.put(target, t.get(target) + 10)

            for number in range(25):
                db.run(lambda t, n=number: move(t, f"account{n % 5}", f"account{(n * 3 + 1) % 5}"))
            assert sum(value for _, value in db.scan(prefix="account")) == 500
