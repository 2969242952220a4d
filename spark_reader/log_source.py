"""A running cluster as a source: archives where there are any, the shards' streams elsewhere.

    block at a position --an archive has it--> the next;  --none has--> scanned up to the next

Rule: an archive that fails is left for the next replica's, and all of them for the stream, which
goes on by itself: a server that is killed costs time, and nothing else. Invariant: what is given
out follows what was given out before (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

import ziplog
from spark_reader.options import SERVERS, Options
from spark_reader.planning import cut
from spark_reader.reading import Replicas, Session, first_block, fuller, in_blocks
from ziplog.client import arguments
from ziplog.errors import NoSuchRecordError, TrimmedError, UnavailableError
from ziplog.runtime.archive import ArchiveClient
from ziplog.segments.memory import ReadMemory
from ziplog.segments.writers import Writers
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spark_reader.planning import Piece
    from spark_reader.reading import Pinned
    from ziplog.segments.rows import Block

_T = TypeVar("_T")
#: Host and port.
_Endpoint = tuple[str, int]


class LogSource(msgspec.Struct, frozen=True):
    """A cluster, by its servers' addresses in the options."""

    options: Options

    def open(self, memory: ReadMemory | None = None) -> LogSession:
        """Connect; see `Source.open`.

        Raises:
            ConfigError: an address is none.
            UnavailableError: nobody answers.

        """
        options = self.options
        # So that the error has the option's name.
        arguments.endpoints(options.servers, SERVERS)
        log = ziplog.connect(options.servers, timeout=options.timeout_s)
        return LogSession(options, log, memory or ReadMemory())


class LogSession(Session):
    """A client of the cluster."""

    def __init__(self, options: Options, log: ziplog.Log, memory: ReadMemory) -> None:
        super().__init__(options)
        self._log: Final = log
        self.memory: Final = memory
        #: "": not asked for yet.
        self._name = ""
        #: By shard; those that did not fail.
        self._archives: Final[dict[int, list[_Endpoint]]] = {}

    def close(self) -> None:
        """Disconnect."""
        self._log.close()

    # --- planning ---

    def topic(self) -> str:
        """Return the cluster's name."""
        if not self._name:
            self._name = str(self._log.cluster()["cluster"])
        return self._name

    def latest(self) -> int:
        """Return the position after the tail."""
        return self._log.check_tail().gsn + 1

    def latest_decided(self) -> int:
        """Return the same once all below is decided; see `Session.latest_decided`.

        A shard decides in order, so what it owns up to its last position below is decided once that
        one is; who left, or is out of the leases now, is asked for the last that it had.
        """
        stop = self.latest()
        known = self._log.extents(1, stop)
        ends: dict[int, int] = {}
        for extent in known.shards:
            ends[extent.shard] = max(extent.stop, ends.get(extent.shard, 0))
        with ExitStack() as stack:
            # All are open before one is waited for.
            scans = [
                stack.enter_context(self._log.scan(shard, end - 1, end))
                for shard, end in ends.items()
            ]
            for scan in scans:
                # What was trimmed meanwhile is decided.
                with suppress(TrimmedError):
                    deque(scan, maxlen=0)
        return max(stop, known.trim)

    def pin(self) -> Pinned:
        """Return the range; see `Session.pin`."""
        options, log = self._options, self._log
        has_end = options.stop is not None or options.last_epoch is not None
        # Before the leases are asked for: so they reach as far. Not if the end is given: the tail
        # needs all shards, and one that is away may have nothing of the range.
        latest = 0 if has_end else self.latest()
        if options.first_epoch is not None or options.last_epoch is not None:
            known = log.extents(1, None)
        else:
            known = log.extents(max(options.start or 1, options.stop or latest), None)
        trim = max(known.trim, 1)
        return self._pinned(*self._bounds(lambda: known, trim), latest, trim)

    def _first(self, trim: int) -> RecordId:
        try:
            return RecordId(trim, self._log.extents(trim, trim + 1).owner_at(trim))
        except NoSuchRecordError:
            # All that was ever given out was trimmed.
            return super()._first(trim)

    def stretches(self, start: int, stop: int) -> list[Piece]:
        """Return the range in pieces; see `Session.stretches`."""
        if start >= stop:
            return []
        known = self._log.extents(start, stop)
        self.behind_trim(start, known.trim)
        pieces: list[Piece] = []
        for extent in sorted(known.shards, key=_by_shard):
            outline = self._log.outline(extent.shard, extent.start, extent.stop)
            self._archives[extent.shard] = outline.archives
            pieces += cut(extent.shard, extent.start, extent.stop, outline.steps)
        return pieces

    def replicas(self, shard: int, start: int, stop: int, turn: int) -> Replicas:
        """Return the shard's servers; see `Session.replicas`."""
        del stop
        if shard not in self._archives:
            self.ask_again(shard, start)
        return _Servers(self, self._log, shard, start, turn)

    # --- archives ---

    @property
    def timeout_s(self) -> float:
        """How long a server may take."""
        return self._options.timeout_s

    def archives(self, shard: int) -> list[_Endpoint]:
        """Return the archives of a shard that was read, but for those that failed."""
        return self._archives[shard]

    def ask_again(self, shard: int, gsn: int) -> None:
        """Ask for a shard's archives; one that is away costs its grace each time."""
        self._archives[shard] = self._log.outline(shard, gsn, gsn + 1).archives

    def leave(self, shard: int, endpoint: _Endpoint) -> None:
        """Ask one that failed nothing more."""
        self._archives[shard] = [each for each in self._archives[shard] if each != endpoint]


