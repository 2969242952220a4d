"""Insert rate of a shard: measures it, and reports changes to the membership service.

At the end of a batch, at most once a millisecond, the placed records are sampled in windows of
several lengths. If a window's count is too unlikely under the last reported rate, the window's own
rate is reported, and counting restarts there (docs/protocol.md, section 13; T 4.2.3, 4.4.4).

Arrivals are modelled as a Poisson process of bunches; their size is measured continuously, and so
are the pauses between regular ones. A change must show in several samples: one burst, however
large, is not a rate. Invariant: a window begins with a sample as old as the window is long, or with
the first sample since counting started.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.core.units import NEVER, NS_PER_MS, NS_PER_S
from ziplog.wire import Rate

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState

#: Shortest interval between two samples.
SAMPLE_INTERVAL_NS: Final = 1 * NS_PER_MS
#: Shortest interval between two reports of a rate.
REPORT_INTERVAL_NS: Final = 5 * NS_PER_MS
#: Shortest time of counting after which a heartbeat carries a new rate.
MIN_HEARTBEAT_NS: Final = 250 * NS_PER_MS
#: Length of each window, and the standard deviations that count as a change in it. Short windows
#: need more: there are more of them, and small counts deviate further.
WINDOWS: Final = (
    (4 * NS_PER_MS, 6.0),
    (8 * NS_PER_MS, 5.5),
    (16 * NS_PER_MS, 5.0),
    (32 * NS_PER_MS, 5.0),
    (128 * NS_PER_MS, 4.5),
    (1000 * NS_PER_MS, 4.5),
)
#: Ratio of the variance to that of a Poisson process above which there was a burst.
_BURST: Final = 4
#: What is longer than this, between two samples with records, is a pause.
_NO_PAUSE_NS: Final = 2 * SAMPLE_INTERVAL_NS
#: A pause shows another rate only beyond this many usual ones.
_USUAL_PAUSES: Final = 2


class Count(NamedTuple):
    """A sample: the records since the process started, at some time."""

    #: Time of the sample, in ns.
    at: int
    #: Time of the last sample with records until then, in ns.
    busy_at: int
    records: int
    #: Sum of half the squared differences between consecutive samples.
    jumps: float
    #: Over the samples with records: the sums of the squared count, of the count times the time
    #: since the previous such sample (in s), of that time squared, and of that time.
    squares: float
    products: float
    times: float
    pauses: float


def is_unlikely(came: int, expected: float, squared_sigmas: float) -> bool:
    """Whether a count is too far from the expected one to be chance.

    A count that is not remains so if another one is expected that is nearer to it.
    """
    deviation = abs(came - expected)
    return (
        deviation * deviation / squared_sigmas >= max(expected, came / 4)
        and 8 * deviation >= expected
        and deviation > 0
    )


class Meter:
    """Measures the insert rate of one server."""

    def __init__(self, now: int) -> None:
        #: The last reported rate, in records per second.
        self.reported = 0
        self._reported_at = now - REPORT_INTERVAL_NS
        #: Time over which that rate was counted, in ns.
        self._counted_ns = 1
        #: Earliest time of the next sample, in ns.
        self.due = now
        #: Idle time after which to sample without records, in ns; None: that shows nothing.
        self._silence_ns: int | None = None
        self._last = Count(now, now, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
        #: Time between the last two samples, and the records in it.
        self._before = (SAMPLE_INTERVAL_NS, 0)
        #: The samples of each window, a quarter of its length apart; the first begins it.
        self._windows: Final = [deque([self._last]) for _ in WINDOWS]

    def sample(self, records: int, now: int) -> int | None:
        """Add a sample; return the rate in records per second if it has changed.

        `records`: all records so far. `now`: in ns.
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
        """Return the rate over the last second, in records per second; it counts as reported.

        Returns the last reported rate if that was reported a moment ago.
        """
        self._count(records, now)
        start = self._windows[-1][0]
        if now - start.at >= MIN_HEARTBEAT_NS:
            self._report_rate_since(start)
        return self.reported

    @property
    def silence_due(self) -> int | None:
        """Time of a sample without records, in ns; None: a heartbeat is soon enough."""
        return None if self._silence_ns is None else self._last.at + self._silence_ns

    def _report_rate_since(self, start: Count) -> None:
        self._counted_ns = self._last.at - start.at
        self.reported = (self._last.records - start.records) * NS_PER_S // self._counted_ns
        needed = 2 * self._bunching() * NS_PER_S
        self._silence_ns = next(
            (n // 2 for n, sigmas in WINDOWS if self.reported * n >= sigmas * sigmas * needed), None
        )

    def _count(self, records: int, now: int) -> None:
        last = self._last
        came, interval = records - last.records, now - last.at
        if interval <= 0:
            return
        self.due = now + SAMPLE_INTERVAL_NS
        # Scale the longer of the two samples to the length of the shorter one.
        before, other = self._before, (interval, came)
        (short, fewer), (long, more) = sorted((before, other))
        difference = fewer - more * short / long
        self._before = other
        _, busy_at, _, jumps, squares, products, times, pauses = last
        jumps += difference * difference / 2
        if came:
            # Without a reported rate, a pause before the sample does not count.
            pause = now - busy_at if self.reported else min(interval, SAMPLE_INTERVAL_NS)
            since, busy_at = pause / NS_PER_S, now
            squares += came * came
            products, times = products + came * since, times + since * since
            pauses += since
        self._last = last = Count(now, busy_at, records, jumps, squares, products, times, pauses)
        for (length, _), window in zip(WINDOWS, self._windows, strict=True):
            if 4 * (now - window[-1].at) >= length:
                window.append(last)
            while len(window) > 1 and now - window[1].at >= length:
                window.popleft()

    def _bunching(self) -> float:
        """Return the ratio of the variance to that of a Poisson process: at least 1."""
        start, last = self._windows[-1][0], self._last
        records, rate = last.records - start.records, self.reported
        if not records:
            return 1.0
        # Squared differences between the counts and the counts expected by the reported rate.
        squares = (
            last.squares - start.squares
            - 2 * rate * (last.products - start.products)
            + rate * rate * (last.times - start.times)
        )  # fmt: skip
        return max(1.0, squares / records)

    def _explained_by(self, pause_ns: int) -> float:
        """Return how many missing records a pause of this length explains: pauses are usual."""
        start, last = self._windows[-1][0], self._last
        pauses = last.pauses - start.pauses
        # The mean length of a pause, weighted by the length.
        usual = (last.times - start.times) / pauses * NS_PER_S if pauses else 0.0
        longest = _USUAL_PAUSES * max(0.0, usual - _NO_PAUSE_NS)
        return self.reported * min(pause_ns, longest) / NS_PER_S

    def _contradicts(self, start: Count, squared_sigmas: float) -> bool:
        """Whether the records since `start` are too unlikely under the reported rate."""
        last = self._last
        came, length = last.records - start.records, last.at - start.at
        expected = self.reported * length / NS_PER_S
        # What explains a deviation lessens it, so most windows need no explanation.
        if not is_unlikely(came, expected, squared_sigmas):
            return False
        # With bunches at regular intervals, a window that ends in a pause may have one too few, and
        # a window that begins in a pause one too many.
        if came < expected:
            pause = last.at - max(last.busy_at, start.at)
            expected = max(came, expected - self._explained_by(pause))
        else:
            expected = min(came, expected + self._explained_by(start.at - start.busy_at))
        if not is_unlikely(came, expected, squared_sigmas):
            return False
        deviation, variance = came - expected, max(expected, came / 4)
        chance = deviation * deviation / squared_sigmas
        # The reported rate is a count too, and as uncertain.
        variance *= self._bunching() * (1 + min(1, length / self._counted_ns))
        jumps = last.jumps - start.jumps
        return chance >= (max(variance, jumps) if jumps > _BURST * came else variance)

    def _restart_at(self, start: Count) -> None:
        """Restart all windows at `start`: earlier records had another rate."""
        for window in self._windows:
            window.clear()
            window.append(start)


class RateReporter:
    """Reports the insert rate of a server to the membership service."""

    def __init__(self, state: ReplicaState, now: int) -> None:
        self._state: Final = state
        self._meter: Final = Meter(now)
        #: Earliest time of a sample after a batch, in ns; a backup never samples.
        self.due = now if state.server == 0 else NEVER
        #: Time of a sample without a batch, in ns.
        self.silence_due = NEVER

    def on_batch_end(self, now: int) -> None:
        """Sample the records, if that is due; report the rate if it has changed."""
        if now >= self.due:
            self.sample(now)

    def sample(self, now: int) -> None:
        """Sample the records; report the rate if it has changed."""
        state = self._state
        rate = self._meter.sample(state.placed_records, now)
        self._schedule()
        # A leaving shard reports 0 only when it is drained, never for a pause.
        if rate is None or state.server_state != "up" or state.shard_state == "leaving":
            return
        state.broadcast(state.service, Rate(state.cluster, state.shard, state.view, rate))

    def average(self, now: int) -> int:
        """Return the rate for a heartbeat, in records per second."""
        rate = self._meter.average(self._state.placed_records, now)
        self._schedule()
        return rate

    def _schedule(self) -> None:
        if self._state.server == 0:
            self.due = self._meter.due
            silence_due = self._meter.silence_due
            self.silence_due = NEVER if silence_due is None else silence_due
