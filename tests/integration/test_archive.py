"""Archives of real servers, during inserts and while processes die.

Always: blocks and scans equal a subscription, whichever replica serves them, and no process is left
at the end.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ziplog
from tests.unit.shard.archive.processes import children, is_running
from tests.unit.ziplog.segments.blocks import Row, rows_in
from tests.waiting import wait_until
from ziplog import local
from ziplog.archive import client as client_module
from ziplog.archive.client import ArchiveClient
from ziplog.config_text import dump
from ziplog.deploy.new_shard import free_ports
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import UnavailableError
from ziplog.segments.block_reader import BlockReader
from ziplog.segments.blocks import Block, block_of_units

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

MIB = 1024 * 1024


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[local.Cluster]:
    """One shard of two servers, with segments that are as small as may be."""
    settings = {"segment_bytes": MIB, "disk_reserve_bytes": 0}
    with local.Cluster(tmp_path / "data", shards=1, settings=settings) as running:
        yield running


def insert(log: ziplog.Log, count: int) -> int:
    """Insert `count` KiB; return the position after the last record."""
    for number in range(count // 100):
        payloads = [b"%d-%d:" % (number, index) + b"x" * 1000 for index in range(100)]
        rids = log.insert_many(payloads, key=b"k" if number % 2 else None)
    return rids[-1].gsn + 1


def archives_of(pid: int) -> list[int]:
    """Return the archives of a server's process that run."""
    return [child for child in children(pid) if is_running(child)]


def halves(cluster: local.Cluster, name: str) -> tuple[int, int]:
    """Return the two processes of a server's archive: the block server and the block builder."""
    (serving,) = archives_of(cluster.pid(name))
    (making,) = children(serving)
    return serving, making


def has_all_rows(cluster: local.Cluster, name: str) -> bool:
    """Whether all sealed segments of a server have blocks."""
    directory = cluster.config.data_dir / name / "segments"
    segments = sorted(path.stem for path in directory.glob("*.seg"))
    return {path.stem for path in directory.glob("*.rows")} == set(segments[:-1])


def archives(
    cluster: local.Cluster, log: ziplog.Log, stop: int, names: set[str]
) -> dict[str, tuple[str, int]]:
    """Return the addresses of these servers' archives, once they serve all sealed segments."""
    wait_until(lambda: all(has_all_rows(cluster, name) for name in names), "all rows are made")
    found: dict[str, tuple[str, int]] = {}

    def are_there() -> bool:
        # A dead archive is still announced for a while.
        announced = {where[1]: where for where in log.outline(0, 1, stop).archives}
        ports = {name: archive_port(cluster.pid(name)) for name in names}
        found.update({name: announced[port] for name, port in ports.items() if port in announced})
        return set(ports.values()) == set(announced)

    wait_until(are_there, "the archives are announced")
    return found


def archive_port(pid: int) -> int:
    """Return where the archive of a server's process listens; 0: nowhere yet."""
    sockets = {name for child in archives_of(pid) for name in sockets_of(child)}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            return int(fields[1].partition(":")[2], 16)
    return 0


def sockets_of(pid: int) -> set[str]:
    """Return the kernel's names of a process's open files, without those closed meanwhile."""
    names = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                names.add(link.readlink().name)
    return names


def client(log: ziplog.Log, where: tuple[str, int]) -> ArchiveClient:
    return ArchiveClient(*where, log.cluster_number, 0)


def read(log: ziplog.Log, where: tuple[str, int], stop: int) -> list[Row]:
    """Read up to `stop`: blocks, and a scan for the unsealed rest."""
    rows: list[Row] = []
    gsn = 1
    with client(log, where) as archive:
        while gsn < stop and isinstance(block := archive.block(gsn), Block):
            rows += rows_in(block)
            gsn = block.stop
    if gsn < stop:
        with log.scan(0, gsn, stop) as scan:
            for units, reached in scan:
                rows += rows_in(block_of_units(units, gsn, reached))
                gsn = reached
    return [row for row in rows if row.gsn < stop]


def subscribed(log: ziplog.Log, stop: int) -> list[Row]:
    """Return the records of a subscription."""
    rows: list[Row] = []
    with log.subscribe() as records:
        for record in records:
            rows.append(
                Row(record.rid.gsn, record.epoch, record.timestamp_us, record.key, record.payload,
                    None)
            )  # fmt: skip
            if record.rid.gsn >= stop - 1:
                return rows
    raise AssertionError("a subscription has no end")


