"""The wire version in use, at one node: what it reports, records and refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ziplog.core.node import Halt, RecordWire
from ziplog.core.wire_use import Release, WireRange, WireUse
from ziplog.errors import ConfigError, VersionError
from ziplog.runtime import wire_file

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = Release("0.1"), Release("0.2", WireRange(1, 2))


def test_a_version_is_used_once_it_is_recorded() -> None:
    use = WireUse(NEW, 1)
    assert use.on_report(1) == []
    assert use.on_report(2) == [RecordWire(2)]
    assert use.wire == 1
    assert use.on_report(2) == [RecordWire(2)]  # the disk refused the first one
    use.on_recorded(2)
    assert use.wire == 2


def test_a_late_report_changes_nothing() -> None:
    use = WireUse(NEW, 2)
    assert use.wire == 2
    assert use.on_report(1) == []
    use.on_recorded(1)
    assert use.wire == 2


@pytest.mark.parametrize(
    ("release", "wire", "known"),
    [(OLD, 2, "Ziplog 0.1) knows 1:"), (Release("0.9", WireRange(3, 4)), 2, "0.9) knows 3 to 4:")],
)
def test_a_release_that_does_not_know_the_version_halts(
    release: Release, wire: int, known: str
) -> None:
    [effect] = WireUse(release, 1).on_report(wire)
    assert isinstance(effect, Halt)
    assert effect.reason.startswith(f"the cluster uses wire version {wire}, but")
    assert known in effect.reason


def test_a_directory_keeps_the_version(tmp_path: Path) -> None:
    assert wire_file.read(tmp_path / "new", OLD) == 1
    assert wire_file.read(tmp_path, OLD) == 1
    wire_file.record(tmp_path, 2)
    assert wire_file.read(tmp_path, NEW) == 2
    wire_file.record(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["wire"]


def test_an_earlier_release_refuses_the_directory(tmp_path: Path) -> None:
    wire_file.record(tmp_path, 2)
    with pytest.raises(VersionError) as refused:
        wire_file.read(tmp_path, OLD)
    assert str(refused.value) == (
        f"{tmp_path}: the cluster uses wire version 2, but this release (Ziplog 0.1) knows 1:"
        " install a release that knows 2, and start this node again. Nothing was changed in the"
        " directory"
    )


@pytest.mark.parametrize("contents", [b"", b"\n", b"x\n", b"2222\n", b"-1\n", b"2\n2\n", b"\xff"])
def test_a_damaged_version_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "wire").write_bytes(contents)
    with pytest.raises(ConfigError, match="restore it"):
        wire_file.read(tmp_path, NEW)
