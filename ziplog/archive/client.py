"""Client of an archive: reads blocks of sealed segments, over TCP or from local files.

One connection, one request at a time. The size of an answer is limited before it is read, and its
contents are used only if their CRCs are right. If the archive runs on the same machine, the client
requests the places of blocks and reads the files itself; if that fails, it requests the blocks from
then on. Blocks are stable, so any replica's archive will do (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from ziplog.archive.messages import (
    ANSWER_BYTES,
    BLOCK,
    LOCATE,
    LOCATED,
    NEXT,
    WRITERS,
    WRONG_SHARD,
    Answer,
    Request,
    decode_answer,
    decode_places,
    encode_request,
)
from ziplog.archive.sockets import is_same_machine, receive
from ziplog.errors import ClosedError, UnavailableError
from ziplog.segments.block_file import decode_origins, decode_writers, is_sound
from ziplog.segments.block_reader import BlockPlace, read_block
from ziplog.segments.blocks import Block
from ziplog.segments.buffer_pool import BufferPool
from ziplog.segments.segment import Segment

if TYPE_CHECKING:
    from types import TracebackType

    from ziplog.core.writer_table import WriterTable

#: Connect timeout, independent of the timeout for answers: the archive's address may be out of
#: date, and then another replica's archive can be used sooner.
_CONNECT_S: Final = 2.0


class ArchiveClient:
    """A client of one server's archive, for one thread. A context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        cluster: int,
        shard: int,
        *,
        timeout_s: float = 10.0,
        pool: BufferPool | None = None,
    ) -> None:
        """Create a client of the archive at `host` and `port`; it connects at the first request.

        Args:
            host: the server's host.
            port: the archive's port, from `Outlined`.
            cluster: the cluster's number.
            shard: the shard of the requested blocks.
            timeout_s: timeout for each answer.
            pool: buffers for blocks that are read from local files; None: a pool of its own.

        """
        self._address, self._timeout_s = (host, port), timeout_s
        self._cluster, self._shard = cluster, shard
        self._socket: socket.socket | None = None
        #: Whether the archive seems to run on this machine, and whether to read its files.
        self._is_same_machine, self._reads_files = False, True
        #: The places of blocks that it sent.
        self._places: list[BlockPlace] = []
        self._pool: Final = pool or BufferPool()
        self._is_closed = False

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._is_closed = True
        self._disconnect()

    def block(self, gsn: int) -> Block | int:
        """Return the block that holds a position.

        Returns:
            The block, with columns aligned to 8 bytes in memory; or, if the archive
            does not have it, or no longer, the start of its next block; 0: there is none.

        Raises:
            UnavailableError: the archive does not answer, belongs to another cluster or shard, or
                its data is damaged: use another replica's archive, or its server.
            ClosedError: this client was closed.

        """
        block = self._read(gsn)
        if block is not None:
            return block
        answer, content = self._request(BLOCK, gsn)
        if answer.kind == LOCATED:
            self._places = _block_places(content)
            block = self._read(gsn)
            if block is not None:
                return block
            # The files are on another machine, or were deleted just now.
            self._reads_files, self._places = False, []
            answer, content = self._request(BLOCK, gsn)
        if answer.kind == NEXT and (not answer.start or answer.start > gsn):
            return answer.start
        if not answer.start <= gsn < answer.stop:
            raise self._unavailable(f"sent a block that does not hold gsn {gsn}")
        return self._block(answer, content)

    def _read(self, gsn: int) -> Block | None:
        """Return the block that holds a position from local files; None if that is not possible."""
        for place in self._places:
            if place.block.start <= gsn < place.block.stop:
                return read_block(place, self._pool)
        return None

    def _block(self, answer: Answer, content: bytearray) -> Block:
        view = memoryview(content)
        at = 0
        parts: list[memoryview] = []
        for part in (answer.columns, answer.origins, answer.data):
            parts.append(view[at : at + part.size])
            at += part.size
            if not is_sound(part, parts[-1]):
                raise self._unavailable("sent a damaged block")
        columns, origins, data = parts
        try:
            runs = decode_origins(origins)
        except msgspec.MsgspecError as error:
            raise self._unavailable(f"sent invalid origins: {error}") from error
        return Block(
            answer.start, answer.stop, answer.rows, answer.has_keys, columns, data, runs
        )  # fmt: skip

    def writers(self, gsn: int) -> tuple[int, WriterTable]:
        """Return the writer table at a position, or at the last position known before it.

        Returns:
            A position, and the table there: `gsn`, or less if blocks do not cover all before it.

        Raises:
            UnavailableError: as `block`.
            ClosedError: likewise.

        """
        answer, content = self._request(WRITERS, gsn)
        if answer.kind != WRITERS or not is_sound(answer.columns, content):
            raise self._unavailable("sent a damaged writer table")
        try:
            return answer.start, decode_writers(content)
        except msgspec.MsgspecError as error:
            raise self._unavailable(f"sent an invalid writer table: {error}") from error

    # --- the connection ----------------------------------------------------------------------

    def _request(self, kind: int, gsn: int) -> tuple[Answer, bytearray]:
        if self._is_closed:
            raise ClosedError("this archive client")
        was_connected = self._socket is not None
        try:
            try:
                answer, content = self._send_and_receive(kind, gsn)
            except ConnectionError:
                # The archive may have closed a connection that was idle for long.
                if not was_connected:
                    raise
                self._disconnect()
                answer, content = self._send_and_receive(kind, gsn)
        except OSError as error:
            raise self._unavailable(f"does not answer: {error or type(error).__name__}") from error
        if answer.kind == WRONG_SHARD:
            raise self._unavailable(f"does not belong to shard {self._shard} of this cluster")
        return answer, content

    def _send_and_receive(self, kind: int, gsn: int) -> tuple[Answer, bytearray]:
        connection = self._socket
        if connection is None:
            connect_timeout_s = min(self._timeout_s, _CONNECT_S)
            connection = self._socket = socket.create_connection(self._address, connect_timeout_s)
            connection.settimeout(self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._is_same_machine = is_same_machine(connection)
        if kind == BLOCK and self._is_same_machine and self._reads_files:
            kind = LOCATE
        connection.sendall(encode_request(Request(kind, self._cluster, self._shard, gsn)))
        answer = decode_answer(bytes(receive(connection, ANSWER_BYTES)))
        # Places are accepted only from an archive on this machine.
        if answer is None or (answer.kind == LOCATED and kind != LOCATE):
            raise self._unavailable("sent an invalid answer")
        return answer, receive(connection, answer.size)

    def _unavailable(self, what: str) -> UnavailableError:
        self._disconnect()
        host, port = self._address
        return UnavailableError(f"the archive at {host}:{port} {what}")

    def _disconnect(self) -> None:
        self._places = []
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None


def _block_places(content: bytearray) -> list[BlockPlace]:
    """Return the places of blocks in an answer; empty if they are invalid."""
    places = decode_places(content)
    if places is None:
        return []
    path = Path(os.fsdecode(places.segment))
    # The archive is not trusted: only segment files and their block files are read.
    segment = Segment.named(path.name)
    if segment is None:
        return []
    rows = path.with_name(segment.block_file_name)
    return [BlockPlace(path, rows, block) for block in places.blocks]
