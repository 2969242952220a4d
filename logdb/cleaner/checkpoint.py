"""Checkpoints: written from a walk through the state, and found again from the tail backwards.

Rule: a checkpoint counts if all its parts can be read and have its checksum, and the record at its
position is still there, so that what follows it is. Whatever else is found is passed over for an
earlier one. Invariant: a log that was trimmed without one is never replayed from its middle.
See docs/logdb.md, section 8.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from crc32c import crc32c

from logdb.errors import NoCheckpointError
from logdb.records import (
    CheckpointDone,
    CheckpointPart,
    count_entries,
    decode,
    encode,
    is_done,
)
from ziplog.client.common.requests import (
    NEVER,
    FetchRequest,
    ReadRequest,
    SubscribeRequest,
    TailRequest,
    UnsubscribeRequest,
)
from ziplog.errors import ClosedError, TrimmedError, UnavailableError, ZiplogError
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from logdb.records import Decision, Segment
    from logdb.tasks import TaskSteps
    from logdb.versions import Row
    from ziplog.client.common.requests import Fetched, Request

#: The first look goes back so many positions, each other one four times as many.
_FIRST_SEARCH: Final = 1 << 24
#: Of one look, so many checkpoints are tried, the last ones.
_MAX_TRIED: Final = 64
_FETCH_RECORDS: Final = 1_000
#: Parts that are read at once.
_READS: Final = 32
#: Bytes of an entry besides its key, of a decision, and of a segment, at most.
_ENTRY_BYTES: Final = 36
_DECISION_BYTES: Final = 36
_SEGMENT_BYTES: Final = 28


# --- writing ---


class PartEncoder:
    """Makes the payloads of a checkpoint's parts, in order."""

    def __init__(self, part_bytes: int) -> None:
        """Begin.

        Args:
            part_bytes: about so many bytes has each of them.

        """
        self._part_bytes: Final = part_bytes
        self._entries: list[Row] = []
        self._bytes = 0
        #: Of all payloads so far.
        self.checksum = 0
        self.bytes = 0
        self.keys = 0
        #: No place is before this gsn.
        self.first_place = NEVER

    def take(self, rows: Iterable[Row]) -> Iterator[bytes]:
        """Add entries; yields the payload of each part that is full."""
        for row in rows:
            self._entries.append(row)
            self._bytes += len(row[0]) + _ENTRY_BYTES
            self.first_place = min(self.first_place, row[1].place.gsn)
            if self._bytes >= self._part_bytes:
                yield self._flush()

    def end(self, decisions: list[Decision], segments: list[Segment]) -> Iterator[bytes]:
        """Yield the payloads of the last parts."""
        if self._entries:
            yield self._flush()
        count = max(self._part_bytes // _DECISION_BYTES, 1)
        for start in range(0, len(decisions), count):
            yield self._encode_part(CheckpointPart([], decisions[start : start + count], []))
        count = max(self._part_bytes // _SEGMENT_BYTES, 1)
        for start in range(0, len(segments), count):
            yield self._encode_part(CheckpointPart([], [], segments[start : start + count]))

    def _flush(self) -> bytes:
        entries, self._entries, self._bytes = self._entries, [], 0
        self.keys += len(entries)
        return self._encode_part(CheckpointPart(entries, [], []))

    def _encode_part(self, part: CheckpointPart) -> bytes:
        payload = encode(part)
        self.checksum = crc32c(payload, self.checksum)
        self.bytes += len(payload)
        return payload


# --- finding ---


def find_checkpoint() -> TaskSteps:
    """Find the last complete checkpoint.

    A task: it returns the `CheckpointDone`, and the parts as an iterator, to be taken once; None if
    there is none and the log can be replayed from its first record. While a shard recovers it
    waits, like anybody who starts: ready is who has passed a tail, and a tail is told by all.

    Raises:
        NoCheckpointError: there is none, and the log was trimmed.
        UnavailableError: nobody can tell now whether there is one; later, somebody may.

    """
    begins_at = 0
    while True:
        try:
            return (yield from _search())
        except NoCheckpointError as error:
            # Perhaps a checkpoint was made, and the log trimmed, while we looked.
            if error.first.gsn <= begins_at:
                raise
            begins_at = error.first.gsn


def _search() -> TaskSteps:
    tail = yield TailRequest(NEVER)
    stop, width = tail.gsn + 1, _FIRST_SEARCH
    doubt: UnavailableError | None = None
    trimmed: TrimmedError | None = None
    while stop > 1:
        start = max(stop - width, 1)
        found, end = yield from _search_range(start, stop)
        trimmed = end or trimmed
        for done in reversed(found):
            try:
                parts = yield from _load_parts(done)
            except UnavailableError as error:
                doubt = error
                continue
            except TrimmedError as error:
                trimmed = error
                continue
            if parts is not None:
                return done, parts
        if end is not None:
            break
        stop, width = start, width * 4
    if trimmed is not None:
        raise doubt or NoCheckpointError(trimmed.first)
    return None


def _search_range(start: int, stop: int) -> Generator[Request | list[Request], Any, Any]:
    """Return the last ones of [start, stop), and the error if the log does not go back so far."""
    found: deque[CheckpointDone] = deque(maxlen=_MAX_TRIED)
    end: TrimmedError | None = None
    while start < stop:
        subscription = 0
        begin = RecordId(start, 0)
        try:
            subscription = yield SubscribeRequest(NEVER, begin, follow=False)
            is_over = False
            while not is_over:
                fetched: Fetched = yield FetchRequest(NEVER, subscription, _FETCH_RECORDS)
                is_over = _collect_done(fetched, stop, found)
            start = stop
        except TrimmedError as error:
            end = error
            start = error.first.gsn
        if subscription:
            yield UnsubscribeRequest(NEVER, subscription)
    return found, end


def _collect_done(fetched: Fetched, stop: int, found: deque[CheckpointDone]) -> bool:
    """Keep those before `stop`; whether that was all."""
    for record in fetched.records:
        if record.rid.gsn >= stop:
            return True
        if is_done(record.payload):
            done = decode(record.payload)
            if isinstance(done, CheckpointDone):
                found.append(done)
    return fetched.ended


def _load_parts(
    done: CheckpointDone,
) -> Generator[list[Request], Any, Iterator[CheckpointPart] | None]:
    """Return a checkpoint's parts, to be taken once; None if it is not whole.

    Raises:
        TrimmedError: it is half trimmed.
        UnavailableError: nobody can tell.

    """
    # The record at its position comes last: if that is there, what follows it is, too.
    rids = [*done.parts, done.position]
    payloads: deque[bytes] = deque()
    checksum = keys = 0
    for start in range(0, len(rids), _READS):
        results = yield [ReadRequest(NEVER, rid) for rid in rids[start : start + _READS]]
        for result in results:
            if isinstance(result, (UnavailableError, ClosedError, TrimmedError)):
                raise result
            if isinstance(result, ZiplogError):
                return None
            assert isinstance(result, Record), result
            if len(payloads) == len(done.parts):
                break
            count = count_entries(result.payload)
            if count is None:
                return None
            checksum = crc32c(result.payload, checksum)
            keys += count
            payloads.append(result.payload)
    is_whole = checksum == done.checksum and keys == done.keys
    return _decoded_parts(payloads) if is_whole else None


def _decoded_parts(payloads: deque[bytes]) -> Iterator[CheckpointPart]:
    """Yield the parts, one at a time: all of them, decoded, take more room than the state."""
    while payloads:
        part = decode(payloads.popleft())
        assert isinstance(part, CheckpointPart), "what has its checksum is what was written"
        yield part
