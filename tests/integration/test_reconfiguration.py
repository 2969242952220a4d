"""Shards are added and removed in real clusters, under load and by an operator."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
from tests.integration.ports import consecutive_ports
from tests.waiting import wait_until
from ziplog.config import load
from ziplog.config_text import dump
from ziplog.deploy import new_shard
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

pytestmark = pytest.mark.timeout(300)

ZIPLOG = [sys.executable, "-m", "ziplog"]


def states(log: ziplog.Log) -> dict[int, str]:
    return {shard["id"]: shard["state"] for shard in log.cluster()["shards"]}


def is_back(cluster: Cluster, log: ziplog.Log, pid: int) -> bool:
    """Whether shard 0 is finalized in a new view, with another process of its first server."""
    shard = log.cluster()["shards"][0]
    is_new = shard["view"] >= 2 and cluster.dead() == [] and cluster.pid("shard-0-0") != pid
    return is_new and shard["state"] == "finalized"


class Load:
    """Clients that insert as fast as they are let, and one that follows the log."""

    def __init__(self, cluster: Cluster, policies: tuple[Any, ...] | None = None) -> None:
        policies = policies or (
            ziplog.policy.random(),
            ziplog.policy.sticky(),
            ziplog.policy.by_key_hash(),
        )
        self.cluster = cluster
        self.inserted: dict[bytes, ziplog.RecordId] = {}
        self.seen: list[ziplog.Record] = []
        self.faults: list[BaseException] = []
        self._stopped = threading.Event()
        self._drained = threading.Event()
        #: Records were seen, or something went wrong.
        self._news = threading.Condition()
        self._inserters = [
            threading.Thread(target=self._insert, args=(number, policy))
            for number, policy in enumerate(policies)
        ]
        self._follower = threading.Thread(target=self._follow)

    def __enter__(self) -> Self:
        for thread in (self._follower, *self._inserters):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the inserts, let the follower see them all, and say what went wrong."""
        self._stopped.set()
        for thread in self._inserters:
            thread.join()
        with self._news:
            self._news.wait_for(lambda: len(self.seen) >= len(self.inserted) or self.faults, 120)
        self._drained.set()
        self._follower.join()

    def _insert(self, number: int, policy: Any) -> None:
        with self.cluster.connect(timeout=120.0) as log:
            log.set_policy(policy)
            for count in itertools.count():
                if self._stopped.is_set():
                    return
                payload = f"{number}:{count}".encode()
                try:
                    self.inserted[payload] = log.insert_after(payload, key=payload)
                except BaseException as error:  # noqa: BLE001 - the test reports it
                    self._fail(error)
                    return

    def _follow(self) -> None:
        try:
            with self.cluster.connect() as log, log.subscribe() as records:
                while not self._drained.is_set():
                    found = records.fetch(timeout=0.1)
                    with self._news:
                        self.seen += found
                        self._news.notify_all()
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self.faults.append(error)
            self._news.notify_all()

    def at(self, shard: int) -> int:
        """Return the number of records inserted at a shard so far."""
        return sum(rid.shard == shard for rid in list(self.inserted.values()))

    def goes_on(self, *shards: int) -> None:
        """Wait until each of these shards has taken 20 more records."""
        until = {shard: self.at(shard) + 20 for shard in shards}
        wait_until(
            lambda: bool(self.faults) or all(self.at(s) >= least for s, least in until.items()),
            f"each of shards {shards} takes records",
            deadline_s=120,
        )
        assert self.faults == []

    def was_right(self) -> None:
        """Assert that no call failed, and that the follower saw all inserts in order."""
        assert self.faults == []
        gsns = [record.rid.gsn for record in self.seen]
        assert gsns == sorted(set(gsns))
        assert {record.payload: record.rid for record in self.seen} == self.inserted
        assert len(self.seen) == len(self.inserted)


