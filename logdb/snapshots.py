"""States of former moments, for as long as somebody reads them.

Rule: what replaces a key's entry leaves the former one with the newest snapshot, which serves all
that are older; a value that was only moved is read where it is now. Invariant: a snapshot's version
of a key is that of its moment. Bounded by entries: the oldest expires. docs/logdb.md, section 9.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final

from sortedcontainers import SortedList

from logdb.errors import SnapshotExpired
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logdb.records import Entry
    from logdb.state import State
    from logdb.versions import Row

#: A snapshot that nobody reads for so long, in nanoseconds, ends.
IDLE_NS: Final = 60 * 10**9
#: Entries that are kept for all snapshots together.
MAX_ENTRIES: Final = 1_000_000
#: Moments that are told apart.
MAX_MOMENTS: Final = 1_000


class _Moment:
    """What has changed between a moment and the next newer one that is kept (or the present)."""

    def __init__(self, older: _Moment | None) -> None:
        self.former: dict[bytes, Entry | None] = {}
        self.older = older
        self.newer: _Moment | None = None
        #: The numbers under which it is read.
        self.numbers: Final[set[int]] = set()


class Snapshots:
    """The snapshots of one coordinator."""

    def __init__(
        self,
        state: State,
        *,
        idle_ns: int = IDLE_NS,
        max_entries: int = MAX_ENTRIES,
        max_moments: int = MAX_MOMENTS,
    ) -> None:
        """Begin with none.

        Args:
            state: what they are of.
            idle_ns: nanoseconds without a read that end one.
            max_entries: of all together; beyond, the oldest expires.
            max_moments: at most so many are told apart; beyond, the oldest expires.

        """
        self._state: Final = state
        self._idle_ns: Final = idle_ns
        self._max_entries: Final = max_entries
        self._max_moments: Final = max_moments
        #: Each snapshot's moment and last use, in the order of use.
        self._held: Final[OrderedDict[int, tuple[_Moment, int]]] = OrderedDict()
        self._oldest: _Moment | None = None
        self._newest: _Moment | None = None
        self._moments = 0
        #: Keys that may be absent now and were there in a snapshot.
        self._ghosts: Any = SortedList()
        self._last = 0
        #: Former entries that are kept.
        self.entries = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, now: int) -> int:
        """Keep the present state; returns its number. `now` is in monotonic nanoseconds."""
        newest = self._newest
        if newest is None or newest.former:
            newest = self._begin()
        self._last += 1
        newest.numbers.add(self._last)
        self._held[self._last] = (newest, now)
        return self._last

    def get(self, number: int, key: bytes, now: int) -> Entry | None:
        """Return a key's entry in a snapshot.

        Raises:
            SnapshotExpired: it is not kept, or the value is no longer in the log.

        """
        return self._entry(self._use(number, now), key)

    def range(
        self, number: int, start: bytes, stop: bytes | None, limit: int, now: int
    ) -> list[Row]:
        """Return the first `limit` entries from `start` on, before `stop`, in a snapshot.

        Raises:
            SnapshotExpired: it is not kept, or a value is no longer in the log.

        """
        moment = self._use(number, now)
        rows: list[Row] = []
        if limit < 1:
            return rows
        for key in in_order(
            self._state.versions.keys(start, stop),
            self._ghosts.irange(start, stop, (True, False)),
        ):
            entry = self._entry(moment, key)
            if entry is not None:
                rows.append((key, entry))
                if len(rows) == limit:
                    break
        return rows

    def drop(self, number: int) -> None:
        """End a snapshot, if it is still kept."""
        held = self._held.pop(number, None)
        if held is None:
            return
        moment, _ = held
        moment.numbers.discard(number)
        if not moment.numbers:
            self._end(moment)

    def expire(self, now: int) -> None:
        """End those that nobody has read for long."""
        while self._held:
            number, (_, used) = next(iter(self._held.items()))
            if used + self._idle_ns > now:
                break
            self.drop(number)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        moments = []
        moment = self._oldest
        while moment is not None:
            assert moment.numbers, "a moment that nobody reads"
            assert moment.newer is not None or moment is self._newest
            moments.append(moment)
            moment = moment.newer
        assert len(moments) == self._moments <= self._max_moments
        assert sum(len(each.former) for each in moments) == self.entries <= self._max_entries
        assert bool(moments) == (self._changed in self._state.on_change)
        assert moments or not len(self._ghosts), "absent keys that nobody needs"
        get = self._state.versions.get
        for each in moments:
            for key, former in each.former.items():
                assert former is None or get(key) is not None or key in self._ghosts, key

    def _use(self, number: int, now: int) -> _Moment:
        held = self._held.get(number)
        if held is None:
            raise SnapshotExpired("its coordinator does not keep it (any more)")
        moment, _ = held
        self._held[number] = (moment, now)
        self._held.move_to_end(number)
        return moment

    def _entry(self, moment: _Moment, key: bytes) -> Entry | None:
        each: _Moment | None = moment
        while each is not None:
            if key in each.former:
                former = each.former[key]
                if former is not None and former.place.gsn < self._state.trimmed:
                    raise SnapshotExpired("a value that was replaced was cleared out of the log")
                return former
            each = each.newer
        return self._state.versions.get(key)

    def _begin(self) -> _Moment:
        """Tell apart another moment: the present one."""
        if self._moments == self._max_moments:
            self._expire_oldest()
        former = self._newest
        self._newest = moment = _Moment(former)
        if former is None:
            self._oldest = moment
            self._state.on_change.append(self._changed)
        else:
            former.newer = moment
        self._moments += 1
        return moment

    def _changed(self, key: bytes, former: Entry | None, entry: Entry | None) -> None:
        """Keep what a key was; observes the state."""
        newest = self._newest
        assert newest is not None, "nobody observes without a snapshot"
        if entry is None:
            if former is not None:
                self._ghosts.add(key)
        elif former is None:
            self._ghosts.discard(key)
        elif former.version == entry.version:
            return
        if key in newest.former:
            return
        newest.former[key] = former
        self.entries += 1
        while self.entries > self._max_entries:
            self._expire_oldest()

    def _expire_oldest(self) -> None:
        assert self._oldest is not None
        for number in list(self._oldest.numbers):
            self.drop(number)

    def _end(self, moment: _Moment) -> None:
        """Forget a moment; an older one needs what it kept."""
        older, newer = moment.older, moment.newer
        self.entries -= len(moment.former)
        if older is None:
            self._oldest = newer
        else:
            self.entries -= len(older.former)
            older.former = _merged(older.former, moment.former)
            self.entries += len(older.former)
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        self._moments -= 1
        if not self._moments:
            self._state.on_change.remove(self._changed)
            self._ghosts.clear()
        elif len(self._ghosts) > 2 * self.entries + 1000:
            self._count_ghosts()

    def _count_ghosts(self) -> None:
        """Forget the absent keys that no snapshot has."""
        get = self._state.versions.get
        there: set[bytes] = set()
        moment = self._oldest
        while moment is not None:
            there.update(key for key, former in moment.former.items() if former is not None)
            moment = moment.newer
        self._ghosts = SortedList(key for key in there if get(key) is None)


class SnapshotCursor:
    """A walk that has begun. It must be closed."""

    def __init__(self, state: State, max_entries: int = MAX_ENTRIES) -> None:
        """Begin at the present moment.

        Args:
            state: what to walk through.
            max_entries: if more change ahead of it, the walk fails.

        """
        self._state: Final = state
        self._max_entries: Final = max_entries
        self._former: Final[dict[bytes, Entry | None]] = {}
        #: The keys of `_former` that were there and are absent now.
        self._ghosts: Final[Any] = SortedList()
        #: The last key that was passed; None: at the beginning.
        self._passed: bytes | None = None
        self._failed = False
        self.is_done = False
        #: The rest of the checkpoint, of the same moment.
        self.image: Final = state.image()
        state.on_change.append(self._changed)

    def rows(self, count: int) -> list[Row]:
        """Pass at most `count` keys; returns those entries that were there. May be empty.

        Raises:
            UnavailableError: too much has changed ahead of the walk; begin another one.

        """
        if self._failed:
            raise UnavailableError(
                f"more than {self._max_entries:,} keys changed while a checkpoint was written"
            )
        versions, former, passed = self._state.versions, self._former, self._passed
        start, is_inside = passed or b"", passed is None
        found = in_order(
            versions.keys(start, None, after=not is_inside),
            self._ghosts.irange(start, None, (is_inside, True)),
        )
        keys = list(islice(found, count))
        rows = []
        for key in keys:
            entry = former.pop(key) if key in former else versions.get(key)
            if entry is not None:
                rows.append((key, entry))
        if keys:
            self._passed = keys[-1]
            del self._ghosts[: self._ghosts.bisect_right(keys[-1])]
        if len(keys) < count:
            self.is_done = True
            self.close()
        return rows

    def close(self) -> None:
        """End the walk; any number of times."""
        if self._changed in self._state.on_change:
            self._state.on_change.remove(self._changed)
        self._former.clear()
        self._ghosts.clear()

    def _changed(self, key: bytes, former: Entry | None, entry: Entry | None) -> None:
        """Keep what a key ahead was; observes the state."""
        if self._passed is not None and key <= self._passed:
            return
        if key not in self._former:
            if len(self._former) == self._max_entries:
                self._failed = True
                self.close()
                return
            self._former[key] = former
        if entry is not None:
            self._ghosts.discard(key)
        elif former is not None and self._former[key] is not None:
            self._ghosts.add(key)


def in_order(first: Iterator[bytes], second: Iterator[bytes]) -> Iterator[bytes]:
    """Iterate over the keys of two iterators that are each in order, once each."""
    return (key for key, _ in groupby(heapq.merge(first, second)))


def _merged(
    older: dict[bytes, Entry | None], newer: dict[bytes, Entry | None]
) -> dict[bytes, Entry | None]:
    """Return what both kept, the older one's word first; costs what the smaller one has."""
    if len(older) < len(newer):
        newer.update(older)
        return newer
    for key, former in newer.items():
        older.setdefault(key, former)
    return older
