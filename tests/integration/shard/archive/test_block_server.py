"""An archive's process and its clients: requests, answers, limits."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest

from shard.archive import __main__ as main_module
from shard.archive import block_server as server_module
from shard.archive.block_server import MAX_CONNECTIONS, ArchiveServer
from shard.archive.shared_state import SharedState
from tests.unit.shard.archive.logs import WRITER, end_of, fill, log, make, open_store, records, unit
from tests.unit.shard.archive.processes import CLUSTER, SHARD, Process
from tests.unit.ziplog.segments.blocks import rows_in
from tests.waiting import wait_until
from ziplog.archive import client as client_module
from ziplog.archive.client import ArchiveClient
from ziplog.archive.messages import (
    ANSWER_BYTES,
    BLOCK,
    NEXT,
    REQUEST_BYTES,
    WRITERS,
    Answer,
    Request,
    decode_answer,
    encode_answer,
    encode_request,
)
from ziplog.archive.sockets import receive
from ziplog.core.entries import Origin
from ziplog.errors import ClosedError, UnavailableError
from ziplog.segments.block_file import part_of
from ziplog.segments.block_reader import BlockReader
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.ziplog.segments.blocks import Row


@pytest.fixture(params=["files", "connection"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read from the files, or sent as to another machine."""
    if request.param == "connection":
        monkeypatch.setattr(client_module, "is_same_machine", lambda _: False)


def read(client: ArchiveClient, gsn: int) -> tuple[list[Row], int]:
    """Read contiguous blocks from a position on."""
    rows: list[Row] = []
    while isinstance(block := client.block(gsn), Block):
        assert block.start <= gsn < block.stop
        memoryview(block.columns).cast("q")
        rows += [row for row in rows_in(block) if row.gsn >= gsn]
        gsn = block.stop
    return rows, gsn


@pytest.mark.usefixtures("each_way")
def test_requested_blocks_are_served_as_in_the_files(
    segments: Path, started: Callable[..., Process]
) -> None:
    store = open_store(segments)
    entries = log(60, origins=True)
    fill(store, entries)
    process = started(segments)
    end = store._segments[-1].base
    with process.client() as client:
        # It received no notification yet.
        assert client.block(1) == 0
        process.notify()
        wait_until(lambda: read(client, 1)[1] == end, "all rows are built")
        assert read(client, 1)[0] == records(entries, 1, end)
        assert read(client, 200)[0] == records(entries, 200, end)
        files = BlockReader(segments)
        for gsn in (1, 100, 200, end, end + 50):
            position, writers = client.writers(gsn)
            expected = files.writers(gsn)
            assert (position, writers.export()) == (expected[0], expected[1].export())
            writers.first_new_row(Origin(WRITER, 10**6, 1), 1)
        assert client.block(end) == 0
        # New blocks are found over the same connection.
        more = log(30, first=61, gsn=end_of(entries))
        fill(store, more)
        process.notify()
        newer = store._segments[-1].base
        wait_until(lambda: read(client, 1)[1] == newer, "newer rows are built")
        assert read(client, 1)[0] == records(entries + more, 1, newer)
    store.close()


def test_only_what_is_stable_is_served(segments: Path, started: Callable[..., Process]) -> None:
    store = open_store(segments)
    fill(store, log(60))
    process = started(segments)
    process.shared.stable = store._segments[2].base_fseq - 1
    process.notify()
    end = store._segments[2].base
    with process.client() as client:
        wait_until(lambda: read(client, 1)[1] == end, "stable segments have rows")
        process.shared.stable = 2**60
        process.notify()
        wait_until(lambda: read(client, 1)[1] > end, "the rest has rows")
    store.close()


