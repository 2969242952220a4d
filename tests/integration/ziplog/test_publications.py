"""Publications over real sockets: lost at worst, never in the way."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import socket
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import zmq

from tests.forking import in_child
from tests.logged_events import captured_events
from tests.waiting import wait_until
from ziplog.errors import UnavailableError
from ziplog.runtime import descriptors
from ziplog.runtime.publication_receiver import PublicationReceiver
from ziplog.runtime.publications import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST = "127.0.0.1"
NOISE = random.Random(1).randbytes(10_000)


class Received:
    """A receiver, and what it received."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.receiver = PublicationReceiver(lambda name, frame: self.frames.append((name, frame)))


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with contextlib.closing(Publisher(HOST)) as publisher:
        yield publisher


@pytest.fixture
def receive() -> Iterator[Callable[..., Received]]:
    with contextlib.ExitStack() as opened:

        def start(*endpoints: str) -> Received:
            received = Received()
            opened.callback(received.receiver.close)
            for index, endpoint in enumerate(endpoints):
                received.receiver.receive_from(b"mms-%d" % index, endpoint)
            return received

        yield start


def publish_until(publisher: Publisher, frame: bytes, *receivers: Received) -> None:
    """Publish until each receiver has the frame: a new one has not subscribed yet."""

    def is_received() -> bool:
        publisher.publish(frame)
        return all(frame in (got for _, got in one.frames) for one in receivers)

    wait_until(is_received, "the publication")


def port_of(publisher: Publisher) -> int:
    return int(publisher.endpoint.rpartition(":")[2])


def connect(port: int, *, type_of_service: int = descriptors.NODE_TOS) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, type_of_service)
    connection.settimeout(5 if type_of_service else 0.3)
    try:
        connection.connect((HOST, port))
    except OSError:
        connection.close()
        raise
    return connection


def test_every_receiver_gets_a_publication_with_the_name_of_its_publisher(
    publisher: Publisher, receive: Callable[..., Received]
) -> None:
    receivers = [receive(publisher.endpoint) for _ in range(5)]
    publish_until(publisher, b"lease 1", *receivers)
    assert all(one.frames[0] == (b"mms-0", b"lease 1") for one in receivers)


def test_the_endpoint_of_a_publisher_has_the_advertised_host(
    receive: Callable[..., Received],
) -> None:
    with contextlib.closing(Publisher("0.0.0.0", "localhost")) as publisher:
        assert publisher.endpoint == f"localhost:{port_of(publisher)}"
        publish_until(publisher, b"lease", receive(publisher.endpoint))


def test_publications_keep_their_order(
    publisher: Publisher, receive: Callable[..., Received]
) -> None:
    received = receive(publisher.endpoint)
    publish_until(publisher, b"first", received)
    for number in range(50):
        publisher.publish(b"%d" % number)
    wait_until(lambda: received.frames[-1][1] == b"49", "the last publication")
    assert [frame for _, frame in received.frames][-50:] == [b"%d" % n for n in range(50)]


def test_a_receiver_follows_a_publisher_that_moved(
    publisher: Publisher, receive: Callable[..., Received]
) -> None:
    received = receive(publisher.endpoint)
    publish_until(publisher, b"before", received)
    with contextlib.closing(Publisher(HOST)) as moved:
        received.receiver.receive_from(b"mms-0", moved.endpoint)
        publish_until(moved, b"after", received)
        publisher.publish(b"stale")
        publish_until(moved, b"later", received)
    assert b"stale" not in [frame for _, frame in received.frames]


def test_a_repeated_call_keeps_the_connection(
    publisher: Publisher, receive: Callable[..., Received]
) -> None:
    received = receive(publisher.endpoint)
    publish_until(publisher, b"before", received)
    received.receiver.receive_from(b"mms-0", publisher.endpoint)
    publisher.publish(b"at once")
    wait_until(lambda: (b"mms-0", b"at once") in received.frames, "the publication")


def test_a_receiver_of_several_publishers(receive: Callable[..., Received]) -> None:
    with contextlib.closing(Publisher(HOST)) as one, contextlib.closing(Publisher(HOST)) as two:
        received = receive(one.endpoint, two.endpoint)
        publish_until(one, b"of one", received)
        publish_until(two, b"of two", received)
    assert {(b"mms-0", b"of one"), (b"mms-1", b"of two")} <= set(received.frames)


def test_a_publication_without_receivers_is_lost(
    publisher: Publisher, receive: Callable[..., Received]
) -> None:
    for _ in range(10_000):
        publisher.publish(b"x" * 1000)
    received = receive(publisher.endpoint)
    publish_until(publisher, b"later", received)
    assert {frame for _, frame in received.frames} == {b"later"}


def test_connections_of_clients_are_ignored(publisher: Publisher) -> None:
    with pytest.raises(TimeoutError):
        connect(port_of(publisher), type_of_service=0)
    connect(port_of(publisher)).close()


