"""`ziplog membership rebuild` on real clusters: the membership nodes' directories are lost.

Always: all records stay at their positions, inserts go on, and no position is given twice. A
command that refuses writes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest

from mms.state import ClusterState
from tests.waiting import wait_until
from ziplog.deploy.membership_rebuild import UNFINISHED
from ziplog.errors import UnavailableError
from ziplog.local import Cluster
from ziplog.raft.offline import read_state
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import ziplog

pytestmark = pytest.mark.timeout(600)

DEADLINE_S: Final = 60.0
RECORDS: Final = 100_000
CALL: Final = 2_000


def shard_of(log: ziplog.Log, number: int) -> dict[str, Any]:
    shards: list[dict[str, Any]] = log.cluster()["shards"]
    return shards[number]


def raise_view(log: ziplog.Log, shard: int, server: int) -> None:
    """Kill a server, and wait for a later view of its shard: a recovery may begin anew."""
    before = shard_of(log, shard)
    os.kill(before["replicas"][server]["pid"], signal.SIGKILL)

    def is_back() -> bool:
        now = shard_of(log, shard)
        return now["view"] > before["view"] and now["state"] == "live"

    wait_until(is_back, "the shard is not back", DEADLINE_S)


def contents(log: ziplog.Log, start: RecordId) -> list[tuple[RecordId, bytes]]:
    return [(record.rid, record.payload) for record in log.subscribe(start, follow=False)]


def lose_membership(directory: Path) -> None:
    for node in directory.glob("mms-*"):
        shutil.rmtree(node)


def command(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", "ziplog", "membership", "rebuild", "--data-dir", str(directory), *options]
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def save_holdings(directory: Path, file: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["membership", "holdings", "--data-dir", str(directory), "-o", str(file)]
    return subprocess.run(
        [sys.executable, "-m", "ziplog", *arguments], capture_output=True, text=True, check=False
    )


def rebuild(directory: Path) -> str:
    done = command(directory, "--yes")
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(directory: Path, *options: str) -> str:
    """Return the one line of a refused command, which wrote nothing."""
    before = files_of(directory)
    done = command(directory, "--yes", *options)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert files_of(directory) == before
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("ziplog: error: ")


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in {"lock", "supervisor.pid"}
    }


def assert_new(fresh: Iterable[RecordId], given: Iterable[RecordId]) -> None:
    assert not {rid.gsn for rid in fresh} & {rid.gsn for rid in given}


@pytest.mark.nightly
def test_all_records_stay_and_inserts_go_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given: list[RecordId] = []
    former = tmp_path_factory.mktemp("former") / "mms-2"
    with Cluster(tmp_path, shards=3, mms=3, supervise=True) as cluster, cluster.connect() as log:
        for first in range(0, RECORDS, CALL):
            given += log.insert_many([b"%d" % n for n in range(first, first + CALL)])
        for server in (0, 1, 0):
            raise_view(log, 0, server)
            given += log.insert_many([b"view"] * 100)
        view = shard_of(log, 0)["view"]
        assert view >= 4
        trim = sorted(given)[RECORDS // 10]
        log.trim(trim)
        cluster.finalize_shard(2)
        given += log.insert_many([b"after"] * 100)
        log.sync()
        before = contents(log, trim)
    assert len(before) == len(given) - RECORDS // 10
    shutil.copytree(tmp_path / "mms-2", former)
    lose_membership(tmp_path)
    with pytest.raises(UnavailableError, match="had data, and its files are not here"):
        Cluster(tmp_path)
    shown = rebuild(tmp_path)
    assert "finalized" in shown
    shutil.rmtree(tmp_path / "mms-2")
    former.rename(tmp_path / "mms-2")  # a node that returns with its former directory
    with Cluster(tmp_path, supervise=True) as cluster, cluster.connect() as log:
        assert contents(log, trim) == before
        for rid, payload in before[:: len(before) // 50]:
            assert log.read_record(rid).payload == payload
        shards = log.cluster()["shards"]
        assert [one["state"] for one in shards] == ["live", "live", "finalized"]
        assert shards[0]["view"] >= view
        fresh = log.insert_many([b"fresh"] * CALL)
        assert_new(fresh, given)
        assert {rid.shard for rid in fresh} <= {0, 1}
        raise_view(log, 1, 0)
        more = log.insert_many([b"more"] * CALL)
        assert_new(more, given + fresh)
        assert len(contents(log, trim)) == len(before) + 2 * CALL
        number = log.cluster()["lease"]
    state = ClusterState()
    read_state(tmp_path / "mms-2", state)
    assert state.last is not None
    assert state.last.number >= number, "it did not take the rebuilt state"


def test_a_crashed_cluster_with_a_lost_server_and_handler(tmp_path: Path) -> None:
    """The servers are killed, and the failure handler's directory is lost as well."""
    directory = tmp_path / "cluster"
    with Cluster(directory, shards=2, supervise=False) as cluster, cluster.connect() as log:
        given = log.insert_many([b"%d" % n for n in range(200)])
        log.sync()
        before = contents(log, RecordId(0, 0))
        for shard in log.cluster()["shards"]:
            for replica in shard["replicas"]:
                os.kill(replica["pid"], signal.SIGKILL)
    lose_membership(directory)
    shutil.rmtree(directory / "fh-0")
    held = directory / "shard-1-1"
    held.rename(tmp_path / "away")
    assert "the directory of shard-1-1 is needed" in refusal(directory)
    (tmp_path / "away").rename(held)
    assert "crashed" in rebuild(directory)
    with Cluster(directory, supervise=True, accept_limbo=True) as cluster, cluster.connect() as log:

        def is_live() -> bool:
            return {shard["state"] for shard in log.cluster()["shards"]} == {"live"}

        wait_until(is_live, "the shards are not live", DEADLINE_S)
        assert contents(log, RecordId(0, 0)) == before
        assert_new(log.insert_many([b"fresh"] * 200), given)


