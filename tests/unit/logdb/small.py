"""A small coordinator on a fake log: a state that tails it, and a cleaner; no clients.

`Small` does what the real one does between the log and the cleaner, in virtual time. `write` puts
transactions into the log as a client would, and `Oracle` remembers what every key must hold.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from logdb.cleaner.checkpoint import find_checkpoint
from logdb.cleaner.cleaner import Cleaner
from logdb.cleaner.settings import RoundSettings
from logdb.errors import NoCheckpointError
from logdb.log_usage import LogUsage
from logdb.records import Commit, TransactionId, Value, Write, decode, encode, value_at
from logdb.state import State
from ziplog.client.common.requests import Fetched, FetchRequest, SubscribeRequest
from ziplog.client.log_tasks import LogTasks
from ziplog.core.node import Wakeup
from ziplog.core.units import NEVER
from ziplog.errors import TrimmedError, UnavailableError, ZiplogError
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.logdb.fakelog import FakeLog
    from ziplog.client.log_tasks import TaskSteps

MS: Final = 1_000_000
S: Final = 1000 * MS
#: Settings for small logs.
SMALL: Final = RoundSettings(
    every_records=50, min_dead_bytes=2_000, part_bytes=600, inserts=3, slice_keys=7
)


def small_state() -> State:
    return State(log_usage=LogUsage(segment_bytes=500, min_dead_bytes=1_000))


class Small:
    """A coordinator that only tails and cleans."""

    def __init__(
        self,
        log: FakeLog,
        name: str,
        settings: RoundSettings | None = None,
        *,
        at_once: bool = True,
        make_state: Callable[[], State] = small_state,
    ) -> None:
        self.log: Final = log
        self.name: Final = name.encode().ljust(8, b"-")
        self.settings: Final = settings or SMALL
        self._make_state: Final = make_state
        self.now = 0
        self.core = log.core(at_once=at_once)
        self.calls = LogTasks(self.core, 0)
        self.state = make_state()
        self.cleaner: Cleaner | None = None
        self.error: ZiplogError | None = None
        #: The position of the checkpoint that it started from; 0: none.
        self.restored = 0
        self.starts = 0
        self._subscription = 0
        self._is_fetching = False
        #: The tail at its start; it is ready after that.
        self._ready_at = 0
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self._is_due = False
        self.state = self._make_state()
        if self.cleaner is not None:
            self.cleaner.close()
        self.cleaner = None
        self._subscription = 0
        self._is_fetching = False
        self.calls.run(self._begin(self.state), self._begun)

    def _begin(self, state: State) -> TaskSteps:
        found = yield from find_checkpoint()
        if found is not None:
            state.restore(*found)
            self.restored = state.position.gsn
        start = RecordId(state.position.gsn + 1, 0)
        return (yield SubscribeRequest(NEVER, start, follow=True))

    def _begun(self, result: Any) -> None:
        if isinstance(result, (TrimmedError, UnavailableError)) and not isinstance(
            result, NoCheckpointError
        ):
            self._is_due = True
        elif isinstance(result, ZiplogError):
            self.error = result
        else:
            self._subscription = result
            self._ready_at = self.log.tail.gsn
            self.cleaner = Cleaner(self.state, self.calls, self.name, self.settings)

    def _fetched(self, result: Fetched | ZiplogError) -> None:
        self._is_fetching = False
        if isinstance(result, TrimmedError):
            self._start()
            return
        if isinstance(result, UnavailableError):
            return
        assert not isinstance(result, ZiplogError), result
        for record in result.records:
            self.state.apply(record)

    def step(self, records: int = 100) -> None:
        """Let a millisecond pass, and events come."""
        self.now += MS
        self.calls.step(Wakeup(), self.now)
        if self._is_due:
            self._start()
        if self._subscription and not self._is_fetching:
            self._is_fetching = True
            self.calls.call(FetchRequest(NEVER, self._subscription, records), self._fetched)
        if self.cleaner is not None and self.state.position.gsn >= self._ready_at:
            self.cleaner.step(self.now)
        self.calls.pop_effects()

    def settle(self, turns: int = 2000) -> None:
        """Run until it has caught up and is idle."""
        for _ in range(turns):
            self.step()
            is_busy = self.cleaner is None or self.cleaner.is_busy
            if not is_busy and self.state.position == self.log.tail:
                return
        raise AssertionError("it never came to rest")


class Oracle:
    """What each key holds, by its own reading of the log's first copy of everything."""

    def __init__(self, log: FakeLog, make_state: Callable[[], State] = small_state) -> None:
        self.log: Final = log
        self.model: Final = make_state()
        self._numbers: Final = itertools.count(1)
        self._written: Final[dict[int, Record]] = {}
        self.user_bytes = 0

    def write(self, writes: dict[bytes, bytes | None], *, inline: bool = True) -> None:
        """Insert a transaction that writes; None deletes."""
        log = self.log
        made: list[Write] = []
        last = RecordId(log.sealed, 0)
        for key, value in writes.items():
            self.user_bytes += len(key) + len(value or b"")
            if value is None:
                made.append(Write(key))
            elif inline:
                made.append(Write(key, value, None, len(value)))
            else:
                (rid,) = log.insert(encode(Value(key, value)))
                made.append(Write(key, None, rid, len(value)))
                last = max(last, rid)
        self.commit(made, last)

    def commit(self, writes: list[Write], after: RecordId = RID_GENESIS) -> RecordId:
        """Insert a commit record with these writes."""
        id_ = TransactionId(b"oracle--", next(self._numbers))
        began = self.log.sealed
        record = encode(Commit(id_, began, [], [], writes))
        return self.log.insert(record, after=after)[0]

    def note(self) -> None:
        """Remember what is certain in the log now: a trim may take it away."""
        at = self.model.position.gsn
        for record in self.log.between(at + 1, self.log.sealed + 1, 10**9):
            self._written[record.rid.gsn] = record
            self.model.apply(record)

    def payload(self, gsn: int) -> bytes:
        """Return what was at a gsn, trimmed or not."""
        return self._written[gsn].payload

    def all(self) -> list[Record]:
        """Return all records ever inserted, in order."""
        return list(self._written.values())

    def payloads(self) -> list[bytes]:
        """Return their payloads."""
        return [record.payload for record in self._written.values()]

    def check(self, state: State) -> None:
        """Assert that a state at the log's end has every key, version and value, in the log."""
        self.note()
        assert state.position == self.model.position == self.log.tail
        entries = state.versions.range(b"", None, 10**9)
        expected = self.model.versions.range(b"", None, 10**9)
        assert [(key, e.version, e.size) for key, e in entries] == [
            (key, e.version, e.size) for key, e in expected
        ]
        assert state.decisions.export() == self.model.decisions.export()
        assert (state.horizon, state.decisions.floor) == (
            self.model.horizon,
            self.model.decisions.floor,
        )
        for key, entry in entries:
            record = self.log.read(entry.place)
            assert isinstance(record, Record), (key, entry, record)
            value = value_at(decode(record.payload), key)
            first = self._written[entry.version].payload
            assert value is not None
            assert value == value_at(decode(first), key)
            assert len(value) == entry.size
