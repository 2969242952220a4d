"""What the tasks of one process share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.feed import Feed
from logplayer.turns import Turns

if TYPE_CHECKING:
    from logplayer.settings import PlayerSettings
    from ziplog.client.log_tasks import LogTasks


class PlayerContext:
    """The log, the feed and the settings of one process of a player."""

    def __init__(self, calls: LogTasks, settings: PlayerSettings, owner: str) -> None:
        """Make what the tasks share.

        Args:
            calls: the log.
            settings: the player's.
            owner: describes this process to people.

        """
        self.calls: Final = calls
        self.settings: Final = settings
        self.owner: Final = owner
        #: The shared subscription.
        self.feed: Final = Feed(
            calls, settings.memory_bytes, {spec.partitions for spec in settings.targets}
        )
        self.turns: Final = Turns()
        #: The membership service did not answer for a lease: no step begins.
        self.is_cut_off = False
        #: The positions that calls wait for: tasks that have passed one move there at once.
        self.awaited: tuple[int, ...] = ()
        #: A claim was lost: the cursors are listed soon.
        self.wants_round = False
        self._workers = 0

    def is_awaited(self, after: int, upto: int) -> bool:
        """Whether a call waits for a position after the first one, up to the second one."""
        return any(after < position <= upto for position in self.awaited)

    def next_worker(self) -> int:
        """Return the number of a new worker."""
        self._workers += 1
        return self._workers
