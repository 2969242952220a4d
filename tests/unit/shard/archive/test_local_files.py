"""A client on the archive's machine reads blocks from the files, with checks."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING, Final

import pytest

from shard.archive import block_server as server_module
from shard.archive.block_server import ArchiveServer
from shard.archive.shared_state import SharedState
from tests.unit.shard.archive.logs import fill, log, make, open_store
from tests.unit.shard.archive.processes import CLUSTER, SHARD, Process
from ziplog.archive import client as client_module
from ziplog.archive.client import ArchiveClient
from ziplog.archive.messages import (
    BLOCK,
    LOCATE,
    LOCATED,
    MAX_PLACES,
    REQUEST_BYTES,
    Answer,
    Places,
    decode_request,
    encode_answer,
    encode_places,
)
from ziplog.archive.sockets import is_same_machine, receive
from ziplog.errors import UnavailableError
from ziplog.segments import block_reader as files_module
from ziplog.segments.block_file import BlockIndex, Part, part_of
from ziplog.segments.block_reader import BlockReader
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COLUMNS: Final = bytes(range(32))
DATA: Final = b"payload"
#: As in the files: with bytes before and after them.
ROWS: Final = b"r" * 16 + COLUMNS + b"more"
SEGMENT: Final = b"s" * 5 + DATA + b"more"
NAME: Final = f"{1:08d}-{1:019d}-{1:019d}-{7:08x}"
FACTS: Final = Answer(
    BLOCK, 1, 9, 1, has_keys=False, columns=part_of(COLUMNS, 0), data=part_of(DATA, 0)
)
WHOLE: Final = encode_answer(FACTS) + COLUMNS + DATA
BEHIND: Final = encode_answer(FACTS._replace(start=9, stop=20)) + COLUMNS + DATA


def is_of_files(block: Block | int) -> bool:
    """Whether a block was read from files; a received block is one piece."""
    assert isinstance(block, Block)
    return memoryview(block.data).obj is not memoryview(block.columns).obj


# --- archives --------------------------------------------------------------------------------


def test_on_one_machine_the_files_are_read(
    segments: Path, started: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(segments)
    fill(store, log(60, origins=True))
    make(segments)
    store.close()
    process = started(segments)
    expected = BlockReader(segments).block(100)
    with process.client() as client:
        assert is_of_files(client.block(100))
        assert client.block(100) == expected
    monkeypatch.setattr(client_module, "is_same_machine", lambda _: False)
    with process.client() as client:
        block = client.block(100)
        assert not is_of_files(block)
        assert block == expected


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions requested from archives."""
    gsns: list[int] = []

    def ask(self: ArchiveClient, kind: int, gsn: int) -> object:
        gsns.append(gsn)
        return real(self, kind, gsn)

    real = ArchiveClient._request
    monkeypatch.setattr(ArchiveClient, "_request", ask)
    return gsns


def test_a_segments_blocks_are_requested_together(
    segments: Path, started: Callable[..., Process], asked: list[int]
) -> None:
    entries = log(300)
    store = open_store(segments, 30_000)
    fill(store, entries)
    make(segments)
    store.close()
    _, index = BlockReader(segments).indexed()[0]
    starts = [block.start for block in index.blocks]
    assert len(starts) > 2 * MAX_PLACES
    with started(segments).client() as client:
        for start in starts:
            block = client.block(start)
            assert is_of_files(block)
            assert block == BlockReader(segments).block(start)
    assert asked == starts[::MAX_PLACES]


def test_trimmed_blocks_are_requested_again_once_their_files_are_gone(
    segments: Path, started: Callable[..., Process], asked: list[int]
) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    store.close()
    process = started(segments)
    with process.client() as client:
        block = client.block(100)
        assert isinstance(block, Block)
        older = [(s, index) for s, index in BlockReader(segments).indexed() if index.start <= 100]
        stop = older[-1][1].stop
        # Its files are unchanged, and their locations are known.
        process.shared.trim = stop
        assert client.block(100) == block
        for segment, _ in older:
            (segments / segment.name).unlink()
        assert client.block(100) == stop
        assert is_of_files(client.block(stop))
    assert asked == [100, 100, stop]


