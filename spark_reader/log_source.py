"""Cluster source: reads a running cluster, from archives if possible, otherwise by scans.

    block at a position --an archive has it--> the next;  --none has--> a scan up to the next

Rule: after a failed archive the session uses another replica's, and after all of them a scan, which
retries by itself. A killed server costs time and nothing else. Invariant: each block follows the
block before it (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, suppress
from functools import reduce
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

import ziplog
from spark_reader.options import SERVERS, Options
from spark_reader.planning import cut
from spark_reader.reading import Replicas, Session, blocks_from_units, first_block
from ziplog.archive.client import ArchiveClient
from ziplog.client import arguments
from ziplog.core.writer_table import WriterTable, merged_tables
from ziplog.errors import ClosedError, NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.segments.buffer_pool import BufferPool
from ziplog.types import RecordId, cluster_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spark_reader.planning import Piece
    from spark_reader.reading import Pinned
    from ziplog.segments.blocks import Block

_T = TypeVar("_T")
#: Host and port.
_Endpoint = tuple[str, int]


class _ClusterFacts(msgspec.Struct, frozen=True):
    """Facts that the driver sends to tasks, so that tasks need not request them."""

    #: The cluster's number.
    number: int
    #: Archives by shard; shards without an archive are absent.
    archives: dict[int, list[_Endpoint]]


class LogSource(msgspec.Struct, frozen=True):
    """A running cluster, by the server addresses in the options."""

    options: Options
    #: None: not requested yet.
    found: _ClusterFacts | None = None

    def open(self, memory: BufferPool | None = None) -> LogSession:
        """Connect, now or (in a task) when a connection is needed; see `Source.open`.

        Raises:
            ConfigError: an address is malformed.
            UnavailableError: no server answers.

        """
        session = LogSession(self, memory or BufferPool())
        if self.found is None:
            session.connect()
        return session


class LogSession(Session):
    """Session with clients of the archives, and a client of the cluster once it is needed."""

    def __init__(self, source: LogSource, memory: BufferPool) -> None:
        super().__init__(source.options)
        self._connected: ziplog.Log | None = None
        self._is_closed = False
        self._found: Final = source.found
        #: "": not requested yet.
        self._name = ""
        #: Archives by shard, without those that failed.
        self._archives: Final = dict(source.found.archives) if source.found is not None else {}
        #: Buffers for the blocks of archives.
        self.memory: Final = memory

    def connect(self) -> ziplog.Log:
        """Return the client; connect first if necessary.

        Raises:
            ClosedError: the session is closed. Other errors are those of `LogSource.open`.

        """
        if self._is_closed:
            raise ClosedError("this reader of the log", "open another one to continue")
        if self._connected is None:
            options = self._options
            # Checked here so that the error names the option.
            arguments.endpoints(options.servers, SERVERS)
            # A task reads the same cluster as the driver.
            expected = cluster_id(self._found.number) if self._found is not None else None
            self._connected = ziplog.connect(
                options.servers, timeout=options.timeout_s, cluster_id=expected
            )
        return self._connected

    @property
    def number(self) -> int:
        """The cluster's number."""
        return self._found.number if self._found is not None else self.connect().cluster_number

    def close(self) -> None:
        """Disconnect."""
        self._is_closed = True
        if self._connected is not None:
            self._connected.close()

    def for_tasks(self) -> LogSource:
        """Return the source with the known archives; see `Session.for_tasks`."""
        # A shard without an archive is left out: it may have one when the task starts.
        known = {shard: archives for shard, archives in self._archives.items() if archives}
        return LogSource(self._options, _ClusterFacts(self.number, known))

    # --- planning ---

    def topic(self) -> str:
        """Return the cluster's name."""
        if not self._name:
            self._name = str(self.connect().cluster()["cluster"])
        return self._name

    def cluster_id(self) -> str:
        """Return the cluster's id."""
        return cluster_id(self.number)

    def latest(self) -> int:
        """Return the position after the tail."""
        return self.connect().check_tail().gsn + 1

    def latest_decided(self) -> int:
        """Return the same once all positions below are decided; see `Session.latest_decided`.

        A shard decides in order, so a decision about its last position below the end is enough.
        This includes shards that left, or that are parked now: their last position counts.
        """
        stop, log = self.latest(), self.connect()
        known = log.extents(1, stop)
        ends: dict[int, int] = {}
        for extent in known.shards:
            ends[extent.shard] = max(extent.stop, ends.get(extent.shard, 0))
        with ExitStack() as stack:
            # All scans are open before the first wait.
            scans = [
                stack.enter_context(log.scan(shard, end - 1, end)) for shard, end in ends.items()
            ]
            for scan in scans:
                # Positions that were trimmed meanwhile are decided.
                with suppress(TrimmedError):
                    deque(scan, maxlen=0)
        return max(stop, known.trim)

    def pin(self) -> Pinned:
        """Return the range; see `Session.pin`."""
        options, log = self._options, self.connect()
        has_end = options.stop is not None or options.last_epoch is not None
        # The tail is requested before the leases, so the leases reach as far. It is not requested
        # if the end is given: it needs all shards, and an absent one may not be in the range.
        latest = 0 if has_end else self.latest()
        if options.first_epoch is not None or options.last_epoch is not None:
            known = log.extents(1, None)
        else:
            known = log.extents(max(options.start or 1, options.stop or latest), None)
        trim = max(known.trim, 1)
        return self._pinned(*self._bounds(lambda: known, trim), latest, trim)

    def _first(self, trim: int) -> RecordId:
        try:
            return RecordId(trim, self.connect().extents(trim, trim + 1).owner_at(trim))
        except NoSuchRecordError:
            # Every position ever assigned was trimmed.
            return super()._first(trim)

    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        """Return the range in pieces; see `Session.pieces_of`."""
        if start >= stop:
            return []
        log = self.connect()
        known = log.extents(start, stop)
        self.after_trim(start, known.trim)
        pieces: list[Piece] = []
        for extent in sorted(known.shards, key=_by_shard):
            outline = log.outline(extent.shard, extent.start, extent.stop)
            self._archives[extent.shard] = outline.archives
            pieces += cut(extent.shard, extent.start, extent.stop, outline.steps)
        return pieces

    def replicas(self, shard: int, start: int, stop: int, task_index: int) -> Replicas:
        """Return the shard's servers; see `Session.replicas`."""
        del stop
        if shard not in self._archives:
            self.locate_archives(shard, start)
        return _Servers(self, shard, start, task_index)

    # --- archives ---

    @property
    def timeout_s(self) -> float:
        """Timeout of a request to an archive, in seconds."""
        return self._options.timeout_s

    def archives(self, shard: int) -> list[_Endpoint]:
        """Return the known archives of a shard, without those that failed."""
        return self._archives[shard]

    def locate_archives(self, shard: int, gsn: int) -> None:
        """Request the archives of a shard; an absent server costs its timeout each time."""
        self._archives[shard] = self.connect().outline(shard, gsn, gsn + 1).archives

    def drop_archive(self, shard: int, endpoint: _Endpoint) -> None:
        """Remove an archive that failed."""
        self._archives[shard] = [each for each in self._archives[shard] if each != endpoint]


