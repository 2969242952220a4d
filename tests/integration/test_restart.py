"""Processes that stop, die, hang, lose data or run out of disk while clients insert.

Always: an acknowledged record is in the log exactly once, one with an unknown outcome at most once,
and no call hangs. These clusters have no failure handler: dead servers stay dead, and servers in
limbo stay in limbo.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import pytest

import ziplog
from tests.waiting import wait_until
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import OutcomeUnknownError, UnavailableError, ZiplogError
from ziplog.local import Cluster
from ziplog.segments.directory import SegmentDirectory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

DEADLINE_S: Final = 40.0
#: Timeout of an insert, in seconds: it may have to wait for a stopped or paused server.
INSERT_S: Final = 120.0


class Load:
    """Clients that insert sequentially until the context exit, each with its own policy.

    `acked` has the acknowledged inserts, `failed` the others. The payloads of two loads differ.
    """

    _numbers: ClassVar = itertools.count()

    def __init__(
        self, cluster: Cluster, policies: dict[str, Any], *, timeout: float = INSERT_S
    ) -> None:
        self.acked: dict[str, list[tuple[ziplog.RecordId, bytes]]] = {name: [] for name in policies}
        self.failed: list[tuple[bytes, ZiplogError]] = []
        self._number = next(self._numbers)
        self._over = threading.Event()
        self._logs = [cluster.connect(timeout=timeout) for _ in policies]
        self._threads = []
        for log, (name, policy) in zip(self._logs, policies.items(), strict=True):
            log.set_policy(policy)
            self._threads.append(threading.Thread(target=self._run, args=(log, name)))

    def _run(self, log: ziplog.Log, name: str) -> None:
        after, number = ziplog.RID_GENESIS, 0
        while not self._over.is_set():
            number += 1
            payload = f"{name}-{self._number}-{number}".encode()
            try:
                after = log.insert_after(payload, after)
            except ZiplogError as error:
                self.failed.append((payload, error))
            else:
                self.acked[name].append((after, payload))
            self._over.wait(0.001)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.wait_progress()
        return self

    def wait_progress(self, *names: str) -> None:
        """Wait until each of these clients (or all) had more records acknowledged."""
        before = {name: len(self.acked[name]) for name in names or self.acked}
        for name, count in before.items():
            wait_until(
                lambda: len(self.acked[name]) > count + 20,  # noqa: B023
                f"inserts of {name} go on; {self.failed[-1:]}",
                deadline_s=100,
            )

    def failures(self, name: str) -> list[ZiplogError]:
        """Return the errors of this client's inserts."""
        mine = name.encode() + b"-"
        return [error for payload, error in self.failed if payload.startswith(mine)]

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for log in self._logs:
            log.close()

    def check(self, log: ziplog.Log) -> None:
        """Check that the log contains acked records exactly once, others at most once."""
        found = Counter(record.payload for record in log.subscribe(follow=False))
        acked = [payload for records in self.acked.values() for _, payload in records]
        assert [payload for payload in acked if found[payload] != 1] == []
        assert [payload for payload, _ in self.failed if found[payload] > 1] == []
        for payload, error in self.failed:
            if not isinstance(error, OutcomeUnknownError):
                assert isinstance(error, UnavailableError)
                assert found[payload] == 0
        for records in self.acked.values():
            rids = [rid for rid, _ in records]
            assert rids == sorted(set(rids))
            for rid, payload in records[:: max(1, len(records) // 10)]:
                assert log.read_record(rid).payload == payload


def pinned(*shards: int) -> dict[str, Any]:
    return {f"pinned{shard}": ziplog.policy.pin(shard) for shard in shards}


def stop(cluster: Cluster, name: str) -> None:
    """Stop one process cleanly, as its supervisor would."""
    os.kill(cluster.pid(name), signal.SIGTERM)
    wait_until(lambda: name in cluster.dead(), f"{name} stops")


def states(log: ziplog.Log) -> dict[str, str]:
    """The state of every shard and of every replica."""
    shards = log.cluster(timeout=DEADLINE_S)["shards"]
    found = {str(shard["id"]): shard["state"] for shard in shards}
    return found | {node["name"]: node["state"] for s in shards for node in s["replicas"]}


def wait_all_up(log: ziplog.Log) -> None:
    wait_until(lambda: set(states(log).values()) == {"up", "live"}, "everything is up and live")


def check_others_go_on(cluster: Cluster) -> None:
    """Check that inserts with a free choice of shard continue while one shard is parked."""
    with cluster.connect(timeout=60.0) as log:
        for number in range(50):
            log.insert_after(b"%d" % number)


def log_text(cluster: Cluster, name: str) -> str:
    return (cluster.config.data_dir / "logs" / f"{name}.log").read_text()


def stable_end(cluster: Cluster, name: str) -> int:
    """Up to where a server has noted that all is stable."""
    return SegmentDirectory(cluster.config.data_dir / name / "segments").stable_end


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests after which everything is as it was."""
    with Cluster(tmp_path_factory.mktemp("restart"), shards=2, failure_handlers=0) as running:
        yield running


@pytest.fixture
def log(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect(timeout=60.0) as client:
        yield client


# --- stopped and started again ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["shard-0-0", "shard-0-1"])
def test_a_stopped_server_continues_where_it_was(
    cluster: Cluster, log: ziplog.Log, name: str
) -> None:
    with Load(cluster, pinned(0, 1)) as load:
        stop(cluster, name)
        load.wait_progress("pinned1")
        cluster.restart(name)
        load.wait_progress()
    assert load.failed == []
    load.check(log)
    wait_all_up(log)


def test_everything_is_stopped_and_started_again(cluster: Cluster, log: ziplog.Log) -> None:
    with Load(cluster, pinned(0, 1)) as load:
        for name in reversed(cluster.nodes):
            stop(cluster, name)
        for name in cluster.nodes:
            cluster.restart(name)
        load.wait_progress()
    assert load.failed == []
    load.check(log)
    wait_all_up(log)


@pytest.mark.parametrize(
    "name", ["shard-1-0", pytest.param("shard-1-1", marks=pytest.mark.nightly)]
)
def test_a_server_that_is_frozen_for_a_while(cluster: Cluster, log: ziplog.Log, name: str) -> None:
    with Load(cluster, pinned(0, 1)) as load:
        cluster.pause(name)
        try:
            # Longer than it takes until its shard is parked.
            wait_until(lambda: states(log)["1"] == "parked", "the shard is parked")
            load.wait_progress("pinned0")
            check_others_go_on(cluster)
            wait_until(lambda: states(log)[name] == "down", "the server counts as down")
        finally:
            cluster.resume(name)
        load.wait_progress()
    assert load.failed == []
    load.check(log)
    wait_all_up(log)


# --- the membership service ------------------------------------------------------------------


def test_no_insert_fails_while_the_membership_service_is_dead(
    cluster: Cluster, log: ziplog.Log
) -> None:
    policies = {**pinned(0, 1), "random": ziplog.policy.random()}
    with Load(cluster, policies, timeout=20.0) as load:
        before = log.cluster()
        cluster.kill("mms-0")
        for _ in range(5):
            load.wait_progress()
        last = max(rid for records in load.acked.values() for rid, _ in records)
        cluster.restart("mms-0")
        wait_until(lambda: log.cluster(timeout=DEADLINE_S)["epoch"] > before["epoch"], "an epoch")
        load.wait_progress()
    assert load.failed == []
    load.check(log)
    wait_all_up(log)
    # Leases continue after the last committed one: no position was assigned twice.
    assert log.insert_after(b"later", last) > last
    assert "halted" not in "".join(log_text(cluster, name) for name in cluster.nodes)


def test_a_group_of_three_continues_without_one(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, shards=1, mms=3, failure_handlers=0, timeout=100.0) as cluster,
        cluster.connect(timeout=60.0) as log,
    ):
        (leader,) = [node["name"] for node in log.cluster()["mms"] if node["leader"]]
        with Load(cluster, pinned(0), timeout=20.0) as load:
            cluster.kill(leader)
            wait_until(
                lambda: any(
                    node["leader"] and node["name"] != leader
                    for node in log.cluster(timeout=DEADLINE_S)["mms"]
                ),
                "another one leads",
            )
            first = load.acked["pinned0"][0][0]
            log.trim(first, timeout=DEADLINE_S)
            load.wait_progress()
            cluster.restart(leader)
            wait_until(
                lambda: all(node["state"] == "up" for node in log.cluster()["mms"]), "all are up"
            )
            load.wait_progress()
        assert load.failed == []
        assert log.cluster()["trimmed_before"] == str(first)
        delivered = [r.rid for r in log.subscribe(first, follow=False)]
        assert delivered == [rid for rid, _ in load.acked["pinned0"]]


# --- servers that forget ---------------------------------------------------------------------


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, shards=2, failure_handlers=0) as running:
        yield running


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_server_comes_back_in_limbo(doomed: Cluster, index: int) -> None:
    killed, other = f"shard-0-{index}", f"shard-0-{1 - index}"
    with doomed.connect(timeout=60.0) as log:
        with Load(doomed, pinned(0, 1), timeout=2.0) as load:
            wait_until(lambda: len(load.acked["pinned0"]) > 300, "many inserts")
            noted = load.acked["pinned0"][:200]
            # A server records its watermark ten times a second during inserts.
            for name in (killed, other):
                wait_until(lambda: stable_end(doomed, name) > noted[-1][0].gsn, "it is noted")  # noqa: B023
            doomed.kill(killed)
            # No call hangs: a call with an unknown outcome ends at its deadline with an error.
            wait_until(lambda: load.failures("pinned0"), "the pinned insert ends")
            doomed.restart(killed)
            wait_until(lambda: states(log)[killed] == "limbo", "it says that it is in limbo")
            wait_until(lambda: states(log)["0"] == "parked", "the shard is parked")
            assert "limbo=true" in log_text(doomed, killed)
            load.wait_progress("pinned1")
            check_others_go_on(doomed)
        for error in load.failures("pinned0"):
            assert isinstance(error, (OutcomeUnknownError, UnavailableError))
            assert "shard 0" in str(error)
        # It still serves the records that it knows to be stable, without the other server too.
        rid, payload = noted[0]
        doomed.pause(other)
        try:
            assert log.read_record(rid, timeout=DEADLINE_S).payload == payload
        finally:
            doomed.resume(other)
        # The other replica has all records; a recovery finds those not known to be stable.
        for rid, payload in noted:
            assert log.read_record(rid, timeout=DEADLINE_S).payload == payload
        log.set_policy(ziplog.policy.pin(0))
        with pytest.raises((OutcomeUnknownError, UnavailableError), match="shard 0"):
            log.insert_after(b"pinned", timeout=0.5)
        # A clean restart does not wash it clean.
        stop(doomed, killed)
        doomed.restart(killed)
        wait_until(lambda: log_text(doomed, killed).count("event=ready") == 3, "it is ready again")
        wait_until(lambda: states(log)[killed] == "limbo", "it is still in limbo")


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_server_with_a_wiped_directory_is_refused_as_fresh(doomed: Cluster, index: int) -> None:
    wiped = f"shard-0-{index}"
    directory = doomed.config.data_dir / wiped
    kept = directory.with_name("kept")
    with doomed.connect(timeout=60.0) as log:
        # One insert is under way over all of it.
        with Load(doomed, pinned(0, 1), timeout=200.0) as load:
            stop(doomed, wiped)
            directory.rename(kept)
            doomed.restart(wiped)
            wait_until(lambda: states(log)[wiped] == "limbo", "it is in limbo")
            wait_until(lambda: "another data directory" in log_text(doomed, wiped), "it says why")
            load.wait_progress("pinned1")
            wait_until(lambda: states(log)["0"] == "parked", "its shard is parked")
            check_others_go_on(doomed)
            # Neither a restart of it nor one of the service makes it forget that.
            stop(doomed, wiped)
            doomed.restart(wiped)
            doomed.kill("mms-0")
            doomed.restart("mms-0")
            wait_until(lambda: states(log)[wiped] == "limbo", "it is still in limbo")
            count = len(load.acked["pinned0"])
            load.wait_progress("pinned1")
            assert len(load.acked["pinned0"]) == count
            # With its directory back, nothing was lost.
            stop(doomed, wiped)
            shutil.rmtree(directory)
            kept.rename(directory)
            doomed.restart(wiped)
            load.wait_progress()
        assert load.failed == []
        load.check(log)
        wait_all_up(log)


def test_a_server_whose_segments_were_deleted_is_in_limbo(doomed: Cluster) -> None:
    name = "shard-0-1"
    with doomed.connect(timeout=60.0) as log:
        with Load(doomed, pinned(0)) as load:
            pass
        last = max(rid.gsn for rid, _ in load.acked["pinned0"])
        # Acked records that are not stable yet stay unreadable until a recovery.
        wait_until(lambda: log.cluster()["shards"][0]["stable_gsn"] >= last, "all is stable")
        stop(doomed, name)
        shutil.rmtree(doomed.config.data_dir / name / "segments")
        doomed.restart(name)
        wait_until(lambda: states(log)[name] == "limbo", "it is in limbo")
        for rid, payload in load.acked["pinned0"]:
            assert log.read_record(rid, timeout=DEADLINE_S).payload == payload


# --- a full disk -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 24 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


#: Longer than the time limit of a test.
NEVER_S = 10_000.0


def free_bytes(path: Path) -> int:
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


@pytest.mark.parametrize(
    ("durability", "reserve"), [("memory", 0), ("memory", 8 * 1024 * 1024), ("disk", 0)]
)
def test_a_full_disk(tmp_path: Path, small_disk: Path, durability: Any, reserve: int) -> None:
    directory = tmp_path / "data"
    with Cluster(directory, shards=1, durability=durability, failure_handlers=0):
        pass
    for name in ("shard-0-0", "shard-0-1"):
        shutil.rmtree(directory / name)
        (directory / name).symlink_to(small_disk / name)
        (small_disk / name).mkdir()
    shutil.rmtree(directory / "mms-0")
    text = (directory / CLUSTER_FILE).read_text()
    old = f"disk_reserve_bytes = {256 * 1024 * 1024}"
    assert old in text
    (directory / CLUSTER_FILE).write_text(text.replace(old, f"disk_reserve_bytes = {reserve}"))
    ballast = small_disk / "ballast"
    with (
        Cluster(directory, found_again=True) as cluster,
        cluster.connect(timeout=60.0) as log,
    ):
        acked = [log.insert_after(b"first")]
        ballast.write_bytes(bytes(max(0, free_bytes(small_disk) - reserve - 3 * 1024 * 1024)))
        refused = insert_until_refused(cluster, log, acked)
        assert isinstance(refused, UnavailableError), refused
        assert "shard 0" in str(refused)
        wait_until(lambda: disk_states(log) == (["full", "full"], True), "the status says so")
        if durability == "memory":  # at level disk, it waits behind records that are placed
            why = "disk_reserve" if reserve else "takes no more bytes"
            with pytest.raises(UnavailableError, match=rf"a disk is full \(shard-0-.*{why}"):
                log.insert_after(bytes(50_000), timeout=NEVER_S)
        # Stored records are read and delivered.
        assert log.read_record(acked[-1]).payload
        missing = set(acked)
        with log.subscribe(timeout=DEADLINE_S) as records:
            for record in records:
                missing.discard(record.rid)
                if not missing:
                    break
        ballast.unlink()
        wait_until(lambda: is_taken(log, acked), "inserts go on")
        wait_until(lambda: disk_states(log) == (["up", "up"], False), "the status says so")
        for rid in acked:
            assert log.read_record(rid, timeout=DEADLINE_S).payload
        with log.subscribe(follow=False, timeout=DEADLINE_S) as records:
            delivered = [record.rid for record in records]
        assert delivered == sorted(set(delivered))
        assert set(acked) <= set(delivered)
        for name in cluster.nodes:
            assert cluster.pid(name)


def test_a_full_disk_of_a_primary(tmp_path: Path, small_disk: Path) -> None:
    """The shard refuses records, although its backup has space; other shards take them."""
    directory, reserve = tmp_path / "data", 4 * 1024 * 1024
    with Cluster(directory, shards=2, settings={"disk_reserve_bytes": reserve}):
        pass
    shutil.move(directory / "shard-0-0", small_disk / "shard-0-0")
    (directory / "shard-0-0").symlink_to(small_disk / "shard-0-0")
    with Cluster(directory) as cluster, cluster.connect(timeout=DEADLINE_S) as log:
        at_both = [log.insert_after(b"first", shard=shard) for shard in (0, 1)]
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(free_bytes(small_disk) - reserve // 2))
        wait_until(lambda: log.cluster()["shards"][0]["refusing"], "the status says so")
        acked: list[ziplog.RecordId] = []
        for _ in range(5):
            with cluster.connect(timeout=DEADLINE_S) as client:
                acked += [client.insert_after(b"unpinned"), client.append(b"sealed")]
        assert {rid.shard for rid in acked} == {1}
        with pytest.raises(UnavailableError, match=r"a disk is full \(shard-0-0: .*disk_reserve"):
            log.insert_after(b"pinned", shard=0, timeout=NEVER_S)
        with log.subscribe(follow=False, timeout=DEADLINE_S) as records:
            assert {record.rid for record in records} >= {*at_both, *acked}
        ballast.unlink()
        log.set_policy(ziplog.policy.pin(0))
        wait_until(lambda: is_taken(log, acked), "inserts go on")
        assert acked[-1].shard == 0


def disk_states(log: ziplog.Log) -> tuple[list[str], bool]:
    """Return the states of the servers of the only shard, and whether it refuses records."""
    (shard,) = log.cluster()["shards"]
    return [replica["state"] for replica in shard["replicas"]], shard["refusing"]


def insert_until_refused(
    cluster: Cluster, log: ziplog.Log, acked: list[ziplog.RecordId]
) -> ZiplogError:
    """Insert until the disk is full; return the error of an insert that began after that."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            acked.append(log.insert_after(bytes(50_000), acked[-1], timeout=5.0))
        except UnavailableError as error:
            if "disk full" in log_text(cluster, "shard-0-0"):
                return error
        except OutcomeUnknownError:
            continue  # under way when the disk became full
    raise AssertionError(f"{len(acked)} records, and the disk is not full")


def is_taken(log: ziplog.Log, acked: list[ziplog.RecordId]) -> bool:
    try:
        acked.append(log.insert_after(b"there is room again", acked[-1], timeout=5.0))
    except (UnavailableError, OutcomeUnknownError):
        return False
    return True
