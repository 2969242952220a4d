"""The file of rejected records, on a disk that becomes full."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import msgspec
import pytest

from logplayer import dead_letters
from logplayer.contract import RejectedRecord, Task
from ziplog.types import Record, RecordId

if TYPE_CHECKING:
    from pathlib import Path

_TASK = Task("orders", "db", 0, 1, 9, 2, 5, 0, 7, b"", has_moved=False)
_REJECTED = [RejectedRecord(Record(RecordId(10, 0), b"payload", None, 1, 0), "it is odd")]


def test_lines_on_a_full_disk_are_taken_back_and_the_name_is_stable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, fsync = tmp_path / "dead.jsonl", os.write, os.fsync
    synced: list[bool] = []

    def full(file: int, lines: bytes, size: int = 20) -> int:
        if os.fstat(file).st_size >= size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, lines[:size])

    def sync(file: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(file).st_mode))
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    for size in (0, 20):
        monkeypatch.setattr(os, "write", lambda file, lines, size=size: full(file, lines, size))
        with pytest.raises(OSError, match="No space"):
            dead_letters.append(str(path), _TASK, _REJECTED)
    monkeypatch.setattr(os, "write", write)
    dead_letters.append(str(path), _TASK, _REJECTED)
    assert any(synced), "the directory was never synced"
    (line,) = path.read_bytes().splitlines()
    assert msgspec.json.decode(line)["gsn"] == 10


def test_lines_follow_one_that_a_process_did_not_end(tmp_path: Path) -> None:
    path = tmp_path / "dead.jsonl"
    path.write_bytes(b'{"player":')
    dead_letters.append(str(path), _TASK, _REJECTED)
    broken, line = path.read_bytes().splitlines()
    assert broken == b'{"player":'
    assert msgspec.json.decode(line)["gsn"] == 10
