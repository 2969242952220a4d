"""Players that fill a database on a log of its own; docs/player.md, section 8."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

import logdb
import logplayer
from logplayer import targets
from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.targets.logdb_target import LogdbTarget
from tests.integration.logplayer.playing import LEASE_S, Process, insert
from tests.unit.logplayer.targets.databases import batch, record, task
from tests.waiting import wait_until
from ziplog.errors import OutcomeUnknownError
from ziplog.local import Cluster
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import ziplog

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[logdb.Coordinator]:
    with (
        Cluster(tmp_path_factory.mktemp("database") / "log", shards=1) as cluster,
        cluster.connect() as log,
        logdb.Coordinator(log) as running,
    ):
        yield running


@pytest.fixture
def database(coordinator: logdb.Coordinator) -> Iterator[logdb.Database]:
    with logdb.connect(coordinator.endpoint, timeout=60) as connected:
        yield connected


def tail(log: ziplog.Log) -> RecordId:
    return RecordId(log.check_tail().gsn + 1, 0)


def connected(coordinator: logdb.Coordinator, apply: Any = None) -> LogdbTarget:
    spec = targets.logdb("warehouse", coordinator.endpoint, apply, timeout_s=30)
    target = spec.connect()
    assert isinstance(target, LogdbTarget)
    return target


def test_former_owner_is_fenced(coordinator: logdb.Coordinator, database: logdb.Database) -> None:
    former, successor = connected(coordinator), connected(coordinator)
    of, later = task(1, player="fenced"), task(2, player="fenced", has_moved=True)
    assert former.open(of) == Opened(1)
    former.deliver(batch(of, 1, 4, [record(1, b"a", b"fenced")]))
    assert successor.open(later) == Opened(4)
    with pytest.raises(Fenced, match="term 2 and position 4"):
        former.deliver(batch(of, 4, 9, [record(5, b"b", b"fenced")]))
    with pytest.raises(Fenced, match="later term 2"):
        former.open(of)
    assert database.get("fenced") == b"a"
    successor.deliver(batch(later, 4, 9, [record(5, b"c", b"fenced")]))
    assert database.get("fenced") == b"c"
    for target in (former, successor):
        target.close()


def test_commit_of_unknown_outcome_is_not_repeated(
    coordinator: logdb.Coordinator,
    database: logdb.Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, of = connected(coordinator), task(1, player="unknown")
    target.open(of)
    run = logdb.Database.run

    def lose(*arguments: Any, **options: Any) -> object:
        run(*arguments, **options)
        raise OutcomeUnknownError("the answer is lost", shard=0, seq=1)

    with monkeypatch.context() as patch:
        patch.setattr(logdb.Database, "run", lose)
        with pytest.raises(Retry, match="unknown"):
            target.deliver(batch(of, 1, 4, [record(1, b"once", b"unknown")]))
    assert target.open(of) == Opened(4)
    assert database.get("unknown") == b"once"
    target.close()


def test_commit_that_read_before_an_open_is_aborted(coordinator: logdb.Coordinator) -> None:
    """As a commit of unknown outcome whose record the log shows after the open."""
    target, again, of = connected(coordinator), connected(coordinator), task(1, player="late")
    target.open(of)
    calls: list[Opened] = []

    def open_meanwhile(*_: object) -> None:
        if not calls:
            calls.append(again.open(of))

    late = connected(coordinator, open_meanwhile)
    late.open(of)
    late.deliver(batch(of, 1, 4))  # its first attempt is aborted, its second one is not
    assert calls == [Opened(1)]
    assert again.open(of) == Opened(4)
    for one in (target, again, late):
        one.close()


def test_records_and_batches_that_do_not_fit_are_rejected(
    coordinator: logdb.Coordinator, database: logdb.Database
) -> None:
    target, of = connected(coordinator), task(1, player="large")
    target.open(of)
    keys = [record(gsn, b"x", b"%d" % gsn * 200) for gsn in range(1000, 3000)]
    with pytest.raises(Rejected, match="does not fit"):
        target.deliver(batch(of, 1, 3000, keys))
    with pytest.raises(Rejected, match="does not fit"):
        target.deliver(batch(of, 1, 4, [record(1, bytes(2**20), b"large")]))
    target.deliver(batch(of, 1, 1200, keys[:200]))
    assert database.get(keys[199].key or b"") == b"x"
    target.close()


def test_player_fills_the_database_and_splits_batches(
    log: ziplog.Log, coordinator: logdb.Coordinator, database: logdb.Database
) -> None:
    start = tail(log)
    keys = [(b"%d" % number).rjust(900, b"-") for number in range(3000)]
    rids = sorted(log.insert_many([b"%d" % number for number in range(3000)], keys=keys))
    database_target = targets.logdb("copy", coordinator.endpoint, value="json")
    with logplayer.Player(log, "split", [database_target], start=start) as playing:
        playing.wait_until(rids[-1], timeout=120)
        assert playing.status()["tasks"][0]["rejected"] == 0
    for number in range(0, 3000, 100):
        assert database.get(keys[number]) == number


def test_processes_are_killed_and_suspended(
    log: ziplog.Log, coordinator: logdb.Coordinator, database: logdb.Database, tmp_path: Path
) -> None:
    file = tmp_path / "player.toml"
    (tmp_path / "counting_of_test.py").write_text("""\
def count(transaction, records):
    for one in records:
        key = f"applied/{one.rid.gsn}"
        transaction.put(key, (transaction.get(key) or 0) + 1)
""")
    file.write_text(f"""\
[player]
name = "killed-logdb"
bootstrap = "{",".join(log.endpoints)}"
start = "{tail(log)}"
lease_s = {LEASE_S}
commit_ms = 100
[[target]]
name = "copy"
kind = "logdb"
coordinators = "{coordinator.endpoint}"
apply = "counting_of_test:count"
partitions = 2
batch_records = 20
""")
    rids: list[RecordId] = []

    def applied() -> dict[int, int]:
        return {int(key[8:]): value for key, value in database.scan(prefix="applied/")}

    with Process(file) as first, Process(file) as second:
        first.ready()
        second.ready()
        rids += insert(log, 200)
        first.send(signal.SIGKILL)
        rids += insert(log, 200)
        wait_until(lambda: len(applied()) == 400, "the other process has all")
        with Process(file) as third:
            third.ready()
            second.send(signal.SIGSTOP)
            rids += insert(log, 200)
            wait_until(lambda: len(applied()) == 600, "the third process has all")
            second.send(signal.SIGCONT)
            rids += insert(log, 200)
            wait_until(lambda: len(applied()) == 800, "all records are there")
            assert third.stop()[0] == 0
        assert second.stop()[0] == 0
    assert applied() == {rid.gsn: 1 for rid in rids}


def test_database_on_the_log_of_the_player_is_refused(log: ziplog.Log) -> None:
    start = tail(log)
    with logdb.Coordinator(log) as own:
        player = logplayer.Player(log, "circle", [targets.logdb("copy", own.endpoint)], start=start)
        with player as playing:
            wait_until(lambda: playing.status()["tasks"][0]["state"] == "failed", "the task fails")
            assert (
                "is on the log that the player reads" in playing.status()["tasks"][0]["last_error"]
            )
