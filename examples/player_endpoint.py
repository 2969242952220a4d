"""An HTTP endpoint that gets each record of a log exactly once, from a player's `http` target.

    python examples/player_endpoint.py events.db 8000

The player's file has `kind = "http"`, `url = "http://127.0.0.1:8000/"`, `position = "endpoint"`.
The endpoint stores term and position in the same transaction as the records, and refuses a batch
of another term or start (docs/player.md, section 6). Here the effect is a row for each record.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS events (gsn INTEGER PRIMARY KEY, body TEXT);
CREATE TABLE IF NOT EXISTS positions (
  task TEXT PRIMARY KEY, cursor TEXT, term INTEGER, seek INTEGER, position INTEGER);
"""


class RefusedError(Exception):
    """A request that gets another answer than 200."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status: Final = status


def task_of(fields: dict[str, Any]) -> str:
    """Return the name of a task."""
    return f"{fields['player']}/{fields['target']}/{fields['partition']}"


def open_task(database: sqlite3.Connection, fields: dict[str, Any]) -> int:
    """Store the term of a claim; return the stored position."""
    task = task_of(fields)
    cursor = f"{fields['cluster']} {fields['birth']} {fields['partitions']}"
    query = "SELECT cursor, term, seek, position FROM positions WHERE task = ?"
    row = database.execute(query, (task,)).fetchone()
    if row is None:
        if not fields["fresh"]:
            raise RefusedError(404, f"no position of {task}")
        row = (cursor, 0, fields["seek"], fields["position"])
    of, term, seek, position = row
    if of != cursor:
        raise RefusedError(422, f"the position of {task} is another cursor's: {of}, not {cursor}")
    if fields["term"] < term:
        raise RefusedError(409, f"term {term} is stored")
    if fields["seek"] > seek:
        if not fields["fresh"]:
            raise RefusedError(404, f"the position of {task} is older than the last seek")
        position = fields["position"]
    new = (task, cursor, fields["term"], max(seek, fields["seek"]), position)
    database.execute("INSERT OR REPLACE INTO positions VALUES (?, ?, ?, ?, ?)", new)
    return int(position)


def deliver(database: sqlite3.Connection, fields: dict[str, Any]) -> None:
    """Store the records of a batch, and the position behind them."""
    moved = database.execute(
        "UPDATE positions SET position = ? WHERE task = ? AND term = ? AND position = ?",
        (fields["stop"], task_of(fields), fields["term"], fields["start"]),
    )
    if moved.rowcount != 1:
        raise RefusedError(409, "another term or position is stored")
    rows = [(record["gsn"], record.get("payload")) for record in fields["records"]]
    database.executemany("INSERT INTO events VALUES (?, ?)", rows)


class Handler(BaseHTTPRequestHandler):
    """One connection of a player; each request is a transaction."""

    protocol_version = "HTTP/1.1"
    server: Endpoint

    def do_PUT(self) -> None:
        """Open a task."""
        self._answer(lambda database, fields: {"position": open_task(database, fields)})

    def do_POST(self) -> None:
        """Take a batch."""
        self._answer(deliver)

    def _answer(self, step: Any) -> None:
        fields = dict(parse_qsl(urlsplit(self.path).query))
        fields |= json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        database = sqlite3.connect(self.server.path, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous = EXTRA")
            database.execute("BEGIN IMMEDIATE")
            self._send(200, step, database, fields)
        finally:
            database.close()

    def _send(self, status: int, step: Any, database: sqlite3.Connection, fields: Any) -> None:
        try:
            body = json.dumps(step(database, fields)).encode()
            database.execute("COMMIT")
        except RefusedError as error:
            status, body = error.status, str(error).encode()
        except sqlite3.IntegrityError as error:
            status, body = 422, str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Endpoint(ThreadingHTTPServer):
    """The endpoint, on loopback."""

    daemon_threads = True

    def __init__(self, path: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.path: Final = path
        database = sqlite3.connect(path)
        database.executescript(_TABLES)
        database.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Endpoint(sys.argv[1], int(sys.argv[2])).serve_forever()
