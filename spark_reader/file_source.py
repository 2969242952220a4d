"""File source: reads the segment files of a cluster or of one storage server, without a server.

Rule: a record that any replica of a shard knows to be stable is read, and no file is changed.
Invariant: while a server runs, a load never reads past a position that another shard may still
fill (docs/spark.md, section 1.2).
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from spark_reader.epochs import Epochs, ShardEpochs
from spark_reader.options import PATH, STOP, Options
from spark_reader.planning import cut
from spark_reader.reading import Replicas, Session, blocks_from_units, first_block
from ziplog.config import load
from ziplog.core.writer_table import WriterTable, merged_tables
from ziplog.errors import ConfigError, UnavailableError
from ziplog.segments.block_reader import BlockReader
from ziplog.segments.buffer_pool import BufferPool
from ziplog.segments.entry import UnreadableError
from ziplog.segments.identity import IDENTITY_FILE, Identity, decode_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spark_reader.planning import Piece
    from spark_reader.reading import Pinned
    from ziplog.segments.blocks import Block
    from ziplog.segments.segment import Segment

_CLUSTER_FILE: Final = "cluster.toml"
_SEGMENTS: Final = "segments"
#: Default names of servers.
_SERVER: Final = re.compile(r"shard-(\d{1,9})-\d{1,2}", re.ASCII)
#: Larger than every position.
_MAX_END: Final = 2**63 - 1
_RULE: Final = "the data directory of a cluster, or of one of its storage servers"


class _ServerDirectories(msgspec.Struct, frozen=True):
    """The cluster's name and id, and the server directories of a data directory."""

    #: The cluster's name.
    name: str
    #: "": unknown.
    cluster_id: str
    #: Directories of servers, by shard.
    servers: dict[int, list[str]]

    def is_readable(self) -> bool:
        """Whether this machine has the files of at least one server of each shard."""
        return all(
            any((Path(server) / _SEGMENTS).is_dir() for server in servers)
            for servers in self.servers.values()
        )


class FileSource(msgspec.Struct, frozen=True):
    """A data directory, by the path in the options."""

    options: Options
    #: None: not searched yet.
    directories: _ServerDirectories | None = None

    def open(self, memory: BufferPool | None = None) -> FileSession:
        """Find the server directories; see `Source.open`.

        Raises:
            ConfigError: the path is not a data directory.
            UnavailableError: the files of a shard are missing.

        """
        path = _path(self.options)
        try:
            directories = self.directories
            if directories is None or not directories.is_readable():
                directories = _find_servers(path)
        except OSError as error:
            raise ConfigError(PATH, str(path), f"{_RULE} ({error.strerror})") from None
        return FileSession(self.options, directories, memory or BufferPool())


def _path(options: Options) -> Path:
    return Path(options.path.removeprefix("file:")).absolute()


def _find_servers(path: Path) -> _ServerDirectories:
    if (path / _SEGMENTS).is_dir():
        identity = _identity(path)
        shard = _shard_of(path, identity.node)
        return _ServerDirectories(identity.cluster, "", {shard: [str(path)]})
    if (path / _CLUSTER_FILE).is_file():
        config = load(path / _CLUSTER_FILE)
        servers = {s.id: [path / node.name for node in s.replicas] for s in config.shards}
        if not any(server.is_dir() for each in servers.values() for server in each):
            data = config.data_dir
            servers = {s.id: [data / node.name for node in s.replicas] for s in config.shards}
        there = {
            shard: [str(server) for server in each if (server / _SEGMENTS).is_dir()]
            for shard, each in servers.items()
        }
        for shard, each in there.items():
            if not each:
                names = " and ".join(server.name for server in servers[shard])
                raise UnavailableError(f"{path} has no files of shard {shard} ({names})")
        return _ServerDirectories(config.name, config.id or "", there)
    why = "" if path.is_dir() else " (no such directory on this machine)"
    raise ConfigError(PATH, str(path), _RULE + why)


def _identity(path: Path) -> Identity:
    try:
        return decode_identity((path / IDENTITY_FILE).read_bytes())[0]
    except ValueError:
        raise ConfigError(PATH, str(path), f"{_RULE}; its {IDENTITY_FILE} is damaged") from None


