"""Serves blocks of sealed segments: one thread per connection, with limits.

A block goes from the files to the socket with `sendfile`; a client on the same machine receives its
location instead. Rule: any peer may connect. An invalid or slow request ends the connection, and so
does a file that changed during the transfer. A peer can cost at most its connection, and a remote
peer learns no path (docs/protocol.md, section 14.2).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from ziplog import event_log
from ziplog.archive.messages import (
    BLOCK,
    LOCATE,
    LOCATED,
    MAX_PLACES,
    NEXT,
    REQUEST_BYTES,
    WRITERS,
    WRONG_SHARD,
    Answer,
    Places,
    decode_request,
    encode_answer,
    encode_places,
)
from ziplog.archive.sockets import is_same_machine, receive
from ziplog.segments.block_file import encode_writers, part_of
from ziplog.segments.block_reader import BlockReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shard.archive.shared_state import SharedState
    from ziplog.archive.messages import Request
    from ziplog.segments.block_reader import BlockPlace

MAX_CONNECTIONS: Final = 64
#: Timeouts for a connection's first request, and between requests.
_FIRST_REQUEST_TIMEOUT_S: Final = 5.0
_IDLE_TIMEOUT_S: Final = 60.0
#: Timeout of a send that makes no progress.
_SEND_TIMEOUT_S: Final = 10.0
#: Pause after the system refused to accept a connection.
_ACCEPT_RETRY_S: Final = 1.0


class ArchiveServer:
    """The serving process of the archive."""

    def __init__(
        self,
        directory: Path,
        state: SharedState,
        host: str,
        shard: int,
        on_missing: Callable[[], object],
        port: int = 0,
    ) -> None:
        """Listen on a port of `host`.

        Args:
            directory: the directory of the segments.
            state: the memory shared with the storage server.
            host: the address to listen on.
            shard: the shard of the segments.
            on_missing: called when a client requests a missing block of a sealed segment; on any
                thread.
            port: where to listen; 0: the system selects one.

        Raises:
            OSError: the system refuses to listen.

        """
        self._blocks: Final = BlockReader(directory)
        # The index is not thread-safe, and lookups are short.
        self._blocks_lock: Final = threading.Lock()
        self._state, self._shard = state, shard
        self._on_missing = on_missing
        self._free_connections: Final = threading.BoundedSemaphore(MAX_CONNECTIONS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket: Final = socket.create_server((host, port), family=family, backlog=128)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Start to serve, until the process ends."""
        threading.Thread(target=self._accept, name="archive", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                # Too many files are open, or the peer has disconnected.
                event_log.warning("the archive cannot accept a connection", error=str(error))
                time.sleep(_ACCEPT_RETRY_S)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Start a thread for a connection, if the limit allows."""
        if not self._free_connections.acquire(blocking=False):
            connection.close()
            return
        thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The system is out of threads.
            event_log.warning("the archive cannot start a thread", error=str(error))
            connection.close()
            self._free_connections.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_FIRST_REQUEST_TIMEOUT_S)
                while request := decode_request(bytes(receive(connection, REQUEST_BYTES))):
                    connection.settimeout(_SEND_TIMEOUT_S)
                    if not self._answer(connection, request):
                        return
                    connection.settimeout(_IDLE_TIMEOUT_S)
        except OSError:
            pass  # the peer disconnected, or was too slow
        finally:
            self._free_connections.release()

    def _answer(self, connection: socket.socket, request: Request) -> bool:
        """Answer a request; return whether the connection stays open."""
        cluster = self._state.cluster
        if not cluster or (request.cluster, request.shard) != (cluster, self._shard):
            connection.sendall(encode_answer(Answer(WRONG_SHARD)))
            return False
        if request.kind == WRITERS:
            with self._blocks_lock:
                position, writers = self._blocks.writers(request.gsn)
            content = encode_writers(writers)
            answer = Answer(WRITERS, position, columns=part_of(content, 0))
            connection.sendall(encode_answer(answer) + content)
            return True
        with self._blocks_lock:
            found = self._blocks.find(request.gsn, MAX_PLACES)
            is_sealed = self._state.trim <= request.gsn < self._blocks.sealed_end
            if not isinstance(found, int) and request.gsn < self._state.trim:
                # As for any trimmed position, answer with the first one still there.
                found = self._blocks.next_start(max(self._state.trim, found[0].block.stop))
        if isinstance(found, int):
            if is_sealed:
                self._on_missing()
            connection.sendall(encode_answer(Answer(NEXT, found)))
            return True
        if request.kind == LOCATE and is_same_machine(connection):
            return _locate(connection, found)
        return _send(connection, found[0])


def _locate(connection: socket.socket, places: Sequence[BlockPlace]) -> bool:
    """Send the locations of blocks to a client on this machine."""
    path = os.fsencode(places[0].segment.absolute())
    content = encode_places(Places(path, [place.block for place in places]))
    connection.sendall(encode_answer(Answer(LOCATED, places_size=len(content))) + content)
    return True


def _send(connection: socket.socket, place: BlockPlace) -> bool:
    block = place.block
    answer = Answer(
        BLOCK, block.start, block.stop, block.rows, block.has_keys,
        block.columns, block.origins, block.data,
    )  # fmt: skip
    index_size = block.columns.size + block.origins.size
    try:
        rows, segment = place.rows.open("rb"), place.segment.open("rb")
    except FileNotFoundError:
        # The segment was deleted just now.
        connection.sendall(encode_answer(Answer(NEXT, block.stop)))
        return True
    with rows, segment:
        connection.sendall(encode_answer(answer), socket.MSG_MORE)
        # A block of no-ops has no columns.
        is_sent = not index_size or (
            connection.sendfile(rows, block.columns.at, index_size) == index_size
        )
        size = block.data.size
        return is_sent and connection.sendfile(segment, block.data.at, size) == size
