"""Peers that send without end, disconnect early or send garbage do not stop the process."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import resource
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import pytest
import zmq

from tests.waiting import wait_until
from ziplog.runtime import descriptors, receive_limits
from ziplog.runtime.receive_limits import LIMIT_BYTES, ReceiveLimiter
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
PING: Final = b"\x04\x07\x04PING\0\0"
#: libzmq reads this much at once.
READ_BYTES: Final = 8192


class Raw:
    """A peer that sends plain bytes after the handshake."""

    def __init__(self, port: int, identity: bytes = b"") -> None:
        ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity"
        ready += struct.pack(">I", len(identity)) + identity
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.send(GREETING + b"\x04" + bytes([len(ready)]) + ready)
        got = b""
        while len(got) < len(GREETING) + 2 or len(got) < len(GREETING) + 2 + got[65]:
            got += self.socket.recv(4096)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reset(self) -> None:
        """Close the connection; unsent data is lost."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def wire(frame: bytes) -> bytes:
    """Return a frame as it is on the wire."""
    size = len(frame)
    head = b"\0" + bytes([size]) if size < 256 else b"\2" + size.to_bytes(8, "big")
    return head + frame


@pytest.fixture
def server() -> Iterator[Transport]:
    transport = Transport("127.0.0.1:0")
    yield transport
    transport.close()


def port_of(transport: Transport) -> int:
    assert transport.endpoint is not None
    return int(transport.endpoint.rpartition(":")[2])


def take_all(transport: Transport) -> list[bytes]:
    found = []
    while (received := transport.receive()) is not None:
        found.append(received[1])
    transport.wait(0)
    return found


# --- peers that disconnect -------------------------------------------------------------------


