"""Players against real servers: order, shares, deaths, zombies, pauses, and the command line."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import logplayer
from logplayer import Rejected, Retry, targets
from tests.integration.logplayer.playing import (
    LEASE_S,
    Filled,
    Process,
    assert_exactly_once,
    history,
    insert,
    inserting,
)
from tests.processes import signal_another_thread
from tests.unit.ziplog.cli.fakes import run
from tests.waiting import next_turn, wait_until
from ziplog.client.reads.known_rows import TableSearch, TableSearches
from ziplog.deploy.new_shard import free_ports
from ziplog.errors import ClosedError, ConfigError, DeadlineError, TrimmedError
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog

pytestmark = pytest.mark.timeout(240)


def tail(log: ziplog.Log) -> RecordId:
    """Return the position after the last record."""
    return RecordId(log.check_tail().gsn + 1, 0)


def player(log: ziplog.Log, name: str, *chosen: object, start: RecordId) -> logplayer.Player:
    return logplayer.Player(log, name, chosen, start=start, lease_s=LEASE_S, commit_ms=50)  # type: ignore[arg-type]


# --- one process ---


def test_targets_get_all_records_in_order(log: ziplog.Log, tmp_path: Path) -> None:
    start = tail(log)
    insert(log, 500)
    filled = Filled(tmp_path, log, "order", start)
    seen: list[Record] = []
    attempts = itertools.count()

    def handle(record: Record) -> None:
        if next(attempts) % 100 == 5:
            raise Retry("not now", after_s=0.01)
        seen.append(record)

    copy = targets.sqlite(
        "copy", filled.path, "INSERT INTO events VALUES (:gsn, :key_text, :text)", batch_records=64
    )
    function = targets.function("function", handle, partitions=3)
    with player(log, "order", copy, function, start=start) as playing:
        last = insert(log, 500)[-1]
        playing.wait_until(last, timeout=60)
        expected = history(log, start)
        assert filled.rows() == expected
        assert_exactly_once(
            [(one.rid.gsn, (one.key or b"").decode(), one.payload.decode()) for one in seen],
            expected,
        )
        document = json.loads(json.dumps(playing.status()))
        assert [task["state"] for task in document["tasks"]] == ["playing"] * 4
        assert document["tasks"][0]["delivered"] == 1000
        assert playing.join(0) is False
    with pytest.raises(ClosedError):
        playing.status()
    assert playing.join(0) is True
    assert {cursor.state for cursor in log.cursors("order/*")} == {"free"}
    last = insert(log, 10)[-1]
    with player(log, "order", copy, function, start=RID_GENESIS) as playing:
        playing.wait_until(last, timeout=60)
    assert filled.rows() == history(log, start)


def test_rows_that_a_writer_repeats_are_delivered_once(log: ziplog.Log) -> None:
    """The player ends between the rows and their repetition."""
    start, rows, writer = tail(log), [b"row %d" % number for number in range(20)], bytes(16)
    shard = start.shard
    seen: list[bytes] = []
    function = targets.function("f", lambda record: seen.append(record.payload))
    for count in (12, 20):
        log.insert_rows(rows[:count], shard=shard, writer=writer, batch=0)
        with player(log, "rows", function, start=start) as playing:
            playing.wait_until(log.check_tail(), timeout=100)
        assert seen == rows[:count]


def test_a_player_asks_archives_for_the_rows_before_its_start(
    log: ziplog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage servers announce an archive once they have sealed a segment; this log has none."""
    (port,) = free_ports(1, "127.0.0.1")
    search = TableSearches._on_archives
    asked: list[int] = []

    def with_archive(self: TableSearches, of: TableSearch, trim: int, _none: object) -> None:
        asked.append(of.shard)
        search(self, of, trim, [("127.0.0.1", port)])

    monkeypatch.setattr(TableSearches, "_on_archives", with_archive)
    log.insert_many([b"before"] * 10)
    got: list[bytes] = []
    target = targets.function("all", lambda record: got.append(record.payload))
    with player(log, "archive", target, start=tail(log)) as running:
        running.wait_until(log.insert_many([b"last"])[0], 30)
        assert running.status()["failure"] == ""
    assert got == [b"last"]
    assert asked


