"""A materialised view: a dict with the newest payload of each key, which a player keeps up to date.

    python examples/player_view.py 127.0.0.1:7400

The view is in memory, so each process fills its own from the beginning of the log, with cursors of
its own. A repetition stores what is there, so at least once is enough. An empty payload deletes its
key.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from typing import TYPE_CHECKING

import logplayer
import ziplog
from logplayer import targets

if TYPE_CHECKING:
    from collections.abc import Iterator


class View(dict[bytes, bytes]):
    """The newest payload of each key."""

    def apply(self, record: ziplog.Record) -> None:
        """Store one record."""
        if record.key is not None and record.payload:
            self[record.key] = record.payload
        elif record.key is not None:
            self.pop(record.key, None)


@contextlib.contextmanager
def playing(view: View, log: ziplog.Log) -> Iterator[logplayer.Player]:
    """Keep a view up to date within the block; then delete the cursors, which nothing needs."""
    name = f"view-{uuid.uuid4().hex}"
    with logplayer.Player(log, name, [targets.function("view", view.apply)], hold_s=0) as player:
        yield player
    for cursor in log.cursors(f"{name}/*"):
        log.delete_cursor(cursor.name)


def main(bootstrap: str) -> None:
    """Fill a view, and print it."""
    view = View()
    with ziplog.connect(bootstrap) as log, playing(view, log) as player:
        player.wait_until(log.check_tail())
        for key, payload in sorted(view.items()):
            print(key.decode(errors="replace"), payload.decode(errors="replace"))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
