"""What is particular to SQLite: its locks, its durability, its errors."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from logplayer import targets
from logplayer.contract import Opened, Rejected, Retry
from logplayer.targets import sqlite_target
from logplayer.targets.sql import SqlTarget
from logplayer.targets.sqlite_target import open_file
from tests.unit.logplayer.targets.databases import batch, record, sqlite_database, task
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from logplayer.contract import Target
    from ziplog.types import Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "warehouse.db"


def run(path: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(path)
    with connection:
        rows = connection.execute(sql).fetchall()
    connection.close()
    return rows


def test_commits_are_on_stable_storage(path: Path) -> None:
    connection = open_file(str(path))
    assert connection.execute("PRAGMA synchronous").fetchone() == (3,)
    connection.close()


def test_file_is_created_and_filled(path: Path) -> None:
    target = targets.sqlite("warehouse", path).connect()
    assert target.open(task()) == Opened(1)
    target.deliver(batch(task(), 1, 9))
    target.close()
    assert run(path, "SELECT gsn, key, payload FROM records")[-1] == (8, b"k", b"good")


def test_replaced_file_is_opened_again(path: Path) -> None:
    target = targets.sqlite("warehouse", path).connect()
    target.open(task())
    target.deliver(batch(task(), 1, 9))
    older = path.read_bytes()
    target.deliver(batch(task(), 9, 22))
    path.unlink()
    path.write_bytes(older)
    with pytest.raises(Retry):
        target.deliver(batch(task(), 22, 40))
    moved = task(2, 22, has_moved=True)
    assert target.open(moved) == Opened(9)
    target.deliver(batch(moved, 9, 40))
    path.unlink()
    with pytest.raises(Retry):
        target.deliver(batch(moved, 40, 41))
    with pytest.raises(ConfigError, match="has no position"):
        target.open(moved)
    target.close()


def test_replaced_file_with_a_wal_is_opened_again(path: Path) -> None:
    """SQLite itself goes on in the file that has no name any more, and reports nothing."""
    run(path, "PRAGMA journal_mode = WAL")
    target, backup = targets.sqlite("warehouse", path).connect(), path.with_name("backup.db")
    target.open(task())
    target.deliver(batch(task(), 1, 9))
    run(path, f"VACUUM INTO '{backup}'")
    target.deliver(batch(task(), 9, 22))
    for name in ("warehouse.db", "warehouse.db-wal", "warehouse.db-shm"):
        path.with_name(name).rename(path.with_name(f"{name}.former"))
    backup.rename(path)
    with pytest.raises(Retry, match="was deleted or replaced"):
        target.deliver(batch(task(), 22, 40))
    assert target.open(task(2, 22, has_moved=True)) == Opened(9)
    target.close()


def test_timestamp_is_a_text_for_sqlites_functions(path: Path) -> None:
    run(path, "CREATE TABLE t (day TEXT, at TEXT)")
    statement = "INSERT INTO t VALUES (date(:timestamp), :timestamp)"
    target = targets.sqlite("warehouse", path, statement).connect()
    target.open(task())
    target.deliver(batch(task(), 1, 2))
    target.close()
    assert run(path, "SELECT * FROM t") == [("2023-11-14", "2023-11-14T22:13:20.000001+00:00")]


def filled(path: Path, statement: str) -> Target:
    run(path, "CREATE TABLE t (id)")
    target = targets.sqlite("warehouse", path, statement).connect()
    target.open(task())
    return target


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO t VALUES (json_extract(:text, '$.id'))",
        "WITH new(id) AS (SELECT json_extract(:text, '$.id')) INSERT INTO t SELECT id FROM new",
    ],
)
def test_text_that_is_no_json_is_a_rejected_record(path: Path, statement: str) -> None:
    target = filled(path, statement)
    records = [record(1, b'{"id": 1}'), record(2, b"{"), record(3, b'{"id": 3}')]
    with pytest.raises(Rejected, match="malformed JSON") as caught:
        target.deliver(batch(task(), 1, 4, records))
    assert caught.value.index == 1
    target.deliver(batch(task(), 1, 4, [records[0], records[2]]))
    target.close()
    assert run(path, "SELECT id FROM t") == [(1,), (3,)]


def test_trigger_may_reject_a_record(path: Path) -> None:
    target = filled(path, "INSERT OR ROLLBACK INTO t VALUES (:gsn)")
    run(
        path,
        "CREATE TRIGGER refuse BEFORE INSERT ON t WHEN new.id = 3"
        " BEGIN SELECT RAISE(ROLLBACK, 'not three'); END",
    )
    with pytest.raises(Rejected, match="not three") as caught:
        target.deliver(batch(task(), 1, 4))
    assert caught.value.index == 2
    assert run(path, "SELECT id FROM t") == []
    assert run(path, "SELECT position FROM ziplog_position") == [(1,)]
    target.close()


def test_wrong_statement_is_reported_at_each_attempt(path: Path) -> None:
    target = filled(path, "INSERT INTO t VALUES (:gsn, :gsn)")
    with pytest.raises(Retry, match="2 values"):
        target.deliver(batch(task(), 1, 4))
    target.close()


def test_locked_file_is_a_reason_to_retry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_target, "BUSY_S", 0.05)
    target = filled(path, "INSERT INTO t VALUES (:gsn)")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Retry, match="database is locked"):
        target.deliver(batch(task(), 1, 4))
    with pytest.raises(Retry, match="database is locked"):
        target.open(task())
    other.close()
    assert target.open(task()) == Opened(1)
    target.close()


def test_full_disk_is_a_reason_to_retry(path: Path) -> None:
    target = filled(path, "INSERT INTO t VALUES (zeroblob(20000))")
    target.open(task())
    (pages,) = run(path, "PRAGMA page_count")[0]
    limit = target._connection.execute  # type: ignore[attr-defined]
    limit(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Retry, match="disk is full"):
        target.deliver(batch(task(), 1, 4))
    assert run(path, "SELECT count(*) FROM t") == [(0,)]
    limit("PRAGMA max_page_count = 1000000")
    assert target.open(task()) == Opened(1)
    target.deliver(batch(task(), 1, 4))
    assert run(path, "SELECT count(*) FROM t") == [(3,)]
    target.close()


def test_missing_directory_is_a_reason_to_retry(path: Path) -> None:
    target = targets.sqlite("warehouse", path.parent / "absent" / "a.db").connect()
    with pytest.raises(Retry, match=r"cannot open .*/absent/a\.db: unable to open"):
        target.open(task())


def test_apply_must_not_commit(tmp_path: Path) -> None:
    def apply(cursor: sqlite3.Cursor, records: Sequence[Record]) -> None:
        del records
        cursor.execute("COMMIT")

    with closing(sqlite_database(tmp_path)) as database:
        target = database.target(apply=apply)
        target.open(task())
        with pytest.raises(ConfigError, match="ended the transaction"):
            target.deliver(batch(task(), 1, 4))


def look(path: Path, statement: str | None = None) -> None:
    target = targets.sqlite("warehouse", path, statement).connect()
    assert isinstance(target, SqlTarget)
    target.check()


def test_check_changes_nothing(path: Path) -> None:
    look(path)
    assert not path.exists()
    run(path, "CREATE TABLE t (gsn BIGINT NOT NULL CHECK (gsn > 5))")
    look(path, "INSERT INTO t VALUES (:gsn)")
    assert run(path, "SELECT name FROM sqlite_master") == [("t",)]
    assert run(path, "SELECT * FROM t") == []


def test_check_finds_wrong_statements_and_unreachable_files(path: Path) -> None:
    with pytest.raises(UnavailableError, match="no database yet"):
        look(path, "INSERT INTO t VALUES (:gsn)")
    run(path, "CREATE TABLE t (id)")
    with pytest.raises(ConfigError, match="refuses the statement: no such table: u"):
        look(path, "INSERT INTO u VALUES (:gsn)")
    with pytest.raises(UnavailableError, match="its directory is absent"):
        look(path.parent / "absent" / "a.db")
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(UnavailableError, match="file is not a database"):
        look(path)


def test_check_finds_a_file_that_cannot_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda found, _: found != path)
    look(path)
    run(path, "CREATE TABLE t (id)")
    with pytest.raises(UnavailableError, match=f"cannot write in {path};"):
        look(path)
    monkeypatch.setattr("os.access", lambda found, _: found != path.parent)
    with pytest.raises(UnavailableError, match=f"cannot write in {path.parent};"):
        look(path)


def test_connection_with_autocommit_is_refused(path: Path) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None)

    target = targets.dbapi("warehouse", connect, paramstyle="qmark").connect()
    for _attempt in range(2):
        with pytest.raises(ConfigError, match="it commits by itself"):
            target.open(task())
    assert run(path, "SELECT * FROM ziplog_position") == []
