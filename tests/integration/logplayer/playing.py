"""Processes of a player, and the databases that they fill."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import ziplog
    from ziplog.types import RecordId

_DEADLINE_S = 60.0
#: The lease of the processes, in seconds.
LEASE_S = 2


class Process:
    """One `ziplog player run`; it ends with the block."""

    def __init__(self, file: Path, *arguments: str) -> None:
        self.running = subprocess.Popen(
            [sys.executable, "-m", "ziplog", "player", "run", str(file), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.kill()
        self.running.communicate(timeout=_DEADLINE_S)

    @property
    def pid(self) -> int:
        return self.running.pid

    def ready(self) -> str:
        """Return its first line, once it plays."""
        assert self.running.stdout is not None
        line = self.running.stdout.readline()
        assert "ready" in line, self.end()
        return line

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Return its exit code, and what it wrote to stderr."""
        _, stderr = self.running.communicate(timeout=_DEADLINE_S)
        return self.running.returncode, stderr

    def stop(self) -> tuple[int, str]:
        self.send(signal.SIGTERM)
        return self.end()


class Filled:
    """A database that a player fills, and the file of that player."""

    def __init__(
        self, directory: Path, log: ziplog.Log, name: str, start: RecordId, partitions: int = 1
    ) -> None:
        self.name = name
        self.file = directory / f"{name}.toml"
        self.path = directory / f"{name}.db"
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE events (gsn INTEGER, key TEXT, text TEXT)")
            database.commit()
        self.file.write_text(f"""\
[player]
name = "{name}"
bootstrap = "{",".join(log.endpoints)}"
start = "{start}"
lease_s = {LEASE_S}
commit_ms = 100
[[target]]
name = "copy"
kind = "sqlite"
path = "{self.path.name}"
statement = "INSERT INTO events VALUES (:gsn, :key_text, :text)"
partitions = {partitions}
""")

    def rows(self) -> list[tuple[int, str, str]]:
        """Return the rows in the order of their insertion."""
        with closing(sqlite3.connect(self.path, timeout=30)) as database:
            return database.execute("SELECT gsn, key, text FROM events ORDER BY rowid").fetchall()

    def count(self) -> int:
        with closing(sqlite3.connect(self.path, timeout=30)) as database:
            (number,) = database.execute("SELECT count(*) FROM events").fetchone()
            return int(number)

    def suspend(self, process: Process) -> None:
        """Suspend a process while it has no lock of the database, which would stop all others."""
        with closing(sqlite3.connect(self.path, timeout=30)) as database:
            database.execute("BEGIN EXCLUSIVE")
            process.send(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    def owners(self, log: ziplog.Log) -> dict[str, int]:
        """Return how many tasks each process has, by its pid."""
        found: dict[str, int] = {}
        for cursor in log.cursors(f"{self.name}/copy/*"):
            pid = cursor.owner.split(":")[1] if cursor.owner else ""
            found[pid] = found.get(pid, 0) + 1
        return found


def insert(log: ziplog.Log, count: int, keys: int = 7) -> list[RecordId]:
    """Insert records with keys; return their positions in the log's order."""
    payloads = [b"%d" % number for number in range(count)]
    names = [b"key-%d" % (number % keys) for number in range(count)]
    return sorted(log.insert_many(payloads, keys=names))


@contextmanager
def inserting(log: ziplog.Log) -> Iterator[None]:
    """Insert records without a pause until the end of the block."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            insert(log, 20)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def history(log: ziplog.Log, start: RecordId) -> list[tuple[int, str, str]]:
    """Return what a database has to have: the records of the log from a position on."""
    with log.subscribe(start, follow=False) as subscription:
        return [
            (record.rid.gsn, (record.key or b"").decode(), record.payload.decode())
            for record in subscription
        ]


def assert_exactly_once(
    rows: list[tuple[int, str, str]], expected: list[tuple[int, str, str]]
) -> None:
    """Assert that each record is there once, and that records of one key are in order."""
    assert sorted(rows) == expected
    for key in {row[1] for row in rows}:
        gsns = [row[0] for row in rows if row[1] == key]
        assert gsns == sorted(gsns)
