"""The state of a transaction: read set, write set and commit, as steps for both APIs.

A method that sends requests is a generator: it yields a request, and resumes with the result or
with its exception raised at the `yield`. A transaction reads its own writes, and repeats a read
without a request. A reply counts only if it was validated against all earlier reads. Invariants:
every read is in the read set or in a range, unless this transaction wrote the key; the commit
record of these sets fits into a record. See docs/logdb.md, sections 5 and 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from logdb.client.arguments import (
    PAGE_ROWS,
    RANGE_BYTES,
    READ_BYTES,
    WRITE_BYTES,
    Sizes,
)
from logdb.client.requests import CommitRequest, GetRequest, ScanRequest, ValidateRequest
from logdb.errors import TooManyReadsError, TransactionAborted, TransactionClosed
from logdb.records import KeyRead
from logdb.wire import MAX_KEYS
from ziplog.errors import RecordTooLargeError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from logdb.client.arguments import Bounds
    from logdb.client.requests import DropRequest, Page, Values
    from logdb.records import RangeRead
    from ziplog.client.common.requests import Request
    from ziplog.types import RecordId

    Rows = list[tuple[bytes, bytes]]

TransactionStatus = Literal["open", "committing", "committed", "aborted", "rolled back", "in doubt"]


class TransactionSets:
    """The read set, the ranges, the write set and the status of one transaction."""

    __slots__ = (
        "_error", "_range_keys", "_ranges", "_reads", "_sizes", "_values", "_versions", "_writes",
        "position", "status",
    )  # fmt: skip

    def __init__(self, largest: int) -> None:
        """Start a transaction.

        Args:
            largest: maximum bytes of a record.

        """
        self.status: TransactionStatus = "open"
        #: The commit's rid; for a read-only transaction, the position of the state that validated
        #: it.
        self.position: RecordId | None = None
        #: The read set, as a list to send and by key.
        self._reads: Final[list[KeyRead]] = []
        self._versions: Final[dict[bytes, int]] = {}
        #: Values that were read.
        self._values: Final[dict[bytes, bytes | None]] = {}
        self._ranges: Final[list[RangeRead]] = []
        self._range_keys: Final[set[tuple[bytes, bytes | None]]] = set()
        #: None: deleted.
        self._writes: Final[dict[bytes, bytes | None]] = {}
        self._sizes: Final = Sizes(largest)
        #: What aborted it.
        self._error: TransactionAborted | None = None

    # --- writing ---

    def write(self, key: bytes, value: bytes | None) -> None:
        """Record a write; None: a deletion.

        Raises:
            TransactionClosed: the transaction is over.
            RecordTooLargeError: the commit record would be too large.

        """
        self.check_open()
        if key not in self._writes:
            self._sizes.add(len(key) + WRITE_BYTES)
        self._writes[key] = value

    def check_open(self) -> None:
        """Raise TransactionClosed if the transaction is over."""
        if self.status != "open":
            raise TransactionClosed(self.status)

    # --- reading ---

    def get(
        self, keys: Sequence[bytes], deadline_ns: int
    ) -> Generator[Request, Any, list[bytes | None]]:
        """Return the values of keys; None: absent."""
        missing = self._missing(keys, self._values)
        if missing:
            found: Values = yield from self._read(missing, deadline_ns, wants_values=True)
            self._values.update(zip(missing, found.values, strict=True))
        writes, values = self._writes, self._values
        return [writes[key] if key in writes else values[key] for key in keys]

    def exists(self, key: bytes, deadline_ns: int) -> Generator[Request, Any, bool]:
        """Return whether a key exists."""
        missing = self._missing((key,), self._versions)
        if missing:
            yield from self._read(missing, deadline_ns, wants_values=False)
        if key in self._writes:
            return self._writes[key] is not None
        return self._versions[key] > 0

    def _missing(self, keys: Sequence[bytes], known: dict[bytes, Any]) -> list[bytes]:
        self.check_open()
        unknown = (key for key in keys if key not in self._writes and key not in known)
        return list(dict.fromkeys(unknown))

    def _read(
        self, keys: list[bytes], deadline_ns: int, *, wants_values: bool
    ) -> Generator[Request, Any, Values]:
        new = [key for key in keys if key not in self._versions]
        if len(self._reads) + len(new) > MAX_KEYS:
            raise TooManyReadsError(len(self._reads) + len(new), MAX_KEYS)
        self._sizes.add(sum(map(len, new)) + READ_BYTES * len(new))
        found: Values = yield from self._query(
            lambda reads, ranges: GetRequest(
                deadline_ns, keys, False, reads, ranges, None, wants_values
            )
        )
        for key, version in zip(keys, found.versions, strict=True):
            if key not in self._versions:
                self._versions[key] = version
                self._reads.append(KeyRead(key, version))
        return found

    def _query(
        self, build: Callable[[list[KeyRead], list[RangeRead]], Request]
    ) -> Generator[Request, Any, Any]:
        """Send a query with all earlier reads; a conflict ends the transaction."""
        while True:
            count = len(self._reads), len(self._ranges)
            try:
                result = yield build(self._reads.copy(), self._ranges.copy())
            except TransactionAborted as error:
                if self.status != "aborted":
                    # During or after a commit, the conflict may be this transaction's own write.
                    self.check_open()
                self.status, self._error = "aborted", error
                raise
            self.check_open()
            # Another task may have read in this transaction in the meantime.
            if count == (len(self._reads), len(self._ranges)):
                return result

    def page(
        self, bounds: Bounds, start: bytes, max_rows: int | None, deadline_ns: int
    ) -> Generator[Request, Any, tuple[Rows, bytes | None]]:
        """Return the next rows of a scan, and the start of the next page; None: the end.

        Args:
            bounds: the range of the scan.
            start: the first key of this page.
            max_rows: the limit; None: no limit.
            deadline_ns: the deadline.

        """
        self.check_open()
        if len(self._ranges) == MAX_KEYS:
            raise TooManyReadsError(MAX_KEYS + 1, MAX_KEYS, "pages of scans")
        limit = PAGE_ROWS if max_rows is None else min(max_rows, PAGE_ROWS)
        page: Page = yield from self._query(
            lambda reads, ranges: ScanRequest(
                deadline_ns, start, bounds.stop, limit, False, reads, ranges, None
            )
        )
        covered = page.range
        if (covered.start, covered.stop) not in self._range_keys:
            self._sizes.add(len(covered.start) + len(covered.stop or b"") + RANGE_BYTES)
            self._range_keys.add((covered.start, covered.stop))
            self._ranges.append(covered)
        rows = self._with_writes(page.rows, covered.start, covered.stop)
        return rows[:max_rows], None if page.is_end else covered.stop

    def _with_writes(self, rows: Rows, start: bytes, stop: bytes | None) -> Rows:
        """Return the rows of a range with this transaction's writes applied."""
        writes = {
            key: value
            for key, value in self._writes.items()
            if key >= start and (stop is None or key < stop)
        }
        if not writes:
            return rows
        merged = dict(rows) | writes
        return sorted((key, value) for key, value in merged.items() if value is not None)

    def validate(self, deadline_ns: int) -> Generator[Request, Any, None]:
        """Raise TransactionAborted, and end the transaction, if a read has changed."""
        self.check_open()
        if self._reads or self._ranges:
            yield from self._query(
                lambda reads, ranges: ValidateRequest(deadline_ns, reads, ranges)
            )

    # --- the end ---

    def commit(self, deadline_ns: int) -> Generator[Request, Any, None]:
        """Commit; afterwards `position` is the commit's rid.

        If nothing was done (UnavailableError), the transaction stays open and may be committed
        again.
        """
        if self._error is not None:
            raise self._error
        self.check_open()
        request: Request
        if self._writes:
            request = CommitRequest(deadline_ns, self._reads, self._ranges, self._writes)
        elif self._reads or self._ranges:
            request = ValidateRequest(deadline_ns, self._reads, self._ranges)
        else:
            self.status = "committed"
            return
        # No call may change it during the commit.
        self.status = "committing"
        try:
            self.position = yield request
        except TransactionAborted as error:
            self.status, self._error = "aborted", error
            raise
        except (UnavailableError, RecordTooLargeError):
            self.status = "open"
            raise
        except BaseException:
            # Cancellation included.
            self.status = "in doubt"
            raise
        self.status = "committed"

    def rollback(self) -> None:
        """Roll back, without a trace. Does nothing if the transaction is over.

        Raises:
            TransactionClosed: it is being committed, or its outcome is unknown.

        """
        if self.status in {"committing", "in doubt"}:
            raise TransactionClosed(self.status)
        if self.status == "open":
            self.status = "rolled back"

    @property
    def is_undecided(self) -> bool:
        """Whether the end of the `with` block must end it, or report that it was aborted."""
        return self.status in {"open", "aborted"}


