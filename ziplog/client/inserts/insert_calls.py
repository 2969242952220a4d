"""Insert calls: their payloads, split into units, or several of them as one unit.

A unit is the records of one `Insert` message. A call with many payloads has many units. Single
inserts of one client that wait for the same shard share a unit (`InsertGroup`); each of them keeps
its own deadline, result and error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from ziplog.client.common.requests import InsertRequest
from ziplog.core.entries import Body, encode_body
from ziplog.core.fields import MAX_UNIT_RECORDS
from ziplog.core.units import NEVER
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

#: The largest units that a client sends: in records, and in bytes unless it has a single record.
UNIT_RECORDS: Final = 256
UNIT_BYTES: Final = 256 * 1024
#: The same of a writer's rows: one unit is in flight, so small ones would wait for round trips.
ROW_UNIT_RECORDS: Final = MAX_UNIT_RECORDS
ROW_UNIT_BYTES: Final = 1024 * 1024
_SINGLE: Final[Sequence[tuple[int, int]]] = ((0, 1),)


class InsertCall:
    """One insert call: its payloads, split into units."""

    __slots__ = (
        "group", "gsns", "is_single", "number", "open", "placed_rids", "previous", "request",
        "sent", "shard", "since", "unit_ranges",
    )  # fmt: skip

    def __init__(self, number: int, request: InsertRequest) -> None:
        self.number: Final = number
        self.request: Final = request
        #: The rids of the payloads that were placed before `restart_remainder`.
        self.placed_rids: tuple[RecordId, ...] = ()
        payloads = request.payloads
        #: It may share a unit with other calls.
        self.is_single = request.is_single
        #: The group that it is sent in.
        self.group: InsertGroup | None = None
        #: The payloads [start, stop) of each unit.
        self.unit_ranges: Sequence[tuple[int, int]] = _SINGLE
        if len(payloads) > 1:
            split = split_into_units if request.origin is None else split_into_row_units
            self.unit_ranges = split(payloads, request.keys)
        #: The gsns of each unit; None while they are unknown.
        self.gsns: list[list[int] | None] = [None] * len(self.unit_ranges)
        #: Number of units without gsns.
        self.open = len(self.unit_ranges)
        #: The shard that the policy selected last; -1 before that.
        self.shard = -1
        #: Number of units that were sent, and the seq of the last one.
        self.sent = 0
        self.previous = 0
        #: `ShardWindow.since` when the first unit was sent.
        self.since = 0

    @property
    def calls(self) -> list[InsertCall]:
        """The calls of callers that wait for this call's units."""
        return [self]

    def pop_results(self) -> list[tuple[InsertCall, list[RecordId]]]:
        """Return each of `calls` with its rids, once, when all units are placed."""
        return [(self, self.rids)]

    @property
    def rids(self) -> list[RecordId]:
        """The rids of the payloads that are placed."""
        shard = self.shard
        rids = [RecordId(gsn, shard) for gsns in self.gsns if gsns is not None for gsn in gsns]
        return [*self.placed_rids, *rids] if self.placed_rids else rids

    @property
    def is_partly_placed(self) -> bool:
        """Whether some payloads are placed."""
        return self.open < len(self.unit_ranges) or bool(self.placed_rids)

    def restart_remainder(self) -> None:
        """Give new identities to the units that are not placed; all of them are absent."""
        self.placed_rids = tuple(self.rids)
        first = len(self.unit_ranges) - self.open
        self.unit_ranges, self.gsns = self.unit_ranges[first:], self.gsns[first:]
        assert self.gsns.count(None) == self.open, "a unit would be placed after a later one"
        self.sent = self.previous = 0

    @property
    def is_sequential(self) -> bool:
        """Whether a unit is sent only after all units before it are placed.

        With several units in flight, a later one might be placed alone: if the client crashes, or
        if a recovery uses a backup that guessed them in another order than the primary's.
        """
        return self.request.origin is not None

    @property
    def floor(self) -> int:
        """The gsn that must precede the next unit."""
        before = self.gsns[self.sent - 1] if self.is_sequential and self.sent else None
        if before:
            return before[-1]
        return self.placed_rids[-1].gsn if self.placed_rids else self.request.after.gsn

    def has_later_unit_placed(self, index: int) -> bool:
        """Whether a unit after this one is placed."""
        return any(gsns is not None for gsns in self.gsns[index + 1 : self.sent])

    def body(self, start: int, stop: int) -> bytes:
        """Return the encoded body of a unit with these payloads."""
        request = self.request
        origin, key, keys = request.origin, request.key, request.keys
        if origin is not None:
            origin = replace(origin, row=origin.row + start)
        if keys is not None:
            keys = keys[start:stop]
            if keys.count(keys[0]) == len(keys):
                key, keys = keys[0], None
        payloads = request.payloads[start:stop]
        return encode_body(Body(request.timestamp_us, key, payloads, origin, keys))

    @property
    def payload_bytes(self) -> int:
        """The size of a single insert's record."""
        request = self.request
        return len(request.payloads[0]) + len(request.key or b"")

    @property
    def many(self) -> bool:
        """Whether the caller passed a list."""
        return self.request.many or len(self.request.payloads) > 1

    @property
    def results(self) -> list[RecordId | None]:
        """The rid of each payload; None while it is unknown."""
        results: list[RecordId | None] = [*self.placed_rids]
        for (start, stop), gsns in zip(self.unit_ranges, self.gsns, strict=True):
            known = [RecordId(gsn, self.shard) for gsn in gsns or ()]
            results += known or [None] * (stop - start)
        return results


