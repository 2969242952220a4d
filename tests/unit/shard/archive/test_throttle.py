"""Throttle of the builder: slow while records arrive, fast while a reader waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from shard.archive import throttle as pace_module
from shard.archive.__main__ import _CHECK, _EXPEDITE, _receive_commands, _send_command
from shard.archive.block_builder import BlockBuilder
from shard.archive.block_server import ArchiveServer
from shard.archive.shared_state import SharedState
from shard.archive.throttle import EXPEDITED_S, IDLE_S, MAX_PAUSE_S, Throttle
from tests.unit.shard.archive.logs import fill, log, make, open_store
from tests.unit.shard.archive.processes import CLUSTER, SHARD
from ziplog.archive.client import ArchiveClient
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Clock:
    """A clock that only waits advance."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self.worked = 50.0
        self.waits: list[float] = []
        self.throttle = Throttle()
        patch.setattr(pace_module.time, "monotonic", lambda: self.now)
        patch.setattr(pace_module.time, "thread_time", lambda: self.worked)
        patch.setattr(self.throttle._woken, "wait", self._wait)
        self.meanwhile: Callable[[], None] = lambda: None

    def _wait(self, timeout: float) -> None:
        assert timeout > 0
        self.waits.append(timeout)
        self.now += timeout
        self.meanwhile()

    def work(self, worked_s: float) -> None:
        """Work for a duration, on a machine that gives this thread half of the time."""
        self.throttle.start()
        self.worked += worked_s
        self.now += 2 * worked_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "1.seg"
    path.touch()
    # As if written to during the whole test.
    later = time.time() + 3_600
    os.utime(path, (later, later))
    return path


def test_while_records_come_a_twentieth_of_the_time_is_work(clock: Clock, written: Path) -> None:
    clock.work(0.1)
    clock.throttle.throttle(written)
    assert sum(clock.waits) == pytest.approx(1.9)
    assert max(clock.waits) <= IDLE_S, "it would notice the end of writes late"


def test_a_pause_does_not_count_as_work(clock: Clock, written: Path) -> None:
    clock.work(0.1)
    clock.throttle.throttle(written)
    clock.waits.clear()
    clock.throttle.throttle(written)
    assert clock.waits == []


def test_with_nothing_written_there_is_no_rest(clock: Clock, written: Path) -> None:
    before = time.time() - 1
    os.utime(written, (before, before))
    clock.work(10)
    clock.throttle.throttle(written)
    clock.throttle.throttle(written.with_name("gone"))
    assert clock.waits == []


def test_a_pause_is_bounded(clock: Clock, written: Path) -> None:
    clock.work(100)
    clock.throttle.throttle(written)
    assert sum(clock.waits) == pytest.approx(MAX_PAUSE_S)


def test_a_reader_without_rows_ends_this_pause_and_the_next_ones(
    clock: Clock, written: Path
) -> None:
    clock.work(10)
    clock.meanwhile = clock.throttle.expedite
    clock.throttle.throttle(written)
    assert clock.waits == [IDLE_S]
    clock.waits.clear()
    clock.work(1)
    clock.throttle.throttle(written)
    assert clock.waits == []
    clock.now += EXPEDITED_S
    clock.work(0.01)
    clock.throttle.throttle(written)
    assert clock.waits == [pytest.approx(0.19)]


def test_a_request_for_missing_rows_is_reported(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    store.close()
    shared = SharedState()
    shared.cluster = CLUSTER
    misses: list[int] = []
    server = ArchiveServer(segments, shared, "127.0.0.1", SHARD, lambda: misses.append(1))
    server.start()
    with ArchiveClient("127.0.0.1", server.port, CLUSTER, SHARD) as client:
        assert isinstance(client.block(1), Block)
        assert not misses
        assert client.block(2**40) == 0
        assert not misses, "rows need a sealed segment"
        second = store._segments[1]
        (segments / second.block_file_name).unlink()
        assert isinstance(client.block(second.base), int)
        assert misses == [1]
        shared.trim = store._segments[2].base
        assert isinstance(client.block(second.base), int)
        assert misses == [1], "trimmed rows are not built again"


@pytest.mark.parametrize("word", [_CHECK, _EXPEDITE])
def test_an_expedite_command_does_not_wake_an_idle_builder(word: bytes) -> None:
    """A request for missing rows does not wake a builder without work or space."""
    throttle, called = Throttle(), threading.Event()
    line, its = socket.socketpair()
    with line, its:
        _send_command(line, word)
        line.shutdown(socket.SHUT_WR)
        _receive_commands(its, throttle, called)
    assert called.is_set() == (word == _CHECK)
    assert throttle._woken.is_set() == (word == _EXPEDITE)


def test_each_block_is_followed_by_a_rest(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(segments)
    fill(store, log(60))
    maker = BlockBuilder(segments)
    rests: list[Path] = []
    monkeypatch.setattr(maker.throttle, "throttle", rests.append)
    maker.build(lambda: 2**60)
    sealed = store._segments[:-1]
    assert len(rests) >= len(sealed) > 1
    assert set(rests) == {segments / store._segments[-1].name}
    store.close()
