"""Rows are made slowly while records come, and at once where somebody waits for them."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from shard.archive import pace as pace_module
from shard.archive.__main__ import _HURRY, _NEWS, _listen, _say
from shard.archive.board import Board
from shard.archive.maker import Maker
from shard.archive.pace import CALM_S, Pace
from shard.archive.server import ArchiveServer
from tests.shard.archive.logs import fill, log, make, open_store
from tests.shard.archive.processes import CLUSTER, SHARD
from ziplog.runtime.archive import ArchiveClient
from ziplog.segments.rows import Block

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """A clock that only waiting moves on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self.waits: list[float] = []
        self.pace = Pace()
        patch.setattr(pace_module.time, "monotonic", lambda: self.now)
        patch.setattr(self.pace._hurried, "wait", self._wait)

    def _wait(self, timeout: float) -> bool:
        if not self.pace._hurried.is_set():
            self.waits.append(timeout)
            self.now += timeout
        return self.pace._hurried.is_set()

    def work(self, worked_s: float) -> None:
        self.pace.begin()
        self.now += worked_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "1.seg"
    path.touch()
    # As if it were written to for as long as a test lasts.
    later = time.time() + 3_600
    os.utime(path, (later, later))
    return path


def test_while_records_come_a_twentieth_of_the_time_is_work(clock: Clock, written: Path) -> None:
    clock.work(0.1)
    clock.pace.rest(written)
    assert sum(clock.waits) == pytest.approx(1.9)
    assert max(clock.waits) <= CALM_S, "it would notice late that no more come"


def test_a_rest_is_no_work(clock: Clock, written: Path) -> None:
    clock.work(0.1)
    clock.pace.rest(written)
    clock.waits.clear()
    clock.pace.rest(written)
    assert clock.waits == []


def test_with_nothing_written_there_is_no_rest(clock: Clock, written: Path) -> None:
    before = time.time() - 1
    os.utime(written, (before, before))
    clock.work(10)
    clock.pace.rest(written)
    clock.pace.rest(written.with_name("gone"))
    assert clock.waits == []


def test_who_waits_ends_the_rest_until_all_is_made(clock: Clock, written: Path) -> None:
    clock.work(10)
    clock.pace.hurry()
    clock.pace.rest(written)
    assert clock.waits == []
    clock.pace.done()
    clock.work(0.01)
    clock.pace.rest(written)
    assert sum(clock.waits) == pytest.approx(0.19)


def test_who_asks_for_what_is_not_there_is_said(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    make(segments)
    store.close()
    board = Board()
    board.cluster = CLUSTER
    misses: list[int] = []
    server = ArchiveServer(segments, board, "127.0.0.1", SHARD, lambda: misses.append(1))
    server.start()
    with ArchiveClient("127.0.0.1", server.port, CLUSTER, SHARD) as client:
        assert isinstance(client.block(1), Block)
        assert not misses
        assert client.block(2**40) == 0
        assert misses == [1]


def test_only_a_word_of_hurry_is_one() -> None:
    pace, called = Pace(), threading.Event()
    line, its = socket.socketpair()
    with line, its:
        _say(line, _NEWS)
        line.shutdown(socket.SHUT_WR)
        _listen(its, pace, called)
    assert called.is_set()
    assert not pace._hurried.is_set()
    line, its = socket.socketpair()
    with line, its:
        _say(line, _HURRY)
        _say(line, _NEWS)
        line.shutdown(socket.SHUT_WR)
        _listen(its, pace, called)
    assert pace._hurried.is_set()


def test_when_all_is_made_nobody_waits(segments: Path) -> None:
    store = open_store(segments)
    fill(store, log(60))
    maker = Maker(segments)
    maker.pace.hurry()
    maker.make(lambda: 2**60)
    assert not maker.pace._hurried.is_set()
    store.close()


def test_each_block_is_followed_by_a_rest(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(segments)
    fill(store, log(60))
    maker = Maker(segments)
    rests: list[Path] = []
    monkeypatch.setattr(maker.pace, "rest", rests.append)
    maker.make(lambda: 2**60)
    sealed = store._segments[:-1]
    assert len(rests) >= len(sealed) > 1
    assert set(rests) == {segments / store._segments[-1].name}
    store.close()
