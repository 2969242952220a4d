"""Fault layer inside a node's process: between the node and its sockets, Raft links and disk.

Nodes with this layer introduce themselves by an extra frame on every connection, so each frame has
a known sender and receiver; a peer that does not introduce itself is a client. Rule: a frame that a
fault drops looks to the node like a frame that the network lost: it was sent.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fault_injection import control
from ziplog.raft import connections
from ziplog.runtime import transport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fault_injection.control import FaultSource

#: Begins no message of the protocol.
_INTRODUCTION: Final = b"\xc1I am "
_INTRODUCE_NS: Final = 20_000_000
#: Maximum number of routes with a remembered owner.
_MAX_ROUTES: Final = 10_000


def install(source: FaultSource, name: str, raft_nodes: Mapping[str, str]) -> None:
    """Install the fault layer of a node in this process.

    Args:
        source: the current faults.
        name: the node's name.
        raft_nodes: the consensus endpoints ("host:port") of all nodes, with their names.

    """
    transport.Transport = _transport(source, name)  # type: ignore[misc]
    _link(source, raft_nodes)
    _slow_disk(source)
    _full_disk(source)


def _transport(source: FaultSource, name: str) -> type[transport.Transport]:
    introduction = _INTRODUCTION + name.encode()
    chance = random.Random(name)  # noqa: S311 - no secret

    class FaultyTransport(transport.Transport):
        """The transport, of which some frames get lost, and some come late."""

        def __init__(self, bind: str | None = None) -> None:
            super().__init__(bind)
            #: Frames that came and were not passed on.
            self.swallowed = 0
            self._peers: dict[bytes, str] = {}
            self._introduced: dict[bytes, int] = {}
            self._late: deque[tuple[int, bytes, bytes]] = deque()

        def connect(self, name: bytes, endpoint: str) -> None:
            super().connect(name, endpoint)
            self._introduce(name, time.monotonic_ns())

        def _introduce(self, name: bytes, now: int) -> None:
            # Again and again: the connection may be another one by now.
            self._introduced[name] = now
            super().send(name, introduction)

        def send(self, dst: bytes, frame: bytes) -> bool:
            current, now = source.current(), time.monotonic_ns()
            if not _is_route(dst):
                peer: str | None = dst.decode(errors="replace")
                if now - self._introduced.get(dst, 0) >= _INTRODUCE_NS:
                    self._introduce(dst, now)
            else:
                peer = self._peers.get(dst)
            if current.no_clients if peer is None else peer in current.silent_to:
                return True
            if current.lost_percent and chance.random() * 100 < current.lost_percent:
                return True
            delay_ms = current.delay_ms(peer)
            if delay_ms or any(late == dst for _, late, _ in self._late):
                self._late.append((now + int(delay_ms * 1e6), dst, frame))
                return True
            return super().send(dst, frame)

        def receive(self) -> tuple[bytes, bytes] | None:
            self._send_late()
            while (received := super().receive()) is not None:
                src, frame = received
                if frame.startswith(_INTRODUCTION):
                    if len(self._peers) >= _MAX_ROUTES:
                        self._peers.clear()
                    self._peers[src] = frame[len(_INTRODUCTION) :].decode(errors="replace")
                    continue
                is_client = _is_route(src) and src not in self._peers
                if not (is_client and source.current().no_clients):
                    return received
                self.swallowed += 1
            return None

        def wait(self, timeout_ns: int | None) -> None:
            self._send_late()
            if self._late:
                due = max(0, self._late[0][0] - time.monotonic_ns())
                timeout_ns = due if timeout_ns is None else min(timeout_ns, due)
            super().wait(timeout_ns)

        def wait_and_receive(self, timeout_ns: int | None) -> tuple[bytes, bytes] | None:
            self.wait(timeout_ns)
            return self.receive()

        def _send_late(self) -> None:
            while self._late and self._late[0][0] <= time.monotonic_ns():
                _, dst, frame = self._late.popleft()
                super().send(dst, frame)

    return FaultyTransport


def _is_route(peer: bytes) -> bool:
    """Whether a peer connected to this process; if not, this process connected to it."""
    return peer[0] == 0


def _link(source: FaultSource, raft_nodes: Mapping[str, str]) -> None:
    """Drop or delay a node's consensus messages."""
    send = connections.Transport.send
    chance = random.Random()  # noqa: S311

    def faulty(self: Any, node: Any, message: Any) -> Any:
        current = source.current()
        name = raft_nodes.get(node.address)
        if name in current.silent_to:
            return True
        if current.lost_percent and chance.random() * 100 < current.lost_percent:
            return True
        if delay_ms := current.delay_ms(name):
            time.sleep(delay_ms / 1000)
        return send(self, node, message)

    connections.Transport.send = faulty


def _slow_disk(source: FaultSource) -> None:
    def slow(flush: Callable[[Any], None]) -> Callable[[Any], None]:
        def slowly(fd: Any) -> None:
            current = source.current()
            size = os.fstat(fd).st_size
            if current.flush_ms:
                time.sleep(current.flush_ms / 1000)
            flush(fd)
            if current.notes_syncs:
                path = str(Path(f"/proc/self/fd/{fd}").readlink()) if isinstance(fd, int) else ""
                if path.endswith(".seg"):
                    control.note_sync(source.data_dir, source.node, path, size)

        return slowly

    os.fsync = slow(os.fsync)  # type: ignore[assignment]
    os.fdatasync = slow(os.fdatasync)  # type: ignore[assignment]


def _full_disk(source: FaultSource) -> None:
    """Limit the bytes that segment files accept from the start of the fault on."""
    written, write = 0, os.pwritev

    def limited(fd: int, buffers: Any, offset: int, /, flags: int = 0) -> int:
        nonlocal written
        limit = source.current().disk_bytes
        if limit is None:
            written = 0
        else:
            written += sum(map(len, buffers))
            if written > limit:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, buffers, offset, flags)

    os.pwritev = limited
