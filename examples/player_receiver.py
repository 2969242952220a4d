"""A receiver that keeps each record of a log exactly once, from a player's `push` target.

    python examples/player_receiver.py copy.db 7600

The player's file is that of `ziplog player example push`. The receiver stores nothing itself: the
position is in the SQLite file, in the same transaction as the records. So this program may be
killed at any time (docs/player.md, section 10).
"""

from __future__ import annotations

import signal
import sqlite3
import sys
from contextlib import closing

import logplayer
from logplayer import targets


def main(path: str, port: int) -> None:
    """Receive until SIGTERM or Ctrl-C."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE IF NOT EXISTS events (gsn INTEGER, key TEXT, text TEXT)")
    copy = targets.sqlite("copy", path, "INSERT INTO events VALUES (:gsn, :key_text, :text)")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())
    with logplayer.Receiver(f"127.0.0.1:{port}", copy) as receiver:
        print(f"receiver ready at {receiver.endpoint}", flush=True)
        receiver.serve()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