def test_rejected_records_are_kept_aside(log: ziplog.Log, tmp_path: Path) -> None:
    start = tail(log)
    rids = insert(log, 20, keys=1)
    seen: list[int] = []

    def handle(record: Record) -> None:
        if record.rid in rids[3:5]:
            raise Rejected("unlucky")
        seen.append(record.rid.gsn)

    file = tmp_path / "dead.jsonl"
    function = targets.function("f", handle, rejected="dead-letter", dead_letter=file)
    with player(log, "dead", function, start=start) as playing:
        playing.wait_until(rids[-1], timeout=60)
        assert playing.status()["tasks"][0]["rejected"] == 2
    assert list(dict.fromkeys(seen)) == [rid.gsn for rid in rids if rid not in rids[3:5]]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["gsn"] for line in lines] == [rid.gsn for rid in rids[3:5]]


def test_a_rejected_record_stops_its_task_until_it_is_passed(
    log: ziplog.Log, tmp_path: Path
) -> None:
    start = tail(log)
    rids = insert(log, 10, keys=1)
    filled = Filled(tmp_path, log, "stop", start)

    def apply(cursor: sqlite3.Cursor, records: list[Record]) -> None:
        for index, record in enumerate(records):
            if record.rid == rids[4]:
                raise Rejected(index, "no")
            cursor.execute("INSERT INTO events VALUES (?, '', '')", [record.rid.gsn])

    copy = targets.sqlite("copy", filled.path, apply=apply)
    with player(log, "stop", copy, start=start) as playing:
        wait_until(lambda: playing.status()["tasks"][0]["state"] == "failed", "the task fails")
        assert "no" in playing.status()["tasks"][0]["last_error"]
        assert [row[0] for row in filled.rows()] == [rid.gsn for rid in rids[:4]]
        playing.seek("copy", RecordId(rids[4].gsn + 1, 0))
        playing.wait_until(rids[-1], timeout=60)
        expected = [rid.gsn for rid in rids if rid != rids[4]]
        assert [row[0] for row in filled.rows()] == expected


def test_a_task_that_failed_ends_the_wait_of_a_player_that_ends_then(log: ziplog.Log) -> None:
    start = tail(log)
    seen: list[bytes] = []

    def handle(record: Record) -> None:
        if record.payload == b"bad":
            raise TypeError("a bug")
        seen.append(record.payload)

    chosen = [targets.function("f", handle), targets.function("g", lambda _: None)]
    name = log.endpoints
    running = logplayer.Player(
        name, "ends", chosen, start=start, lease_s=LEASE_S, commit_ms=50, on_failed="exit"
    )
    with running:
        running.wait_until(log.insert_many([b"good"])[0], 30)
        assert not running.join(0)
        assert running.failed_tasks == {}
        log.insert_many([b"bad"])
        assert running.join(60)
        assert running.failed_tasks == {"ends/f/0": "TypeError: a bug"}
    with logplayer.Player(name, "ends", chosen, on_failed="exit") as running:
        threading.Timer(0.1, running.stop).start()
        assert running.join(60)
    assert seen == [b"good"]


