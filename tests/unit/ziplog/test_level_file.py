"""The durability level in a server's directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ziplog.runtime import level_file

if TYPE_CHECKING:
    from pathlib import Path


def test_the_last_recorded_level_is_read(tmp_path: Path) -> None:
    assert level_file.read(tmp_path) == "memory"
    for level in ("disk", "memory", "disk"):
        level_file.record(tmp_path, level)  # type: ignore[arg-type]
        assert level_file.read(tmp_path) == level


@pytest.mark.parametrize("contents", [b"", b"disk", b"disk\n\n", b"memory\n", b"\xff"])
def test_anything_but_the_whole_level_counts_as_memory(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / level_file.LEVEL_FILE).write_bytes(contents)
    assert level_file.read(tmp_path) == "memory"


def test_level_that_cannot_be_recorded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        level_file.record(tmp_path / "missing", "disk")
