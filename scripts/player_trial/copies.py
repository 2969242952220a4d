"""The targets of a trial: each copies the log to a place where the verdict reads it.

Invariant: the place has no constraint that would hide a record that was delivered twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tests import postgres
from ziplog.runtime.child_processes import environment

if TYPE_CHECKING:
    from collections.abc import Callable

#: A position, and the payload there.
Row = tuple[int, str]

_ENDPOINT: Final = Path(__file__).resolve().parents[2] / "examples" / "player_endpoint.py"
_RECORDED: Final = Path(__file__).with_name("recorded.py")
_LOCKED_S: Final = 3.0
_FUNCTION: Final = """\
import os
FILE = os.open({path!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

def write(record):
    os.write(FILE, b"%d %s\\n" % (record.rid.gsn, record.payload))
"""


def recorded(history: Path, *program: str) -> list[str]:
    """Return the command that runs a program, and records the steps of its targets."""
    return [sys.executable, str(_RECORDED), str(history), *program]


class Copy(Protocol):
    """A target of the trial's player."""

    name: str
    is_exactly_once: bool
    #: Number of its tasks.
    partitions: int
    #: Its table in the player's file.
    table: str
    #: What may happen to it, by name.
    faults: dict[str, Callable[[], None]]

    def rows(self) -> list[Row]:
        """Return what it received, in this order."""
        ...

    def close(self) -> None:
        """Stop what it started."""
        ...


def _table(name: str, kind: str, partitions: int, **more: str) -> str:
    keys = "".join(f"{key} = {value!r}\n" for key, value in more.items())
    return f'[[target]]\nname = "{name}"\nkind = "{kind}"\npartitions = {partitions}\n{keys}'


class SqliteCopy:
    """A table in a file, which other programs lock."""

    def __init__(self, directory: Path, partitions: int) -> None:
        self.name, self.is_exactly_once, self.partitions = "sqlite", True, partitions
        self._path: Final = directory / "copy.db"
        with contextlib.closing(self._connect()) as database:
            database.execute("CREATE TABLE events (gsn INTEGER, payload TEXT)")
            database.commit()
        statement = "INSERT INTO events VALUES (:gsn, :text)"
        self.table = _table("sqlite", "sqlite", partitions, path="copy.db", statement=statement)
        self.faults = {"lock-sqlite": self._lock}

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=60, isolation_level="IMMEDIATE")

    def _lock(self) -> None:
        with contextlib.closing(self._connect()) as database:
            database.execute("DELETE FROM events WHERE gsn < 0")
            time.sleep(_LOCKED_S)
            database.rollback()

    def rows(self) -> list[Row]:
        """Return what it received, in this order."""
        with contextlib.closing(self._connect()) as database:
            return database.execute("SELECT gsn, payload FROM events ORDER BY rowid").fetchall()

    def close(self) -> None:
        """Nothing was started."""


class PostgresCopy:
    """A table in a PostgreSQL server of its own, which crashes."""

    def __init__(self, partitions: int) -> None:
        self.name, self.is_exactly_once, self.partitions = "postgres", True, partitions
        self._server: Final = postgres.Server()
        self._run("CREATE TABLE events (n BIGSERIAL, gsn BIGINT, payload TEXT)")
        statement = "INSERT INTO events (gsn, payload) VALUES (:gsn, :text)"
        dsn = self._server.dsn
        self.table = _table("postgres", "postgres", partitions, dsn=dsn, statement=statement)
        self.faults = {"crash-postgres": self._server.crash, "end-sessions": self._end_sessions}

    def _run(self, statement: str) -> list[Any]:
        import psycopg  # noqa: PLC0415 - it is optional

        with psycopg.connect(self._server.dsn, autocommit=True) as database:
            cursor = database.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _end_sessions(self) -> None:
        self._run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )

    def rows(self) -> list[Row]:
        """Return what it received, in this order."""
        return self._run("SELECT gsn, payload FROM events ORDER BY n")

    def close(self) -> None:
        """Stop what was started."""
        self._server.stop()


