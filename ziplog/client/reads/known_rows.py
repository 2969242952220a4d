"""The rows before a reader's start: the writer tables with which its streams begin.

    archives queried --addresses--> all archives asked --table found--> stream behind the reader
    stream behind the reader --reaches the reader's position--> stream level with the reader

Rules: what the tables of all archives know counts. The stream begins at the highest one's position;
the reader drops all rows below its own, but their origins count. An archive that fails, or does not
answer in time, is left out. The time is shorter once one has replied and no record was trimmed:
then each table is complete, and another one only shortens the stretch. Without a table the stream
begins at the trim point, with what is known. A trim of the stretch in between starts another
search.

Invariant: a shard has a table, or a search that ends in time. See docs/protocol.md, section 14.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from ziplog.core.distance import archive_grace_ns, archive_timeout_ns
from ziplog.core.units import NEVER
from ziplog.core.writer_table import TableAt, WriterTable, merged_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.requests import ArchiveReply
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.shard_stream import ShardStream

#: The host and port of an archive.
Address = tuple[str, int]


class Archives(Protocol):
    """Finds the archives of a shard."""

    def query_archives(
        self, shard: int, gsn: int, on_found: Callable[[int, list[Address]], None]
    ) -> int:
        """Query a shard's trim point and archives without a deadline; return the query's number."""
        ...

    def cancel(self, call: int) -> None:
        """Cancel a query."""
        ...


class TableSearch(msgspec.Struct, eq=False):
    """The search for the table of a shard at a position."""

    shard: int
    gsn: int
    #: Where the stream begins without an archive, and the table that it then has.
    fallback: TableAt
    on_found: Callable[[TableAt], None]
    #: What the tables of the archives so far know.
    best: TableAt = msgspec.field(default_factory=lambda: (0, WriterTable()))
    #: The number of the query of archives; 0: it has ended.
    query: int = 0
    #: The numbers of the requests without a reply, and when these archives are left out.
    numbers: set[int] = msgspec.field(default_factory=set)
    deadline: int = NEVER


class TableSearches:
    """The searches of a client."""

    def __init__(self, context: StepContext, routing: Routing, archives: Archives) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._archives: Final = archives
        #: Those that wait for archives, by the number of each request.
        self._by_number: Final[dict[int, TableSearch]] = {}

    def start(
        self, shard: int, gsn: int, fallback: TableAt, on_found: Callable[[TableAt], None]
    ) -> TableSearch:
        """Search the table of a shard at `gsn`; `on_found` gets one at that position or before."""
        search = TableSearch(shard, gsn, fallback, on_found)
        search.query = self._archives.query_archives(
            shard, gsn, lambda trim, archives: self._on_archives(search, trim, archives)
        )
        return search

    def _on_archives(self, search: TableSearch, trim: int, archives: list[Address]) -> None:
        search.query = 0
        at, table = search.fallback
        search.fallback = max(at, trim), table
        context = self._context
        if trim <= search.gsn:  # Otherwise the stream reports the trim.
            for host, port in archives:
                number = context.ask_archive(
                    host, port, self._routing.cluster, search.shard, search.gsn
                )
                search.numbers.add(number)
                self._by_number[number] = search
        search.deadline = context.now + archive_timeout_ns(context.rtt_ms)
        self._conclude(search)

    def _conclude(self, search: TableSearch) -> None:
        """End the search if it waits for no archive; otherwise wake up when they are late."""
        if search.numbers and self._context.now < search.deadline:
            self._context.set_timer(search.deadline)
            return
        self._forget(search)
        at, table = merged_tables(search.best, search.fallback)
        search.on_found((min(at, search.gsn), table))

    def _forget(self, search: TableSearch) -> None:
        """Ignore the replies that have not come."""
        for number in search.numbers:
            del self._by_number[number]
        search.numbers.clear()

    def on_reply(self, call: int, reply: ArchiveReply) -> None:
        """Handle an archive's reply, or the lack of one."""
        search, context = self._by_number.pop(reply.number, None), self._context
        if search is not None:
            search.numbers.remove(reply.number)
            # Archives are not trusted.
            if reply.table is not None and 0 < reply.table[0] <= search.gsn:
                search.best = merged_tables(search.best, reply.table)
                if search.fallback[0] <= 1:  # Nothing was trimmed.
                    grace_until = context.now + archive_grace_ns(context.rtt_ms)
                    search.deadline = min(search.deadline, grace_until)
            self._conclude(search)
        context.complete(call, None)

    def cancel(self, search: TableSearch) -> None:
        """End a search without a result."""
        self._archives.cancel(search.query)
        self._forget(search)

    def tick(self) -> None:
        """Leave out the archives that did not answer in time."""
        for search in list(dict.fromkeys(self._by_number.values())):
            self._conclude(search)

    def check(self) -> None:
        """Assert the invariant."""
        for number, search in self._by_number.items():
            assert number in search.numbers
            assert self._context.next_timer <= search.deadline, "an archive would be waited for"


class KnownRows:
    """The tables of one reader's streams."""

    def __init__(
        self,
        searches: TableSearches,
        writers: dict[int, WriterTable],
        on_found: Callable[[], None],
    ) -> None:
        """Create one without tables.

        Args:
            searches: of the client.
            writers: the tables of the reader's streams, by shard.
            on_found: called when `writers` has another table.

        """
        self._searches: Final = searches
        self._writers: Final = writers
        self._on_found: Final = on_found
        self._pending: Final[dict[int, TableSearch]] = {}
        #: Where the stream of a shard begins, until it has reached the reader's position.
        self._behind: Final[dict[int, int]] = {}

    def ready(self, members: set[int], position: int) -> set[int]:
        """Return the members with a table; start a search for each of the others."""
        for shard in self._pending.keys() - members:
            self._searches.cancel(self._pending.pop(shard))
        for shard in self._behind.keys() - members:
            del self._behind[shard], self._writers[shard]
        for shard in sorted(members - self._writers.keys() - self._pending.keys()):
            if position > 1:
                self._search(shard, position, (1, WriterTable()))
            else:
                self._writers[shard] = WriterTable()
        return members - self._pending.keys()

    def _search(self, shard: int, position: int, fallback: TableAt) -> None:
        def found(table: TableAt) -> None:
            del self._pending[shard]
            self._behind[shard], self._writers[shard] = table
            self._on_found()

        self._pending[shard] = self._searches.start(shard, position, fallback, found)

    def is_behind(self, shard: int) -> bool:
        """Whether the stream of a shard has not reached the reader's position yet."""
        return shard in self._behind

    def start_of(self, shard: int, position: int) -> int:
        """Return where the stream of a shard begins."""
        return self._behind.get(shard, position)

    def advance(self, streams: Mapping[int, ShardStream], position: int) -> None:
        """Let the streams behind the reader's position drop what is below it.

        Raises:
            ProtocolError: a unit's body is malformed.

        """
        for shard in self._behind.keys() & streams.keys():
            streams[shard].skip(position)
            if streams[shard].frontier >= position:
                del self._behind[shard]

    def on_trimmed(self, shard: int, first: int, position: int) -> None:
        """Search again: a stream behind the reader was trimmed up to `first`, and is closed."""
        del self._behind[shard]
        self._search(shard, position, (first, self._writers[shard]))

    def close(self) -> None:
        """End the searches."""
        for search in self._pending.values():
            self._searches.cancel(search)
        self._pending.clear()

    def check(self) -> None:
        """Assert the invariant."""
        assert not self._pending.keys() & self._behind.keys()
        assert self._behind.keys() <= self._writers.keys()
        self._searches.check()