def be_attacked() -> None:
    """Run a server with a peer that sends more than is read, sends a ping, and disconnects."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    server = Transport("127.0.0.1:0")
    port = port_of(server)
    for _ in range(5):
        attacker = Raw(port)
        attack = wire(b"x") * 2_000 + PING * 10
        assert len(attack) < READ_BYTES
        attacker.send(attack)
        # After a later handshake, the I/O thread has processed everything before it.
        Raw(port).reset()
        attacker.reset()
        Raw(port).reset()
        wait_until(lambda: not take_all(server), "all frames")
    with Raw(port) as friend:
        friend.send(wire(b"still there"))
        wait_until(lambda: take_all(server) == [b"still there"], "a frame")
    server.close()


def test_peer_that_disconnects_in_a_flood_does_not_stop_the_process() -> None:
    # libzmq would abort the process with SIGABRT, so the server has a process of its own.
    process = multiprocessing.get_context("spawn").Process(target=be_attacked)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_libzmq_never_stops_reading_and_sends_no_heartbeats(server: Transport) -> None:
    # Either of the two can abort the process if a connection ends at the wrong time.
    options = (zmq.RCVHWM, zmq.HEARTBEAT_IVL)
    assert [server._socket.get(option) for option in options] == [0, 0]
    with Raw(port_of(server)) as peer:
        peer.send(wire(b"x"))
        wait_until(lambda: take_all(server) == [b"x"], "a frame")
        (found,) = [fd for fd in open_files() if is_to(fd, peer.socket.getsockname())]
        with socket.fromfd(found, socket.AF_INET, socket.SOCK_STREAM) as ours:
            # The kernel's keepalive replaces them.
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000


def open_files() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def is_to(fd: int, address: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError):
        # `fromfd` does not close its duplicate if the descriptor is not a socket.
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as found:
                return bool(found.getpeername() == address)
    return False


# --- peers that send without end -------------------------------------------------------------


class Flood:
    """A peer that sends frames until its connection is closed."""

    def __init__(self, port: int, identity: bytes = b"") -> None:
        self._peer = Raw(port, identity)
        self._is_over = False
        self.sent = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        data = wire(bytes(1000)) * 100
        with contextlib.suppress(OSError):
            while not self._is_over:
                self._peer.send(data)
                self.sent += len(data)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):
            self._peer.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._peer.reset()


@pytest.mark.parametrize("identity", [b"", b"twin", b"\0twin"])
def test_only_the_flooding_connection_is_closed(server: Transport, identity: bytes) -> None:
    port = port_of(server)
    # libzmq never delivers the frames of the second of two peers with one identity.
    with Raw(port, identity), Raw(port) as other, Flood(port, identity) as flood:
        # No frame is read in the meantime.
        wait_until(lambda: server.wait(0) or server.cut, "a cut")
        assert flood.sent > LIMIT_BYTES // 2
        other.send(wire(b"after"))
        wait_until(lambda: b"after" in take_all(server), "the other's frame")
        assert server.cut == 1


def test_small_frames_of_many_connections_are_bounded_together(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limits, "TOTAL_BYTES", 1_000_000)
    monkeypatch.setattr(receive_limits, "CHECK_INTERVAL_NS", 0)
    port = port_of(server)
    with contextlib.ExitStack() as stack:
        quiet = stack.enter_context(Raw(port))
        peers = [stack.enter_context(Raw(port)) for _ in range(8)]
        for peer in peers:
            peer.send(wire(b"x"))  # so that the size of its frames is known
        taken: list[bytes] = []
        wait_until(lambda: taken.extend(take_all(server)) or len(taken) == 8, "frames")
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.send(wire(b"x") * 20_000)
        wait_until(lambda: server.wait(0) or server.cut >= 8 - 1, "all but one cut off")
        quiet.send(wire(b"after"))
        wait_until(lambda: b"after" in take_all(server), "the other's frame")


def test_port_accepts_no_connections_while_closed_ones_have_left_too_much(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limits, "TOTAL_BYTES", 1_000_000)
    monkeypatch.setattr(receive_limits, "CHECK_INTERVAL_NS", 0)
    port = port_of(server)
    watch = server._limiter
    assert watch is not None
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Raw(port)) for _ in range(8)]
        for peer in peers:
            peer.send(wire(b"x"))  # so that the size of its frames is known
        taken: list[bytes] = []
        wait_until(lambda: taken.extend(take_all(server)) or len(taken) == 8, "frames")
        assert not watch._accept_pause.is_active
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.send(wire(b"x") * 20_000)
        wait_until(lambda: server.wait(0) or watch._accept_pause.is_active, "a pause")
        monkeypatch.setattr(descriptors, "_PAUSE_NS", 0)
    wait_until(lambda: take_all(server) == [] and not watch._accept_pause.is_active, "no pause")
    with Raw(port) as newcomer:
        newcomer.send(wire(b"after"))
        wait_until(lambda: b"after" in take_all(server), "the newcomer's frame")


def test_frames_that_are_read_do_not_count(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limits, "LIMIT_BYTES", 500_000)
    monkeypatch.setattr(receive_limits, "CHECK_INTERVAL_NS", 0)
    frames = [bytes(size) for size in (0, 1, 255, 256, 70_000)]
    data = b"".join(wire(frame) for frame in frames)
    with Raw(port_of(server)) as peer:
        for _ in range(20):
            peer.send(data)
            found: list[bytes] = []
            wait_until(lambda: found.extend(take_all(server)) or found == frames, "frames")  # noqa: B023
        [counted] = server._peers.values()
        assert server._limiter is not None
        server._limiter._next_check = 0
        server.wait(0)
        # Exact to the byte: a drifting count would in the end close every connection.
        assert counted.taken == 20 * len(data) > receive_limits.LIMIT_BYTES
    assert server.cut == 0


def test_process_that_never_waits_checks_too(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_limits, "LIMIT_BYTES", 1_000_000)
    with Flood(port_of(server)):
        wait_until(lambda: [server.receive() for _ in range(100)] and server.cut, "a cut")


def test_closed_peer_is_removed(server: Transport) -> None:
    port = port_of(server)
    for _ in range(50):
        with Raw(port) as peer:
            peer.send(wire(b"x"))
            wait_until(lambda: take_all(server) == [b"x"], "a frame")
    wait_until(lambda: take_all(server) == [] and not server._peers, "no peers")


def test_no_peer_is_removed_for_lack_of_descriptors(
    server: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Raw(port_of(server)) as peer:
        peer.send(wire(b"x"))
        wait_until(lambda: take_all(server) == [b"x"], "a frame")
        looks: list[str] = []

        def fail(path: str) -> None:
            looks.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "scandir", fail)
        wait_until(lambda: take_all(server) == [] and len(looks) > 2, "looks")
        assert len(server._peers) == 1


def test_only_connections_to_the_port_are_closed_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_limits, "LIMIT_BYTES", 1_000)
    with contextlib.ExitStack() as stack:
        ours, others = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in "ab")
        accepted = []
        for listener in (ours, others):
            outward = stack.enter_context(socket.create_connection(listener.getsockname()))
            accepted.append(stack.enter_context(listener.accept()[0]))
            for end in (outward, accepted[-1]):
                end.sendall(bytes(1_001))
        for end in accepted:
            assert len(end.recv(1_001, socket.MSG_PEEK | socket.MSG_WAITALL)) == 1_001
        watch = ReceiveLimiter(ours.getsockname()[1])
        for _ in range(2):
            watch._next_check = 0
            assert watch.enforce() == []
            assert watch.cut == 1
        # Closed in the middle of it, and from now on.
        assert [len(connection.recv(2_000)) for connection in accepted] == [1_001, 1_001]
        assert accepted[0].recv(1) == b""
        accepted[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            accepted[1].recv(1)


def test_descriptor_that_is_not_a_connection_is_not_counted() -> None:
    watch, peer = ReceiveLimiter(1), receive_limits.Peer(b"x")
    with socket.socket(socket.AF_UNIX) as unix, Path(os.devnull).open("rb") as file:
        assert not watch.add(peer, unix.fileno())
        assert not watch.add(peer, file.fileno())
    assert not watch.add(peer, 10_000)
    assert watch.enforce() == []