def _shard_of(path: Path, node: str) -> int:
    """Return the shard of a server, from the cluster file or else from its name."""
    file = path.parent / _CLUSTER_FILE
    if file.is_file():
        for shard in load(file).shards:
            if node in {server.name for server in shard.replicas}:
                return shard.id
    usual = _SERVER.fullmatch(node)
    if usual is None:
        allowed = f"in the directory of the {_CLUSTER_FILE} that lists {node!r}"
        raise ConfigError(PATH, str(path), allowed)
    return int(usual[1])


class FileSession(Session):
    """Session over the directories of all servers, shard by shard."""

    def __init__(
        self, options: Options, directories: _ServerDirectories, memory: BufferPool
    ) -> None:
        super().__init__(options)
        self._memory: Final = memory
        self._cluster_file: Final = _path(options) / _CLUSTER_FILE
        #: The version of the cluster file that `_directories` agree with; None: not known.
        self._stamp: tuple[int, int] | None = None
        self._use(directories)

    def _use(self, directories: _ServerDirectories) -> None:
        self._directories = directories
        self._segment_directories = {
            shard: [Path(server) / _SEGMENTS for server in servers]
            for shard, servers in sorted(directories.servers.items())
        }
        self._readers = {
            shard: [BlockReader(path, self._memory) for path in each]
            for shard, each in self._segment_directories.items()
        }

    def _find_again(self) -> bool:
        """Find the servers in a changed cluster file; return whether they are others.

        Raises:
            UnavailableError: the files of a shard are missing.

        """
        stamp = _stamp(self._cluster_file)
        if stamp == self._stamp:
            return False
        found = _find_servers(self._cluster_file.parent)
        self._stamp = stamp
        if found == self._directories:
            return False
        self._use(found)
        return True

    def close(self) -> None:
        """Do nothing: no file is open between two calls."""

    def for_tasks(self) -> FileSource:
        """Return the source with the directories found; see `Session.for_tasks`."""
        return FileSource(self._options, self._directories)

    # --- planning ---

    def _ends(self) -> dict[int, int]:
        return {shard: _end(shard, each) for shard, each in self._readers.items()}

    @property
    def trim(self) -> int:
        """The trim point in the files now; 1: nothing was trimmed."""
        return max(_trim(reader) for each in self._readers.values() for reader in each)

    def topic(self) -> str:
        """Return the cluster's name."""
        return self._directories.name

    def cluster_id(self) -> str:
        """Return the cluster's id in the cluster file; "" if it has none."""
        return self._directories.cluster_id

    def latest(self) -> int:
        """Return the end of the files of all shards, also of those that were added meanwhile."""
        latest = self._latest()
        try:
            # After the ends: a shard that is not in the cluster file yet has no position there.
            is_current = not self._find_again()
        except UnavailableError:
            # The new shard has no files yet. Nothing can be read until they show its positions.
            return 1
        return latest if is_current else self.latest()

    def _latest(self) -> int:
        """Return the least stable end of all shards, or the largest if all servers are stopped.

        Without a clean stop of one of its servers, a shard may hold more than its files show.
        """
        # Before the ends are read: the files of a server that stops meanwhile are complete.
        is_running = any(reader.is_locked for each in self._readers.values() for reader in each)
        unsure = [
            shard
            for shard, each in self._readers.items()
            if is_running or not any(reader.was_stopped for reader in each)
        ]
        ends = self._ends()
        return min((ends[shard] for shard in unsure), default=max(ends.values()))

    def latest_decided(self) -> int:
        """Return the same: positions in files are decided while stopped servers stay stopped."""
        return self.latest()

    def pin(self) -> Pinned:
        """Return the range; see `Session.pin`."""
        options, latest = self._options, self._latest()
        if options.stop is not None and options.stop > latest:
            raise ConfigError(
                STOP, options.stop, f"at most {latest}, the end of the files of all shards"
            )
        trim = self.trim
        return self._pinned(*self._bounds(lambda: self._epochs(trim, latest), trim), latest, trim)

    def _epochs(self, start: int, stop: int) -> Epochs:
        pieces: dict[int, list[Piece]] = {}
        for piece in self.pieces_of(start, stop):
            pieces.setdefault(piece.shard, []).append(piece)
        shards = [
            ShardEpochs(mine, self.replicas(shard, start, stop, 0).blocks)
            for shard, mine in pieces.items()
        ]
        return Epochs(shards, stop)

    def pieces_of(self, start: int, stop: int) -> list[Piece]:
        """Return the range in pieces; see `Session.pieces_of`."""
        if start >= stop:
            return []
        start = self.after_trim(start, self.trim)
        pieces: list[Piece] = []
        for shard, end in self._ends().items():
            each = zip(self._readers[shard], self._segment_directories[shard], strict=True)
            steps = max((_steps(reader, path) for reader, path in each), key=len)
            pieces += cut(shard, start, min(stop, end), steps)
        return pieces

    def replicas(self, shard: int, start: int, stop: int, task_index: int) -> Replicas:
        """Return the shard's directories; see `Session.replicas`.

        A plan of an earlier run may name a shard that left the cluster file after its trim.
        """
        del start, stop
        each = self._readers.get(shard, [])
        first = task_index % max(len(each), 1)
        return _Directories(self, each[first:] + each[:first])


