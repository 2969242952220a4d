"""A data directory has one process and one owner, and its checkpoint serves one start."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shard.storage.data_directory import DataDirectory
from tests.checkpoints import consume
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DataDirectory]]:
    directories: list[DataDirectory] = []

    def start(cluster: str = "demo", node: str = "shard-0-0") -> DataDirectory:
        directories.append(DataDirectory(tmp_path / "data" / "shard-0-0", cluster, node))
        return directories[-1]

    yield start
    for directory in directories:
        directory.close()


def test_a_first_start_is_not_a_restart(opened: Callable[..., DataDirectory]) -> None:
    directory = opened()
    assert not directory.was_used
    assert consume(directory) is None
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in directory.path.iterdir()} == {0o600}


def test_a_start_that_failed_early_does_not_count(opened: Callable[..., DataDirectory]) -> None:
    opened().close()
    assert not opened().was_used


def test_a_start_after_a_crash_knows_it(opened: Callable[..., DataDirectory]) -> None:
    first = opened()
    consume(first)
    first.close()
    second = opened()
    assert second.was_used
    assert consume(second) is None


def test_a_checkpoint_serves_one_start(opened: Callable[..., DataDirectory]) -> None:
    first = opened()
    consume(first)
    first.write_checkpoint(b"state")
    first.close()
    second = opened()
    assert second.was_used
    assert consume(second) == b"state"
    second.close()
    third = opened()
    assert third.was_used
    assert consume(third) is None


@pytest.mark.parametrize("length", range(9))
def test_a_damaged_checkpoint_is_ignored(opened: Callable[..., DataDirectory], length: int) -> None:
    directory = opened()
    directory.write_checkpoint(b"state")
    path = directory.path / "checkpoint"
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    assert consume(directory) is None
    assert not path.exists()
    path.write_bytes(whole[:length] + b"\xff" + whole[length + 1 :])
    assert consume(directory) is None


def test_a_checkpoint_that_the_disk_cannot_read_is_ignored(
    opened: Callable[..., DataDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened()
    directory.write_checkpoint(b"state")

    def refuse(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        patched.setattr(os, "pread", refuse)
        assert consume(directory) is None
    assert not (directory.path / "checkpoint").exists()


def test_an_empty_checkpoint_is_valid(opened: Callable[..., DataDirectory]) -> None:
    directory = opened()
    directory.write_checkpoint(b"")
    assert consume(directory) == b""


def test_a_checkpoint_is_written_as_a_whole_or_not(
    opened: Callable[..., DataDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            directory.write_checkpoint(b"state")
    assert consume(directory) is None
    assert not list(directory.path.glob("*.tmp"))


def test_a_second_process_is_refused(opened: Callable[..., DataDirectory]) -> None:
    first = opened()
    with pytest.raises(UnavailableError, match=str(os.getpid())):
        opened()
    first.close()
    first.close()
    opened()


def test_a_lock_ends_with_its_process(opened: Callable[..., DataDirectory], tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, os, signal\n"
        "from shard.storage.data_directory import DataDirectory\n"
        "d = DataDirectory(pathlib.Path(sys.argv[1]), 'demo', 'shard-0-0')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "data" / "shard-0-0"
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == -9
    assert opened().identity.node == "shard-0-0"


def test_an_identity_stays(opened: Callable[..., DataDirectory]) -> None:
    first = opened()
    first.close()
    assert opened().identity == first.identity
    assert len(first.identity.server) == 32


@pytest.mark.parametrize(("cluster", "node"), [("other", "shard-0-0"), ("demo", "shard-0-1")])
def test_another_nodes_directory_is_refused(
    opened: Callable[..., DataDirectory], cluster: str, node: str
) -> None:
    opened().close()
    with pytest.raises(ConfigError, match="choose another data_dir"):
        opened(cluster, node)
    opened()  # the refused directory holds no lock


def test_any_flipped_bit_of_an_identity_is_refused(opened: Callable[..., DataDirectory]) -> None:
    directory = opened()
    directory.close()
    path = directory.path / "identity.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(ConfigError, match=r"identity\.json.*move the directory away"):
                opened()
    path.write_bytes(whole)
    assert opened().identity == directory.identity


def test_an_identity_of_an_earlier_release_is_read_and_gets_a_checksum(
    opened: Callable[..., DataDirectory],
) -> None:
    directory = opened()
    directory.close()
    path = directory.path / "identity.json"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b',"checksum"')] + b"}\n")
    again = opened()
    assert again.identity == directory.identity
    assert path.read_bytes() == whole


def test_a_damaged_identity_is_refused(opened: Callable[..., DataDirectory]) -> None:
    directory = opened()
    directory.close()
    (directory.path / "identity.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match="identity"):
        opened()


def test_a_used_directory_without_an_identity_is_refused(
    opened: Callable[..., DataDirectory],
) -> None:
    directory = opened()
    directory.delete_checkpoint()
    directory.close()
    path = directory.path / "identity.json"
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(ConfigError, match=r"identity\.json.*missing.*move the directory away"):
        opened()
    assert not path.exists()
    path.write_bytes(whole)
    assert opened().identity == directory.identity


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="data directory"):
        DataDirectory(tmp_path / "file" / "shard-0-0", "demo", "shard-0-0")


def test_a_full_disk_keeps_no_server_from_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DataDirectory(tmp_path / "d", "c", "n").close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    directory = DataDirectory(tmp_path / "d", "c", "n")
    assert consume(directory) is None
    directory.close()