@pytest.mark.usefixtures("each_way")
def test_trimmed_blocks_are_absent_immediately(
    segments: Path, started: Callable[..., Process]
) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    make(segments)
    process = started(segments)
    with process.client() as client:
        block = client.block(100)
        assert isinstance(block, Block)
        middle = (block.start + block.stop) // 2
    # Its files are not deleted yet.
    process.shared.trim = middle
    with process.client() as client:
        assert client.block(1) == client.block(middle - 1) == block.stop
        kept = client.block(middle)
        assert isinstance(kept, Block)
        assert kept.start == block.start
        process.shared.trim = 1
        assert client.block(1) == block.stop, "a trim point never goes back"
    store.close()


@pytest.mark.usefixtures("each_way")
def test_files_that_are_deleted_meanwhile(segments: Path, started: Callable[..., Process]) -> None:
    store = open_store(segments)
    entries = log(60)
    fill(store, entries)
    make(segments)
    process = started(segments)
    with process.client() as client:
        assert isinstance(client.block(1), Block)
        third = store._segments[2].base
        store.trim(third)
        assert store.flush()
        assert client.block(1) == third
        assert read(client, third)[0] == records(entries, third, store._segments[-1].base)
    store.close()


@pytest.mark.parametrize(("cluster", "shard"), [(78, SHARD), (CLUSTER, 4), (0, SHARD)])
def test_another_cluster_or_shard_receives_nothing(
    segments: Path, started: Callable[..., Process], cluster: int, shard: int
) -> None:
    process = started(segments)
    with process.client(cluster, shard) as client:
        with pytest.raises(UnavailableError, match="does not belong to shard"):
            client.block(1)
        with pytest.raises(UnavailableError, match="does not belong to shard"):
            client.writers(1)
    process.shared.cluster = 0  # unknown yet
    with (
        process.client() as client,
        pytest.raises(UnavailableError, match="does not belong to shard"),
    ):
        client.block(1)


def test_it_ends_with_its_server(segments: Path, started: Callable[..., Process]) -> None:
    process = started(segments)
    with process.client() as client:
        assert client.block(1) == 0
        assert process.leave() == (0, "")
        with pytest.raises(UnavailableError, match="does not answer"):
            client.block(1)


