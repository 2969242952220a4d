"""A player's process with a broken rule: SQL targets go by the cursor, not by their position.

`python broken.py player run FILE`, in place of `ziplog player run FILE`. It shows that a trial
finds what it looks for: a process that is killed between a commit and the move of the cursor
delivers records twice.
"""

from __future__ import annotations

from unittest.mock import patch

from logplayer.contract import Opened
from logplayer.targets.sql import SqlTarget
from ziplog.__main__ import main

if __name__ == "__main__":
    with (
        patch.object(SqlTarget, "_fence", lambda _self, _cursor, task: Opened(task.position)),
        patch.object(SqlTarget, "_move", lambda _self, _cursor, _batch: None),
    ):
        main()