class _Servers(Replicas):
    """A shard's servers: tries one archive after the other, then a scan.

    The session requests the list of archives once, because an absent server costs some time.
    """

    def __init__(self, session: LogSession, shard: int, start: int, task_index: int) -> None:
        self._session, self._shard = session, shard
        self._start, self._task_index = start, task_index
        #: If all archives fail, the list is requested once more: there may be others by now.
        self._may_relocate = bool(session.archives(shard))
        self._open: Final[dict[_Endpoint, ArchiveClient]] = {}

    def close(self) -> None:
        """Close the connections to archives."""
        for client in self._open.values():
            client.close()
        self._open.clear()

    # --- archives ---

    def block(self, gsn: int) -> Block | int:
        """Try one archive after the other; see `Replicas.block`."""
        return first_block(self._try_archives(lambda client: client.block(gsn)))

    def table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return what the tables of all archives know; see `Replicas.table`."""
        best = self.known_table(gsn)
        # The trim point may have advanced since the archives were opened.
        trim = self._session.connect().extents(gsn, gsn).trim
        if trim > gsn:
            raise TrimmedError(RecordId(trim, 0))
        return merged_tables(best, (max(trim, 1), WriterTable()))

    def known_table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return what the tables of all archives know; see `Replicas.known_table`."""
        answers = self._try_archives(lambda client: client.writers(gsn))
        return reduce(merged_tables, answers, (0, WriterTable()))

    def _try_archives(self, ask: Callable[[ArchiveClient], _T]) -> Iterator[_T]:
        """Yield the responses of the archives; drop each archive that fails."""
        known = self._session.archives(self._shard)
        first = self._task_index % max(len(known), 1)
        for endpoint in known[first:] + known[:first]:
            try:
                answer = ask(self._client(endpoint))
            except UnavailableError:
                self._drop(endpoint)
            else:
                yield answer
        if self._may_relocate and not self._session.archives(self._shard):
            self._may_relocate = False
            self._session.locate_archives(self._shard, self._start)
            yield from self._try_archives(ask)

    def _client(self, endpoint: _Endpoint) -> ArchiveClient:
        client = self._open.get(endpoint)
        if client is None:
            session = self._session
            client = self._open[endpoint] = ArchiveClient(
                *endpoint, session.number, self._shard,
                timeout_s=session.timeout_s, pool=session.memory,
            )  # fmt: skip
        return client

    def _drop(self, endpoint: _Endpoint) -> None:
        self._session.drop_archive(self._shard, endpoint)
        client = self._open.pop(endpoint, None)
        if client is not None:
            client.close()

    # --- scans ---

    def scanned(self, start: int, stop: int) -> Iterator[Block]:
        """Yield blocks made from a scan of the shard; see `Replicas.scanned`."""
        at = start
        while at < stop:
            try:
                with self._session.connect().scan(self._shard, at, stop) as scan:
                    for block in blocks_from_units(scan, at):
                        yield block
                        at = block.stop
            except TrimmedError as error:
                at = min(self._session.after_trim(at, error.first.gsn), stop)


def _by_shard(extent: ziplog.Extent) -> tuple[int, int]:
    return extent.shard, extent.start
