"""An upgrade of real processes under load, from this release to a later one, and back.

tests/later_release.py is the later release. It uses other messages and files once the wire version
in use is 2.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ziplog
import ziplog.client.common.routing
from tests import later_release
from tests.later_release import NEW_FORM, set_later
from tests.waiting import wait_until
from ziplog.deploy.rolling_restart import RollingRestart
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import UnavailableError
from ziplog.local import Cluster
from ziplog.runtime.wire_file import WIRE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 60.0
LAUNCHER = Path(later_release.__file__)
MODULES = {"mms-0": "mms", "fh-0": "failure_handler", "shard-0-0": "shard"}


@contextmanager
def inserting(log: ziplog.Log) -> Iterator[list[ziplog.RecordId]]:
    """Insert one record after the other; no insert may fail."""
    rids: list[ziplog.RecordId] = []
    errors: list[BaseException] = []
    stopped = threading.Event()

    def insert() -> None:
        try:
            while not stopped.is_set():
                rids.append(log.insert_after(str(len(rids)).encode(), timeout=TIMEOUT_S))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=insert)
    thread.start()
    try:
        yield rids
    finally:
        stopped.set()
        thread.join()
    assert errors == []


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def unknown_messages(cluster: Cluster) -> list[str]:
    """The log lines about messages that a node could not decode."""
    logs = Path(cluster.config.data_dir / "logs").glob("*.log")
    lines = [line for path in logs for line in path.read_text().splitlines()]
    return [line for line in lines if "is not a valid message" in line]


@pytest.mark.timeout(400)
def test_a_release_can_be_taken_back_until_the_upgrade_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clients know both versions: they are upgraded before the upgrade is finished.
    monkeypatch.setattr(ziplog.client.common.routing, "VERSIONS", later_release.WIRES)
    with (
        Cluster(tmp_path, shards=1, mms=3, launcher=[str(LAUNCHER)]) as cluster,
        cluster.connect(timeout=TIMEOUT_S) as log,
        cluster.connect(timeout=TIMEOUT_S) as operator,
        inserting(log) as rids,
    ):
        names = cluster.nodes
        half = [name for name in names if name in {"shard-0-1", "mms-0", "fh-0"}]

        def restart(later: list[str], nodes: list[str]) -> None:
            set_later(tmp_path, later)
            RollingRestart(tmp_path, operator, TIMEOUT_S).run(nodes, lambda *_: None)

        def versions() -> dict[str, list[int]]:
            status = operator.cluster()
            replicas = [replica for shard in status["shards"] for replica in shard["replicas"]]
            nodes = [*status["mms"], *status["failure_handlers"], *replicas]
            assert status["wire_in_use"] == 1
            return {node["name"]: node["wire_versions"] for node in nodes}

        def runs(later: list[str]) -> bool:
            return versions() == {name: [1, 2] if name in later else [1, 1] for name in names}

        assert runs([])
        # Half of the nodes run the later release: it cannot be finished, and can be taken back.
        restart(half, half)
        wait_until(lambda: runs(half), "the versions of both releases are reported")
        with pytest.raises(UnavailableError, match=r"shard-0-0 \(Ziplog .*\) knows wire version 1"):
            operator.finish_upgrade(2)
        restart([], half)
        wait_until(lambda: runs([]), "the later release is taken back")
        # All nodes run the later release, and still use what the former one knows.
        restart(list(names), [])
        wait_until(lambda: runs(list(names)), "all nodes run the later release")
        count = len(rids)
        wait_until(lambda: len(rids) > count + 10, "inserts flow")
        assert unknown_messages(cluster) == []
        assert not any((tmp_path / name / WIRE_FILE).exists() for name in names)

        assert operator.finish_upgrade(2, timeout=TIMEOUT_S) == 2
        wait_until(
            lambda: all((tmp_path / name / WIRE_FILE).exists() for name in names),
            "all nodes use the later version",
        )
        assert operator.cluster()["wire_in_use"] == 2
        count = len(rids)
        wait_until(lambda: len(rids) > count + 10, "inserts flow")
        # The servers start with what they stored in the later form, and with the later messages.
        restart(list(names), ["shard-0-0", "shard-0-1"])
        assert unknown_messages(cluster) == []
        refuse_a_former_client(cluster)
        refuse_the_former_release(cluster, operator)
    read_everything(tmp_path, rids)


def refuse_a_former_client(cluster: Cluster) -> None:
    """A client of the former release, in a process of its own, does not hang."""
    done = subprocess.run(
        [sys.executable, "-m", "ziplog", "status", "--bootstrap", cluster.config.bootstrap],
        check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "uses wire version 2, but this client knows 1" in done.stderr


def refuse_the_former_release(cluster: Cluster, operator: ziplog.Log) -> None:
    """A server of the former release, with a new directory, halts once it meets the cluster."""
    directory = cluster.config.data_dir
    set_later(directory, [name for name in cluster.nodes if name != "shard-0-1"])
    (directory / "shard-0-1" / WIRE_FILE).unlink()
    cluster.kill("shard-0-1")
    reason = "the cluster uses wire version 2, but this release (Ziplog"
    log = directory / "logs" / "shard-0-1.log"
    wait_until(lambda: f'event=halted reason="{reason}' in log.read_text(), "it halts")
    set_later(directory, cluster.nodes)

    def is_whole() -> bool:
        [shard] = operator.cluster()["shards"]
        states = {replica["state"] for replica in shard["replicas"]}
        return bool(shard["state"] == "live") and states == {"up"}

    wait_until(is_whole, "the later release runs it again", TIMEOUT_S)


def read_everything(directory: Path, rids: list[ziplog.RecordId]) -> None:
    """The former release refuses each directory and changes nothing; the later one has the log."""
    assert (directory / "shard-0-0" / "checkpoint").read_bytes()[4:].startswith(NEW_FORM)
    for node, module in MODULES.items():
        before = contents(directory / node)
        arguments = ["--config", str(directory / CLUSTER_FILE), "--node", node]
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert f"{directory / node}: the cluster uses wire version 2, but this release" in line
        assert line.endswith("Nothing was changed in the directory")
        assert contents(directory / node) == before
    with Cluster(directory, launcher=[str(LAUNCHER)]) as cluster, cluster.connect() as log:
        found = {record.rid: record.payload for record in log.subscribe(follow=False)}
        assert found == {rid: str(index).encode() for index, rid in enumerate(rids)}