class _Directories(Replicas):
    """The segment directories of a shard's servers."""

    def __init__(self, session: FileSession, readers: list[BlockReader]) -> None:
        self._session, self._readers = session, readers

    def close(self) -> None:
        """Do nothing: no file is open between two calls."""

    def block(self, gsn: int) -> Block | int:
        """Search one directory after the other; see `Replicas.block`."""
        return first_block(reader.block(gsn) for reader in self._readers)

    def table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return what the tables of all directories know; see `Replicas.table`."""
        return self.known_table(gsn)

    def known_table(self, gsn: int) -> tuple[int, WriterTable]:
        """Return the same, whatever was trimmed; see `Replicas.known_table`."""
        return reduce(
            merged_tables, (reader.writers(gsn) for reader in self._readers), (1, WriterTable())
        )

    def scanned(self, start: int, stop: int) -> Iterator[Block]:
        """Yield blocks made from the units in segments; see `Replicas.scanned`."""
        at = start
        while at < stop:
            faults: list[str] = []
            for reader in self._readers:
                try:
                    for block in blocks_from_units(reader.units(at, stop), at):
                        yield block
                        at = block.stop
                except UnreadableError as error:
                    faults.append(str(error))
                if at >= stop:
                    return
            # A running server may have deleted trimmed segments.
            kept = self._session.after_trim(at, self._session.trim)
            if kept == at:
                why = "; ".join(faults) or "the stable records end before it"
                raise UnavailableError(f"no server's files contain gsn {at}: {why}")
            at = kept


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return what changes with each version of a file; None if there is no file."""
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


def _end(shard: int, readers: list[BlockReader]) -> int:
    """Return the greatest stable end of a shard's directories.

    Raises:
        UnavailableError: all have files that cannot be read, so the shard's records are unknown.

    """
    ends: list[int] = []
    faults: list[str] = []
    for reader in readers:
        try:
            ends.append(reader.stable_end)
        except UnreadableError as error:
            faults.append(str(error))
    if not ends:
        raise UnavailableError(f"no files of shard {shard} can be read: {'; '.join(faults)}")
    return max(ends)


def _trim(reader: BlockReader) -> int:
    try:
        return reader.trim
    except UnreadableError:
        return reader.start


def _steps(reader: BlockReader, directory: Path) -> list[tuple[int, int]]:
    """Return the ends of blocks, and of segments without blocks, each with its size in bytes."""
    rows = {segment.name: index.blocks for segment, index in reader.indexed()}
    listed: list[Segment] = []
    with suppress(OSError):  # another server may have the files
        listed = [entry.segment for entry in reader.listed()]
    ends = [segment.base for segment in listed[1:]] + [_MAX_END] * bool(listed)
    steps: list[tuple[int, int]] = []
    for segment, end in zip(listed, ends, strict=True):
        blocks = rows.get(segment.name)
        if blocks is None:
            steps.append((end, _size(directory / segment.name)))
        else:
            steps += [(block.stop, block.data.size) for block in blocks]
    return steps


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
