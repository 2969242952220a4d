"""What the tasks of one process share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logplayer.feed import Feed
from logplayer.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.settings import PlayerSettings
    from ziplog.client.log_tasks import LogTasks


class PlayerContext:
    """The log, the feed and the settings of one process of a player."""

    def __init__(
        self,
        calls: LogTasks,
        settings: PlayerSettings,
        owner: str,
        on_feed_change: Callable[[], None],
    ) -> None:
        """Make what the tasks share.

        Args:
            calls: the log.
            settings: the player's.
            owner: describes this process to people.
            on_feed_change: called when the feed opens, and when its ring has more.

        """
        self.calls: Final = calls
        self.settings: Final = settings
        self.owner: Final = owner
        #: The shared subscription.
        counts = {spec.partitions for spec in settings.targets}
        self.feed: Final = Feed(calls, settings.memory_bytes, on_feed_change, counts)
        self.turns: Final = Turns()
        #: The membership service did not answer for a lease: no step begins.
        self.is_cut_off = False
        #: The positions that calls wait for: tasks that have passed one move there at once.
        self.awaited: tuple[int, ...] = ()
        #: A claim was lost: the cursors are listed soon.
        self.wants_round = False
        #: When each task is polled, in monotonic ns, by the names of their cursors. Whatever
        #: changes a task wakes it, so no other task need be looked at.
        self.due: Final[dict[str, int]] = {}
        #: The tasks with a subscription of their own, which are polled with every batch.
        self.own_readers: Final[set[str]] = set()
        #: The tasks by the numbers of their workers.
        self.workers: Final[dict[int, str]] = {}
        self._workers = 0

    def wake(self, task: str) -> None:
        """Poll a task at the end of the batch: something that it waits for has changed."""
        self.due[task] = self.calls.now

    def is_awaited(self, after: int, upto: int) -> bool:
        """Whether a call waits for a position after the first one, up to the second one."""
        awaited = self.awaited
        return bool(awaited) and any(after < position <= upto for position in awaited)

    def add_worker(self, task: str) -> int:
        """Return the number of a new worker of a task."""
        self._workers += 1
        self.workers[self._workers] = task
        return self._workers