@pytest.mark.parametrize(
    "hostile",
    [b"GET / HTTP/1.1\r\n\r\n", NOISE, b"\xff" * 100_000, b"\xff" + bytes(8) + b"\x7f"],
    ids=["http", "noise", "ones", "half a greeting"],
)
def test_hostile_bytes_do_not_stop_a_publisher(
    publisher: Publisher, receive: Callable[..., Received], hostile: bytes
) -> None:
    received = receive(publisher.endpoint)
    with contextlib.ExitStack() as opened:
        for _ in range(20):
            connection = opened.enter_context(connect(port_of(publisher)))
            with contextlib.suppress(OSError):
                connection.sendall(hostile)
        publish_until(publisher, b"lease", received)


def test_hostile_bytes_do_not_stop_a_receiver(receive: Callable[..., Received]) -> None:
    with socket.create_server((HOST, 0)) as listening:
        received = receive("{}:{}".format(*listening.getsockname()))
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(NOISE)
            connection.recv(1_000_000)
    # What looks like a frame of an old version is passed on; the driver drops it.
    with contextlib.closing(Publisher(HOST)) as publisher:
        received.receiver.receive_from(b"mms-0", publisher.endpoint)
        publish_until(publisher, b"lease", received)


def test_a_long_subscription_is_refused(publisher: Publisher) -> None:
    with zmq.Context() as context:
        sockets = [context.socket(zmq.SUB) for _ in range(2)]
        for subscriber, topic in zip(sockets, (b"x" * 1000, b"x" * 10), strict=True):
            subscriber.setsockopt(zmq.TOS, descriptors.NODE_TOS)
            subscriber.setsockopt(zmq.SUBSCRIBE, topic)
            subscriber.connect(f"tcp://{publisher.endpoint}")
        refused, accepted = sockets

        def is_received() -> bool:
            publisher.publish(b"x" * 2000)
            return bool(accepted.poll(10))

        wait_until(is_received, "the publication")
        assert not refused.poll(100)
        context.destroy(linger=0)


def test_a_receiver_that_does_not_read_holds_up_no_other(
    publisher: Publisher, receive: Callable[..., Received]
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(_name: bytes, _frame: bytes) -> None:
        entered.set()
        leave.wait(30)

    stuck = PublicationReceiver(block)
    stuck.receive_from(b"mms-0", publisher.endpoint)
    try:
        received = receive(publisher.endpoint)
        publish_until(publisher, b"x", received)
        wait_until(lambda: publisher.publish(b"y") or entered.is_set(), "a blocked receiver")
        for _ in range(200):
            publisher.publish(b"z" * 1_000_000)
        publish_until(publisher, b"last", received)
    finally:
        leave.set()
        stuck.close()


def test_a_receiver_without_a_thread_goes_without_publications(
    publisher: Publisher, receive: Callable[..., Received], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    received = receive(publisher.endpoint)
    monkeypatch.undo()
    publisher.publish(b"lease")
    assert not received.frames
    received.receiver.receive_from(b"mms-0", publisher.endpoint)
    publish_until(publisher, b"later", received)


@pytest.mark.parametrize("allowed", [1, 2])
def test_a_process_survives_that_the_system_has_no_thread_for_zeromq(allowed: int) -> None:
    def open_both() -> str:
        """Return what a receiver logs, and the error of a publisher."""
        if os.getuid() == 0:  # The limit does not hold for root.
            os.setuid(54_321)
        resource.setrlimit(resource.RLIMIT_NPROC, (allowed, allowed))
        with captured_events() as events:
            PublicationReceiver(print).receive_from(b"mms-0", "127.0.0.1:9")
        with pytest.raises(UnavailableError) as refused:
            Publisher(HOST)
        return f"{events[0]['event']}; {refused.value}"

    found = in_child(open_both)
    assert found.startswith("no publications; cannot open a port for publications")
    assert "the system refuses a thread" in found


def test_a_server_without_descriptors_to_load_zeromq_goes_without_publications() -> None:
    def receive_first() -> str:
        for name in [
            name for name in sys.modules if name.startswith(("zmq", "ziplog.runtime.pub"))
        ]:
            del sys.modules[name]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        with captured_events() as events:
            PublicationReceiver(print).receive_from(b"mms-0", "127.0.0.1:9")
        return str(events[0]["event"])

    assert in_child(receive_first) == "no publications"


def test_what_zeromq_refuses_is_refused_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Context, "socket", refuse)
    with pytest.raises(UnavailableError, match="Too many open files"):
        Publisher(HOST)
    with captured_events() as events:
        PublicationReceiver(print).receive_from(b"mms-0", "127.0.0.1:9")
    assert [event["event"] for event in events] == ["no publications"]


def test_closing_ends_threads_and_connections(publisher: Publisher) -> None:
    threads = threading.active_count()
    received = Received()
    received.receiver.receive_from(b"mms-0", publisher.endpoint)
    assert threading.active_count() == threads + 1
    received.receiver.close()
    received.receiver.close()
    assert threading.active_count() == threads
