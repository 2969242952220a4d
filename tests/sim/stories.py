"""Small handwritten histories of calls, times and results.

The positions of shard 0 are the even ones, those of shard 1 the odd ones.
"""

from __future__ import annotations

from typing import Any

from tests.sim.history import PENDING, Operation
from tests.sim.linearizability import Explanation, explain
from ziplog.client.common.requests import (
    Fetched,
    FetchRequest,
    InsertRequest,
    ReadRequest,
    SealRequest,
    SubscribeRequest,
    TailRequest,
    TrimRequest,
)
from ziplog.client.common.unknown_outcome import ResolveRequest
from ziplog.core.units import NEVER
from ziplog.errors import NoSuchRecordError, OutcomeUnknownError
from ziplog.types import RID_RECENT, Record, RecordId


def shard_of(gsn: int) -> int:
    return gsn % 2


def rid(gsn: int) -> RecordId:
    return RecordId(gsn, shard_of(gsn))


def record(gsn: int, payload: bytes) -> Record:
    return Record(rid(gsn), payload, None, 0, 0)


def empty(gsn: int) -> NoSuchRecordError:
    return NoSuchRecordError(rid(gsn), "the position is not decided yet")


def no_op(gsn: int) -> NoSuchRecordError:
    return NoSuchRecordError(rid(gsn), "the position is a no-op")


def unknown() -> OutcomeUnknownError:
    return OutcomeUnknownError("unknown outcome", shard=0, seq=1)


class Story:
    """Operations, each with the times of its call and its result (None: no result)."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(
        self, called: int, returned: int | None, request: Any, result: Any, of: int | None = None
    ) -> int:
        number = len(self.operations)
        result = PENDING if returned is None else result
        self.operations.append(
            Operation(number, f"client-{number}", request, called, of, returned, result)
        )
        return number

    def insert(
        self,
        called: int,
        returned: int | None,
        payloads: bytes,
        result: Any,
        after: int = 0,
        *,
        sealed: bool = False,
    ) -> int:
        """Add an insert: `payloads`, one for each byte; `result`: gsns, or an exception."""
        rows = [payloads[i : i + 1] for i in range(len(payloads))]
        request = InsertRequest(
            NEVER, rows, RecordId(after, 0), None, 0, many=len(rows) > 1, sealed=sealed
        )
        if isinstance(result, list):
            result = [rid(gsn) for gsn in result]
        return self.add(called, returned, request, result)

    def read(self, called: int, returned: int, gsn: int, result: Any) -> int:
        """Add a read; `result`: a payload, or an exception."""
        found = record(gsn, result) if isinstance(result, bytes) else result
        return self.add(called, returned, ReadRequest(NEVER, rid(gsn)), found)

    def subscribe(self, called: int, returned: int, start: int = 0, *, follow: bool = True) -> int:
        at = RID_RECENT if start < 0 else RecordId(start, 0)
        return self.add(called, returned, SubscribeRequest(NEVER, at, follow), 1)

    def fetch(
        self, called: int, returned: int, of: int, *rows: tuple[int, bytes], ended: bool = False
    ) -> int:
        result = Fetched([record(*row) for row in rows], ended=ended)
        return self.add(called, returned, FetchRequest(NEVER, 1, 9), result, of)

    def trim(self, called: int, returned: int | None, gsn: int, result: Any = None) -> int:
        return self.add(called, returned, TrimRequest(NEVER, rid(gsn)), result)

    def append(self, called: int, returned: int | None, payloads: bytes, result: Any) -> int:
        return self.insert(called, returned, payloads, result, sealed=True)

    def seal(self, called: int, returned: int, gsn: int) -> int:
        return self.add(called, returned, SealRequest(NEVER, rid(gsn)), rid(gsn))

    def tail(self, called: int, returned: int, gsn: int, *, sealed: bool = False) -> int:
        return self.add(called, returned, TailRequest(NEVER, sealed), rid(gsn))

    def resolve(self, called: int, returned: int, of: int, *gsns: int | None) -> int:
        doubt: Any = None
        result = [None if gsn is None else rid(gsn) for gsn in gsns]
        return self.add(called, returned, ResolveRequest(NEVER, doubt), result, of)

    def explain(self, **options: Any) -> Explanation | None:
        return explain(self.operations, **options)