class EndpointCopy:
    """An HTTP endpoint that stores positions, in a process that is killed."""

    def __init__(self, directory: Path, port: int) -> None:
        self.name, self.is_exactly_once, self.partitions = "endpoint", True, 1
        self._path: Final = directory / "endpoint.db"
        self._port: Final = port
        url = f"http://127.0.0.1:{port}/"
        self.table = _table("endpoint", "http", 1, url=url, position="endpoint")
        self.table += "batch_records = 100\n"
        self.faults = {"kill-endpoint": self._restart}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(_ENDPOINT), str(self._path), str(self._port)]
        return subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL)

    def _restart(self) -> None:
        self.close()
        self._process = self._start()

    def rows(self) -> list[Row]:
        """Return what it received, in this order."""
        with contextlib.closing(sqlite3.connect(self._path, timeout=60)) as database:
            return database.execute("SELECT gsn, body FROM events ORDER BY rowid").fetchall()

    def close(self) -> None:
        """Stop what was started."""
        self._process.kill()
        self._process.wait()


class PushCopy:
    """A table behind a receiver, in a process that is killed and suspended."""

    def __init__(self, directory: Path, history: Path, port: int, seed: int) -> None:
        self.name, self.is_exactly_once, self.partitions = "copy", True, 1
        self._history: Final = history
        self._path: Final = directory / "received.db"
        self._port: Final = port
        self._random: Final = random.Random(f"receiver {seed}")  # noqa: S311 - no secret
        self.table = _table("copy", "push", 1, address=f"127.0.0.1:{port}")
        self.faults = {"kill-receiver": self._restart, "suspend-receiver": self._suspend}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        program = ("examples/player_receiver.py", str(self._path), str(self._port))
        return subprocess.Popen(
            recorded(self._history, *program),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def _restart(self) -> None:
        self.close()
        self._process = self._start()

    def _suspend(self) -> None:
        """Suspend it, for less or for longer than the player waits for a reply."""
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.choice((0.3, 3.0, 12.0)))
        self._process.send_signal(signal.SIGCONT)

    def rows(self) -> list[Row]:
        """Return what it received, in this order."""
        with contextlib.closing(sqlite3.connect(self._path, timeout=60)) as database:
            return database.execute("SELECT gsn, text FROM events ORDER BY rowid").fetchall()

    def close(self) -> None:
        """Stop what was started."""
        self._process.kill()
        self._process.wait()


class FunctionCopy:
    """A function that appends lines to a file: at least once."""

    def __init__(self, directory: Path, partitions: int) -> None:
        self.name, self.is_exactly_once, self.partitions = "function", False, partitions
        self._path: Final = directory / "lines.txt"
        self._path.touch()
        source = _FUNCTION.format(path=os.fspath(self._path))
        (directory / "trial_function.py").write_text(source, encoding="utf-8")
        reference = "trial_function:write"
        self.table = _table("function", "function", partitions, function=reference)
        self.faults: dict[str, Callable[[], None]] = {}

    def rows(self) -> list[Row]:
        """Return what it received, in this order."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        return [(int(gsn), payload) for gsn, payload in (line.split(" ", 1) for line in lines)]

    def close(self) -> None:
        """Nothing was started."""


def judge(copy: Copy, expected: dict[int, str], possible: set[str]) -> list[str]:
    """Return what is wrong with a copy.

    Args:
        copy: the copy.
        expected: the payload at each position; it begins with its key and a space.
        possible: payloads of inserts of unknown outcome.

    """
    rows, wrong = copy.rows(), []
    first = dict(reversed(rows))
    lost = expected.keys() - first.keys()
    if lost:
        wrong.append(f"{len(lost)} records are missing, the first at gsn {min(lost)}")
    strange = [row for row in rows if row[1] not in {expected.get(row[0]), *possible}]
    if strange:
        wrong.append(f"{len(strange)} rows are not of the log, the first is {strange[0]}")
    if copy.is_exactly_once and len(first) != len(rows):
        wrong.append(f"{len(rows) - len(first)} records are there twice")
    latest: dict[str, int] = {}
    for gsn, payload in dict.fromkeys(rows):
        key = payload.split(" ", 1)[0]
        if gsn < latest.get(key, 0):
            wrong.append(f"gsn {gsn} of {key} came after gsn {latest[key]}")
            break
        latest[key] = gsn
    return [f"{copy.name}: {text}" for text in wrong]
