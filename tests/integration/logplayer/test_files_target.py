"""Processes of a player that fill a directory, are killed and suspended; docs/player.md, 7."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from pyarrow import parquet

import logplayer
from logplayer import targets
from tests.integration.logplayer.playing import (
    LEASE_S,
    Process,
    assert_exactly_once,
    history,
    insert,
)
from tests.unit.ziplog.cli.fakes import run
from tests.waiting import wait_until
from ziplog.errors import ConfigError
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId

if TYPE_CHECKING:
    from pathlib import Path

    import ziplog
    from logplayer.targets.file_formats import Format

pytestmark = pytest.mark.timeout(240)


def rows(directory: Path) -> list[tuple[int, str, str]]:
    """Return the records of all partitions, in the order of their files."""
    found = [
        (line["gsn"], line["key"], line["payload"])
        for path in sorted(directory.rglob("*.jsonl"))
        for line in map(json.loads, path.read_text().splitlines())
    ]
    for path in sorted(directory.rglob("*.parquet")):
        table = parquet.read_table(path)
        columns = (table.column(name).to_pylist() for name in ("offset", "key", "value"))
        found += [
            (gsn, key.decode(), value.decode()) for gsn, key, value in zip(*columns, strict=True)
        ]
    return found


def tail(log: ziplog.Log) -> RecordId:
    return RecordId(log.check_tail().gsn + 1, 0)


def player_file(path: Path, log: ziplog.Log, name: str, kind: Format) -> Path:
    path.write_text(f"""\
[player]
name = "{name}"
bootstrap = "{",".join(log.endpoints)}"
start = "{tail(log)}"
lease_s = {LEASE_S}
commit_ms = 100
idle_ms = 200
[[target]]
name = "copy"
kind = "files"
directory = "{name}"
format = "{kind}"
roll_s = 1
partitions = 2
batch_records = 50
""")
    return path


def staged(directory: Path) -> int:
    """Return the size of what is durable and in no file yet."""
    return sum(path.stat().st_size for path in directory.rglob(".*.stage"))


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=pytest.mark.nightly)])
def test_processes_are_killed_and_suspended(log: ziplog.Log, tmp_path: Path, kind: Format) -> None:
    name = f"killed-{kind}"
    start, directory = tail(log), tmp_path / name
    file = player_file(tmp_path / "player.toml", log, name, kind)
    with Process(file) as first, Process(file) as second:
        first.ready()
        second.ready()
        insert(log, 300)
        wait_until(lambda: staged(directory) > 0, "records are staged")
        first.send(signal.SIGKILL)
        insert(log, 300)
        wait_until(lambda: len(rows(directory)) >= 600, "the other process has all")
        with Process(file) as third:
            third.ready()
            second.send(signal.SIGSTOP)
            insert(log, 300)
            wait_until(lambda: len(rows(directory)) >= 900, "the third process has all")
            second.send(signal.SIGCONT)
            last = insert(log, 300)[-1]
            wait_until(
                lambda: all(one.position > last for one in log.cursors(f"{name}/copy/*")),
                "all positions are committed",
            )
            wait_until(lambda: len(rows(directory)) >= 1200, "all records are in files")
            assert_exactly_once(rows(directory), history(log, start))
            assert third.stop()[0] == 0
        assert second.stop()[0] == 0
    assert not [*directory.rglob("*.part"), *directory.rglob("*.stage")]
    assert {path.name for path in directory.iterdir()} == {"part-000", "part-001"}


def test_seek_back_fails_the_task_until_a_seek_after_the_files(
    log: ziplog.Log, tmp_path: Path
) -> None:
    start = tail(log)
    rids = insert(log, 100)
    files = targets.files("copy", tmp_path / "out", batch_records=10, roll_bytes=1)
    with logplayer.Player(log, "back", [files], start=start, commit_ms=60_000) as playing:
        wait_until(lambda: len(rows(tmp_path / "out")) == 100, "the cursor is behind the files")
        with pytest.raises(ConfigError, match=r"files are not written twice; remove those"):
            playing.seek("copy", rids[50])
        with pytest.raises(ConfigError, match=r"`ziplog cursor seek back/copy/0"):
            playing.seek("copy", RID_GENESIS)
        with pytest.raises(TypeError, match="position must be a RecordId"):
            playing.seek("copy", "5@0")  # type: ignore[arg-type]
        playing.seek("copy", RID_RECENT)
        log.seek_cursor("back/copy/0", rids[50])
        wait_until(lambda: playing.status()["tasks"][0]["state"] == "failed", "the task fails")
        assert "has records up to" in playing.status()["tasks"][0]["last_error"]
        playing.seek("copy", RecordId(rids[-1].gsn + 1, 0))
        last = insert(log, 10)[-1]
        playing.wait_until(last, timeout=60)
    assert rows(tmp_path / "out") == history(log, start)
    assert len(list((tmp_path / "out").rglob("*.jsonl"))) >= 11


def test_the_example_runs_as_it_is(
    log: ziplog.Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIPLOG_BOOTSTRAP", ",".join(log.endpoints))
    last = insert(log, 10)[-1]
    file = tmp_path / "player.toml"
    file.write_text(run("player", "example", "files").stdout)
    checked = run("player", "check", str(file))
    assert (checked.exit_code, "exactly once" in checked.stderr) == (0, True)
    assert not (tmp_path / "copy").exists()
    with Process(file) as process:
        process.ready()
        wait_until(lambda: log.cursors("files/copy/0")[0].position > last, "it has all")
        assert process.stop()[0] == 0
    shown = run("tail", "--json", "--bootstrap", ",".join(log.endpoints)).stdout
    written = sorted((tmp_path / "copy" / "part-000").glob("*.jsonl"))
    assert "".join(path.read_text() for path in written) == shown