class _Servers(Replicas):
    """A shard's servers: one archive is asked after the other, and the stream if none has it.

    Which archives there are is asked once a session: a server that is away costs some time.
    """

    def __init__(
        self, session: LogSession, log: ziplog.Log, shard: int, start: int, turn: int
    ) -> None:
        self._session, self._log, self._shard = session, log, shard
        self._start, self._turn = start, turn
        #: If all fail, others may be there by now; those are asked for once.
        self._may_ask = bool(session.archives(shard))
        self._open: Final[dict[_Endpoint, ArchiveClient]] = {}

    def close(self) -> None:
        """Leave the archives."""
        for client in self._open.values():
            client.close()
        self._open.clear()

    # --- archives ---

    def block(self, gsn: int) -> Block | int:
        """Ask one archive after the other; see `Replicas.block`."""
        return first_block(self._answers(lambda client: client.block(gsn)))

    def table(self, gsn: int) -> tuple[int, Writers]:
        """Return the nearest that an archive has; see `Replicas.table`."""
        best = 0, Writers()
        for found in self._answers(lambda client: client.writers(gsn)):
            best = fuller(best, found)
            if best[0] == gsn and best[1]:
                return best
        # No archive may know where the log begins, which is later than when this was opened.
        base = max(self._log.extents(gsn, gsn).trim, 1)
        return fuller(best, (min(base, gsn), Writers()))

    def _answers(self, ask: Callable[[ArchiveClient], _T]) -> Iterator[_T]:
        """Ask those that are left; who fails is asked nothing more."""
        known = self._session.archives(self._shard)
        first = self._turn % max(len(known), 1)
        for endpoint in known[first:] + known[:first]:
            try:
                answer = ask(self._client(endpoint))
            except UnavailableError:
                self._drop(endpoint)
            else:
                yield answer
        if self._may_ask and not self._session.archives(self._shard):
            self._may_ask = False
            self._session.ask_again(self._shard, self._start)
            yield from self._answers(ask)

    def _client(self, endpoint: _Endpoint) -> ArchiveClient:
        client = self._open.get(endpoint)
        if client is None:
            number, timeout_s = self._log.cluster_number, self._session.timeout_s
            client = ArchiveClient(
                *endpoint, number, self._shard, timeout_s=timeout_s, memory=self._session.memory
            )
            self._open[endpoint] = client
        return client

    def _drop(self, endpoint: _Endpoint) -> None:
        self._session.leave(self._shard, endpoint)
        client = self._open.pop(endpoint, None)
        if client is not None:
            client.close()

    # --- the stream ---

    def scanned(self, start: int, stop: int) -> Iterator[Block]:
        """Give blocks made of the shard's stream; see `Replicas.scanned`."""
        at = start
        while at < stop:
            try:
                with self._log.scan(self._shard, at, stop) as scan:
                    for block in in_blocks(scan, at):
                        yield block
                        at = block.stop
            except TrimmedError as error:
                at = min(self._session.behind_trim(at, error.first.gsn), stop)


def _by_shard(extent: ziplog.Extent) -> tuple[int, int]:
    return extent.shard, extent.start
