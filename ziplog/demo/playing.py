"""A player that copies the log into SQLite, and is killed in the middle.

Another process of the player, started at the kill, continues. The table has no constraints, so a
record that was delivered twice, or late, would be there. See docs/player.md.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import time
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.demo.parts import checksum
from ziplog.errors import UnavailableError
from ziplog.runtime.child_processes import environment, python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Time without a new row after which the demo fails.
_TIMEOUT_S: Final = 90.0
_POLL_S: Final = 0.05
_FILE: Final = """\
[player]
name = "demo"
bootstrap = "{endpoint}"
lease_s = 1
[[target]]
name = "copy"
kind = "sqlite"
path = "copy.db"
statement = "INSERT INTO events VALUES (:gsn, :payload)"
batch_records = 5000
"""


class Played(msgspec.Struct, frozen=True):
    """What is in the table at the end."""

    rows: int
    #: Number of rows with different positions, and of rows that follow a later position.
    positions: int
    late: int
    #: Of the payloads, as of the inserters.
    checksum: int
    #: Number of rows when the first process was killed.
    killed_at: int
    #: From the start of the first process until the last row.
    seconds: float


def play(
    directory: Path, endpoint: str, records: int, on_progress: Callable[[int], None]
) -> Played:
    """Copy the log into a table, with a kill at half of the records.

    Args:
        directory: for the files.
        endpoint: a node of the log's membership service.
        records: the number of records in the log.
        on_progress: called with the number of rows.

    Raises:
        UnavailableError: a process ended by itself, or there is no progress; says why.

    """
    file = directory / "player.toml"
    file.write_text(_FILE.format(endpoint=endpoint), encoding="utf-8")
    began = time.monotonic()
    database = sqlite3.connect(directory / "copy.db", timeout=_TIMEOUT_S)
    with contextlib.closing(database):
        database.execute("CREATE TABLE events (gsn INTEGER, payload BLOB)")
        database.commit()
        with _process(file, directory / "player-1.log") as first:
            _wait(database, (records + 1) // 2, first, on_progress)
            first.kill()
            killed_at = _rows(database)
        with _process(file, directory / "player-2.log") as second:
            _wait(database, records, second, on_progress)
            seconds = time.monotonic() - began
            second.send_signal(signal.SIGTERM)
            second.wait(timeout=_TIMEOUT_S)
        return _summary(database, killed_at, seconds)


@contextlib.contextmanager
def _process(file: Path, errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    with errors.open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            python("ziplog", "player", "run", str(file)),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _rows(database: sqlite3.Connection) -> int:
    (rows,) = database.execute("SELECT coalesce(max(rowid), 0) FROM events").fetchone()
    return int(rows)


def _wait(
    database: sqlite3.Connection,
    rows: int,
    process: subprocess.Popen[bytes],
    on_progress: Callable[[int], None],
) -> None:
    """Wait for a number of rows."""
    done, changed_at = 0, time.monotonic()
    while done < rows:
        if process.poll() is not None:
            raise UnavailableError(f"the demo's player ended with code {process.returncode}")
        former, done = done, _rows(database)
        if done != former:
            changed_at = time.monotonic()
        elif time.monotonic() > changed_at + _TIMEOUT_S:
            raise UnavailableError(f"the demo's player delivered nothing for {_TIMEOUT_S:g} s")
        on_progress(done)
        time.sleep(_POLL_S)


def _summary(database: sqlite3.Connection, killed_at: int, seconds: float) -> Played:
    rows, positions, late = database.execute(
        "SELECT count(*), count(DISTINCT gsn), coalesce(sum(gsn < former), 0)"
        " FROM (SELECT gsn, lag(gsn) OVER (ORDER BY rowid) AS former FROM events)"
    ).fetchone()
    payloads = (payload for (payload,) in database.execute("SELECT payload FROM events"))
    return Played(rows, positions, late, checksum(payloads, 0), killed_at, seconds)