class InsertGroup(InsertCall):
    """Single inserts that are sent as one unit. Its position follows those that they name."""

    __slots__ = ("members",)

    def __init__(self, calls: list[InsertCall]) -> None:
        requests = [call.request for call in calls]
        merged = InsertRequest(
            NEVER,
            [request.payloads[0] for request in requests],
            max(request.after for request in requests),
            None,
            # The time of sending: no earlier than any of the calls.
            max(request.timestamp_us for request in requests),
            keys=[request.key_of(0) for request in requests],
            sealed=any(request.sealed for request in requests),
        )
        super().__init__(0, merged)
        self.shard = calls[0].shard
        #: By position in the unit; None: the call has ended.
        self.members: Final[list[InsertCall | None]] = [*calls]
        for call in calls:
            call.group = self

    @property
    def calls(self) -> list[InsertCall]:
        """The calls that have not ended."""
        return [call for call in self.members if call is not None]

    def pop_results(self) -> list[tuple[InsertCall, list[RecordId]]]:
        """Remove each call that has not ended, and return it with its rid."""
        placed = zip(self.members, self.rids, strict=True)
        results = [(call, [rid]) for call, rid in placed if call is not None]
        # The calls refer to the group: without this, only the garbage collector frees them.
        self.members.clear()
        return results

    def remove(self, call: InsertCall) -> int:
        """Remove a call that ended; return the position of its record in the unit."""
        index = self.members.index(call)
        self.members[index] = call.group = None
        return index

    def dissolve(self) -> list[InsertCall]:
        """Remove and return all calls, because the unit will never exist."""
        calls = self.calls
        for call in calls:
            self.remove(call)
        return calls


def pop_unit(singles: deque[InsertCall]) -> InsertCall:
    """Remove the first single inserts, as many as one unit holds; return them as one call."""
    calls = [singles.popleft()]
    size = calls[0].payload_bytes
    while singles and len(calls) < UNIT_RECORDS:
        size += singles[0].payload_bytes
        if size > UNIT_BYTES:
            break
        calls.append(singles.popleft())
    return calls[0] if len(calls) == 1 else InsertGroup(calls)


def split_into_units(
    payloads: list[bytes], keys: list[bytes | None] | None = None
) -> list[tuple[int, int]]:
    """Split payloads into units [start, stop) within the limits of records and bytes."""
    return _split(payloads, keys, UNIT_RECORDS, UNIT_BYTES)


def split_into_row_units(
    payloads: list[bytes], keys: list[bytes | None] | None = None
) -> list[tuple[int, int]]:
    """Split a writer's rows into units [start, stop), which are larger."""
    return _split(payloads, keys, ROW_UNIT_RECORDS, ROW_UNIT_BYTES)


def _split(
    payloads: list[bytes], keys: list[bytes | None] | None, max_records: int, max_bytes: int
) -> list[tuple[int, int]]:
    unit_ranges: list[tuple[int, int]] = []
    start = size = 0
    for index, payload in enumerate(payloads):
        payload_size = len(payload) + (len(keys[index] or b"") if keys is not None else 0)
        size += payload_size
        if index > start and (size > max_bytes or index - start == max_records):
            unit_ranges.append((start, index))
            start, size = index, payload_size
    unit_ranges.append((start, len(payloads)))
    return unit_ranges