def test_a_full_disk_is_reported_once_and_retried(
    segments: Path, started: Callable[..., Process]
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    process = started(segments, reserve_bytes=2**60)
    process.notify()
    with process.client() as client:
        assert client.block(1) == 0
        process.notify()
        assert client.block(1) == 0
    assert process.child.stderr is not None
    assert b"block files cannot be written now" in process.child.stderr.readline()
    store.close()


def test_the_builder_wakes_up_by_timer_only_after_a_failure() -> None:
    class OverError(BaseException):
        pass

    class Called(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return True

    class BlockBuilder:
        def build(self, stable: Callable[[], int], on_progress: Callable[[int], object]) -> None:
            assert stable() == 0
            on_progress(7)
            if fault := next(faults):
                raise fault

    waits: list[float | None] = []
    faults = iter([None, OSError("full"), OSError("full"), None, OverError()])
    shared = SharedState()
    with pytest.raises(OverError):
        main_module._build_loop(BlockBuilder(), shared, Called())  # type: ignore[arg-type]
    retry = main_module._RETRY_S
    assert waits == [None, None, retry, retry, None]
    assert shared.archive_next == 7
    shared.close()


def test_a_damaged_block_is_reported_by_the_client(
    segments: Path, started: Callable[..., Process]
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    path = segments / store._segments[1].name
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    process = started(segments)
    with process.client() as client:
        damaged = store._segments[1].base
        with pytest.raises(UnavailableError, match="damaged"):
            client.block(damaged)
        assert isinstance(client.block(1), Block), "it may be used again"
    store.close()


def test_the_number_of_connections_is_bounded(
    segments: Path, started: Callable[..., Process]
) -> None:
    store = open_store(segments)
    fill(store, log(30))
    make(segments)
    process = started(segments)
    clients = [process.client() for _ in range(MAX_CONNECTIONS)]
    for client in clients:
        assert isinstance(client.block(1), Block)
    with process.client() as one_more:
        with pytest.raises(UnavailableError, match="does not answer"):
            one_more.block(1)
        assert all(isinstance(client.block(1), Block) for client in clients)
        clients.pop().close()

        def is_served() -> bool:
            try:
                return isinstance(one_more.block(1), Block)
            except UnavailableError:
                return False

        wait_until(is_served, "a connection is free again")
    for client in clients:
        client.close()
    store.close()


# --- invalid peers ---------------------------------------------------------------------------


@pytest.fixture
def serving() -> list[threading.Thread]:
    """The threads of `served`, one for each connection."""
    return []


@pytest.fixture
def served(
    segments: Path, monkeypatch: pytest.MonkeyPatch, serving: list[threading.Thread]
) -> Iterator[Callable[[], socket.socket]]:
    """Connections to a server with short timeouts and large blocks."""
    for name in ("_FIRST_REQUEST_TIMEOUT_S", "_IDLE_TIMEOUT_S", "_SEND_TIMEOUT_S"):
        monkeypatch.setattr(server_module, name, 1.0)
    store = open_store(segments, segment_bytes=3_000_000)
    fill(store, [unit(1, 1, size=4_000_000), unit(2, 100), unit(3, 200)])
    make(segments)
    store.close()
    shared = SharedState()
    shared.cluster = CLUSTER
    server = ArchiveServer(segments, shared, "127.0.0.1", SHARD, bool)
    ends: list[socket.socket] = []

    def connect() -> socket.socket:
        assert server._free_connections.acquire(blocking=False)
        mine = socket.socket()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mine.settimeout(20)
        mine.connect(("127.0.0.1", server.port))
        its, _ = server._socket.accept()
        ends.append(mine)
        serving.append(threading.Thread(target=server._serve, args=(its,), daemon=True))
        serving[-1].start()
        return mine

    yield connect
    for end in ends:
        end.close()
    for thread in serving:
        thread.join(20)
        assert not thread.is_alive()
    # Every connection has released its slot.
    assert server._free_connections._value == MAX_CONNECTIONS
    server._socket.close()
    shared.close()


def is_left(connection: socket.socket) -> bool:
    """Whether the other side closes the connection, after any remaining bytes."""
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    return True


def test_a_silent_connection_is_closed(served: Callable[[], socket.socket]) -> None:
    assert is_left(served())


def test_a_connection_with_half_a_request_is_closed(served: Callable[[], socket.socket]) -> None:
    connection = served()
    connection.sendall(encode_request(Request(BLOCK, CLUSTER, SHARD, 1))[:-1])
    assert is_left(connection)


def test_without_a_thread_a_connection_is_closed_and_the_next_one_served(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedState()
    server = ArchiveServer(segments, shared, "127.0.0.1", SHARD, bool)
    mine, its = socket.socketpair()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", refuse)
        server._admit(its)
    assert mine.recv(1) == b""
    assert server._free_connections._value == MAX_CONNECTIONS
    mine.close()
    server._socket.close()
    shared.close()


def test_garbage_ends_the_connection(served: Callable[[], socket.socket]) -> None:
    for content in (os.urandom(REQUEST_BYTES), encode_request(Request(9, CLUSTER, SHARD, 1))):
        connection = served()
        connection.sendall(content + os.urandom(1000))
        assert is_left(connection)


def test_a_connection_that_does_not_read_is_closed(
    served: Callable[[], socket.socket], serving: list[threading.Thread]
) -> None:
    connection = served()
    connection.sendall(encode_request(Request(BLOCK, CLUSTER, SHARD, 1)))
    wait_until(lambda: not serving[0].is_alive(), "its thread ends")
    answer = decode_answer(bytes(receive(connection, ANSWER_BYTES)))
    assert answer is not None
    assert answer.rows == 3
    with pytest.raises(ConnectionError):
        receive(connection, answer.columns.size + answer.data.size)


# --- the client and fake servers -------------------------------------------------------------


@pytest.fixture
def pretending() -> Iterator[Callable[..., ArchiveClient]]:
    """Clients of a fake server that sends a given answer on each connection."""
    threads: list[threading.Thread] = []
    clients: list[ArchiveClient] = []

    def start(*answers: bytes, timeout_s: float = 20) -> ArchiveClient:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.settimeout(20)
        port = listening.getsockname()[1]

        def run() -> None:
            with listening:
                for answer in answers:
                    connection, _ = listening.accept()
                    connection.settimeout(20)
                    with connection:
                        receive(connection, REQUEST_BYTES)
                        connection.sendall(answer)
                        if not answer:
                            connection.recv(1)  # silent until the client disconnects

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        clients.append(ArchiveClient("127.0.0.1", port, CLUSTER, SHARD, timeout_s=timeout_s))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


COLUMNS: Final = bytes(32)
DATA: Final = b"payload"


def block_answer(**changes: Any) -> bytes:
    parts = {
        "columns": part_of(COLUMNS, 0), "origins": part_of(b"", 0), "data": part_of(DATA, 0),
    }  # fmt: skip
    facts = {"kind": BLOCK, "start": 1, "stop": 9, "rows": 1, "has_keys": False, **parts}
    return encode_answer(Answer(**{**facts, **changes})) + COLUMNS + DATA


def test_an_answer_is_taken(pretending: Callable[..., ArchiveClient]) -> None:
    block = pretending(block_answer()).block(5)
    assert isinstance(block, Block)
    assert (bytes(block.columns), bytes(block.data), block.origins) == (COLUMNS, DATA, [])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (os.urandom(200), "sent an invalid answer"),
        (block_answer(kind=7), "sent an invalid answer"),
        (block_answer(rows=2**31), "sent an invalid answer"),
        (block_answer(data=part_of(b"another", 0)), "damaged"),
        (block_answer(start=6), "that does not hold gsn 5"),
        (encode_answer(Answer(NEXT, 5)), "that does not hold gsn 5"),
        (encode_answer(Answer(WRITERS, 5)), "that does not hold gsn 5"),
        (block_answer()[:-1], "does not answer"),
    ],
)
def test_an_invalid_answer_is_reported(
    pretending: Callable[..., ArchiveClient], answer: bytes, said: str
) -> None:
    client = pretending(answer)
    with pytest.raises(UnavailableError, match=said):
        client.block(5)


def test_silence_has_an_end(pretending: Callable[..., ArchiveClient]) -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        pretending(b"", timeout_s=0.1).block(5)


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(20.0, 2.0), (0.5, 0.5)])
def test_an_unreachable_archive_times_out_sooner(
    pretending: Callable[..., ArchiveClient],
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
    patience_s: float,
) -> None:
    waited: list[float] = []

    def connect(address: tuple[str, int], patience: float) -> socket.socket:
        waited.append(patience)
        return real(address, patience)

    real = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", connect)
    client = pretending(block_answer(), timeout_s=timeout_s)
    assert isinstance(client.block(5), Block)
    assert waited == [patience_s]
    assert client._socket is not None
    assert client._socket.gettimeout() == timeout_s


def test_a_connection_that_was_left_is_made_again_once(
    pretending: Callable[..., ArchiveClient],
) -> None:
    client = pretending(block_answer(), block_answer())
    assert isinstance(client.block(5), Block)
    assert isinstance(client.block(5), Block)
    client = pretending(block_answer(), b"x", block_answer())
    assert isinstance(client.block(5), Block)
    with pytest.raises(UnavailableError, match="does not answer"):
        client.block(5)
    assert isinstance(client.block(5), Block)


def test_a_closed_client_says_so(pretending: Callable[..., ArchiveClient]) -> None:
    client = pretending()
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        client.block(1)