def test_one_clean_server_of_each_shard_is_enough(tmp_path: Path) -> None:
    """The failure handler's log is here, so the other servers' directories are not needed."""
    with Cluster(tmp_path, shards=2) as cluster, cluster.connect() as log:
        given = log.insert_many([b"%d" % n for n in range(200)])
        before = contents(log, RecordId(0, 0))
    lose_membership(tmp_path)
    shutil.rmtree(tmp_path / "shard-0-0")
    shutil.rmtree(tmp_path / "shard-1-1")
    assert "missing" in rebuild(tmp_path)
    with Cluster(tmp_path, supervise=True, accept_limbo=True) as cluster, cluster.connect() as log:

        def is_back() -> bool:
            shards = log.cluster()["shards"]
            return [(one["state"], one["view"]) for one in shards] == [("live", 2)] * 2

        wait_until(is_back, "the shards are not back", DEADLINE_S)
        assert contents(log, RecordId(0, 0)) == before
        assert_new(log.insert_many([b"fresh"] * 200), given)


def test_files_of_other_machines_replace_their_directories(tmp_path: Path) -> None:
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "holdings"
    with Cluster(here, shards=2) as cluster, cluster.connect() as log:
        given = log.insert_many([b"%d" % n for n in range(200)])
        before = contents(log, RecordId(0, 0))
    lose_membership(here)
    there.mkdir()
    shutil.copy(here / "cluster.toml", there)
    moved = ["shard-0-1", "shard-1-0", "shard-1-1", "fh-0"]
    for name in moved:
        (here / name).rename(there / name)
    assert "the directory of shard-0-1 is needed" in refusal(here)

    done = save_holdings(there, file)
    assert (done.returncode, done.stderr) == (
        0, f"ziplog: wrote what {', '.join(moved)} hold to {file}\n"
    )  # fmt: skip
    assert 0 < file.stat().st_size < 20_000
    assert save_holdings(there, file).returncode == 1, "the file exists"
    assert save_holdings(tmp_path / "empty", tmp_path / "none").returncode == 2
    options = ("--holdings", str(file))
    twice = command(here, "--yes", *options, *options)
    assert (twice.returncode, "has fh-0, shard-0-1," in twice.stderr) == (2, True)
    lost = command(here, "--yes", *options, "--lost", "shard-0-1")
    assert (lost.returncode, "that no --holdings file has" in lost.stderr) == (2, True)
    wrong = command(here, "--yes", "--holdings", str(here / "cluster.toml"))
    assert (wrong.returncode, "a file of `ziplog membership" in wrong.stderr) == (2, True)

    done = command(here, "--yes", *options)
    assert done.returncode == 0, done.stderr
    for name in moved:
        (there / name).rename(here / name)
    with Cluster(here) as cluster, cluster.connect() as log:
        assert contents(log, RecordId(0, 0)) == before
        assert_new(log.insert_many([b"fresh"] * 200), given)


def test_refusals_name_the_reason_and_write_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    with Cluster(directory, shards=1, mms=3) as cluster, cluster.connect() as log:
        log.insert_many([b"x"] * 10)
        assert f"process {os.getpid()}" in command(directory, "--yes").stderr
    assert "the membership service is not lost" in refusal(directory)
    shutil.rmtree(directory / "mms-0")
    shutil.rmtree(directory / "mms-1")
    assert "the directory of mms-2 is still in" in refusal(directory)
    lose_membership(directory)

    asked = command(directory)
    assert asked.returncode == 2
    assert "--yes" in asked.stderr

    (directory / UNFINISHED).mkdir()
    assert "a former rebuild was interrupted" in refusal(directory)
    (directory / UNFINISHED).rmdir()

    both = [directory / name for name in ("shard-0-0", "shard-0-1")]
    for path in both:
        path.rename(tmp_path / path.name)
    assert "no directory of a storage server is in" in refusal(directory)

    with Cluster(tmp_path / "other", shards=1) as cluster, cluster.connect() as log:
        log.insert_many([b"x"] * 10)
    for path in both:
        shutil.copytree(tmp_path / "other" / path.name, path)
    assert "is of cluster" in refusal(directory)
    for path in both:
        shutil.rmtree(path)
        (tmp_path / path.name).rename(path)

    checkpoint = directory / "shard-0-0" / "checkpoint"
    checkpoint.unlink()
    both[1].rename(tmp_path / "away")
    assert "shard 0: the directory of shard-0-1 is needed" in refusal(directory)
    (tmp_path / "away").rename(both[1])
    assert (
        "a server whose directory is not here"
        in command(directory, "--lost", "shard-0-1", "--yes").stderr
    )
    document = json.loads(command(directory, "--yes", "--json").stdout)
    assert [shard["id"] for shard in document["shards"]] == [0]
    assert document["known_end"] < document["first_free"]
    (directory / UNFINISHED).mkdir()  # As after a kill: the new directories are in use by now.
    assert "the membership service is not lost" in refusal(directory)
