"""The client of an archive: blocks of sealed segments, over TCP or from the same machine's files.

One connection, one request after the other. Rules: what comes is bounded before it is read, and
believed only under its CRCs; on one machine the archive is asked where blocks are, some at a time,
and the files are read here. What they do not give comes over the connection from then on. Any
replica's archive will do: a block is stable (docs/protocol.md, section 14.2).
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

#: Who does not take a connection in this time is away, however long an answer may take: others are
#: asked sooner, and somebody may have known this one for longer than it was there.
_CONNECT_S: Final = 2.0


class ArchiveClient:
    """A client of one server's archive. One thread. A context manager that closes it."""

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
        """Ask the archive at `host` and `port`; it is called with the first question.

        Args:
            host: as `Outline` tells it.
            port: likewise.
            cluster: the cluster's number.
            shard: whose positions are asked for.
            timeout_s: for how long the archive may be silent.
            pool: where blocks of this machine's files are read to; None: some of its own.

        """
        self._address, self._timeout_s = (host, port), timeout_s
        self._cluster, self._shard = cluster, shard
        self._socket: socket.socket | None = None
        #: Whether the archive seems to be on this machine, and whether its files gave what it said.
        self._is_same_machine, self._reads_files = False, True
        #: Where it said that blocks are.
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
        """Leave the archive. May be called twice."""
        self._is_closed = True
        self._disconnect()

    def block(self, gsn: int) -> Block | int:
        """Return the block over a position.

        Returns:
            The block, whose columns begin at a multiple of 8 bytes in memory; or, if the archive
            does not have it (any more), where its next block begins; 0: there is none.

        Raises:
            UnavailableError: the archive is away, is another cluster's or shard's, or what it has
                is damaged: ask another replica's, or its server.
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
            # They are another machine's, or were deleted just now.
            self._reads_files, self._places = False, []
            answer, content = self._request(BLOCK, gsn)
        if answer.kind == NEXT and (not answer.start or answer.start > gsn):
            return answer.start
        if not answer.start <= gsn < answer.stop:
            raise self._unavailable(f"sent a block that gsn {gsn} is not in")
        return self._block(answer, content)

    def _read(self, gsn: int) -> Block | None:
        """Return the block over a position from where it was told to be, None: it is not there."""
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
                raise self._unavailable("sent a block that is damaged")
        columns, origins, data = parts
        try:
            runs = decode_origins(origins)
        except msgspec.MsgspecError as error:
            raise self._unavailable(f"sent origins that are none: {error}") from error
        return Block(
            answer.start, answer.stop, answer.rows, answer.has_keys, columns, data, runs
        )  # fmt: skip

    def writers(self, gsn: int) -> tuple[int, WriterTable]:
        """Return the writers' table at a position, as far as the archive knows.

        Returns:
            A position, and the table there: `gsn`, or less if blocks do not cover all before it.

        Raises:
            UnavailableError: as `block`.
            ClosedError: likewise.

        """
        answer, content = self._request(WRITERS, gsn)
        if answer.kind != WRITERS or not is_sound(answer.columns, content):
            raise self._unavailable("sent a writers' table that is damaged")
        try:
            return answer.start, decode_writers(content)
        except msgspec.MsgspecError as error:
            raise self._unavailable(f"sent a writers' table that is none: {error}") from error

    # --- the connection ----------------------------------------------------------------------

    def _request(self, kind: int, gsn: int) -> tuple[Answer, bytearray]:
        if self._is_closed:
            raise ClosedError("this client of an archive")
        was_there = self._socket is not None
        try:
            try:
                answer, content = self._send_and_receive(kind, gsn)
            except ConnectionError:
                # It may have left a connection that was silent for long.
                if not was_there:
                    raise
                self._disconnect()
                answer, content = self._send_and_receive(kind, gsn)
        except OSError as error:
            raise self._unavailable(f"does not answer: {error or type(error).__name__}") from error
        if answer.kind == WRONG_SHARD:
            raise self._unavailable(f"is not of shard {self._shard} of this cluster")
        return answer, content

    def _send_and_receive(self, kind: int, gsn: int) -> tuple[Answer, bytearray]:
        connection = self._socket
        if connection is None:
            patience_s = min(self._timeout_s, _CONNECT_S)
            connection = self._socket = socket.create_connection(self._address, patience_s)
            connection.settimeout(self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._is_same_machine = is_same_machine(connection)
        if kind == BLOCK and self._is_same_machine and self._reads_files:
            kind = LOCATE
        connection.sendall(encode_request(Request(kind, self._cluster, self._shard, gsn)))
        answer = decode_answer(bytes(receive(connection, ANSWER_BYTES)))
        # Whoever is not here names no files.
        if answer is None or (answer.kind == LOCATED and kind != LOCATE):
            raise self._unavailable("sent what is no answer")
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
    """Return where blocks are said to be; nothing if they cannot be there."""
    told = decode_places(content)
    if told is None:
        return []
    path = Path(os.fsdecode(told.segment))
    # Whoever answered has nothing else read than what servers wrote.
    segment = Segment.named(path.name)
    if segment is None:
        return []
    rows = path.with_name(segment.block_file_name)
    return [BlockPlace(path, rows, block) for block in told.blocks]
