"""Shards that hold back whoever reads along, though all of their servers are there.

    prompt --four late looks in a row--> parked --5 s--> on probation --5 s--> prompt
    on probation --four late looks in a row--> parked, twice as long as the last time, up to 60 s

A look is a heartbeat of the shard's primary while it is watched; it is late if the frontier is
behind what was the running epoch 100 ms, or ten epochs, ago. Two beats missing are a late look too.

Rule: this is about waiting only. Who is parked keeps its servers and its view, and can be recovered
as any. Invariants: what is late is watched; a shard is parked only while at most half of the
watched ones are late, and only if as many others as are parked stay. A new leader begins with a
clean sheet. See docs/protocol.md, section 13.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

    from ziplog.core.view import Lease

_MS: Final = 1_000_000
_S: Final = 1000 * _MS
#: How far behind is late: the longer of the two.
_LATE_EPOCHS: Final = 10
_LATE_NS: Final = 100 * _MS
#: So many late looks in a row are one too many.
_LOOKS: Final = 4
#: Heartbeats that came at once, as we were stopped, are one look.
_APART_NS: Final = 100 * _MS
#: Primaries that are watched send four heartbeats a second; many together no more than 4,000, or
#: one each.
_BEAT_NS: Final = _S // 4
_BEATS_PER_S: Final = 4000
_PARKED_NS: Final = 5 * _S
_MAX_PARKED_NS: Final = 60 * _S
_PROBATION_NS: Final = 5 * _S
#: Leases whose begin is remembered: at twenty a second, more than ten epochs of any length that
#: a lease has while somebody works.
_KEPT_LEASES: Final = 256


class _Look:
    """What is known of a watched shard."""

    __slots__ = ("at", "late")

    def __init__(self, now: int) -> None:
        #: When the last look was, and how many in a row were late.
        self.at = now - _APART_NS
        self.late = 0


class _Parked:
    """A shard that was too late."""

    __slots__ = ("back", "lasts", "until")

    def __init__(self, now: int, lasts: int) -> None:
        #: Until when it is out of the leases, and how long that is.
        self.until, self.lasts = now + lasts, lasts
        #: When it was heard as a member again.
        self.back: int | None = None

    def is_on_probation(self, now: int) -> bool:
        return self.back is None or now < self.back + _PROBATION_NS


class Stragglers:
    """Who is too late, at the leader."""

    def __init__(self) -> None:
        #: Leases in their order, with the times when they began, or will. The newest of those that
        #: should have begun by some time is the one that ran then.
        self._begun: deque[tuple[int, Lease]] = deque(maxlen=_KEPT_LEASES)
        self._looks: dict[int, _Look] = {}
        self._late: set[int] = set()
        self._parked: dict[int, _Parked] = {}

    def clear(self) -> None:
        """Begin with a clean sheet."""
        self._begun.clear()
        self._looks.clear()
        self._late.clear()
        self._parked.clear()

    def pause(self) -> None:
        """Forget how late anybody is: it was us who did not look."""
        self._looks.clear()
        self._late.clear()

    def begun(self, lease: Lease, starts: int) -> None:
        """Note when a lease starts; those before it that would have started later never do."""
        self._begun.append((starts, lease))

    def look(self, shard: int, frontier: int, now: int, *, is_watched: bool) -> bool:
        """Take a heartbeat of a member's primary; return whether the shard became too late."""
        if not is_watched:
            self.forget(shard)
        if not is_watched or self.is_parked(shard, now):
            return False
        parked, look = self._parked.get(shard), self._looks.get(shard)
        if parked is not None and parked.back is None:
            parked.back = now
        if look is None:
            look = self._looks[shard] = _Look(now)
        if now - look.at < _APART_NS:
            return False
        look.at = now
        self._count(shard, look, is_late=frontier < self._late_below(now))
        return look.late == _LOOKS

    def miss(self, members: Collection[int], now: int) -> None:
        """Look at those of whom nothing is heard, and forget who is no member any more."""
        silent = 2 * min(max(_BEAT_NS, len(members) * _S // _BEATS_PER_S), _S)
        for shard, look in list(self._looks.items()):
            if shard not in members:
                self.forget(shard)
            elif now - look.at >= silent:
                look.at = now
                self._count(shard, look, is_late=True)

    def _count(self, shard: int, look: _Look, *, is_late: bool) -> None:
        if is_late:
            look.late += 1
            self._late.add(shard)
        else:
            look.late = 0
            self._late.discard(shard)

    def _late_below(self, now: int) -> int:
        """Return the position that every frontier should have reached; 0 if that is not known."""
        if not self._begun:
            return 0
        running = next((lease for at, lease in reversed(self._begun) if at <= now), None)
        epoch_ms = running.epoch_ms if running is not None else 0
        then = now - max(_LATE_EPOCHS * epoch_ms * _MS, _LATE_NS)
        for at, lease in reversed(self._begun):
            if at <= then:
                index = min((then - at) // (lease.epoch_ms * _MS), lease.epochs - 1)
                return lease.base + index * lease.epoch_size
        return 0

    def park(self, now: int, members: int) -> bool:
        """Park those that are too late, of so many members; return whether there was any."""
        if 2 * len(self._late) > len(self._looks):
            return False  # it is not they who are late
        late = [shard for shard in sorted(self._late) if self._looks[shard].late >= _LOOKS]
        away = sum(now < parked.until for parked in self._parked.values())
        late = late[: max((members + away) // 2 - away, 0)]
        for shard in late:
            before, lasts = self._parked.get(shard), _PARKED_NS
            if before is not None and before.is_on_probation(now):
                lasts = min(2 * before.lasts, _MAX_PARKED_NS)
            self._parked[shard] = _Parked(now, lasts)
            self.forget(shard)
        return bool(late)

    def is_parked(self, shard: int, now: int) -> bool:
        """Whether the shard is to stay out of the leases for now."""
        parked = self._parked.get(shard)
        return parked is not None and now < parked.until

    def forget(self, shard: int) -> None:
        """Forget how late a shard is, but not that it was parked."""
        if self._looks.pop(shard, None) is not None:
            self._late.discard(shard)

    def removed(self, shard: int) -> None:
        """Forget all about a shard: it failed, and when it is back, it is another."""
        self.forget(shard)
        self._parked.pop(shard, None)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._late == {shard for shard, look in self._looks.items() if look.late}
        assert all(not self.is_parked(shard, look.at) for shard, look in self._looks.items())