def test_operators_pause_continue_and_seek(log: ziplog.Log, tmp_path: Path) -> None:
    start = tail(log)
    rids = insert(log, 20)
    filled = Filled(tmp_path, log, "operated", start)
    bootstrap = ("--bootstrap", ",".join(log.endpoints))
    with logplayer.load(filled.file) as playing:
        playing.wait_until(rids[-1], timeout=60)
        stop = insert(log, 1)[-1]
        playing.wait_until(stop, timeout=60)
        at = str(stop.gsn + 1)
        assert run("cursor", "pause", "operated/copy/*", "--at", at, *bootstrap).exit_code == 0
        wait_until(lambda: playing.status()["tasks"][0]["state"] == "paused", "it pauses")
        later = insert(log, 5)
        with pytest.raises(DeadlineError, match="operated/copy/0"):
            playing.wait_until(later[-1], timeout=0.5)
        assert filled.count() == 21
        playing.resume()
        playing.wait_until(later[-1], timeout=60)
        assert filled.rows() == history(log, start)
        assert run("cursor", "seek", "operated/copy/0", str(later[0]), *bootstrap).exit_code == 0
        playing.wait_until(later[-1], timeout=60)
        assert filled.count() == 31, "the records after the position come again"
        assert filled.rows()[-5:] == history(log, later[0])


def test_a_target_that_hangs_delays_no_other_and_is_named_at_the_stop(log: ziplog.Log) -> None:
    start = tail(log)
    seen: list[Record] = []
    release = threading.Event()
    hanging = targets.function("hanging", lambda _: release.wait(60))
    playing = player(log, "hang", hanging, targets.function("f", seen.append), start=start)
    playing.start()
    try:
        insert(log, 100)
        wait_until(lambda: len(seen) == 100, "the other target has all")
        with pytest.raises(DeadlineError, match="hang/hanging/0"):
            playing.stop(timeout=1)
    finally:
        release.set()
    assert playing.join(0) is True
    states = {cursor.name: cursor.state for cursor in log.cursors("hang/*/0")}
    assert (states["hang/f/0"], states["hang/hanging/0"]) == ("free", "owned")


