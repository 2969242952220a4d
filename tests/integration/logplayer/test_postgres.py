"""Targets in a real PostgreSQL: the tests of all SQL targets, and what is particular to it."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import logplayer
from logplayer import targets
from logplayer.contract import Fenced, Opened, Rejected, RejectedRecord, Retry
from tests.postgres import Server, why_not
from tests.properties import examples
from tests.unit.logplayer.targets.databases import Database, batch, record, task
from tests.unit.logplayer.targets.test_sql import (  # noqa: F401
    check_any_order,
    steps,
    test_applying_function_must_not_end_the_transaction,
    test_batches_follow_each_other,
    test_death_before_the_commit_changes_nothing,
    test_death_before_the_cursor_moved_repeats_nothing,
    test_emptied_database_fails_the_task_until_a_seek,
    test_failure_of_the_applying_function_undoes_the_batch,
    test_former_owner_is_fenced,
    test_function_applies_records_in_the_transaction,
    test_lost_answer_of_a_commit_is_learned_by_opening,
    test_missing_table_is_a_reason_to_retry,
    test_new_target_begins_at_the_position_of_its_cursor,
    test_older_state_of_the_database_is_played_on_from_there,
    test_owner_in_its_transaction_is_waited_for,
    test_position_of_a_seek_counts_once,
    test_position_of_another_cursor_is_refused,
    test_record_that_is_not_text_is_rejected,
    test_rejected_record_is_named_and_nothing_is_done,
    test_rejected_records_are_kept_with_the_batch,
    test_rejection_inside_an_applying_function_has_no_index,
    test_repetition_of_a_committed_batch_is_refused,
    test_target_without_a_statement_fills_its_own_table,
    test_unreachable_database_is_a_reason_to_retry,
)
from ziplog.errors import ConfigError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import ziplog
    from logplayer.contract import Target
    from ziplog.types import Record

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

import psycopg

from logplayer.targets.postgres_target import PostgresDialect, open_session

#: A trigger of the table t that refuses a body.
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN IF new.body = 'no' THEN RAISE 'no'; END IF; RETURN new; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse();
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def dsn(server: Server) -> str:
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return server.dsn


@pytest.fixture
def database(dsn: str) -> Iterator[Database]:
    made = Database(lambda: quick(dsn), PostgresDialect())
    yield made
    made.close()


def quick(dsn: str) -> psycopg.Connection[Any]:
    """Return a session that waits for locks only shortly."""
    connection = open_session({"conninfo": dsn})
    connection.execute("SET lock_timeout = '200ms'")
    connection.commit()
    return connection


def run(dsn: str, sql: str) -> list[Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(sql)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []


def opened(dsn: str, statement: str | None = None, apply: Any = None) -> Target:
    target = targets.postgres("warehouse", dsn, statement, apply).connect()
    target.open(task())
    return target


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(steps, max_size=12))
def test_any_order_of_steps_keeps_position_and_effects_equal(
    database: Database, plan: list[tuple[str, int, str]]
) -> None:
    check_any_order(database, plan)


# --- sessions ---


def test_session_is_durable_and_holds_no_lock_for_long(dsn: str) -> None:
    run(dsn, "ALTER ROLE postgres SET synchronous_commit = off")
    session = open_session({"conninfo": dsn})
    found = {
        name: session.execute(f"SHOW {name}").fetchone()[0]  # type: ignore[index]
        for name in (
            "synchronous_commit", "idle_in_transaction_session_timeout", "lock_timeout",
            "transaction_isolation",
        )
    }  # fmt: skip
    session.close()
    run(dsn, "ALTER ROLE postgres RESET synchronous_commit")
    assert found == {
        "synchronous_commit": "on",
        "idle_in_transaction_session_timeout": "30s",
        "lock_timeout": "10s",
        "transaction_isolation": "read committed",
    }


def test_server_ends_a_session_that_stands_still_in_its_transaction(dsn: str) -> None:
    """The owner is suspended in its transaction; its successor waits, and repeats nothing."""
    run(dsn, "CREATE TABLE t (gsn BIGINT PRIMARY KEY)")
    successor = targets.postgres("warehouse", dsn, "INSERT INTO t VALUES (:gsn)").connect()

    def apply(cursor: Any, records: Sequence[Record]) -> None:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = '300ms'")
        cursor.execute("INSERT INTO t VALUES (%s)", [records[0].rid.gsn])
        # Until the server has ended this session, the row is locked.
        assert successor.open(task(2)) == Opened(1)

    former = opened(dsn, apply=apply)
    with pytest.raises(Retry):
        former.deliver(batch(task(), 1, 2))
    with pytest.raises(Fenced):
        former.open(task())
    successor.deliver(batch(task(2), 1, 4))
    assert run(dsn, "SELECT gsn FROM t ORDER BY gsn") == [(1,), (2,), (3,)]
    former.close()
    successor.close()


def test_update_that_waited_sees_the_new_term(dsn: str) -> None:
    """The former owner waits for the row's lock, while its successor stores the next term."""
    run(dsn, "CREATE TABLE t (gsn BIGINT PRIMARY KEY)")
    former = opened(dsn, "INSERT INTO t VALUES (:gsn)")
    found: list[Exception] = []

    def deliver() -> None:
        try:
            former.deliver(batch(task(), 1, 4))
        except Fenced as error:
            found.append(error)

    with psycopg.connect(dsn) as session:
        session.execute("UPDATE ziplog_position SET term = 2")
        thread = threading.Thread(target=deliver)
        thread.start()
        with psycopg.connect(dsn, autocommit=True) as looking:
            waiting = "SELECT COUNT(*) FROM pg_locks WHERE NOT granted"
            while looking.execute(waiting).fetchone() == (0,):
                thread.join(0.01)
                assert thread.is_alive()
    thread.join()
    assert "term 2 and position 1" in str(found[0])
    assert run(dsn, "SELECT gsn FROM t") == []
    former.close()