def test_every_archive_equals_a_subscription(
    cluster: local.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.connect() as log:
        stop = insert(log, 6_000)
        where = archives(cluster, log, stop, {"shard-0-0", "shard-0-1"})
        expected = subscribed(log, stop)
        assert len(expected) == 6_000
        # Their segments begin and end at other places.
        for place in where.values():
            assert read(log, place, stop) == expected
        # The same for a client on another machine.
        monkeypatch.setattr(client_module, "is_same_machine", lambda _: False)
        for place in where.values():
            assert read(log, place, stop) == expected
        outline = log.outline(0, 1, stop)
        assert 6_000_000 < sum(size for _, size in outline.steps) < 7_000_000


def test_an_outline_request_makes_blocks_of_unsealed_entries(tmp_path: Path) -> None:
    settings = {"segment_bytes": 16 * MIB, "disk_reserve_bytes": 0}
    with (
        local.Cluster(tmp_path / "data", shards=1, settings=settings) as cluster,
        cluster.connect() as log,
    ):
        stop = insert(log, 4_000)
        found: list[tuple[str, int]] = []

        def are_there() -> bool:
            found[:] = log.outline(0, 1, stop).archives
            return len(found) == 2

        wait_until(are_there, "both have sealed their segments")
        for where in found:
            with client(log, where) as archive:
                wait_until(lambda: isinstance(archive.block(1), Block), "its rows")
            assert read(log, where, stop) == subscribed(log, stop)


def test_the_rest_of_an_archive_survives_the_death_of_a_part(cluster: local.Cluster) -> None:
    names = {"shard-0-0", "shard-0-1"}
    with cluster.connect(timeout=60.0) as log:
        stop = insert(log, 4_000)
        expected = subscribed(log, stop)
        where = archives(cluster, log, stop, names)
        # Half of an archive dies: so does the other one, and another archive is started.
        for half in range(2):
            both = halves(cluster, "shard-0-1")
            os.kill(both[half], signal.SIGKILL)
            wait_until(lambda both=both: not any(map(is_running, both)), "both are gone")
            with client(log, where["shard-0-1"]) as archive, pytest.raises(UnavailableError):
                archive.block(1)
            wait_until(lambda: archives_of(cluster.pid("shard-0-1")), "there is another one")
            where = archives(cluster, log, stop, names)
            assert read(log, where["shard-0-1"], stop) == expected
        # A server dies: its archive does, and comes back with it.
        both = halves(cluster, "shard-0-0")
        with client(log, where["shard-0-0"]) as archive:
            assert isinstance(archive.block(1), Block)
            cluster.kill("shard-0-0")
            wait_until(lambda: not any(map(is_running, both)), "its archive ends")
            # It knows the blocks of the first segment.
            with pytest.raises(UnavailableError):
                archive.block(stop)
        stop = insert(log, 2_000)
        wait_until(lambda: "shard-0-0" not in cluster.dead(), "it is started again")
        expected = subscribed(log, stop)
        where = archives(cluster, log, stop, names)
        for place in where.values():
            assert read(log, place, stop) == expected


def test_archives_listen_at_the_ports_of_the_cluster_file(tmp_path: Path) -> None:
    settings = {"segment_bytes": MIB, "disk_reserve_bytes": 0}
    with local.Cluster(tmp_path / "data", shards=1, settings=settings) as created:
        config = created.config
    ports = list(free_ports(2, "127.0.0.1", {port for node in config.nodes for port in node.ports}))
    replicas = tuple(
        dataclasses.replace(node, archive_port=port)
        for node, port in zip(config.shards[0].replicas, ports, strict=True)
    )
    shards = (dataclasses.replace(config.shards[0], replicas=replicas),)
    file = tmp_path / "data" / CLUSTER_FILE
    file.write_text(dump(dataclasses.replace(config, shards=shards)))
    with local.Cluster(tmp_path / "data") as cluster, cluster.connect() as log:
        stop = insert(log, 3000)
        where = archives(cluster, log, stop, {"shard-0-0", "shard-0-1"})
        assert [where[name][1] for name in ("shard-0-0", "shard-0-1")] == ports
        cluster.restart("shard-0-0")
        assert archives(cluster, log, stop, {"shard-0-0", "shard-0-1"}) == where


def test_no_archive_reports_trimmed_positions(cluster: local.Cluster) -> None:
    with cluster.connect() as log:
        stop = insert(log, 4_000)
        where = archives(cluster, log, stop, {"shard-0-0", "shard-0-1"})
        expected = subscribed(log, stop)
        middle = expected[2_000].gsn
        for place in where.values():
            with client(log, place) as archive:
                assert isinstance(archive.block(middle), Block)
        log.trim(ziplog.RecordId(middle, 0))
        for place in where.values():
            with client(log, place) as archive:
                assert isinstance(archive.block(1), int)
                assert isinstance(archive.block(middle - 1), int)
                assert isinstance(archive.block(middle), Block)


def test_a_clean_stop_leaves_complete_files_and_no_process(cluster: local.Cluster) -> None:
    with cluster.connect() as log:
        stop = insert(log, 3_000)
        archives(cluster, log, stop, {"shard-0-0", "shard-0-1"})
        expected = subscribed(log, stop)
        processes = [half for name in ("shard-0-0", "shard-0-1") for half in halves(cluster, name)]
        last = log.insert_after(b"just before the end", ziplog.RID_GENESIS)
        with log.subscribe(last) as records:
            assert next(records).rid == last  # one of them knows that it is stable
    assert len(processes) == 4
    cluster.stop()
    assert [pid for pid in processes if is_running(pid)] == []
    directories = [
        BlockReader(cluster.config.data_dir / name / "segments")
        for name in ("shard-0-0", "shard-0-1")
    ]
    # The last stable records may be known to only one of them.
    assert max(directory.stable_end for directory in directories) > last.gsn
    for directory in directories:
        assert not directory.is_locked
        rows: list[Row] = []
        gsn = 1
        while isinstance(block := directory.block(gsn), Block):
            rows += rows_in(block)
            gsn = block.stop
        for units, reached in directory.units(gsn, stop):
            rows += rows_in(block_of_units(units, gsn, reached))
            gsn = reached
        assert [row for row in rows if row.gsn < stop] == expected
