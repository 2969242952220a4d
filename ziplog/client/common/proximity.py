"""How near the nodes of the cluster are to this client, and which replicas it tries first.

A client with a region tries replicas in its region first, then the others by measured round trip,
and those that failed lately last. A client without a region, or at servers without one, has no
order. The round trip to a node is a moving average of requests that were sent once. A measurement
is valid for a minute, so that a node that was slow once is tried again.

Invariant: times decide only what is asked first. See docs/protocol.md, section 20.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

from ziplog.core.nearness import replica_order
from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.client.common.step_context import StepContext

#: A new sample is this part of the average.
_SAMPLE_PART: Final = 4
#: Time after which a measurement counts no more.
_MAX_AGE_NS: Final = 60 * NS_PER_S
#: Time for which a node that failed is tried last.
_FAILED_NS: Final = 5 * NS_PER_S
#: A stream is opened at the replica that knows first what is stable, up to this multiple of the
#: nearest one's round trip.
_DETOUR: Final = 2


class Proximity:
    """The measured round trips and failures of nodes, by the names of their connections."""

    def __init__(self, context: StepContext, region: str) -> None:
        """`region`: where the client runs; "": it has none."""
        self._context: Final = context
        self._region: Final = region
        #: The average, and when it got its last sample.
        self._round_trips: Final[dict[bytes, tuple[int, int]]] = {}
        self._failed_until: Final[dict[bytes, int]] = {}

    def has_order(self, regions: Sequence[str]) -> bool:
        """Whether nodes in these regions have an order: this client and some node have a region."""
        return bool(self._region) and any(regions)

    # --- events ---

    def observe(self, name: bytes, sent_at: int) -> None:
        """Note that a node replied now to a request that was sent once, at `sent_at`, in ns."""
        if not self._region:
            return
        now = self._context.now
        sample, former = now - sent_at, self.round_trip_ns(name)
        average = former + (sample - former) // _SAMPLE_PART if former else sample
        self._round_trips[name] = max(average, 1), now

    def on_reply(self, name: bytes) -> None:
        """Note that a node lives: it does not count as failed any more."""
        if self._failed_until:
            self._failed_until.pop(name, None)

    def on_failure(self, name: bytes) -> None:
        """Note that a node did not answer in time, or cannot serve this client."""
        if self._region:
            self._failed_until[name] = self._context.now + _FAILED_NS

    # --- queries ---

    def round_trip_ns(self, name: bytes) -> int:
        """Return the measured round trip to a node; 0: there is none."""
        average, at = self._round_trips.get(name, (0, 0))
        return average if self._context.now - at < _MAX_AGE_NS else 0

    def order(self, names: Sequence[bytes], regions: Sequence[str]) -> list[int]:
        """Return the indices of nodes in the order in which to try them."""
        now, client = self._context.now, self._context.client
        failed = {
            i for i, name in enumerate(names) if self._failed_until.get(name, 0) > now
        }  # fmt: skip
        round_trips = [self.round_trip_ns(name) for name in names]
        ties = [crc32(client + name) for name in names]
        return replica_order(regions, self._region, round_trips, failed, ties)

    def stream_order(self, names: Sequence[bytes], regions: Sequence[str], first: int) -> list[int]:
        """Return the order for a stream, of which replica `first` knows first what is stable.

        A replica in the client's region is first; else `first`, unless the nearest one is less than
        half as far.
        """
        order = self.order(names, regions)
        nearest = order[0]
        if (
            regions[nearest] == self._region
            or self._failed_until.get(names[first], 0) > self._context.now
        ):
            return order
        limit = self.round_trip_ns(names[nearest])
        if limit and self.round_trip_ns(names[first]) > _DETOUR * limit:
            return order
        return [first, *(i for i in order if i != first)]