def test_a_child_of_the_process_does_not_wait_for_the_player(
    log: ziplog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.function("all", lambda _: None)
    with player(log, "forked", target, start=tail(log)) as running:
        own = os.getpid()
        monkeypatch.setattr("os.getpid", lambda: own + 1)
        with pytest.raises(ClosedError, match="the parent"):
            running.status()
        running.stop(None)
        monkeypatch.undo()
        assert running.status()["player"] == "forked"
        running.stop(None)


def test_a_player_with_coroutines(log: ziplog.Log) -> None:
    start = tail(log)
    seen: list[Record] = []

    async def play() -> None:
        async def handle(records: list[Record]) -> None:
            await next_turn()
            seen.extend(records)

        function = targets.function("f", handle, batch=True)
        async with logplayer.aio.Player(log, "aio", [function], start=start) as playing:
            last = (await asyncio.to_thread(insert, log, 10))[-1]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(playing.join(), 0.05)
            await playing.wait_until(last, timeout=60)
            assert (await playing.status())["player"] == "aio"

    asyncio.run(play())
    assert len(seen) == 10


def test_a_second_stop_waits_for_the_end_of_the_first(log: ziplog.Log) -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), list[str]()

    def handle(_: Record) -> None:
        begun.set()
        assert goes_on.wait(60)
        ended.append("step")

    target = targets.function("slow", handle, batch_records=1)
    running = player(log, "stopped-twice", target, start=tail(log))
    with running:
        insert(log, 1)
        assert begun.wait(60)
        threads = [threading.Thread(target=running.stop, args=(60,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.3)
            assert thread.is_alive(), "a step is under way"
        goes_on.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert ended == ["step"]
        running.stop()


def test_a_handler_that_raises_in_a_stop_leaves_it_to_the_next_one(
    log: ziplog.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = player(log, "stop-struck", targets.function("f", lambda _: None), start=tail(log))
    running.start()

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as struck:
        struck.setattr(running, "_call", strike)
        struck.setattr(running, "_end", strike)
        with pytest.raises(KeyboardInterrupt):
            running.stop()
    assert not running.join(0), "it runs still"
    running.stop()
    with pytest.raises(ClosedError):
        running.status()


# --- several processes ---


def test_processes_share_tasks_and_survive_deaths(log: ziplog.Log, tmp_path: Path) -> None:
    start = tail(log)
    filled = Filled(tmp_path, log, "shared", start, partitions=4)
    insert(log, 200)
    with Process(filled.file) as first:
        assert first.ready() == "player shared ready: 4 tasks, 4 here\n"
        with Process(filled.file) as second:
            second.ready()
            both = {str(first.pid): 2, str(second.pid): 2}
            wait_until(lambda: filled.owners(log) == both, "both have two tasks")
            insert(log, 200)
            first.send(signal.SIGKILL)
            killed_at = time.monotonic()
            insert(log, 200)
            only = {str(second.pid): 4}
            wait_until(lambda: filled.owners(log) == only, "the other takes over")
            took_s = time.monotonic() - killed_at
            insert(log, 200)
            wait_until(lambda: filled.count() >= 800, "all records are there")
            assert_exactly_once(filled.rows(), history(log, start))
            assert took_s < LEASE_S + 15
            assert second.stop()[0] == 0
    assert {cursor.state for cursor in log.cursors("shared/*")} == {"free"}


def test_a_process_that_was_suspended_repeats_nothing(log: ziplog.Log, tmp_path: Path) -> None:
    start = tail(log)
    filled = Filled(tmp_path, log, "zombie", start, partitions=2)
    insert(log, 100)
    with Process(filled.file) as first, Process(filled.file) as second:
        first.ready()
        wait_until(lambda: filled.count() == 100, "the first records are there")
        filled.suspend(first)
        insert(log, 100)
        second.ready()
        only = {str(second.pid): 2}
        wait_until(lambda: filled.owners(log) == only, "the other takes over")
        insert(log, 100)
        wait_until(lambda: filled.count() >= 300, "all records are there")
        first.send(signal.SIGCONT)
        insert(log, 100)
        both = {str(first.pid): 1, str(second.pid): 1}
        wait_until(lambda: filled.owners(log) == both, "both have a task again")
        insert(log, 100)
        wait_until(lambda: filled.count() >= 500, "all records are there")
        assert_exactly_once(filled.rows(), history(log, start))
        assert first.stop()[0] == 0
        wait_until(lambda: filled.owners(log) == only, "its task is free at once")
        assert second.stop()[0] == 0


def test_a_file_changes_one_process_after_the_other_under_load(
    log: ziplog.Log, tmp_path: Path
) -> None:
    """Each SIGTERM comes while records are inserted; the changed file has one more target."""
    start = tail(log)
    filled = Filled(tmp_path, log, "rolled", start, partitions=4)
    more = 'batch_records = 300\n[[target]]\nname = "more"\nkind = "sqlite"\npath = "more.db"\n'
    changed = filled.file.read_text().replace("commit_ms = 100", "commit_ms = 50") + more
    first, second = Process(filled.file), Process(filled.file)
    with inserting(log), first, second:
        first.ready()
        second.ready()
        halves = {str(first.pid): 2, str(second.pid): 2}
        wait_until(lambda: filled.owners(log) == halves, "both have two tasks")
        filled.file.write_text(changed)
        assert first.stop()[0] == 0
        third = Process(filled.file)
        with third:
            third.ready()
            # Both may claim what the first one released: each computes its share by its own file.
            both = {str(second.pid), str(third.pid)}
            wait_until(lambda: filled.owners(log).keys() <= both, "no task is without owner")
            played = filled.count()
            wait_until(lambda: filled.count() > played + 100, "it plays")
            assert second.stop()[0] == 0
            wait_until(lambda: filled.owners(log) == {str(third.pid): 4}, "the other takes over")
            last = insert(log, 10)[-1]
            with logplayer.load(filled.file) as fourth:
                fourth.wait_until(last, timeout=60)
            assert third.stop()[0] == 0
    with logplayer.load(filled.file) as playing:
        playing.wait_until(log.check_tail(), timeout=100)
    expected = history(log, start)
    assert_exactly_once(filled.rows(), expected)
    with closing(sqlite3.connect(tmp_path / "more.db")) as database:
        rows = database.execute("SELECT gsn FROM records ORDER BY rowid").fetchall()
    assert rows == [(gsn,) for gsn, _, _ in expected]


def test_a_process_ends_if_another_thread_gets_the_signal(log: ziplog.Log, tmp_path: Path) -> None:
    """The kernel may select any thread, as it does right after a suspension."""
    with Process(Filled(tmp_path, log, "signalled", tail(log)).file) as process:
        process.ready()
        signal_another_thread(process.pid, signal.SIGTERM)
        assert process.end()[0] == 0


def test_a_process_ends_after_a_task_that_failed(log: ziplog.Log, tmp_path: Path) -> None:
    (tmp_path / "buggy_of_test.py").write_text("def f(record):\n    raise TypeError('a bug')\n")
    start = tail(log)
    log.insert_many([b"x"])
    file = tmp_path / "ends.toml"
    file.write_text(f"""\
[player]
name = "ends-process"
bootstrap = "{",".join(log.endpoints)}"
start = "{start}"
on_failed = "exit"
[[target]]
name = "copy"
kind = "python"
function = "buggy_of_test:f"
""")
    with Process(file) as process:
        process.ready()
        code, stderr = process.end()
    assert code == 1, stderr
    assert "error: ends-process/copy/0: TypeError: a bug" in stderr
    assert {one.owner for one in log.cursors("ends-process/*")} == {""}, "its tasks are released"


def test_a_process_that_gets_two_signals_at_once_ends_at_once(
    log: ziplog.Log, tmp_path: Path
) -> None:
    """Both are pending when a suspended process continues."""
    with Process(Filled(tmp_path, log, "two-signals", tail(log)).file) as process:
        process.ready()
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            process.send(number)
        code, stderr = process.end()
        assert code in {128 + signal.SIGTERM, 128 + signal.SIGINT}
        assert "Traceback" not in stderr


# --- the command line ---


def test_the_example_runs_as_it_is(
    log: ziplog.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIPLOG_BOOTSTRAP", ",".join(log.endpoints))
    last = insert(log, 10)[-1]
    file = tmp_path / "player.toml"
    file.write_text(run("player", "example", "sqlite").stdout)
    before = json.loads(run("player", "status", str(file), "--json").stdout)
    assert [task["state"] for task in before["tasks"]] == ["new"]
    assert not (tmp_path / "copy.db").exists()
    checked = run("player", "check", str(file))
    assert (checked.exit_code, "exactly once" in checked.stderr) == (0, True)
    with Process(file) as process:
        assert process.ready() == "player sqlite ready: 1 task, 1 here\n"
        wait_until(lambda: log.cursors("sqlite/copy/0")[0].position > last, "it has all")
        playing = json.loads(run("player", "status", str(file), "--json").stdout)
        assert playing["members"] == [log.cursors("sqlite/copy/0")[0].owner]
        shown = {key: playing["tasks"][0][key] for key in ("state", "lag_s", "lag_bytes")}
        assert shown == {"state": "owned", "lag_s": 0.0, "lag_bytes": 0}
        process.send(signal.SIGINT)
        assert process.end()[0] == 0
    insert(log, 1)

    def status() -> Any:
        return json.loads(run("player", "status", str(file), "--json").stdout)

    wait_until(lambda: status()["tasks"][0]["lag_s"] >= 0.1, "the lag grows")
    after = status()
    assert 0 < after["tasks"][0]["lag_bytes"] < 2**20
    assert after["members"] == []
    by_name = json.loads(run("player", "status", "sqlite", "--json").stdout)
    lag = {"lag_s": 0, "lag_bytes": 0}
    assert {**by_name, "tasks": [by_name["tasks"][0] | lag]} == {
        **after, "tasks": [after["tasks"][0] | lag],
    }  # fmt: skip
    absent = run("player", "status", "absent")
    assert (absent.exit_code, "no player 'absent'" in absent.stderr) == (2, True)
    assert "name is 'a b'" in run("player", "status", "a b").stderr
    assert "No such file" in run("player", "status", "absent.toml").stderr
    assert after["tasks"][0]["state"] == "free"
    assert "free" in run("player", "status", str(file)).stdout
    with closing(sqlite3.connect(tmp_path / "copy.db")) as database:
        found = database.execute("SELECT gsn FROM records ORDER BY rowid").fetchall()
    assert [gsn for (gsn,) in found][-1] == last.gsn


def test_other_partitions_are_refused(log: ziplog.Log, tmp_path: Path) -> None:
    filled = Filled(tmp_path, log, "parts", tail(log), partitions=2)
    with logplayer.load(filled.file):
        pass
    filled.file.write_text(filled.file.read_text().replace("partitions = 2", "partitions = 3"))
    with pytest.raises(ConfigError, match="has 2 partitions, not 3"):
        logplayer.load(filled.file).start()
    with Process(filled.file) as process:
        code, stderr = process.end()
        assert (code, "has 2 partitions" in stderr) == (2, True)


def test_a_start_that_was_trimmed_is_refused(log: ziplog.Log, tmp_path: Path) -> None:
    rids = insert(log, 3)
    log.trim(rids[2], force=True)
    filled = Filled(tmp_path, log, "trimmed", rids[1])
    with pytest.raises(TrimmedError) as caught:
        logplayer.load(filled.file).start()
    assert caught.value.first.gsn == rids[2].gsn
    assert not log.cursors("trimmed/*")
    checked = run("player", "check", str(filled.file))
    assert (checked.exit_code, "were trimmed" in checked.stderr) == (1, True)
    filled.file.write_text(filled.file.read_text().replace(str(rids[1]), "genesis"))
    with logplayer.load(filled.file) as playing:
        playing.wait_until(rids[2], timeout=60)
    assert [row[0] for row in filled.rows()] == [rids[2].gsn]


def test_positions_of_another_cluster_are_refused(log: ziplog.Log, tmp_path: Path) -> None:
    filled = Filled(tmp_path, log, "foreign", tail(log))
    last = insert(log, 1)[-1]
    with logplayer.load(filled.file) as playing:
        playing.wait_until(last, timeout=60)
    with closing(sqlite3.connect(filled.path)) as database:
        database.execute("UPDATE ziplog_position SET cluster = 5")
        database.commit()
    with logplayer.load(filled.file) as playing:
        wait_until(lambda: playing.status()["tasks"][0]["state"] == "failed", "the task fails")
        assert "cluster" in playing.status()["tasks"][0]["last_error"]


def test_a_log_that_does_not_reply_is_reported(tmp_path: Path, log: ziplog.Log) -> None:
    filled = Filled(tmp_path, log, "unreachable", tail(log))
    text = filled.file.read_text()
    filled.file.write_text(text.replace(",".join(log.endpoints), "127.0.0.1:9"))
    with Process(filled.file, "--timeout", "1") as process:
        code, stderr = process.end()
    assert code == 1
    assert "127.0.0.1:9" in stderr
    assert len(stderr.splitlines()) == 1


def test_check_names_the_target_that_it_cannot_use(log: ziplog.Log, tmp_path: Path) -> None:
    file = tmp_path / "player.toml"
    head = f'[player]\nname = "checked"\nbootstrap = "{",".join(log.endpoints)}"\n'
    head += '[[target]]\nname = "good"\nkind = "function"\nfunction = "builtins:print"\n'
    absent = tmp_path / "absent"
    rest = 'kind = "function"\nfunction = "builtins:print"\nrejected = "dead-letter"\n'
    rest += f'dead_letter = "{absent}/x.jsonl"'
    for more, problem in (
        (f'kind = "sqlite"\npath = "{absent}/x.db"', "target bad: cannot create"),
        (rest, "target bad: cannot write"),
    ):
        file.write_text(f'{head}[[target]]\nname = "bad"\n{more}\n')
        checked = run("player", "check", str(file))
        assert checked.exit_code == 1
        new = "target good: function, at least once, 1 task, position new, from genesis"
        assert new in checked.stderr
        assert problem in checked.stderr
