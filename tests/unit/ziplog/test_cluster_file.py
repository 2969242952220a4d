"""Changes of a cluster file: the lock, and the id."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.ziplog.nodes import make
from ziplog import local
from ziplog.cli import servers
from ziplog.config import load
from ziplog.deploy import cluster_file, new_cluster
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from pathlib import Path

ID = "0123456789abcdef" * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path / CLUSTER_FILE


def test_one_process_at_a_time_changes_a_file(path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom ziplog.deploy import cluster_file\n"
        f"with cluster_file.exclusive_lock(Path({str(path)!r}), 0.0):\n"
        "    print('alone', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"alone\n"
        with (
            pytest.raises(DeadlineError, match="another process is changing"),
            cluster_file.exclusive_lock(path, 0.0),
        ):
            pass
        other.kill()
    with cluster_file.exclusive_lock(path, 20.0):
        # A change of the file does not release the lock.
        cluster_file.set_id(path, ID)
        with pytest.raises(DeadlineError), cluster_file.exclusive_lock(path, 0.0):
            pass
    with pytest.raises(ConfigError, match="cannot open the directory"):
        cluster_file.exclusive_lock(path / "nowhere" / "x", 0.0).__enter__()


def test_an_id_is_written_once_and_removed_and_the_rest_stays(path: Path) -> None:
    text = "# by hand\n" + path.read_text()
    path.write_text(text)
    path.chmod(0o640)
    cluster_file.set_id(path, ID)
    assert load(path).id == ID
    assert path.read_text().replace(f'id = "{ID}"\n', "") == text
    cluster_file.set_id(path, ID[::-1])
    assert load(path).id == ID
    cluster_file.remove_id(path)
    cluster_file.remove_id(path)
    assert path.read_text() == text
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_without_a_place_for_the_id_stays_as_it_is(path: Path) -> None:
    text = path.read_text().replace("[cluster]", "[ cluster ]")
    path.write_text(text)
    cluster_file.set_id(path, ID)
    assert path.read_text() == text


@pytest.mark.parametrize("found", ["x", ID.upper(), ID[:-1]])
def test_an_invalid_id_is_refused(path: Path, found: str) -> None:
    text = path.read_text().replace("[cluster]\n", f'[cluster]\nid = "{found}"\n')
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"id in .* must be 32 hexadecimal digits"):
        load(path)


def test_of_two_processes_that_create_a_cluster_one_writes_its_file(tmp_path: Path) -> None:
    """Both found no cluster file; the second one must not replace the file of the first."""
    shape = new_cluster.shape(1, 0, 1, 0, ())
    first, second = (
        new_cluster.config(shape, port, name="c", data_dir=tmp_path) for port in (20_000, 21_000)
    )
    assert local._create(tmp_path, first, 1.0)
    (tmp_path / "mms-0").mkdir()
    assert not local._create(tmp_path, second, 1.0)
    assert load(tmp_path / CLUSTER_FILE) == first


def test_a_new_cluster_file_is_complete_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / CLUSTER_FILE
    shape = new_cluster.shape(1, 0, 1, 0, ())
    config = new_cluster.config(shape, 20_000, name="c", data_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(ConfigError, match="No space left on device"):
            local._create(tmp_path, config, 1.0)
    assert not file.exists()
    servers._refuse_other_files(tmp_path)  # of `ziplog up`
    assert local._create(tmp_path, config, 1.0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
