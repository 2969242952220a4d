"""Cuts of the log, with refusals and damage at inconvenient moments."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NoReturn

import pytest

from shard.storage import segment_files, segment_store
from tests.unit.shard.logs import Oracle, apply, compare, reopen

if TYPE_CHECKING:
    from pathlib import Path

    from ziplog.segments.segment import Segment


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_cut_that_took_effect_is_not_reported_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive finishes a block file during the cut, and no descriptor is left to delete it."""
    directory = tmp_path / "segments"
    store, oracle = reopen(directory), Oracle()
    for _ in range(20):
        apply(store, oracle, ("place", 0, [1], 60))
    assert store.flush()
    (path,) = directory.glob("*.seg")
    real = segment_store.create

    def create(where: Path, segment: Segment, contents: bytes) -> None:
        real(where, segment, contents)
        path.with_suffix(".rows").touch()
        monkeypatch.setattr(segment_files, "synced_names", refuse)

    monkeypatch.setattr(segment_store, "create", create)
    apply(store, oracle, ("truncate", 2))
    monkeypatch.undo()
    apply(store, oracle, ("place", 0, [1], 60))
    compare(store, oracle)
    assert store.close()
    compare(reopen(directory), oracle)
