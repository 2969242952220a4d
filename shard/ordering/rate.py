"""How fast records come, and when that is not what the membership service was told last.

At the end of a batch, at most once a millisecond, what was placed is counted in windows of several
lengths. If some window's count cannot be chance, given the rate that was told last, the window's
own rate is told, and counting begins anew there (docs/protocol.md, section 13; T 4.2.3, 4.4.4).

Arrivals are taken for a Poisson process of bunches; how large these are is measured all the time.
Rule: a change shows in several looks; one burst, however large, is no rate. Invariant: a window
begins with a count that is as old as the window is long, or with the first since counting began.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.wire import Rate

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

_MS: Final = 1_000_000
_S: Final = 1_000_000_000
_NEVER: Final = 2**63
#: Counts are looked at no more often.
SAMPLE_INTERVAL_NS: Final = 1 * _MS
#: A rate is told no more often.
REPORT_INTERVAL_NS: Final = 5 * _MS
#: A heartbeat tells what was counted if it was counted for so long.
MIN_HEARTBEAT_NS: Final = 250 * _MS
#: How long each window is, and how many standard deviations are no chance in it: an hour has more
#: short windows than long ones, and few arrivals deviate further than many.
WINDOWS: Final = (
    (4 * _MS, 6.0),
    (8 * _MS, 5.5),
    (16 * _MS, 5.0),
    (32 * _MS, 5.0),
    (128 * _MS, 4.5),
    (1000 * _MS, 4.5),
)
#: Counts vary so much more than Poisson's where there was a burst.
_BURST: Final = 4


class Count(NamedTuple):
    """What had come at some moment, since the process started."""

    #: In ns.
    at: int
    records: int
    #: By how much looks differed from those before them: the sum of the squares' halves.
    jumps: float
    #: Over the looks that saw something: the sums of what each saw squared, of that times how long
    #: it was since the one before (in s), and of that time squared.
    squares: float
    products: float
    times: float


class Meter:
    """Counts the records of one server."""

    def __init__(self, now: int) -> None:
        #: What was told last, in records a second.
        self.reported = 0
        self._reported_at = now - REPORT_INTERVAL_NS
        #: How long that was counted, in ns.
        self._counted_ns = 1
        #: The last look that saw something.
        self._busy_at = now
        #: When to look again, at the earliest.
        self.due = now
        #: After so long a silence to look although nothing has come; None: it tells nothing.
        self._silence_ns: int | None = None
        self._last = Count(now, 0, 0.0, 0.0, 0.0, 0.0)
        #: How long it was from the last look but one to the last, and what came.
        self._before = (SAMPLE_INTERVAL_NS, 0)
        #: Each window's counts, a quarter of its length apart; it begins with the first.
        self._windows: Final = [deque([self._last]) for _ in WINDOWS]

    def sample(self, records: int, now: int) -> int | None:
        """Count; return the rate in records a second if it is not what was told.

        `records`: all that ever came. `now`: in ns.
        """
        self._count(records, now)
        if now - self._reported_at < REPORT_INTERVAL_NS:
            return None
        for (length, sigmas), window in zip(WINDOWS, self._windows, strict=True):
            start = window[0]
            if now - start.at >= length and self._contradicts(start, sigmas * sigmas):
                self._report_rate_since(start)
                self._reported_at = now
                self._restart_at(start)
                return self.reported
        return None

    def average(self, records: int, now: int) -> int:
        """Return the rate over the last second, in records a second; it counts as told.

        Who has told another one a moment ago repeats that.
        """
        self._count(records, now)
        start = self._windows[-1][0]
        if now - start.at >= MIN_HEARTBEAT_NS:
            self._report_rate_since(start)
        return self.reported

    @property
    def silence_due(self) -> int | None:
        """When to look although nothing has come; None: a heartbeat is soon enough."""
        return None if self._silence_ns is None else self._last.at + self._silence_ns

    def _report_rate_since(self, start: Count) -> None:
        self._counted_ns = self._last.at - start.at
        self.reported = (self._last.records - start.records) * _S // self._counted_ns
        needed = 2 * self._bunching() * _S
        self._silence_ns = next(
            (n // 2 for n, sigmas in WINDOWS if self.reported * n >= sigmas * sigmas * needed), None
        )

    def _count(self, records: int, now: int) -> None:
        last = self._last
        came, interval = records - last.records, now - last.at
        if interval <= 0:
            return
        self.due = now + SAMPLE_INTERVAL_NS
        # Two looks are compared as if both were as long as the shorter one.
        before, other = self._before, (interval, came)
        (short, fewer), (long, more) = sorted((before, other))
        difference = fewer - more * short / long
        self._before = other
        _, _, jumps, squares, products, times = last
        jumps += difference * difference / 2
        if came:
            # A pause that was noticed says nothing of the rate that ends it.
            pause = now - self._busy_at if self.reported else min(interval, SAMPLE_INTERVAL_NS)
            since, self._busy_at = pause / _S, now
            squares += came * came
            products, times = products + came * since, times + since * since
        self._last = last = Count(now, records, jumps, squares, products, times)
        for (length, _), window in zip(WINDOWS, self._windows, strict=True):
            if 4 * (now - window[-1].at) >= length:
                window.append(last)
            while len(window) > 1 and now - window[1].at >= length:
                window.popleft()

    def _bunching(self) -> float:
        """Return how much more counts vary than Poisson's: at least 1."""
        start, last = self._windows[-1][0], self._last
        records, rate = last.records - start.records, self.reported
        if not records:
            return 1.0
        # What looks saw, less what they should have by the rate told, squared.
        squares = (
            last.squares - start.squares
            - 2 * rate * (last.products - start.products)
            + rate * rate * (last.times - start.times)
        )  # fmt: skip
        return max(1.0, squares / records)

    def _contradicts(self, start: Count, squared_sigmas: float) -> bool:
        """Whether what came since `start` cannot have come at the rate told."""
        last = self._last
        came, length = last.records - start.records, last.at - start.at
        expected = self.reported * length / _S
        deviation = abs(came - expected)
        chance = deviation * deviation / squared_sigmas
        variance = max(expected, came / 4)
        if chance < variance or 8 * deviation < expected or not deviation:
            return False
        # The rate told is a count, too, which was as uncertain.
        variance *= self._bunching() * (1 + min(1, length / self._counted_ns))
        jumps = last.jumps - start.jumps
        return chance >= (max(variance, jumps) if jumps > _BURST * came else variance)

    def _restart_at(self, start: Count) -> None:
        """Count from `start` on: what came before came at another rate."""
        for window in self._windows:
            window.clear()
            window.append(start)


class RateReporter:
    """What a server tells the membership service of its rate."""

    def __init__(self, state: ReplicaState, now: int) -> None:
        self._state: Final = state
        self._meter: Final = Meter(now)
        #: When to look behind a batch, at the earliest; never at a backup.
        self.due = now if state.server == 0 else _NEVER
        #: When to look without one.
        self.silence_due = _NEVER

    def sample(self, now: int) -> None:
        """Count what came; tell the rate, if it has changed."""
        state = self._state
        rate = self._meter.sample(state.placed_records, now)
        self._schedule()
        # A leaving shard says 0 when it has taken its last record: not for a pause.
        if rate is None or state.state != "up" or state.shard_state == "leaving":
            return
        state.broadcast(state.service, Rate(state.cluster, state.shard, state.view, rate))

    def average(self, now: int) -> int:
        """Return what the heartbeat says: records a second."""
        rate = self._meter.average(self._state.placed_records, now)
        self._schedule()
        return rate

    def _schedule(self) -> None:
        if self._state.server == 0:
            self.due = self._meter.due
            silence_due = self._meter.silence_due
            self.silence_due = _NEVER if silence_due is None else silence_due
