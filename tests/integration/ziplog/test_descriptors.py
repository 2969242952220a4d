"""Lack of descriptors or threads: servers keep a reserve free, clients report it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

import ziplog
from tests.waiting import wait_until
from ziplog import policy
from ziplog.client.client_node import ClientCore
from ziplog.client.common.requests import InsertRequest, Preferences
from ziplog.client.engines.blocking_engine import BlockingEngine
from ziplog.core.units import NEVER
from ziplog.errors import ClosedError, UnavailableError
from ziplog.runtime import local_socket
from ziplog.runtime.connection import GREETING, Connection
from ziplog.runtime.descriptors import AcceptPause, Reserve
from ziplog.runtime.listener import Listener
from ziplog.runtime.transport import Transport
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator

S = 1_000_000_000
RAISE = """
import resource, sys
from ziplog.runtime import descriptors, process_logging
process_logging.configure("n")
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(descriptors.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@contextlib.contextmanager
def limited_to(count: int) -> Iterator[None]:
    """Limit the descriptors of this process."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_descriptors_are_checked_after_each_accept_and_once_a_second() -> None:
    with select.epoll() as epoll:
        listener = Listener("127.0.0.1:0", epoll)
        with contextlib.closing(listener):
            listener.check([], now=5 * S)
            assert listener.check_at == 6 * S
            assert listener.retry_at is None
            listener.accept()
            assert listener.check_at == 0
            listener._pause.start(listener._socket, 6 * S)
            listener.check([], now=6 * S)
            assert listener.retry_at == listener.check_at == 7 * S, "then it may accept again"
            listener.check([], now=7 * S)
            assert listener.retry_at is None


class Refusing:
    """A listening socket from which the system lets this process accept nothing."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self.attempts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def accept(self) -> tuple[socket.socket, object]:
        self.attempts += 1
        raise OSError(errno.ENFILE, "Too many open files in system")


def test_a_connection_that_the_system_refuses_does_not_keep_the_server_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_socket, "listen", lambda *_: None)
    with contextlib.closing(Transport("127.0.0.1:0")) as server:
        listener = server._listener
        assert listener is not None
        former = listener._socket
        refusing = listener._socket = Refusing(former)  # type: ignore[misc, assignment]
        assert server.endpoint is not None
        host, port = server.endpoint.split(":")
        with socket.create_connection((host, int(port))) as peer:
            while refusing.attempts < 2:
                server.wait(10 * S)
            assert refusing.attempts == 2
            first = listener.check_at
            server.wait(0)
            assert refusing.attempts == 2
            assert listener.retry_at == first
            listener._socket = former  # type: ignore[misc]
            peer.settimeout(30)
            wait_until(lambda: server.wait(10_000_000) is None and bool(server._open), "accepted")
            assert peer.recv(len(GREETING)) == GREETING


@pytest.mark.parametrize("hard", [4096, 512])
def test_a_server_raises_its_limit_to_the_hard_one_and_warns_if_that_is_low(hard: int) -> None:
    command = [sys.executable, "-c", RAISE, "256", str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(hard)] * 3
    assert ("ulimit -Hn" in done.stderr) == ("few files" in done.stderr) == (hard < 1024)


def descriptors() -> set[str]:
    """Return the open descriptors of this process, without the one that lists them."""
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.exists()}


# --- what is closed --------------------------------------------------------------------------


def peer(number: int, last_active: int, *, is_greeted: bool = True) -> Connection:
    connection = Connection(b"\0%d" % number)
    connection.last_active = last_active
    if is_greeted:
        connection.parse(memoryview(GREETING), deque())
    return connection


def test_silent_connections_are_closed_first_and_no_more_than_needed() -> None:
    reserve = Reserve()
    busy, idle, silent = peer(1, 9), peer(2, 3), peer(3, 5)
    greetless = peer(4, 8, is_greeted=False)
    connections = [busy, idle, silent, greetless]
    reserve.checks = 10
    with limited_to(128):
        assert reserve.choose(connections, 112, 0) == []
        assert reserve.choose(connections, 113, 0) == [greetless]
        assert reserve.choose(connections, 114, 0) == [greetless, idle]
        assert reserve.choose(connections, 115, 0) == [greetless, idle, silent]
        assert reserve.choose(connections, 200, 0) == [greetless, idle, silent, busy]
        assert reserve.shed == 10
        # The greeting of a new connection may not have been read yet.
        new = peer(5, reserve.checks, is_greeted=False)
        assert reserve.choose([*connections, new], 116, 0) == [greetless, idle, silent, busy]
        assert reserve.choose([*connections, new], 115, 0) == [greetless, new, idle]


