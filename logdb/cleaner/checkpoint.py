"""Checkpoint encoding, and the search for the last checkpoint from the tail backwards.

A checkpoint is valid if all its parts are readable and match its checksum, and the record at its
position still exists, and so do the records after it. The search skips an invalid checkpoint in
favour of an earlier one. Invariant: a trimmed log without a valid checkpoint is never replayed. See
docs/logdb.md, section 8.
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
    FetchRequest,
    ReadRequest,
    SubscribeRequest,
    TailRequest,
    UnsubscribeRequest,
)
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, TrimmedError, UnavailableError, ZiplogError
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from logdb.records import Decision, Segment
    from logdb.versions import Row
    from ziplog.client.common.requests import Fetched, Request
    from ziplog.client.log_tasks import TaskSteps

#: Positions covered by the first backward search; each further search covers four times as many.
_FIRST_SEARCH: Final = 1 << 24
#: Checkpoints tried in one search range, the latest first.
_MAX_TRIED: Final = 64
_FETCH_RECORDS: Final = 1_000
#: Parts read concurrently.
_READS: Final = 32
#: Maximum bytes of an entry without its key, of a decision, and of a segment.
_ENTRY_BYTES: Final = 36
_DECISION_BYTES: Final = 36
_SEGMENT_BYTES: Final = 28


# --- writing ---


class PartEncoder:
    """Encodes the parts of a checkpoint, in order."""

    def __init__(self, part_bytes: int) -> None:
        """Start without entries.

        Args:
            part_bytes: approximate size of each part.

        """
        self._part_bytes: Final = part_bytes
        self._entries: list[Row] = []
        self._bytes = 0
        #: Checksum and size of all payloads, and the number of keys.
        self.checksum = 0
        self.bytes = 0
        self.keys = 0
        #: The smallest gsn of an entry's place.
        self.first_place = NEVER

    def add(self, rows: Iterable[Row]) -> Iterator[bytes]:
        """Add entries; yield the payload of each full part."""
        for row in rows:
            self._entries.append(row)
            self._bytes += len(row[0]) + _ENTRY_BYTES
            self.first_place = min(self.first_place, row[1].place.gsn)
            if self._bytes >= self._part_bytes:
                yield self._flush()

    def finish(self, decisions: list[Decision], segments: list[Segment]) -> Iterator[bytes]:
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
    """Find the last complete checkpoint (a task).

    It returns the `CheckpointDone` and a one-shot iterator over the parts, or None if there is no
    checkpoint and the log can be replayed from its first record. A start needs the tail, which all
    shards must report: after a failure the search waits until its shard's next view has begun.

    Raises:
        NoCheckpointError: there is no checkpoint, and the log was trimmed.
        UnavailableError: a checkpoint may exist but cannot be read now.

    """
    begins_at = 0
    while True:
        try:
            return (yield from _search())
        except NoCheckpointError as error:
            # A checkpoint may have been written, and the log trimmed, during the search.
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
    """Return the last checkpoints of [start, stop), and the error if its beginning is trimmed."""
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
        except ZiplogError:
            if subscription:
                yield UnsubscribeRequest(NEVER, subscription)
            raise
        if subscription:
            yield UnsubscribeRequest(NEVER, subscription)
    return found, end


def _collect_done(fetched: Fetched, stop: int, found: deque[CheckpointDone]) -> bool:
    """Collect the checkpoints before `stop`; return whether the range is complete."""
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
    """Return a one-shot iterator over a checkpoint's parts; None if the checkpoint is invalid.

    Raises:
        TrimmedError: a part of it was trimmed.
        UnavailableError: it cannot be read now.

    """
    # The record at its position is read last: if it exists, so do all records after it.
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
    """Yield the parts one at a time: decoded, they take more memory than the state."""
    while payloads:
        part = decode(payloads.popleft())
        assert isinstance(part, CheckpointPart), "a part with a matching checksum does not decode"
        yield part
