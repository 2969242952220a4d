"""SQL targets: position and effect change together, whatever fails; docs/player.md, section 5.

tests/integration/logplayer/test_postgres.py runs the tests with a `database` in PostgreSQL too.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from logplayer.contract import Fenced, Opened, Rejected, RejectedRecord, Retry, Task
from tests.properties import examples
from tests.unit.logplayer.targets.databases import (
    GSNS,
    Database,
    OperationalError,
    batch,
    dbapi_database,
    record,
    sqlite_database,
    task,
)
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from logplayer.targets.sql import SqlTarget
    from ziplog.types import Record


@pytest.fixture(params=["sqlite", "dbapi"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    make = {"sqlite": sqlite_database, "dbapi": dbapi_database}[request.param]
    made = make(tmp_path)
    yield made
    made.close()


def opened(database: Database, term: int = 1, **more: Any) -> tuple[SqlTarget, Task]:
    target, of = database.target(), task(term, **more)
    target.open(of)
    return target, of


# --- batches ---


def test_batches_follow_each_other(database: Database) -> None:
    target, of = opened(database)
    target.deliver(batch(of, 1, 4))
    target.deliver(batch(of, 4, 7))
    target.deliver(batch(of, 7, 8))  # no record in it
    assert (database.position(), database.gsns()) == (8, [1, 2, 3, 5])


def test_new_target_begins_at_the_position_of_its_cursor(database: Database) -> None:
    target = database.target()
    assert target.open(task(position=5)) == Opened(5)
    assert database.position() == 5


def test_target_without_a_statement_fills_its_own_table(database: Database) -> None:
    target, of = database.target(None), task()
    target.open(of)
    target.deliver(batch(of, 1, 4, [record(1), record(3, b"\xff", None)]))
    key = database._dialect.key_column
    rows = database.run(f"SELECT gsn, shard, epoch, timestamp_us, {key}, payload FROM records")
    at = 1_700_000_000_000_000
    assert rows == [(1, 1, 0, at + 1, b"k", b"good"), (3, 1, 0, at + 3, None, b"\xff")]


def test_large_batch_fills_its_own_table(database: Database) -> None:
    """Also with records that are inserted by one statement, of which one violates a rule."""
    target, of = database.target(None), task()
    target.open(of)
    records = [record(gsn, b"%d" % gsn, None) for gsn in range(1, 251)]
    target.deliver(batch(of, 1, 251, records))
    rows = database.run("SELECT gsn, payload FROM records ORDER BY gsn")
    assert rows == [(one.rid.gsn, one.payload) for one in records]

    further = [record(gsn) for gsn in (*range(251, 400), 7)]
    with pytest.raises(Rejected) as caught:
        target.deliver(batch(of, 251, 400, further))
    assert caught.value.index == 149
    assert database.run("SELECT COUNT(*) FROM records") == [(250,)]


def test_function_applies_records_in_the_transaction(database: Database) -> None:
    def apply(cursor: Any, records: Sequence[Record]) -> None:
        for one in records:
            cursor.execute(f"INSERT INTO events VALUES ({one.rid.gsn}, 'applied')")

    target, of = database.target(apply=apply), task()
    target.open(of)
    database.faults[:] = ["before"]
    with pytest.raises(Retry):
        target.deliver(batch(of, 1, 4))
    assert (database.position(), database.gsns()) == (1, [])
    target.open(of)
    target.deliver(batch(of, 1, 4))
    assert (database.position(), database.gsns()) == (4, [1, 2, 3])


def test_failure_of_the_applying_function_undoes_the_batch(database: Database) -> None:
    def apply(cursor: Any, records: Sequence[Record]) -> None:
        cursor.execute("INSERT INTO events VALUES (1, 'applied')")
        json.loads(records[0].payload)

    target, of = database.target(apply=apply), task()
    target.open(of)
    with pytest.raises(ValueError, match="Expecting value"):
        target.deliver(batch(of, 1, 4))
    assert (database.position(), database.gsns()) == (1, [])


def test_applying_function_must_not_end_the_transaction(database: Database) -> None:
    def apply(cursor: Any, records: Sequence[Record]) -> None:
        del records
        cursor.connection.rollback()

    target, of = database.target(apply=apply), task()
    target.open(of)
    with pytest.raises(ConfigError, match="ended the transaction"):
        target.deliver(batch(of, 1, 4))
    assert database.position() == 1


# --- what happens, and what then: the table of docs/player.md, section 5 ---


def test_death_before_the_commit_changes_nothing(database: Database) -> None:
    target, of = opened(database)
    database.faults[:] = ["before"]
    with pytest.raises(Retry, match="unknown"):
        target.deliver(batch(of, 1, 4))
    assert database.gsns() == []
    assert database.target().open(task(2)) == Opened(1)


def test_lost_answer_of_a_commit_is_learned_by_opening(database: Database) -> None:
    target, of = opened(database)
    database.faults[:] = ["after"]
    with pytest.raises(Retry, match="unknown"):
        target.deliver(batch(of, 1, 4))
    assert target.open(of) == Opened(4)
    target.deliver(batch(of, 4, 9))
    assert database.gsns() == [1, 2, 3, 5, 8]


def test_repetition_of_a_committed_batch_is_refused(database: Database) -> None:
    target, of = opened(database)
    database.faults[:] = ["after"]
    with pytest.raises(Retry):
        target.deliver(batch(of, 1, 4))
    with pytest.raises(Retry, match="connection was lost"):
        target.deliver(batch(of, 1, 4))
    target.open(of)
    with pytest.raises(Fenced, match="position 4"):
        target.deliver(batch(of, 1, 4))
    assert database.gsns() == [1, 2, 3]


def test_death_before_the_cursor_moved_repeats_nothing(database: Database) -> None:
    target, of = opened(database)
    target.deliver(batch(of, 1, 4))
    assert database.target().open(task(2, position=1)) == Opened(4)


def test_former_owner_is_fenced(database: Database) -> None:
    former, of = opened(database)
    opened(database, term=2)
    with pytest.raises(Fenced, match="term 2"):
        former.deliver(batch(of, 1, 4))
    with pytest.raises(Fenced, match="later term 2"):
        former.open(of)
    assert (database.position(), database.gsns()) == (1, [])


@pytest.mark.parametrize("does_commit", [True, False])
def test_owner_in_its_transaction_is_waited_for(database: Database, does_commit: bool) -> None:
    """A process stands still in its transaction, and then continues, or dies."""
    successor = database.target()
    successor.open(task(1))

    def apply(cursor: Any, records: Sequence[Record]) -> None:
        cursor.execute(f"INSERT INTO events VALUES ({records[0].rid.gsn}, 'applied')")
        with pytest.raises(Retry):  # It waits for the lock, and not for ever.
            successor.open(task(2))
        if not does_commit:
            raise OSError("killed")

    former, of = database.target(apply=apply), task(1)
    former.open(of)
    if does_commit:
        former.deliver(batch(of, 1, 2))
    else:
        with pytest.raises(OSError, match="killed"):
            former.deliver(batch(of, 1, 2))
    expected = (2, [1]) if does_commit else (1, [])
    assert successor.open(task(2)) == Opened(expected[0])
    assert database.gsns() == expected[1]
    with pytest.raises(Fenced):
        former.deliver(batch(of, 2, 4))


@pytest.mark.parametrize("error", [OSError("gone"), Rejected("odd")])
def test_apply_that_commits_and_then_fails_fails_the_task(
    database: Database, error: Exception
) -> None:
    """The position is stored by then, so the effects after the commit would be lost."""

    def apply(cursor: Any, _: Any) -> None:
        cursor.connection.commit()
        raise error

    target, of = database.target(apply=apply), task(1)
    target.open(of)
    with pytest.raises(ConfigError, match="`apply` ended the transaction"):
        target.deliver(batch(of, 1, 4))


@pytest.mark.parametrize("goes_on", [False, True])
def test_apply_that_commits_and_returns_fails_the_task(database: Database, goes_on: bool) -> None:
    """A crash between its commit and the end of `apply` would lose the effects after it."""

    def apply(cursor: Any, _: Any) -> None:
        cursor.execute("INSERT INTO events VALUES (1, 'applied')")
        cursor.connection.commit()
        if goes_on:
            cursor.execute("SAVEPOINT other")
            cursor.execute("INSERT INTO events VALUES (2, 'applied')")

    target, of = database.target(apply=apply), task(1)
    target.open(of)
    with pytest.raises(ConfigError, match="`apply` ended the transaction"):
        target.deliver(batch(of, 1, 4))
    assert (database.position(), database.gsns()) == (4, [1])


def test_emptied_database_fails_the_task_until_a_seek(database: Database) -> None:
    opened(database)
    database.run("DELETE FROM ziplog_position")
    with pytest.raises(ConfigError, match=r"cursor has moved to 9.*seek orders/warehouse/0"):
        database.target().open(task(2, position=9, has_moved=True))
    assert database.position() is None
    assert database.target().open(task(3, position=5, seek=1)) == Opened(5)


def test_position_of_a_seek_counts_once(database: Database) -> None:
    target, of = opened(database)
    target.deliver(batch(of, 1, 14))
    database.run("DELETE FROM events WHERE gsn >= 3")
    sought, of = database.target(), task(2, position=3, seek=1)
    assert sought.open(of) == Opened(3)
    sought.deliver(batch(of, 3, 6))
    assert database.target().open(task(3, position=3, seek=1)) == Opened(6)
    assert database.gsns() == [1, 2, 3, 5]


def test_older_state_from_before_a_seek_fails_the_task_until_a_seek(database: Database) -> None:
    """The cursor was sought to 8, and moved to 15; then a backup from before that came back."""
    target, of = opened(database)
    target.deliver(batch(of, 1, 4))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"position 4 .*from before the last seek.* 15"):
            database.target().open(task(3, position=15, seek=1, has_moved=True))
    assert database.target().open(task(4, position=4, seek=2)) == Opened(4)
    assert database.target().open(task(5, position=15, seek=2, has_moved=True)) == Opened(4)


def test_older_state_of_the_database_is_played_on_from_there(database: Database) -> None:
    target, of = opened(database)
    target.deliver(batch(of, 1, 4))
    # A backup is restored: position and effects go back together.
    database.run("UPDATE ziplog_position SET position = 2")
    database.run("DELETE FROM events WHERE gsn >= 2")
    restored = database.target()
    after = task(2, position=4, has_moved=True)
    assert restored.open(after) == Opened(2)
    restored.deliver(batch(after, 2, 9))
    assert database.gsns() == [1, 2, 3, 5, 8]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"cluster": 8}, r"cluster 0{31}7; the player's cluster is 0{31}8"),
        ({"birth": 9}, "created in term 1; the present one was created in term 9"),
        ({"partitions": 4}, "has 4 partitions, but 1 in the database"),
        ({"partitions": 4, "partition": 3}, "has 4 partitions, but 1 in the database"),
    ],
)
def test_position_of_another_cursor_is_refused(
    database: Database, other: dict[str, Any], text: str
) -> None:
    target, of = opened(database)
    target.deliver(batch(of, 1, 4))
    with pytest.raises(ConfigError, match=text):
        database.target().open(task(10, **other))
    assert database.position() == 4
    target.deliver(batch(of, 4, 9))


def test_unreachable_database_is_a_reason_to_retry(database: Database) -> None:
    target = database.target()
    reached, database._connect = database._connect, unreachable
    with pytest.raises(Retry, match=r"cannot (connect|open)"):
        target.open(task())
    database._connect = reached
    assert target.open(task()) == Opened(1)


def unreachable() -> Any:
    raise OperationalError("connection refused")


def test_missing_table_is_a_reason_to_retry(database: Database) -> None:
    target, of = opened(database)
    database.run("ALTER TABLE events RENAME TO archive")
    for records in ([record(1)], [record(1), record(2)]):
        with pytest.raises(Retry, match="events"):
            target.deliver(batch(of, 1, 4, records))
    database.run("ALTER TABLE archive RENAME TO events")
    target.open(of)
    target.deliver(batch(of, 1, 4))
    assert database.gsns() == [1, 2, 3]


# --- rejected records ---


@pytest.mark.parametrize("index", [0, 1, 2])
def test_rejected_record_is_named_and_nothing_is_done(database: Database, index: int) -> None:
    target, of = opened(database)
    records = [record(gsn, b"bad" if i == index else b"good") for i, gsn in enumerate((1, 2, 3))]
    with pytest.raises(Rejected) as caught:
        target.deliver(batch(of, 1, 4, records))
    assert caught.value.index == index
    assert (database.position(), database.gsns()) == (1, [])
    del records[index]
    target.deliver(batch(of, 1, 4, records))
    assert database.gsns() == [one.rid.gsn for one in records]


def test_record_that_is_not_text_is_rejected(database: Database) -> None:
    target, of = opened(database)
    with pytest.raises(Rejected, match="payload is not UTF-8, which :text needs") as caught:
        target.deliver(batch(of, 1, 4, [record(1), record(2, b"\xff")]))
    assert caught.value.index == 1


def test_rejected_records_are_kept_with_the_batch(database: Database) -> None:
    target, of = opened(database)
    rejected = [RejectedRecord(record(2, b"bad"), "violates a rule")]
    database.faults[:] = ["before"]
    with pytest.raises(Retry):
        target.deliver(batch(of, 1, 4, [record(1)], rejected))
    assert database.dead() == []
    target.open(of)
    target.deliver(batch(of, 1, 4, [record(1)], rejected))
    assert database.dead() == [(2, "violates a rule")]
    target.deliver(batch(of, 4, 6, [], [RejectedRecord(record(5), "because")]))
    assert (database.position(), database.dead()[1]) == (6, (5, "because"))


def test_rejection_inside_an_applying_function_has_no_index(database: Database) -> None:
    def apply(cursor: Any, records: Sequence[Record]) -> None:
        for one in records:
            cursor.execute(f"INSERT INTO events VALUES ({one.rid.gsn}, '{one.payload.decode()}')")

    target, of = database.target(apply=apply), task()
    target.open(of)
    with pytest.raises(Rejected) as caught:
        target.deliver(batch(of, 1, 4, [record(1), record(2, b"bad")]))
    assert caught.value.index is None
    assert database.gsns() == []


# --- any order of steps ---

steps = st.one_of(
    st.tuples(st.just("claim"), st.integers(0, 1), st.sampled_from(["", "before", "after"])),
    st.tuples(st.just("open"), st.integers(0, 1), st.sampled_from(["", "before", "after"])),
    st.tuples(st.just("deliver"), st.integers(0, 1), st.sampled_from(["", "before", "after"])),
    st.tuples(st.just("reject"), st.integers(0, 1), st.sampled_from(["", "before", "after"])),
    st.tuples(st.just("die"), st.integers(0, 1), st.just("")),
)


class Owner:
    """A process that believes to own the task."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.target = database.target()
        self.task = task(0)
        #: Where it is, as far as it knows; None: it is not open.
        self.at: int | None = None

    def open(self) -> None:
        try:
            self.at = self.target.open(self.task).position
        except (Fenced, Retry):
            self.at = None

    def deliver(self, *, is_rejecting: bool) -> None:
        """Deliver the next records, also after a failure, without opening again."""
        if self.at is None:
            return
        stop = next((gsn for gsn in GSNS if gsn >= self.at + 2), self.at + 1) + 1
        step = batch(self.task, self.at, stop)
        if is_rejecting:
            step = batch(self.task, self.at, stop, [*step.records, record(99, b"bad")])
        with suppress(Fenced, Rejected, Retry):
            self.target.deliver(step)
            assert not is_rejecting
            self.at = stop


def check_any_order(database: Database, plan: list[tuple[str, int, str]]) -> None:
    """Run steps, and check after each that the effects are those below the stored position."""
    database.run("DELETE FROM events")
    with suppress(Fenced):
        database.target().open(task(0))
    database.run("UPDATE ziplog_position SET term = 0, position = 1")
    owners = [Owner(database), Owner(database)]
    term = 0
    for what, number, fault in plan:
        owner = owners[number]
        database.faults[:] = [fault] if fault else []
        before = database.position()
        match what:
            case "claim":
                term += 1
                owner.task = task(term)
                owner.open()
            case "open":
                owner.open()
            case "deliver" | "reject":
                owner.deliver(is_rejecting=what == "reject")
            case "die":
                owner.target.close()
                owners[number] = Owner(database)
        database.faults.clear()
        position = database.position()
        assert position is not None
        assert before is not None
        assert position >= before
        assert database.gsns() == [gsn for gsn in GSNS if gsn < position]
    database.close_targets()


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(steps, max_size=12))
def test_any_order_of_steps_keeps_position_and_effects_equal(
    database: Database, plan: list[tuple[str, int, str]]
) -> None:
    check_any_order(database, plan)
