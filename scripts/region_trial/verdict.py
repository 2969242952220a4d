"""The verdict on faults of regions (pure). All times are monotonic nanoseconds.

A pause is the longest time without an acknowledgement, or without a delivery, in one region from
the beginning of a fault to its healing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from region_trial.schedule import RegionFault

#: Time in which everything must be whole after the healing; and for how long a shard that was slow
#: may stay parked as a straggler (docs/protocol.md, section 13.10).
WHOLE_S: Final = 5.0
_PARKED_S: Final = 10.0
#: Round trips after the suspicion in which writers, and readers, must continue.
_WRITERS_ROUND_TRIPS, _READERS_ROUND_TRIPS = 10, 15
#: Clients that must continue must have done so before the last quarter of a fault.
_LAST_PART: Final = 4
#: Time before and after a fault that its windows cover, and the width of a window, in seconds.
_BEFORE_S, _AFTER_S = 2.0, 5.0
_WINDOW_S: Final = 0.1


@dataclass(frozen=True)
class Injected:
    """A fault that was injected, and when."""

    fault: RegionFault
    #: It was complete from then on, and up to then.
    began: int
    healed: int
    #: Everything was whole again; None: it was not in time.
    whole: int | None
    #: Runnable processes for each core, averaged over a minute.
    load: float


@dataclass
class Seen:
    """What the clients of one region saw."""

    #: The call and the acknowledgement of each insert that returned, of all clients.
    acks: list[tuple[int, int]] = field(default_factory=list)
    #: The acknowledgements of the writers, which do nothing else.
    writer: list[int] = field(default_factory=list)
    #: The deliveries of the readers.
    reader: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """The limits of the pauses."""

    suspicion_s: float
    round_trip_s: float

    @property
    def writers_s(self) -> float:
        """Limit of a writer's pause in a region that is not lost."""
        return self.suspicion_s + _WRITERS_ROUND_TRIPS * self.round_trip_s

    @property
    def readers_s(self) -> float:
        """Limit of a reader's pause there."""
        return self.suspicion_s + _READERS_ROUND_TRIPS * self.round_trip_s


def pause_s(times: Sequence[int], start: int, stop: int) -> float:
    """Return the longest time within [start, stop] without any of `times`, in seconds."""
    points = [start, *sorted(at for at in times if start <= at <= stop), stop]
    return max(later - earlier for earlier, later in pairwise(points)) / NS_PER_S


def row(one: Injected, seen: dict[str, Seen]) -> dict[str, Any]:
    """Return the figures of a fault."""
    whole = None if one.whole is None else round((one.whole - one.healed) / NS_PER_S, 2)
    found: dict[str, Any] = {
        "fault": str(one.fault),
        "writers_s": {},
        "readers_s": {},
        "whole_s": whole,
        "load": round(one.load, 1),
    }
    for region, saw in seen.items():
        found["writers_s"][region] = round(pause_s(saw.writer, one.began, one.healed), 2)
        found["readers_s"][region] = round(pause_s(saw.reader, one.began, one.healed), 2)
    return found


def windows(one: Injected, seen: dict[str, Seen]) -> dict[str, Any]:
    """Return acknowledgements and deliveries in windows of 100 ms, by region.

    The windows begin two seconds before the fault, and end five seconds after its healing. A
    delivery is a call that returned records.
    """
    start = one.began - int(_BEFORE_S * NS_PER_S)
    stop = one.healed + int(_AFTER_S * NS_PER_S)
    width = int(_WINDOW_S * NS_PER_S)

    def in_windows(times: Sequence[int]) -> list[int]:
        counts = [0] * ((stop - start) // width)
        for at in times:
            index = (at - start) // width
            if 0 <= index < len(counts):
                counts[index] += 1
        return counts

    return {
        region: {"acks": in_windows(saw.writer), "deliveries": in_windows(saw.reader)}
        for region, saw in seen.items()
    }


def acked_while_cut(one: Injected, seen: dict[str, Seen]) -> int:
    """Return how many inserts of a region began and were acknowledged while it was cut off."""
    if one.fault.kind != "cut":
        return 0
    return sum(
        one.began < called and acked < one.healed for called, acked in seen[one.fault.region].acks
    )


def stopped(one: Injected, seen: dict[str, Seen]) -> Iterator[str]:
    """Yield the clients that must continue and saw nothing in the last part of the fault."""
    if one.fault.kind == "slow":
        return
    since = one.healed - (one.healed - one.began) // _LAST_PART
    for what, names in (
        ("writer", one.fault.writing(list(seen))),
        ("reader", one.fault.reading(list(seen))),
    ):
        for region in names:
            if not any(since <= at <= one.healed for at in getattr(seen[region], what)):
                yield f"{one.fault}: the {what} in {region} did not continue"


def broken_promises(one: Injected, seen: dict[str, Seen]) -> Iterator[str]:
    """Yield what is wrong whatever the load of the machine."""
    if acked := acked_while_cut(one, seen):
        yield f"{one.fault}: {acked} inserts were acknowledged in the region that was cut off"
    yield from stopped(one, seen)
    if one.whole is None:
        yield f"{one.fault}: the cluster did not become whole"


def too_slow(one: Injected, seen: dict[str, Seen], limits: Limits) -> Iterator[str]:
    """Yield the pauses that were too long; only on a machine with idle cores that says much."""
    if one.fault.kind != "slow":
        for what, names, attribute, limit in (
            ("writer", one.fault.writing(list(seen)), "writer", limits.writers_s),
            ("reader", one.fault.reading(list(seen)), "reader", limits.readers_s),
        ):
            for region in names:
                pause = pause_s(getattr(seen[region], attribute), one.began, one.healed)
                if pause > limit:
                    yield f"{one.fault}: the {what} in {region} paused {pause:.2f} s of {limit:.2f}"
    if one.whole is not None:
        taken = (one.whole - one.healed) / NS_PER_S
        limit = WHOLE_S + (_PARKED_S if one.fault.kind == "slow" else 0)
        if taken > limit:
            yield f"{one.fault}: whole {taken:.2f} s after the healing, of {limit:.2f}"