class TransactionScan:
    """A scan inside a transaction (`logdb.client.rows.Pages`)."""

    __slots__ = ("_bounds", "_left", "_next_deadline", "_sets", "_start")

    def __init__(
        self, sets: TransactionSets, bounds: Bounds, deadline_ns: Callable[[], int]
    ) -> None:
        """Prepare; `deadline_ns` returns the deadline of a call that starts now."""
        self._sets: Final = sets
        self._bounds: Final = bounds
        self._next_deadline: Final = deadline_ns
        #: Rows left to return; None: all.
        self._left = bounds.limit
        #: Start of the next page; None: the scan is over.
        self._start: bytes | None = None if bounds.is_empty else bounds.start

    @property
    def is_over(self) -> bool:
        """Whether there are no more rows."""
        return self._start is None or self._left == 0

    def page(self) -> Generator[Request, Any, Rows]:
        """Return the next rows; none if the scan was closed meanwhile."""
        assert self._start is not None, "a finished scan has no next page"
        rows, start = yield from self._sets.page(
            self._bounds, self._start, self._left, self._next_deadline()
        )
        if self.is_over:  # Another task closed the scan meanwhile.
            return []
        left = None if self._left is None else self._left - len(rows)
        self._start, self._left = start, left
        return rows

    def close(self) -> list[DropRequest]:
        """Close it; there is nothing to release."""
        self._start = None
        return []