def test_paused_port_accepts_no_client_until_the_pause_ends() -> None:
    pause = AcceptPause()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pause.start(listening, 0)
        assert pause.is_active
        with socket.socket() as caller:
            caller.setblocking(False)
            assert caller.connect_ex(listening.getsockname()) == errno.EINPROGRESS
            poll = select.poll()
            poll.register(caller, select.POLLOUT)
            assert not poll.poll(50)
            pause.end_if_due(listening, S - 1)
            assert pause.is_active
            pause.end_if_due(listening, S)
            assert not pause.is_active
            assert poll.poll(30_000)
            assert not caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def test_paused_port_accepts_nodes_and_no_clients() -> None:
    pause = AcceptPause()
    with (
        contextlib.closing(Transport("127.0.0.1:0")) as node,
        contextlib.closing(Transport()) as client,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        pause.start(listening, 0)
        endpoint = "{}:{}".format(*listening.getsockname())
        client.connect(b"server", endpoint)
        node.connect(b"server", endpoint)
        listening.settimeout(30.0)
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(1), "the node sends its greeting"
            listening.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listening.accept()
            pause.end_if_due(listening, S)
            listening.settimeout(30.0)
            listening.accept()[0].close()


SERVE = """
import os, resource
from ziplog.runtime.transport import Transport
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
transport = Transport("127.0.0.1:0")
print(transport.endpoint, flush=True)
while True:
    transport.wait(20_000_000)
    while (received := transport.receive()) is not None:
        try:
            count = len(os.listdir("/proc/self/fd"))
        except OSError:
            count = 99
        transport.send(received[0], b"%d" % count)
"""


class Caller:
    """A client that queries the number of the server's descriptors."""

    def __init__(self, endpoint: str) -> None:
        self.transport = Transport()
        self.transport.connect(b"server", endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()

    def ask(self) -> int:
        """Return the answer; 0: no answer yet."""
        self.transport.send(b"server", b"?")
        self.transport.wait(50_000_000)
        received = self.transport.receive()
        return 0 if received is None else int(received[1])


def greets(busy: Caller, connection: socket.socket) -> bool:
    """Send the greeting, so that the connection is not closed for lack of one."""
    busy.ask()
    try:
        connection.sendall(GREETING)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True


def is_closed(connections: list[socket.socket]) -> bool:
    """Whether the peer has closed one of the connections, after its greeting."""
    for one in connections:
        with contextlib.suppress(BlockingIOError):
            try:
                while one.recv(4096):
                    pass
            except ConnectionError:
                pass
            return True
    return False


def test_idle_connections_leave_a_server_its_descriptors() -> None:
    """The server keeps running, a busy client keeps its connection, a new one can connect."""
    with (
        subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE) as server,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        endpoint = server.stdout.readline().decode().strip()
        host, _, port = endpoint.rpartition(":")
        busy = stack.enter_context(Caller(endpoint))
        wait_until(busy.ask, "the busy client is served")
        idle = [stack.enter_context(socket.socket()) for _ in range(100)]
        for one in idle:
            one.setblocking(False)
            assert one.connect_ex((host, int(port))) in {0, errno.EINPROGRESS}
        for one in idle:
            wait_until(partial(greets, busy, one), "it is connected, and greets")
        wait_until(lambda: busy.ask() and is_closed(idle), "an idle connection is closed")
        # Listing the descriptors needs one more.
        wait_until(lambda: 0 < busy.ask() <= 64 - 8 + 1, "enough of them are closed")
        late = stack.enter_context(Caller(endpoint))
        wait_until(late.ask, "a new client is served")
        wait_until(busy.ask, "the busy client is served")
        assert server.poll() is None


# --- clients ---------------------------------------------------------------------------------


def open_with_few_descriptors() -> None:
    for left in range(24):
        before = descriptors()
        unused = (number for number in itertools.count() if str(number) not in before)
        with (
            limited_to(next(itertools.islice(unused, left, None))),
            pytest.raises(UnavailableError) as caught,
        ):
            ziplog.connect("127.0.0.1:1", timeout=0.01)
        is_refused = "ulimit -n" in str(caught.value)
        assert is_refused == (left < 16), left
        assert descriptors() == before


def test_client_without_descriptors_reports_it_and_leaks_nothing() -> None:
    # No other thread of that process opens a descriptor in the meantime.
    process = multiprocessing.get_context("spawn").Process(target=open_with_few_descriptors)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_server_without_descriptors_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    before = descriptors()
    for name in ("dup", "pipe2"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refuse)
            with pytest.raises(UnavailableError, match="Too many open files"):
                Transport("127.0.0.1:0")
    assert descriptors() == before


def test_a_thread_that_is_refused_is_reported_and_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    shared = BlockingEngine(ClientCore(bytes(16), ["127.0.0.1:1"], Preferences(policy.random())))
    request = InsertRequest(NEVER, [b"x"], RID_GENESIS, None, 0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(2):
                with pytest.raises(UnavailableError, match="refuses a thread"):
                    shared.submit_insert(request)
        future = shared.submit_insert(request)
    finally:
        shared.close()
    with pytest.raises(ClosedError):
        future.result(30)