def test_a_remote_client_learns_no_path(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    store.close()
    monkeypatch.setattr(server_module, "is_same_machine", lambda _: False)
    shared = SharedState()
    shared.cluster = CLUSTER
    server = ArchiveServer(segments, shared, "127.0.0.1", SHARD, bool)
    server.start()
    with ArchiveClient("127.0.0.1", server.port, CLUSTER, SHARD) as client:
        block = client.block(100)
        assert not is_of_files(block)
        assert block == BlockReader(segments).block(100)


@pytest.mark.parametrize(("address", "is_same"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_equal_addresses_are_one_machine(address: str, is_same: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mine = socket.create_connection(listening.getsockname(), 20, (address, 0))
        its, _ = listening.accept()
        with mine, its:
            assert is_same_machine(mine) is is_same_machine(its) is is_same


# --- fake archives ---------------------------------------------------------------------------


class Pretender:
    """A fake archive: answers one request per connection, or a tuple's number, and records them."""

    def __init__(self, answers: list[bytes | tuple[bytes, ...]]) -> None:
        self.asked: list[int] = []
        self._answers = answers
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(20)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def client(self) -> ArchiveClient:
        port = self._socket.getsockname()[1]
        return ArchiveClient("127.0.0.1", port, CLUSTER, SHARD, timeout_s=20)

    def _run(self) -> None:
        with self._socket:
            for answers in self._answers:
                connection, _ = self._socket.accept()
                connection.settimeout(20)
                with connection:
                    for answer in answers if isinstance(answers, tuple) else (answers,):
                        self._answer(connection, answer)

    def _answer(self, connection: socket.socket, answer: bytes) -> None:
        request = decode_request(bytes(receive(connection, REQUEST_BYTES)))
        assert request is not None
        self.asked.append(request.kind)
        connection.sendall(answer)


@pytest.fixture
def pretending() -> Iterator[Callable[..., Pretender]]:
    made: list[Pretender] = []

    def start(*answers: bytes | tuple[bytes, ...]) -> Pretender:
        made.append(Pretender(list(answers)))
        return made[-1]

    yield start
    for one in made:
        one.thread.join(20)
        assert not one.thread.is_alive()


def index_of(start: int = 1, stop: int = 9, columns_at: int = 16, data_at: int = 5) -> BlockIndex:
    return BlockIndex(
        start, stop, 1, False, part_of(DATA, data_at), part_of(COLUMNS, columns_at),
        Part(columns_at + len(COLUMNS), 0, 0),
    )  # fmt: skip


def located(segment: Path, *blocks: BlockIndex) -> bytes:
    """Return an answer with the locations of blocks: of one block by default."""
    return located_answer(encode_places(Places(bytes(segment), list(blocks or [index_of()]))))


def located_answer(places: bytes) -> bytes:
    """Return an answer with locations."""
    return encode_answer(Answer(LOCATED, places_size=len(places))) + places


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """A segment with rows."""
    (tmp_path / f"{NAME}.rows").write_bytes(ROWS)
    path = tmp_path / f"{NAME}.seg"
    path.write_bytes(SEGMENT)
    return path


def test_located_blocks_are_read_from_files(
    pretending: Callable[..., Pretender], segment: Path
) -> None:
    archive = pretending(located(segment))
    with archive.client() as client:
        for _ in range(2):
            assert client.block(5) == Block(1, 9, 1, False, COLUMNS, DATA, [])
    assert archive.asked == [LOCATE]


def _gone(segment: Path) -> None:
    segment.unlink()


def _without_rows(segment: Path) -> None:
    segment.with_suffix(".rows").unlink()


def _another(segment: Path) -> None:
    segment.write_bytes(b"a segment of another machine")


def _other_rows(segment: Path) -> None:
    segment.with_suffix(".rows").write_bytes(bytes(100))


def _cut(segment: Path) -> None:
    os.truncate(segment, 9)


def _pipe(segment: Path) -> None:
    segment.unlink()
    os.mkfifo(segment)


def _pipe_of_rows(segment: Path) -> None:
    rows = segment.with_suffix(".rows")
    rows.unlink()
    os.mkfifo(rows)


def _directory(segment: Path) -> None:
    segment.unlink()
    segment.mkdir()


def _link_to_a_device(segment: Path) -> None:
    segment.unlink()
    segment.symlink_to("/dev/zero")


def _link_elsewhere(segment: Path) -> None:
    # Its target would be valid.
    segment.rename(segment.with_name("secret"))
    segment.symlink_to(segment.with_name("secret"))


@pytest.mark.parametrize(
    "spoil",
    [
        _gone, _without_rows, _another, _other_rows, _cut, _pipe, _pipe_of_rows, _directory,
        _link_to_a_device, _link_elsewhere,
    ],
)  # fmt: skip
def test_blocks_are_sent_once_files_cannot_be_read(
    pretending: Callable[..., Pretender], segment: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(segment)
    archive = pretending(located(segment), WHOLE, WHOLE)
    with archive.client() as client:
        for _ in range(2):
            block = client.block(5)
            assert not is_of_files(block)
            assert block == Block(1, 9, 1, False, COLUMNS, DATA, [])
    assert archive.asked == [LOCATE, BLOCK, BLOCK]


def test_no_other_location_is_tried_after_a_failure(
    pretending: Callable[..., Pretender], segment: Path
) -> None:
    first = index_of(1, 9, columns_at=17)
    archive = pretending((located(segment, first, index_of(9, 20)), WHOLE, BEHIND))
    with archive.client() as client:
        assert not is_of_files(client.block(5))
        assert not is_of_files(client.block(10))
    assert archive.asked == [LOCATE, BLOCK, BLOCK]


@pytest.mark.parametrize("name", ["passwd", f"{NAME}.rows", f"{NAME}.idx", f"{NAME}.seg.old"])
def test_no_file_is_read_but_a_segments(
    pretending: Callable[..., Pretender], segment: Path, name: str
) -> None:
    # It contains all requested bytes.
    path = segment.with_name(name)
    path.write_bytes(SEGMENT)
    archive = pretending(located(path), WHOLE)
    with archive.client() as client:
        assert not is_of_files(client.block(5))
    assert archive.asked == [LOCATE, BLOCK]


@pytest.mark.parametrize(
    "answer",
    [
        located_answer(b""),
        located_answer(b"abc"),
    ],
)
def test_an_invalid_location_is_not_opened(
    pretending: Callable[..., Pretender], answer: bytes
) -> None:
    archive = pretending(answer, WHOLE)
    with archive.client() as client:
        assert not is_of_files(client.block(5))
    assert archive.asked == [LOCATE, BLOCK]


def test_a_block_that_is_not_over_the_position_is_not_taken(
    pretending: Callable[..., Pretender], segment: Path
) -> None:
    archive = pretending(located(segment), WHOLE)
    with (
        archive.client() as client,
        pytest.raises(UnavailableError, match="that does not hold gsn 9"),
    ):
        client.block(9)
    assert archive.asked == [LOCATE, BLOCK]


def test_no_more_is_read_than_a_file_has(
    pretending: Callable[..., Pretender], segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        reads.extend(map(len, buffers))
        return real(fd, buffers, at)

    real = os.preadv
    monkeypatch.setattr(files_module.os, "preadv", preadv)
    archive = pretending(located(segment, index_of(columns_at=len(ROWS) - 31)), WHOLE)
    with archive.client() as client:
        assert not is_of_files(client.block(5))
    archive = pretending(located(segment, index_of(data_at=2**64 - 1)), WHOLE)
    with archive.client() as client:
        assert not is_of_files(client.block(5))
    assert reads == [len(COLUMNS), 0]


def test_an_archive_elsewhere_names_no_files_here(
    pretending: Callable[..., Pretender], segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "is_same_machine", lambda _: False)
    archive = pretending(located(segment))
    with archive.client() as client, pytest.raises(UnavailableError, match="an invalid answer"):
        client.block(5)
    assert archive.asked == [BLOCK]