def test_a_shard_is_added_under_load(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        with Load(cluster) as under_way:
            under_way.goes_on(0, 1)
            assert cluster.add_shard() == 2
            under_way.goes_on(0, 1, 2)
            under_way.stop()
            under_way.was_right()
        assert cluster.nodes[-2:] == ["shard-2-0", "shard-2-1"]
        assert [shard.id for shard in cluster.config.shards] == [0, 1, 2]
        # It is a shard like the others: a killed server is restarted.
        with cluster.connect(timeout=60.0) as log:
            pid = cluster.pid("shard-2-1")
            cluster.kill("shard-2-1")
            wait_until(lambda: log.cluster()["shards"][2]["view"] >= 2, "a new view")
            wait_until(lambda: states(log)[2] == "live", "it is live again")
            assert cluster.pid("shard-2-1") != pid
            log.set_policy(ziplog.policy.pin(2))
            log.insert_after(b"after its recovery")


def test_a_shard_is_removed_under_load_and_its_records_stay(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        with Load(cluster) as under_way:
            under_way.goes_on(0, 1)
            cluster.remove_shard(1)
            left = under_way.at(1)
            under_way.goes_on(0)
            under_way.stop()
            under_way.was_right()
        # Inserts pending at its removal may have been acknowledged since; no new ones went there.
        assert under_way.at(1) - left <= 3
        with cluster.connect() as log:
            assert states(log)[1] in {"leaving", "finalized"}
            of_it = [item for item in under_way.inserted.items() if item[1].shard == 1]
            for payload, rid in of_it[-20:]:
                assert log.read_record(rid).payload == payload
            found = {record.payload: record.rid for record in log.subscribe(follow=False)}
            assert found == under_way.inserted
            with pytest.raises(ConfigError):
                cluster.remove_shard(0)
            # Numbers are never used again.
            assert cluster.add_shard() == 2
            cluster.remove_shard(0)
            assert log.insert_after(b"the only one left").shard == 2


def test_a_finalized_shard_is_read_for_ever(tmp_path: Path) -> None:
    with Cluster(tmp_path, durability="memory") as cluster, cluster.connect(timeout=30.0) as log:
        log.set_policy(ziplog.policy.pin(0))
        rids = log.insert_many([b"a", b"b", b"c"])
        cluster.finalize_shard(0)
        assert states(log) == {0: "finalized", 1: "live"}
        with pytest.raises(UnavailableError, match="finalized"):
            log.insert_after(b"too late", timeout=2.0)
        log.set_policy(ziplog.policy.random())
        more = log.insert_after(b"d", rids[-1])
        pid = cluster.pid("shard-0-0")
        cluster.kill("shard-0-0")
        assert log.read_record(rids[1]).payload == b"b"
        wait_until(lambda: is_back(cluster, log, pid), "it comes back as what it was")
        assert [log.read_record(rid).payload for rid in rids] == [b"a", b"b", b"c"]
    with Cluster(tmp_path) as cluster, cluster.connect() as log:
        assert states(log) == {0: "finalized", 1: "live"}
        payloads = [record.payload for record in log.subscribe(follow=False)]
        assert payloads == [b"a", b"b", b"c", b"d"]
        assert log.read_record(more).rid == more
        # Twice is the same as once.
        cluster.finalize_shard(0)


def test_a_shard_that_is_over_needs_no_servers(tmp_path: Path) -> None:
    """It is finalized, and all its records are trimmed: its table leaves the cluster file."""
    with Cluster(tmp_path) as cluster, cluster.connect(timeout=30.0) as log:
        log.set_policy(ziplog.policy.pin(0))
        last = log.insert_after(b"a")
        cluster.finalize_shard(0)
        log.set_policy(ziplog.policy.random())
        kept = log.insert_after(b"b", last)
        log.trim(kept)
        wait_until(lambda: log.cluster()["shards"][0]["is_over"], "its positions are trimmed")
    config = load(tmp_path / CLUSTER_FILE)
    left = dataclasses.replace(config, shards=config.shards[1:], data_dir=Path())
    (tmp_path / CLUSTER_FILE).write_text(dump(left))
    with Cluster(tmp_path) as cluster, cluster.connect(timeout=10.0) as log:
        assert states(log) == {0: "finalized", 1: "live"}
        assert log.check_tail() == kept
        appended = log.append(b"c")
        assert log.check_tail(sealed=True) == appended
        assert [one.payload for one in log.subscribe(kept, follow=False)] == [b"b", b"c"]
        assert cluster.add_shard() == 2, "no number is used again"


def test_the_tail_does_not_wait_for_a_finalized_shard_before_the_last_record(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, failure_handlers=0) as cluster, cluster.connect(timeout=10.0) as log:
        log.set_policy(ziplog.policy.pin(0))
        last = log.insert_after(b"a")
        cluster.finalize_shard(0)
        log.set_policy(ziplog.policy.random())
        last = log.insert_after(b"b", last)
        cluster.pause("shard-0-1")
        assert log.check_tail() == last
        assert log.subscribe(ziplog.RID_RECENT, follow=False).position == last


def test_a_half_finished_addition_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DeadlineError("no time left")

    # Only the call itself starts servers here.
    with Cluster(tmp_path, shards=1, failure_handlers=0) as cluster, cluster.connect() as log:
        with monkeypatch.context() as patched:
            patched.setattr(new_shard, "await_servers", fail)
            with pytest.raises(DeadlineError, match="no time left"):
                cluster.add_shard()
        assert cluster.nodes[-1] == "shard-1-1"
        assert cluster.pid("shard-1-1") != cluster.pid("shard-1-0")
        assert states(log) == {0: "live"}
        rid = log.insert_after(b"it goes on")
    # Also when all was stopped and started meanwhile.
    with Cluster(tmp_path) as cluster, cluster.connect() as log:
        assert states(log) == {0: "live"}
        assert log.read_record(rid).payload == b"it goes on"
        assert cluster.add_shard() == 1
        assert [shard.id for shard in load(tmp_path / CLUSTER_FILE).shards] == [0, 1]
        log.set_policy(ziplog.policy.pin(1))
        assert log.insert_after(b"there", rid).shard == 1


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    # Only the call itself starts servers here.
    with Cluster(tmp_path, shards=1, failure_handlers=0) as cluster, cluster.connect() as log:
        shard = new_shard.next_shard(tmp_path / CLUSTER_FILE, {0})
        (tmp_path / shard.replicas[0].name).write_text("not a directory")
        with pytest.raises(
            UnavailableError, match=r"shard-1-0 ended during its start: .*shard-1-0"
        ):
            cluster.add_shard()
        assert states(log) == {0: "live"}
        (tmp_path / shard.replicas[0].name).unlink()
        assert cluster.add_shard() == 1


def ziplog_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ZIPLOG, *arguments], check=False, capture_output=True, text=True)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[str]:
    """The option with which clients find a cluster of one shard that runs in the background."""
    where = (f"--data-dir={tmp_path}", "--shards=1", f"--port={consecutive_ports(6)}")
    started = ziplog_cli("up", *where, "--timeout=100", "--detach")
    assert started.returncode == 0, started.stderr
    yield f"--bootstrap={started.stdout.strip()}"
    assert ziplog_cli("down", f"--data-dir={tmp_path}").returncode == 0


