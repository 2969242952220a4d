"""Serves blocks: one thread a connection, at most so many, each with limits on its patience.

A block goes from the files to the socket without passing through here (`sendfile`); who is on the
same machine is told where it is. Rule: whoever connects may be anybody: what is no request, or
comes too slowly, ends the connection, and so does a file that changed while it was sent; nothing
that a peer does costs more than its connection, and who is elsewhere learns of no path
(docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

import structlog

from ziplog.archive.messages import (
    BLOCK,
    LOCATE,
    LOCATED,
    MOST_PLACES,
    NEXT,
    REQUEST_BYTES,
    STRANGER,
    WRITERS,
    Answer,
    Places,
    decode_request,
    encode_answer,
    encode_places,
)
from ziplog.archive.sockets import is_here, receive
from ziplog.segments.block_file import encode_writers, part_of
from ziplog.segments.block_reader import Archive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shard.archive.shared_state import SharedState
    from ziplog.archive.messages import Request
    from ziplog.segments.block_reader import BlockPlace

MAX_CONNECTIONS: Final = 64
#: Who has not asked anything after so long is sent away; who has, may be silent for longer.
_FIRST_S: Final = 5.0
_IDLE_S: Final = 60.0
#: For how long a peer may take nothing of what is sent.
_STUCK_S: Final = 10.0
#: The system is left alone for so long after it had no connection to give.
_REFUSED_S: Final = 1.0


class ArchiveServer:
    """The serving half of the archive."""

    def __init__(
        self,
        directory: Path,
        state: SharedState,
        host: str,
        shard: int,
        on_missing: Callable[[], object],
    ) -> None:
        """Listen at a port of `host` that the system chooses.

        Args:
            directory: the segments.
            state: what the server tells.
            host: where to listen.
            shard: whose segments they are.
            on_missing: is told that somebody has asked for a block of a sealed segment that is not
                there; from any thread.

        Raises:
            OSError: it cannot.

        """
        self._blocks: Final = Archive(directory)
        # An archive is of one thread; what it is asked takes little time.
        self._blocks_lock: Final = threading.Lock()
        self._state, self._shard = state, shard
        self._on_missing = on_missing
        self._free_connections: Final = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._log = structlog.get_logger()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket: Final = socket.create_server((host, 0), family=family, backlog=128)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Serve from now on, as long as the process lives."""
        threading.Thread(target=self._accept, name="archive", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                # Too many files are open, or the peer has gone already.
                self._log.warning("no connection to the archive", error=str(error))
                time.sleep(_REFUSED_S)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Give a connection a thread, if there is room."""
        if not self._free_connections.acquire(blocking=False):
            connection.close()
            return
        thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The system has no more threads for us.
            self._log.warning("no thread for a connection", error=str(error))
            connection.close()
            self._free_connections.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_FIRST_S)
                while request := decode_request(bytes(receive(connection, REQUEST_BYTES))):
                    connection.settimeout(_STUCK_S)
                    if not self._answer(connection, request):
                        return
                    connection.settimeout(_IDLE_S)
        except OSError:
            pass  # it has gone, or was too slow
        finally:
            self._free_connections.release()

    def _answer(self, connection: socket.socket, request: Request) -> bool:
        """Answer a request; whether the connection may go on."""
        cluster = self._state.cluster
        if not cluster or (request.cluster, request.shard) != (cluster, self._shard):
            connection.sendall(encode_answer(Answer(STRANGER)))
            return False
        if request.kind == WRITERS:
            with self._blocks_lock:
                position, writers = self._blocks.writers(request.gsn)
            content = encode_writers(writers)
            answer = Answer(WRITERS, position, columns=part_of(content, 0))
            connection.sendall(encode_answer(answer) + content)
            return True
        with self._blocks_lock:
            found = self._blocks.find(request.gsn, MOST_PLACES)
            is_sealed = self._state.trim <= request.gsn < self._blocks.sealed_end
            if not isinstance(found, int) and request.gsn < self._state.trim:
                # The server says what it says of a position that was trimmed.
                found = self._blocks.next_start(max(self._state.trim, found[0].block.stop))
        if isinstance(found, int):
            if is_sealed:
                self._on_missing()
            connection.sendall(encode_answer(Answer(NEXT, found)))
            return True
        if request.kind == LOCATE and is_here(connection):
            return _locate(connection, found)
        return _send(connection, found[0])


def _locate(connection: socket.socket, places: Sequence[BlockPlace]) -> bool:
    """Tell somebody on this machine, and nobody else, where blocks are."""
    path = os.fsencode(places[0].segment.absolute())
    told = encode_places(Places(path, [place.block for place in places]))
    connection.sendall(encode_answer(Answer(LOCATED, places_size=len(told))) + told)
    return True


def _send(connection: socket.socket, place: BlockPlace) -> bool:
    block = place.block
    answer = Answer(
        BLOCK, block.start, block.stop, block.rows, block.has_keys,
        block.columns, block.origins, block.data,
    )  # fmt: skip
    told = block.columns.size + block.origins.size
    try:
        rows, segment = place.rows.open("rb"), place.segment.open("rb")
    except FileNotFoundError:
        # It was deleted just now.
        connection.sendall(encode_answer(Answer(NEXT, block.stop)))
        return True
    with rows, segment:
        connection.sendall(encode_answer(answer), socket.MSG_MORE)
        # A block of no-ops has no columns.
        is_told = not told or connection.sendfile(rows, block.columns.at, told) == told
        size = block.data.size
        return is_told and connection.sendfile(segment, block.data.at, size) == size
