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
_MAX_LATE: Final = 4
#: Heartbeats that came at once, as we were stopped, are one look.
_MIN_INTERVAL_NS: Final = 100 * _MS
#: Primaries that are watched send four heartbeats a second; many together no more than 4,000, or
#: one each.
_HEARTBEAT_NS: Final = _S // 4
_HEARTBEATS_PER_S: Final = 4000
_PARKED_NS: Final = 5 * _S
_MAX_PARKED_NS: Final = 60 * _S
_PROBATION_NS: Final = 5 * _S
#: Leases whose begin is remembered: at twenty a second, more than ten epochs of any length that
#: a lease has while somebody works.
_KEPT_LEASES: Final = 256


class _Checks:
    """What is known of a watched shard."""

    __slots__ = ("at", "late_in_a_row")

    def __init__(self, now: int) -> None:
        #: When the last look was, and how many in a row were late.
        self.at = now - _MIN_INTERVAL_NS
        self.late_in_a_row = 0


class _Parked:
    """A shard that was too late."""

    __slots__ = ("back_at", "duration", "until")

    def __init__(self, now: int, duration: int) -> None:
        #: Until when it is out of the leases, and how long that is.
        self.until, self.duration = now + duration, duration
        #: When it was heard as a member again.
        self.back_at: int | None = None

    def is_on_probation(self, now: int) -> bool:
        return self.back_at is None or now < self.back_at + _PROBATION_NS


class Stragglers:
    """Who is too late, at the leader."""

    def __init__(self) -> None:
        #: Leases in their order, with the times when they began, or will. The newest of those that
        #: should have begun by some time is the one that ran then.
        self._leases: deque[tuple[int, Lease]] = deque(maxlen=_KEPT_LEASES)
        self._checks: dict[int, _Checks] = {}
        self._late_shards: set[int] = set()
        self._parked: dict[int, _Parked] = {}

    def clear(self) -> None:
        """Begin with a clean sheet."""
        self._leases.clear()
        self._checks.clear()
        self._late_shards.clear()
        self._parked.clear()

    def forget_checks(self) -> None:
        """Forget how late anybody is: it was us who did not look."""
        self._checks.clear()
        self._late_shards.clear()

    def on_lease(self, lease: Lease, starts: int) -> None:
        """Note when a lease starts; those before it that would have started later never do."""
        self._leases.append((starts, lease))

    def on_heartbeat(self, shard: int, frontier: int, now: int, *, is_watched: bool) -> bool:
        """Take a heartbeat of a member's primary; return whether the shard became too late."""
        if not is_watched:
            self.forget(shard)
        if not is_watched or self.is_parked(shard, now):
            return False
        parked, on_heartbeat = self._parked.get(shard), self._checks.get(shard)
        if parked is not None and parked.back_at is None:
            parked.back_at = now
        if on_heartbeat is None:
            on_heartbeat = self._checks[shard] = _Checks(now)
        if now - on_heartbeat.at < _MIN_INTERVAL_NS:
            return False
        on_heartbeat.at = now
        self._count(shard, on_heartbeat, is_late=frontier < self._late_below(now))
        return on_heartbeat.late_in_a_row == _MAX_LATE

    def check_silent(self, members: Collection[int], now: int) -> None:
        """Look at those of whom nothing is heard, and forget who is no member any more."""
        silent = 2 * min(max(_HEARTBEAT_NS, len(members) * _S // _HEARTBEATS_PER_S), _S)
        for shard, on_heartbeat in list(self._checks.items()):
            if shard not in members:
                self.forget(shard)
            elif now - on_heartbeat.at >= silent:
                on_heartbeat.at = now
                self._count(shard, on_heartbeat, is_late=True)

    def _count(self, shard: int, on_heartbeat: _Checks, *, is_late: bool) -> None:
        if is_late:
            on_heartbeat.late_in_a_row += 1
            self._late_shards.add(shard)
        else:
            on_heartbeat.late_in_a_row = 0
            self._late_shards.discard(shard)

    def _late_below(self, now: int) -> int:
        """Return the position that every frontier should have reached; 0 if that is not known."""
        if not self._leases:
            return 0
        running = next((lease for at, lease in reversed(self._leases) if at <= now), None)
        epoch_ms = running.epoch_ms if running is not None else 0
        then = now - max(_LATE_EPOCHS * epoch_ms * _MS, _LATE_NS)
        for at, lease in reversed(self._leases):
            if at <= then:
                index = min((then - at) // (lease.epoch_ms * _MS), lease.epochs - 1)
                return lease.base + index * lease.epoch_size
        return 0

    def park(self, now: int, members: int) -> bool:
        """Park those that are too late, of so many members; return whether there was any."""
        if 2 * len(self._late_shards) > len(self._checks):
            return False  # it is not they who are late
        late = [
            shard
            for shard in sorted(self._late_shards)
            if self._checks[shard].late_in_a_row >= _MAX_LATE
        ]
        parked = sum(now < parked.until for parked in self._parked.values())
        late = late[: max((members + parked) // 2 - parked, 0)]
        for shard in late:
            before, duration = self._parked.get(shard), _PARKED_NS
            if before is not None and before.is_on_probation(now):
                duration = min(2 * before.duration, _MAX_PARKED_NS)
            self._parked[shard] = _Parked(now, duration)
            self.forget(shard)
        return bool(late)

    def is_parked(self, shard: int, now: int) -> bool:
        """Whether the shard is to stay out of the leases for now."""
        parked = self._parked.get(shard)
        return parked is not None and now < parked.until

    def forget(self, shard: int) -> None:
        """Forget how late a shard is, but not that it was parked."""
        if self._checks.pop(shard, None) is not None:
            self._late_shards.discard(shard)

    def on_removed(self, shard: int) -> None:
        """Forget all about a shard: it failed, and when it is back, it is another."""
        self.forget(shard)
        self._parked.pop(shard, None)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._late_shards == {
            shard for shard, on_heartbeat in self._checks.items() if on_heartbeat.late_in_a_row
        }
        assert all(
            not self.is_parked(shard, on_heartbeat.at)
            for shard, on_heartbeat in self._checks.items()
        )