def test_the_shard_commands_against_a_cluster_in_the_background(tmp_path: Path, up: str) -> None:
    text = (tmp_path / CLUSTER_FILE).read_text()
    alone = ziplog_cli("shard", "remove", up, "0")
    assert (alone.returncode, alone.stdout, alone.stderr.count("\n")) == (2, "", 1)
    # Only the endpoint is given: the command finds the directory through the processes.
    added = ziplog_cli("shard", "add", up)
    assert (added.returncode, added.stdout) == (0, "1\n"), added.stderr
    assert "shard 1 is live: shard-1-0 at 127.0.0.1:" in added.stderr
    assert (tmp_path / CLUSTER_FILE).read_text().startswith(text.rstrip())
    log_of_up = (tmp_path / "logs" / "supervisor.log").read_text()
    assert "shard-1-0 was added to the cluster file; starting it" in log_of_up
    lines = ziplog_cli("shard", "list", up, "--json").stdout.splitlines()
    listed = [json.loads(line) for line in lines]
    assert [(shard["id"], shard["state"]) for shard in listed] == [(0, "live"), (1, "live")]
    assert {node["state"] for node in listed[1]["replicas"]} == {"up"}
    removed = ziplog_cli("shard", "remove", up, "0")
    assert (removed.returncode, removed.stdout) == (0, ""), removed.stderr
    assert "shard 0 takes no more records; it stays readable" in removed.stderr
    assert ziplog_cli("insert", up, "x").stdout.rstrip().endswith("@1")
    finalized = ziplog_cli("shard", "finalize", up, "0")
    assert (finalized.returncode, finalized.stdout) == (0, ""), finalized.stderr
    assert "shard 0 is finalized: changes no more" in ziplog_cli("status", up).stdout
    for arguments, said in ((("remove", "1"), "1"), (("finalize", "7"), "7")):
        refused = ziplog_cli("shard", arguments[0], up, arguments[1])
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
        assert said in refused.stderr
    # Its supervisor restarts it, with its new state.
    assert ziplog_cli("down", f"--data-dir={tmp_path}").returncode == 0
    where = (f"--data-dir={tmp_path}", "--shards=1")
    again = ziplog_cli("up", *where, "--timeout=100", "--detach")
    assert again.returncode == 0, again.stderr
    assert ziplog_cli("tail", up).stdout.endswith("\tx\n")


def test_two_concurrent_additions_make_two_shards(tmp_path: Path, up: str) -> None:
    command = [*ZIPLOG, "shard", "add", up]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(one.communicate()[0] for one in both) == ["1\n", "2\n"]
    assert [shard.id for shard in load(tmp_path / CLUSTER_FILE).shards] == [0, 1, 2]


def test_servers_started_by_an_operator_join_by_the_cluster_file(tmp_path: Path, up: str) -> None:
    config = load(tmp_path / CLUSTER_FILE)
    ports = new_shard.free_ports(2, "127.0.0.1", [node.port for node in config.nodes])
    # Elsewhere: another copy of the file, which the running cluster does not look at.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    replicas = "".join(
        f'    {{ name = "far-{index}", host = "127.0.0.1", port = {port} }},\n'
        for index, port in enumerate(ports)
    )
    file = elsewhere / "cluster.toml"
    text = (tmp_path / CLUSTER_FILE).read_text().replace(str(tmp_path), str(elsewhere))
    file.write_text(f"{text}\n[[shard]]\nid = 40\nreplicas = [\n{replicas}]\n")
    command = [sys.executable, "-m", "shard", "--config", str(file), "--node"]
    processes = [
        subprocess.Popen([*command, f"far-{index}"], stderr=subprocess.DEVNULL)
        for index in range(2)
    ]
    try:
        added = ziplog_cli("shard", "add", up, "--config", str(file), "--shard", "40")
        assert (added.returncode, added.stdout) == (0, "40\n"), added.stderr
        with ziplog.connect(up.partition("=")[2]) as log:
            log.set_policy(ziplog.policy.pin(40))
            assert log.insert_after(b"far").shard == 40
        # A new shard in the file of `ziplog up` has a number above all earlier ones.
        assert ziplog_cli("shard", "add", up).stdout == "41\n"
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(30) for process in processes] == [0, 0]
