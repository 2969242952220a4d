"""Stragglers: shards that hold back readers although all of their servers are up.

    prompt --four late checks in a row--> parked --5 s--> on probation --5 s--> prompt
    on probation --four late checks in a row--> parked, twice as long as before, up to 60 s

A check is a heartbeat of the primary of a shard with readers. It is late if the frontier is below
the epoch that ran 100 ms and two round trips, or ten epochs, ago. Two missing heartbeats count as a
late check.

Rule: this affects waiting only. A parked shard keeps its servers and its view, and can be
recovered. Invariants: a late shard has readers. A shard is parked only while at most half of the
checked shards are late, and at least as many shards stay as are parked. A new leader starts empty.
See docs/protocol.md, section 13.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ziplog.core.distance import late_ns
from ziplog.core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Collection

    from ziplog.core.view import Lease

#: Lag that counts as late, in epochs; or a time, if that is longer.
_LATE_EPOCHS: Final = 10
#: Number of late checks in a row after which a shard is parked.
_MAX_LATE: Final = 4
#: Minimum interval between checks: heartbeats that queued while this process was paused are one.
_MIN_INTERVAL_NS: Final = 100 * NS_PER_MS
#: A primary with readers sends four heartbeats a second; all together at most 4,000 a second, but
#: at least one each.
_HEARTBEAT_NS: Final = NS_PER_S // 4
_HEARTBEATS_PER_S: Final = 4000
_PARKED_NS: Final = 5 * NS_PER_S
_MAX_PARKED_NS: Final = 60 * NS_PER_S
_PROBATION_NS: Final = 5 * NS_PER_S
#: Number of remembered lease starts: at twenty a second, more than ten epochs of any
#: length that an active cluster's lease has.
_KEPT_LEASES: Final = 256


class _Checks:
    """The checks of a shard with readers."""

    __slots__ = ("at", "late_in_a_row")

    def __init__(self, now: int) -> None:
        #: When the last check was, and how many in a row were late.
        self.at = now - _MIN_INTERVAL_NS
        self.late_in_a_row = 0


class _Parked:
    """A shard that was parked because it was late."""

    __slots__ = ("back_at", "duration", "until")

    def __init__(self, now: int, duration: int) -> None:
        #: When its parking ends, and how long it lasts.
        self.until, self.duration = now + duration, duration
        #: When its first heartbeat as a member came again.
        self.back_at: int | None = None

    def is_on_probation(self, now: int) -> bool:
        return self.back_at is None or now < self.back_at + _PROBATION_NS


class Stragglers:
    """Straggler detection, at the leader."""

    def __init__(self, rtt_ms: int = 0) -> None:
        self._late_ns: Final = late_ns(rtt_ms)
        #: Leases in order, with their past or planned starts. The newest one that should have
        #: started by some time is the one that ran then.
        self._leases: deque[tuple[int, Lease]] = deque(maxlen=_KEPT_LEASES)
        self._checks: dict[int, _Checks] = {}
        self._late_shards: set[int] = set()
        self._parked: dict[int, _Parked] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._leases.clear()
        self._checks.clear()
        self._late_shards.clear()
        self._parked.clear()

    def forget_checks(self) -> None:
        """Forget all checks: this process was paused."""
        self._checks.clear()
        self._late_shards.clear()

    def on_lease(self, lease: Lease, starts: int) -> None:
        """Store a lease's start; it replaces earlier leases with a later planned start."""
        self._leases.append((starts, lease))

    def on_heartbeat(self, shard: int, frontier: int, now: int, *, has_readers: bool) -> bool:
        """Check a primary's heartbeat; return whether the shard became a straggler."""
        if not has_readers:
            self.forget(shard)
        if not has_readers or self.is_parked(shard, now):
            return False
        parked, checks = self._parked.get(shard), self._checks.get(shard)
        if parked is not None and parked.back_at is None:
            parked.back_at = now
        if checks is None:
            checks = self._checks[shard] = _Checks(now)
        if now - checks.at < _MIN_INTERVAL_NS:
            return False
        checks.at = now
        self._count(shard, checks, is_late=frontier < self._late_below(now))
        return checks.late_in_a_row == _MAX_LATE

    def check_silent(self, members: Collection[int], now: int) -> None:
        """Count silent members as late, and forget shards that are no longer members."""
        silent = 2 * min(max(_HEARTBEAT_NS, len(members) * NS_PER_S // _HEARTBEATS_PER_S), NS_PER_S)
        for shard, checks in list(self._checks.items()):
            if shard not in members:
                self.forget(shard)
            elif now - checks.at >= silent:
                checks.at = now
                self._count(shard, checks, is_late=True)

    def _count(self, shard: int, checks: _Checks, *, is_late: bool) -> None:
        if is_late:
            checks.late_in_a_row += 1
            self._late_shards.add(shard)
        else:
            checks.late_in_a_row = 0
            self._late_shards.discard(shard)

    def _late_below(self, now: int) -> int:
        """Return the position that every frontier should have reached; 0 if unknown."""
        if not self._leases:
            return 0
        running = next((lease for at, lease in reversed(self._leases) if at <= now), None)
        epoch_ms = running.epoch_ms if running is not None else 0
        then = now - max(_LATE_EPOCHS * epoch_ms * NS_PER_MS, self._late_ns)
        for at, lease in reversed(self._leases):
            if at <= then:
                index = min((then - at) // (lease.epoch_ms * NS_PER_MS), lease.epochs - 1)
                return lease.base + index * lease.epoch_size
        return 0

    def park(self, now: int, members: int) -> None:
        """Park the stragglers among `members` members."""
        if 2 * len(self._late_shards) > len(self._checks):
            return  # Most shards are late, so the cause is elsewhere.
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

    def is_parked(self, shard: int, now: int) -> bool:
        """Whether the shard must stay out of the leases now."""
        parked = self._parked.get(shard)
        return parked is not None and now < parked.until

    def forget(self, shard: int) -> None:
        """Forget a shard's checks, but not that it was parked."""
        if self._checks.pop(shard, None) is not None:
            self._late_shards.discard(shard)

    def on_removed(self, shard: int) -> None:
        """Forget a failed shard entirely: it starts afresh when it returns."""
        self.forget(shard)
        self._parked.pop(shard, None)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._late_shards == {
            shard for shard, checks in self._checks.items() if checks.late_in_a_row
        }
        assert all(not self.is_parked(shard, checks.at) for shard, checks in self._checks.items())
