"""One cleaning round: writes a checkpoint and trims the log; a task (`ziplog/client/log_tasks.py`).

    announce --ours is first--> move, copy --> save --> trim
      another coordinator's is first: skipped; the log fails: the round fails

Invariant: the log is trimmed only before a cut for which a checkpoint without earlier places was
applied and is on stable storage; wherever a round stops, the log suffices for a start. The last
record of a checkpoint follows once all that the checkpoint needs is on stable storage. Between two
pauses a round processes at most `slice_keys` keys or records. See docs/logdb.md, section 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from logdb.cleaner.checkpoint import PartEncoder
from logdb.cleaner.relocation import Relocation, UnmovableRecord, moves_from
from logdb.records import CheckpointBegun, CheckpointDone, encode, is_foreign
from logdb.snapshots import SnapshotCursor
from ziplog.client.common.requests import (
    FetchRequest,
    InsertRequest,
    SubscribeRequest,
    SyncRequest,
    TrimRequest,
    UnsubscribeRequest,
)
from ziplog.client.log_tasks import ignore
from ziplog.core.units import NEVER
from ziplog.errors import TrimmedError, UnavailableError
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from logdb.cleaner.schedule import CheckpointSchedule
    from logdb.cleaner.settings import Counts, RoundSettings
    from logdb.state import State
    from ziplog.client.common.requests import Fetched
    from ziplog.client.log_tasks import LogTasks

    Steps = Generator[Any, Any, None]


class WaitUntil(msgspec.Struct, frozen=True, gc=False):
    """A step of a round: wait until the state has passed a gsn."""

    gsn: int


class YieldSlice(msgspec.Struct, frozen=True, gc=False):
    """A step of a round: pause after a slice, so that other events are processed."""


class CleaningRound:
    """The cleaning rounds of one coordinator, one at a time."""

    def __init__(
        self,
        state: State,
        calls: LogTasks,
        schedule: CheckpointSchedule,
        settings: RoundSettings,
        counts: Counts,
    ) -> None:
        """Prepare rounds.

        Args:
            state: the state to checkpoint.
            calls: the log.
            schedule: knows the rounds of other coordinators.
            settings: sizes of steps, and timeouts.
            counts: incremented by the rounds.

        """
        self._state: Final = state
        self._calls: Final = calls
        self._schedule: Final = schedule
        self._settings: Final = settings
        self._counts: Final = counts
        #: When this round was last announced.
        self._announced_at = 0
        #: The open subscription's number; 0: none.
        self._subscription = 0

    def run(self) -> Steps:
        """Run a round."""
        cut = self._schedule.cut()
        begun = yield from self._announce(cut)
        yield WaitUntil(begun.gsn)
        if not self._schedule.is_first(begun, self._calls.now):
            self._counts.left += 1
            return
        if cut:
            cut = yield from self._move(cut)
        done, trim = yield from self._save(cut)
        # Until it is applied, the next round would seem to be due.
        yield WaitUntil(done.gsn)
        self._counts.rounds += 1
        if trim:
            yield from self.trim(trim, done)

    def trim(self, gsn: int, done: RecordId) -> Steps:
        """Trim the log before a gsn that an applied checkpoint names; `done` is its last record."""
        yield SyncRequest(self._deadline(), (done,))
        yield TrimRequest(self._deadline(), RecordId(gsn, 0))
        self._counts.trimmed = gsn

    def unsubscribe(self) -> None:
        """End the subscription of a round, which has moved its entries, failed or was cancelled.

        Not in a `finally` of its steps: those also run when an abandoned round is collected.
        """
        subscription, self._subscription = self._subscription, 0
        if subscription:
            self._calls.call(UnsubscribeRequest(NEVER, subscription), ignore)

    # --- announce ---

    def _announce(self, cut: int) -> Generator[Any, Any, RecordId]:
        """Announce the round to the other coordinators."""
        self._announced_at = self._calls.now
        (rid,) = yield from self._insert([encode(CheckpointBegun(self._schedule.coordinator, cut))])
        return rid

    def _yield_slice(self, cut: int) -> Steps:
        """Pause between two slices, and repeat the announcement when it gets old."""
        yield YieldSlice()
        if self._calls.now - self._announced_at > self._settings.other_round_timeout_ns // 3:
            yield from self._announce(cut)

    # --- move ---

    def _move(self, cut: int) -> Generator[Any, Any, int]:
        """Insert again what the state needs from before the cut; return the final cut.

        Foreign records are copied as they are, in their order.
        """
        relocation = Relocation(self._part_bytes())
        last = copied = RID_GENESIS
        self._subscription = yield from self._subscribe()
        while cut > relocation.passed + 1:
            fetched = yield from self._fetch()
            foreign, cut = self._collect_moves(fetched.records, relocation, cut)
            last = max(last, (yield from self._insert_moves(relocation.pop_full())))
            copied = yield from self._copy(foreign, copied)
            yield from self._yield_slice(cut)
        self.unsubscribe()
        last = max(last, (yield from self._insert_moves(relocation.finish())))
        yield WaitUntil(last.gsn)
        return cut

    def _collect_moves(
        self, records: Iterable[Record], relocation: Relocation, cut: int
    ) -> tuple[list[Record], int]:
        """Add the moves of the next records; return the foreign ones, and the final cut."""
        versions, limit = self._state.versions, self._calls.core.limits.max_payload_bytes
        foreign: list[Record] = []
        for record in records:
            gsn = record.rid.gsn
            if gsn >= cut:
                relocation.passed = cut
                break
            if is_foreign(record.payload):
                relocation.passed = gsn
                foreign.append(record)
                continue
            try:
                relocation.add(record.rid, moves_from(record, versions, limit))
            except UnmovableRecord:
                relocation.passed = gsn
                return foreign, gsn
        return foreign, cut

    def _copy(self, foreign: list[Record], after: RecordId) -> Generator[Any, Any, RecordId]:
        """Insert foreign records again, one after the other; return the last one's rid."""
        for record in foreign:
            after = max(after, self._state.position)
            request = InsertRequest(
                self._deadline(), [record.payload], after, record.key, record.timestamp_us
            )
            (after,) = yield request
            self._counts.copied += 1
        return after

    def _insert_moves(self, payloads: list[bytes]) -> Generator[Any, Any, RecordId]:
        """Insert `Moved` records; return the last one's rid."""
        last = RID_GENESIS
        inserts = self._settings.inserts
        for start in range(0, len(payloads), inserts):
            some = payloads[start : start + inserts]
            last = max(last, *(yield from self._insert(some)))
            self._counts.moved_bytes += sum(map(len, some))
        return last

    # --- save ---

    def _save(self, cut: int) -> Generator[Any, Any, tuple[RecordId, int]]:
        """Write a checkpoint; return its last record's rid, and the gsn before which to trim."""
        cursor = SnapshotCursor(self._state)
        try:
            return (yield from self._write(cursor, cut))
        finally:
            cursor.close()

    def _write(self, cursor: SnapshotCursor, cut: int) -> Generator[Any, Any, tuple[RecordId, int]]:
        image = cursor.image
        parts = PartEncoder(self._part_bytes())
        rids: list[RecordId] = []
        payloads: list[bytes] = []
        for some in self._slices(cursor, parts):
            payloads += some
            if len(payloads) >= self._settings.inserts:
                rids += yield from self._insert(payloads, image.position)
                payloads = []
            yield from self._yield_slice(cut)
        rids += yield from self._insert(payloads, image.position)
        self._counts.checkpoint_bytes += parts.bytes
        # The record at the position is perhaps another client's, at a shard without ours.
        yield SyncRequest(self._deadline(), (image.position,))
        # An entry that was not moved must stay in the log.
        trim = cut if parts.first_place >= cut else 0
        done = CheckpointDone(
            self._schedule.coordinator, image.position, image.floor, rids, parts.checksum,
            parts.keys, image.horizon, image.first_foreign, image.records, trim,
            image.first_unreadable,
        )  # fmt: skip
        (rid,) = yield from self._insert([encode(done)], max(rids, default=image.position))
        return rid, trim

    def _slices(self, cursor: SnapshotCursor, parts: PartEncoder) -> Iterator[list[bytes]]:
        """Yield the full payloads after each slice of the cursor, then the last payloads."""
        while not cursor.is_done:
            yield list(parts.add(cursor.rows(self._settings.slice_keys)))
        for payload in parts.finish(cursor.image.decisions, cursor.image.segments):
            yield [payload]

    # --- requests to the log ---

    def _deadline(self) -> int:
        return self._calls.now + self._settings.request_timeout_ns

    def _part_bytes(self) -> int:
        return min(self._settings.part_bytes, self._calls.core.limits.max_payload_bytes // 2)

    def _insert(
        self, payloads: list[bytes], after: RecordId | None = None
    ) -> Generator[Any, Any, list[RecordId]]:
        """Insert records together; return their rids."""
        after = after or self._state.position
        deadline = self._deadline()
        results = yield [InsertRequest(deadline, [payload], after, None, 0) for payload in payloads]
        if failure := next((each for each in results if isinstance(each, Exception)), None):
            raise failure
        return [rid for rids in results for rid in rids]

    def _subscribe(self) -> Generator[Any, Any, int]:
        """Subscribe to the log from its beginning; return the subscription's number."""
        start = RecordId(max(self._state.trimmed, 1), 0)
        while True:
            try:
                number: int = yield SubscribeRequest(self._deadline(), start, follow=True)
            except TrimmedError as error:
                start = error.first
            else:
                return number

    def _fetch(self) -> Generator[Any, Any, Fetched]:
        count = self._settings.slice_keys
        fetched: Fetched = yield FetchRequest(self._deadline(), self._subscription, count)
        if not fetched.records:
            raise UnavailableError("the log could not be read up to the cut before the deadline")
        return fetched