def test_crash_of_the_server_loses_and_repeats_nothing(server: Server, dsn: str) -> None:
    run(dsn, "CREATE TABLE t (gsn BIGINT PRIMARY KEY)")
    target = opened(dsn, "INSERT INTO t VALUES (:gsn)")
    target.deliver(batch(task(), 1, 4))
    server.crash()
    with pytest.raises(Retry):
        target.deliver(batch(task(), 4, 9))
    assert target.open(task()) == Opened(4)
    target.deliver(batch(task(), 4, 9))
    target.close()
    assert run(dsn, "SELECT gsn FROM t ORDER BY gsn") == [(1,), (2,), (3,), (5,), (8,)]


def test_ended_session_is_replaced(dsn: str) -> None:
    target = opened(dsn)
    run(
        dsn,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'ziplog player'",
    )
    with pytest.raises(Retry):
        target.open(task())
    assert target.open(task()) == Opened(1)
    target.close()


def test_first_opens_at_the_same_time_create_the_tables_once(dsn: str) -> None:
    """Some may fail, and succeed with the next attempt."""

    def open_part(number: int) -> None:
        of = task(partition=number, partitions=8)
        target = targets.postgres("warehouse", dsn).connect()
        for _attempt in range(20):
            with suppress(Retry):
                opened.append(target.open(of))
                break
        target.close()

    opened: list[Opened] = []
    threads = [threading.Thread(target=open_part, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [Opened(1)] * 8


def test_role_without_the_right_to_create_needs_the_tables_only(dsn: str) -> None:
    opened(dsn).close()
    run(dsn, "DROP ROLE IF EXISTS player")
    run(dsn, "CREATE ROLE player LOGIN")
    run(dsn, "GRANT USAGE ON SCHEMA public TO player")
    run(dsn, "GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO player")
    target = opened(dsn.replace("user=postgres", "user=player"))
    target.deliver(batch(task(), 1, 4))
    target.close()
    assert run(dsn, "SELECT count(*) FROM records") == [(3,)]
    run(dsn, "DROP OWNED BY player; DROP ROLE player")


def test_player_fills_the_database_while_its_server_crashes(
    log: ziplog.Log, server: Server, dsn: str
) -> None:
    start = RecordId(log.check_tail().gsn + 1, 0)
    target = targets.postgres("warehouse", dsn, partitions=2, batch_records=10, retry_last_ms=500)
    rids: list[RecordId] = []
    with logplayer.Player(log, "postgres", [target], start=start) as player:
        for _round in range(3):
            rids += log.insert_many([b"x"] * 200)
            server.crash()
            rids += log.insert_many([b"x"] * 200)
        player.wait_until(rids[-1], timeout=60)
    assert [row[0] for row in run(dsn, "SELECT gsn FROM records ORDER BY gsn")] == sorted(
        rid.gsn for rid in rids
    )


@pytest.mark.parametrize("paramstyle", ["format", "pyformat"])
def test_driver_may_be_used_by_its_interface_alone(dsn: str, paramstyle: Any) -> None:
    run(dsn, "CREATE TABLE t (gsn BIGINT PRIMARY KEY, at TIMESTAMPTZ, share TEXT)")
    statement = "INSERT INTO t VALUES (:gsn, :timestamp, '5 %')"
    target = targets.dbapi(
        "warehouse", lambda: psycopg.connect(dsn), statement, paramstyle=paramstyle, blob="BYTEA"
    ).connect()
    assert target.open(task()) == Opened(1)
    target.deliver(batch(task(), 1, 4))
    target.deliver(batch(task(), 4, 6, [], [RejectedRecord(record(5), "because")]))
    with pytest.raises(Fenced):
        target.deliver(batch(task(), 4, 6))
    target.close()
    assert run(dsn, "SELECT gsn, share FROM t") == [(1, "5 %"), (2, "5 %"), (3, "5 %")]
    assert run(dsn, "SELECT record_key, why FROM ziplog_dead") == [(b"k", "because")]


def test_connection_with_autocommit_is_refused(dsn: str) -> None:
    def connect() -> Any:
        return psycopg.connect(dsn, autocommit=True)

    target = targets.dbapi("warehouse", connect, paramstyle="format", blob="BYTEA").connect()
    with pytest.raises(ConfigError, match="autocommit of the connection is True"):
        target.open(task())


# --- rejected records ---


def test_json_is_the_databases_business(dsn: str) -> None:
    run(dsn, "CREATE TABLE t (id BIGINT, at TIMESTAMPTZ, body JSONB)")
    statement = "INSERT INTO t SELECT (:text::jsonb ->> 'id')::bigint, :timestamp, (:text)::jsonb"
    target = opened(dsn, statement)
    records = [record(1, b'{"id": 1}'), record(2, b"{"), record(3, b'{"id": 3}')]
    with pytest.raises(Rejected, match="invalid input syntax for type json") as caught:
        target.deliver(batch(task(), 1, 4, records))
    assert caught.value.index == 1
    del records[1]
    target.deliver(batch(task(), 1, 4, records))
    target.close()
    rows = run(dsn, "SELECT id, at, body ? 'id' FROM t")
    assert rows == [(1, records[0].timestamp, True), (3, records[1].timestamp, True)]


def test_operators_of_jsonb_are_no_parameters(dsn: str) -> None:
    run(dsn, "CREATE TABLE t (id BIGINT)")
    statement = "INSERT INTO t SELECT :gsn WHERE (:text)::jsonb ? 'id' AND 5 % 2 = 1"
    target = opened(dsn, statement)
    target.deliver(batch(task(), 1, 4, [record(1, b'{"id": 1}'), record(2, b"{}")]))
    target.close()
    assert run(dsn, "SELECT id FROM t") == [(1,)]


@pytest.mark.parametrize(
    ("definition", "payload"),
    [
        ("CREATE TABLE t (id BIGINT, body VARCHAR(3))", b"much"),
        ("CREATE TABLE t (id BIGINT, body TEXT)", b"a zero: \0"),
        ("CREATE TABLE t (id BIGINT, body TEXT, UNIQUE (body))", b"ok"),
        (f"CREATE TABLE t (id BIGINT, body TEXT); {REFUSE}", b"no"),
    ],
    ids=["too long", "zero", "unique", "trigger"],
)
def test_record_that_violates_a_rule_is_rejected(dsn: str, definition: str, payload: bytes) -> None:
    run(dsn, definition)
    target = opened(dsn, "INSERT INTO t VALUES (:gsn, :text)")
    records = [record(1, b"ok"), record(2, payload), record(3, b"yes")]
    with pytest.raises(Rejected) as caught:
        target.deliver(batch(task(), 1, 4, records))
    assert caught.value.index == 1
    target.close()
    assert run(dsn, "SELECT * FROM t") == []


def test_constraint_that_is_checked_at_the_commit_rejects_the_batch(dsn: str) -> None:
    run(dsn, "CREATE TABLE t (id BIGINT UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    target = opened(dsn, "INSERT INTO t VALUES (:shard)")
    with pytest.raises(Rejected, match="duplicate key") as caught:
        target.deliver(batch(task(), 1, 4))
    assert caught.value.index is None
    assert target.open(task()) == Opened(1)
    target.close()


def test_error_that_apply_hides_ends_the_batch(dsn: str) -> None:
    def apply(cursor: Any, records: Sequence[Record]) -> None:
        del records
        with suppress(psycopg.Error):
            cursor.execute("SELECT 1 / 0")

    target = opened(dsn, apply=apply)
    with pytest.raises(ConfigError, match="hid an error"):
        target.deliver(batch(task(), 1, 4))
    target.close()
    assert run(dsn, "SELECT position FROM ziplog_position") == [(1,)]


# --- bad input ---


@pytest.mark.parametrize("dsn", [5, "host", "hostname=x", "postgresql://[", b"host=x"])
def test_invalid_connection_string_is_refused_without_showing_it(dsn: Any) -> None:
    with pytest.raises(ConfigError, match=r"^target warehouse: dsn is '\(not shown\)'; it must"):
        targets.postgres("warehouse", dsn)


def test_unreachable_server_is_a_reason_to_retry() -> None:
    target = targets.postgres("warehouse", "host=/tmp/absent user=x").connect()
    with pytest.raises(Retry, match="cannot connect"):
        target.open(task())
