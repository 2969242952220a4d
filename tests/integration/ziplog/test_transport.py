"""The transport: frames arrive, or are dropped and counted, and garbage does no harm."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.integration.ziplog.transport_world import (
    SECOND,
    endpoint_of,
    port_of,
    send_until_received,
    take,
)
from tests.interrupts import Struck, interrupted
from tests.raw_peer import RawPeer, framed
from tests.waiting import wait_until
from ziplog.core.fields import MAX_FRAME
from ziplog.deploy.new_shard import free_ports
from ziplog.errors import ClosedError, ConfigError, UnavailableError
from ziplog.runtime import resolver
from ziplog.runtime import transport as transports
from ziplog.runtime.connection import GREETING, Connection
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_wait_and_receive_returns_each_frame_once_and_in_order(
    opened: Callable[..., Transport],
) -> None:
    server = opened("127.0.0.1:0")
    received: list[bytes] = []

    def receive(count: int) -> None:
        deadline = time.monotonic() + 10
        while len(received) < count and time.monotonic() < deadline:
            found = server.wait_and_receive(SECOND // 100)
            if found is not None:
                received.append(found[1])

    with RawPeer(port_of(server)) as peer, RawPeer(port_of(server)) as other:
        peer.send_frame(b"one")
        receive(1)
        peer.send(framed(b"two") + framed(b"three"))
        receive(3)
        cut = framed(b"four")
        peer.send(cut[:6])
        assert server.wait_and_receive(SECOND // 100) is None
        peer.send(cut[6:] + framed(b"five")[:3])
        receive(4)
        peer.send(framed(b"five")[3:])
        receive(5)
        other.send_frame(b"six")
        receive(6)
        peer.send_frame(b"seven")
        other.send_frame(b"eight")
        receive(8)
    assert received[:6] == [b"one", b"two", b"three", b"four", b"five", b"six"]
    assert sorted(received[6:]) == [b"eight", b"seven"]
    # Both peers have left; a wake-up ends a wait without a time-out.
    server.wake()
    assert server.wait_and_receive(None) is None
    assert server.garbage == 0


def test_connections_are_read_in_the_order_of_their_input(opened: Callable[..., Transport]) -> None:
    """Replicas that receive the inserts of many clients in one order guess the same slots."""
    server = opened("127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(port_of(server))) for _ in range(3)]
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)):
            for number in order:
                peers[number].send_frame(b"%d" % number)
            assert [take(server)[1] for _ in order] == [b"%d" % number for number in order]


def test_input_before_the_end_of_a_connection_is_received(
    opened: Callable[..., Transport],
) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send_frame(b"first")
        take(server)
        peer.send_frame(b"last")
    assert take(server)[1] == b"last"
    deadline = time.monotonic() + 10
    while server.connection_counts[0] and time.monotonic() < deadline:
        assert server.receive() is None
        server.wait(SECOND // 10)
    assert server.connection_counts == (0, 0)


def test_input_of_more_than_one_round_of_reads_is_received(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_READ_BYTES", 64)
    monkeypatch.setattr(transports, "_MAX_READS", 1)
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as peer:
        peer.send(b"".join(framed(b"%03d" % number) for number in range(100)))
        assert [take(server)[1] for _ in range(100)] == [b"%03d" % number for number in range(100)]


def test_a_request_and_its_answer(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))
    assert client.send(b"server", b"question")
    route, frame = take(server)
    assert frame == b"question"
    assert server.send(route, b"answer")
    assert take(client) == (b"server", b"answer")
    assert client.dropped == server.dropped == client.garbage == server.garbage == 0


def test_many_frames_come_in_order(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))
    for number in range(500):
        assert client.send(b"server", b"%d" % number)
    assert [take(server)[1] for _ in range(500)] == [b"%d" % number for number in range(500)]
    assert server.receive() is None


def test_gathered_frames_leave_in_one_write(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))
    assert client.send(b"server", b"first")
    assert take(server, client)[1] == b"first"
    writes: list[int] = []
    flush, write = transports.Connection.flush, transports.Connection.write
    monkeypatch.setattr(
        transports.Connection, "flush", lambda one: (writes.append(1), flush(one))[1]
    )
    monkeypatch.setattr(
        transports.Connection, "write", lambda one, data: (writes.append(1), write(one, data))[1]
    )
    client.gathers = True
    for number in range(20):
        assert client.send(b"server", b"%d" % number)
    client.gathers = False
    assert writes == []
    client.flush_gathered()
    assert [take(server)[1] for _ in range(20)] == [b"%d" % number for number in range(20)]
    assert writes == [1]


def test_frames_wait_for_a_peer_that_starts_later(opened: Callable[..., Transport]) -> None:
    first = opened("127.0.0.1:0")
    endpoint = endpoint_of(first)
    first.close()
    client = opened()
    client.connect(b"server", endpoint)
    assert client.send(b"server", b"early")
    client.wait(SECOND // 10)  # The attempt fails.
    assert take(opened(endpoint), client)[1] == b"early"


def test_a_peer_is_found_again_once_its_host_has_another_address(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, look_up = {"replica": "127.0.0.1"}, socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest: look_up(addresses.get(host, host), *rest)
    )
    monkeypatch.setattr(resolver, "_VALID_NS", SECOND)
    first, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", f"replica:{port_of(first)}")
    client.send(b"server", b"one")
    assert take(first, client)[1] == b"one"
    moved = opened(f"127.0.0.2:{port_of(first)}")
    addresses["replica"] = "127.0.0.2"
    first.close()
    send_until_received(client, moved)


def test_name_survives_a_restart_of_its_peer(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    endpoint = endpoint_of(server)
    client.connect(b"server", endpoint)
    client.send(b"server", b"one")
    take(server)
    server.close()
    send_until_received(client, opened(endpoint))


def test_frame_for_an_unknown_peer_is_dropped_and_counted(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    assert not client.send(b"server", b"x")
    client.connect(b"server", endpoint_of(server))
    assert client.send(b"server", b"y")
    take(server)
    client.disconnect(b"server")
    client.disconnect(b"server")
    assert not client.send(b"server", b"z")
    assert client.dropped == 2


def test_a_full_queue_drops_and_never_blocks(opened: Callable[..., Transport]) -> None:
    client = opened()
    client.connect(b"server", "127.0.0.1:9")
    sent = sum(client.send(b"server", b"") for _ in range(12_000))
    assert 0 < sent < 12_000
    assert client.dropped == 12_000 - sent


def test_a_name_moves_and_old_answers_have_no_name(opened: Callable[..., Transport]) -> None:
    old, new, client = opened("127.0.0.1:0"), opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(old))
    client.connect(b"server", endpoint_of(old))
    client.send(b"server", b"to the old one")
    route, _ = take(old)
    client.connect(b"server", endpoint_of(new))
    client.send(b"server", b"to the new one")
    assert take(new)[1] == b"to the new one"
    old.send(route, b"too late")
    new_route, _ = (client.send(b"server", b"again"), take(new))[1]
    new.send(new_route, b"from the new one")
    assert take(client) == (b"server", b"from the new one")


def test_two_names_of_one_endpoint_are_independent(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"seed", endpoint_of(server))
    client.connect(b"mms-0", endpoint_of(server))
    client.disconnect(b"seed")
    assert client.send(b"mms-0", b"still there")
    route, frame = take(server)
    assert frame == b"still there"
    server.send(route, b"yes")
    assert take(client) == (b"mms-0", b"yes")


def test_peer_that_connects_gets_a_route_of_its_own(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    with RawPeer(port_of(server)) as one, RawPeer(port_of(server)) as two:
        routes = set()
        for peer in (one, two):
            peer.send_frame(b"x")
            route, _ = take(server)
            assert route[0] == 0, "no name starts with this byte"
            routes.add(route)
            server.send(route, b"answer")
            assert peer.receive_frame() == b"answer"
        assert len(routes) == 2


def test_output_that_a_disconnect_writes_is_not_queued_any_more(
    opened: Callable[..., Transport],
) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))
    client.send(b"server", b"question")
    route, _ = take(server)
    for reply in (b"first", b"second"):
        server.send(route, reply)
    take(client)
    client.send(b"server", b"last")  # Gathered, because the second reply waits.
    assert client._queued_bytes == len(framed(b"last"))
    client.disconnect(b"server")
    assert client._queued_bytes == 0
    assert client.counters.sent_bytes == len(GREETING + framed(b"question") + framed(b"last"))
    assert take(server)[1] == b"last"


@pytest.mark.parametrize("data", [os.urandom(4096), b"\n", b"GET / HTTP/1.1\r\n", b"ziplog\2\0"])
def test_peer_of_another_protocol_is_disconnected(
    opened: Callable[..., Transport], data: bytes
) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    with socket.create_connection(("127.0.0.1", port_of(server))) as raw:
        raw.sendall(data)
        client.connect(b"server", endpoint_of(server))
        client.send(b"server", b"fine")
        assert take(server)[1] == b"fine"
        wait_until(lambda: server.poll() or server.receive() or server.garbage, "a disconnect")
        assert server.garbage == 1


def test_two_processes_that_only_connect_do_not_meet(opened: Callable[..., Transport]) -> None:
    """An attempt to a free port of the same machine may connect the socket to itself."""
    with socket.socket() as itself:
        itself.bind(("127.0.0.1", 0))
        itself.connect(itself.getsockname())  # As the kernel may do by chance.
        connection = Connection(b"server", "127.0.0.1:1")
        with contextlib.closing(select.epoll()) as epoll:
            connection.open(itself, select.EPOLLIN, epoll)
            assert not connection.is_connected()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_537, 262_140, 1_000_000, MAX_FRAME])
def test_frames_of_any_size_in_both_directions(opened: Callable[..., Transport], size: int) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))
    frames = [os.urandom(size), b"between", os.urandom(size)]
    for frame in frames:
        assert client.send(b"server", frame)
    route = b""
    for frame in frames:
        route, received = take(server, client)
        assert received == frame
    for frame in frames:
        assert server.send(route, frame)
    assert [take(client, server) for _ in frames] == [(b"server", frame) for frame in frames]
    assert client.dropped == server.dropped == 0


def test_a_port_in_use_is_named(opened: Callable[..., Transport]) -> None:
    server = opened("127.0.0.1:0")
    with pytest.raises(UnavailableError, match=endpoint_of(server)):
        opened(server.endpoint)


@pytest.mark.parametrize("bad", ["nonsense", "127.0.0.1:99999", "192.0.2.1:7400", ":::"])
def test_a_bad_address_is_a_config_error(opened: Callable[..., Transport], bad: str) -> None:
    with pytest.raises(ConfigError):
        opened(bad)


@pytest.mark.parametrize("bad", ["nonsense", "127.0.0.1:notaport", ""])
def test_a_bad_peer_is_a_config_error(opened: Callable[..., Transport], bad: str) -> None:
    with pytest.raises(ConfigError):
        opened().connect(b"server", bad)


@pytest.mark.parametrize("bad", [b"", b"\0abc"])
def test_a_bad_name_is_a_config_error(opened: Callable[..., Transport], bad: bytes) -> None:
    with pytest.raises(ConfigError):
        opened().connect(bad, "127.0.0.1:7400")


def test_wake_ends_a_wait_from_another_thread(opened: Callable[..., Transport]) -> None:
    transport = opened()
    for _ in range(100):
        thread = threading.Thread(target=transport.wake)
        thread.start()
        transport.wait(None)
        thread.join()
        transport.wait(0)


def test_a_wake_while_the_last_one_is_handled_counts(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, read = opened(), os.read

    def read_after_a_wake(file: int, size: int) -> bytes:
        monkeypatch.setattr(os, "read", read)
        transport.wake()
        return read(file, size)

    transport.wake()
    monkeypatch.setattr(os, "read", read_after_a_wake)
    transport.wait(0)
    for _ in range(2):
        assert select.select([transport.fileno()], [], [], 0)[0], "the wake-up is lost"
        transport.wait(None)
        assert not select.select([transport.fileno()], [], [], 0)[0]
        transport.wake()


def test_a_wake_that_a_signal_handler_interrupts_loses_no_later_one(
    opened: Callable[..., Transport],
) -> None:
    transport = opened()

    def wake() -> None:
        with contextlib.suppress(Struck):
            transport.wake()

    def check() -> None:
        transport.wake()
        assert select.select([transport.fileno()], [], [], 0)[0], "the wake-up is lost"
        transport.wait(None)

    assert interrupted(wake, check) > 1


def test_a_wake_before_the_wait_counts(opened: Callable[..., Transport]) -> None:
    transport = opened()
    transport.wake()
    transport.wake()
    transport.wait(None)


@pytest.mark.parametrize(("bind", "longest"), [("127.0.0.1:0", SECOND // 10), (None, SECOND // 2)])
def test_a_node_waits_less_for_its_peers_than_a_client(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch, bind: str, longest: int
) -> None:
    transport, now = opened(bind), [0]
    monkeypatch.setattr(transports, "now_ns", lambda: now[0])
    [free] = free_ports(1, "127.0.0.1")
    transport.connect(b"server", f"127.0.0.1:{free}")
    pauses = []
    for _ in range(20):  # An attempt may take two rounds.
        now[0] = transport.next_timer() or 0
        transport.poll()
        pauses.append(transport._connections[b"server"].retry_ns)
    assert max(pauses) == longest


def test_changes_of_connections_are_reported(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    [free] = free_ports(1, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert server.endpoint is not None
        client.connect(b"server", server.endpoint)
        client.connect(b"absent", f"127.0.0.1:{free}")
        client.connect(b"nameless", "no-such-host.invalid:7400")
        client.connect(b"other", f"127.0.0.1:{other.getsockname()[1]}")
        found: dict[bytes, str] = {}

        def note_changes() -> bool:
            client.wait(10_000_000)
            client.receive()
            found.update(client.changes)
            return len(found) == 4

        wait_until(note_changes, "all attempts ended")
        assert (found[b"server"], found[b"other"]) == ("", "")
        assert found[b"absent"] == "connection refused"
        assert found[b"nameless"].startswith("the name does not resolve: ")
        accepted, _ = other.accept()
        with accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request")
            wait_until(
                lambda: note_changes() and "does not speak" in found[b"other"], "it is garbage"
            )
    client.disconnect(b"other")
    assert b"other" not in client.changes


def test_close_waits_for_a_wake_of_another_thread(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = opened()
    closing = threading.Thread(target=transport.close)
    write = os.write

    def write_late(fd: int, data: bytes) -> int:
        closing.start()
        closing.join(0.2)  # Without the wait, `close` ends in this time.
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_late)
    transport.wake()
    closing.join()
    assert transport.is_closed
    transport.wake()


@pytest.mark.parametrize("timeout_ns", [0, -5, 1, 300_000, 3_000_000, 11_000_000])
def test_a_wait_times_out(opened: Callable[..., Transport], timeout_ns: int) -> None:
    transport = opened()
    transport.wait(timeout_ns)
    assert transport.receive() is None
    transport.wait(timeout_ns)


def test_no_frame_is_missed_by_a_wait(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))

    def echo() -> None:
        left = 3_000
        while left:
            server.wait(None)
            while (received := server.receive()) is not None:
                server.send(*received)
                left -= 1

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    taken = 0
    while taken < 3_000:
        count = min(1 + taken % 5, 3_000 - taken)
        for _ in range(count):
            client.send(b"server", b"x")
        for _ in range(count):
            while client.receive() is None:
                client.wait(20 * SECOND)
        taken += count
    thread.join(20)
    assert not thread.is_alive()


def test_the_event_loop_s_descriptor(opened: Callable[..., Transport]) -> None:
    server, client = opened("127.0.0.1:0"), opened()
    client.connect(b"server", endpoint_of(server))
    assert server.receive() is None
    client.send(b"server", b"x")
    received = None
    while received is None:  # The first event is the connection.
        assert select.select([server.fileno()], [], [], 10)[0]
        server.poll()
        received = server.receive()
    assert received[1] == b"x"
    server.poll()
    assert server.receive() is None
    assert not select.select([server.fileno()], [], [], 0)[0]
    server.wake()
    assert select.select([server.fileno()], [], [], 10)[0]
    server.poll()
    assert not select.select([server.fileno()], [], [], 0)[0]


def test_a_byte_of_a_signal_ends_a_wait(opened: Callable[..., Transport]) -> None:
    transport = opened()
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    signal.set_wakeup_fd(transport.wake_fd)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        transport.wait(None)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_unclosed_transport_in_a_reference_cycle_is_collected_without_blocking(
    opened: Callable[..., Transport],
) -> None:
    lost: list[object] = [Transport("127.0.0.1:0")]
    assert isinstance(lost[0], Transport)
    endpoint = endpoint_of(lost[0])
    lost.append(lost)
    del lost
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(20)
    assert not collecting.is_alive(), "the garbage collector waits for a socket"
    assert opened(endpoint).endpoint == endpoint


def test_attempt_without_a_descriptor_names_the_shortage(
    opened: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = opened("127.0.0.1:0"), opened()

    def refuse() -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(transports.local_socket, "connect", lambda *_: None)
        patched.setattr(transports, "open_socket", refuse)
        client.connect(b"server", endpoint_of(server))
        client.wait(10_000_000)
        cause = "this process cannot open a connection: too many open files"
        assert client.changes == {b"server": cause}

    def is_connected() -> bool:
        client.wait(10_000_000)
        client.receive()
        return client.changes[b"server"] == ""

    wait_until(is_connected, "it tries again")


def test_closed_transport_raises_closed_error(opened: Callable[..., Transport]) -> None:
    transport = opened("127.0.0.1:0")
    transport.connect(b"server", "127.0.0.1:9")
    transport.close()
    transport.close()
    transport.wake()
    with pytest.raises(ClosedError):
        transport.send(b"server", b"x")
    with pytest.raises(ClosedError):
        transport.receive()
