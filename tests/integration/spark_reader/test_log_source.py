"""Cluster source: the rows of a subscription, by archives or scans, whatever fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import ziplog
from spark_reader import log_source
from spark_reader.data_source import Reader
from spark_reader.options import SERVERS, TIMEOUT, parse
from spark_reader.projection import Projection
from spark_reader.ranges import read_range
from spark_reader.schema import DEFAULT
from spark_reader.sources import source_of
from tests.unit.spark_reader.logs import (
    TIMEOUT_S,
    Key,
    as_key,
    as_sent,
    await_archives,
    fill,
    small_cluster,
    subscribed,
)
from tests.waiting import wait_until
from ziplog import RecordId
from ziplog.archive.client import ArchiveClient
from ziplog.core.writer_table import WriterTable
from ziplog.deploy import new_shard
from ziplog.errors import (
    ClosedError,
    ClusterMismatchError,
    ConfigError,
    NoSuchRecordError,
    TrimmedError,
    UnavailableError,
)
from ziplog.segments.blocks import Block

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from spark_reader.planning import Piece
    from spark_reader.reading import Session
    from ziplog import Log
    from ziplog.client.bulk.outline import ShardOutline
    from ziplog.local import Cluster

pytestmark = pytest.mark.timeout(300)

WRITER, OTHER = b"w" * 16, b"o" * 16


def write_again_and_again(log: Log) -> None:
    """Two writers write batches, some of them twice, some of them only in part the first time."""
    rows = [b"%d " % at + b"." * 2000 for at in range(300)]
    for writer, batch, first, count in (
        (WRITER, 0, 0, 200), (OTHER, 0, 0, 100), (WRITER, 0, 0, 300), (WRITER, 1, 0, 50),
        (WRITER, 0, 100, 100), (OTHER, 0, 50, 100), (WRITER, 1, 0, 300), (OTHER, 0, 0, 150),
    ):  # fmt: skip
        mine = rows[first : first + count]
        log.insert_rows(mine, shard=0, writer=writer, batch=batch, row=first)


def all_rows(cluster: Cluster) -> list[Key]:
    return [as_key(record) for record in subscribed(cluster)]


def keys(batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]) -> list[Key]:
    return sorted(
        (row["offset"], row["partition"], row["value"], row["key"], row["epoch"])
        for batch in batches
        for row in batch.to_pylist()
    )


def asked(cluster: Cluster, **options: Any) -> dict[str, str]:
    given = {TIMEOUT: TIMEOUT_S} | options
    return {SERVERS: cluster.endpoint} | {name: str(value) for name, value in given.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A log with sealed segments that contain duplicates, and later records."""
    with small_cluster(tmp_path_factory.mktemp("source") / "log") as running:
        with running.connect(timeout=TIMEOUT_S) as log:
            write_again_and_again(log)
            fill(running, 400)
            write_again_and_again(log)
            await_archives(log)
        yield running


@pytest.fixture(scope="module")
def log(cluster: Cluster) -> Iterator[Log]:
    with cluster.connect(timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
def everything(cluster: Cluster) -> list[Key]:
    return all_rows(cluster)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Port and start of each block that archives serve from now on."""
    found: list[tuple[int, int]] = []

    class Noting(ArchiveClient):
        def block(self, gsn: int) -> Block | int:
            block = super().block(gsn)
            if isinstance(block, Block):
                found.append((self._address[1], block.start))
            return block

    monkeypatch.setattr(log_source, "ArchiveClient", Noting)
    return found


def test_a_range_equals_a_subscription_and_comes_from_archives(
    cluster: Cluster, everything: list[Key], served: list[tuple[int, int]]
) -> None:
    assert keys(read_range(asked(cluster))) == everything
    assert len(everything) == 600 + 150 + 1600
    assert len(served) >= 2
    assert len({port for port, _ in served}) >= 2


def test_duplicates_are_left_out_wherever_the_range_starts(
    cluster: Cluster, everything: list[Key]
) -> None:
    for at in range(0, len(everything), len(everything) // 7):
        start = everything[at][0] + 1
        expected = [row for row in everything if row[0] >= start]
        assert keys(read_range(asked(cluster, startingOffsets=start))) == expected


def test_a_read_without_archives_has_the_same_rows(
    cluster: Cluster, everything: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise UnavailableError("the archive is away")

    monkeypatch.setattr(ArchiveClient, "block", away)
    monkeypatch.setattr(ArchiveClient, "writers", away)
    assert keys(read_range(asked(cluster))) == everything
    middle = everything[len(everything) // 4][0]
    expected = [row for row in everything if row[0] >= middle]
    assert keys(read_range(asked(cluster, startingOffsets=middle))) == expected


def test_tasks_spread_over_the_archives(cluster: Cluster, served: list[tuple[int, int]]) -> None:
    source = source_of(parse(asked(cluster)))
    with source.open() as session:
        for task_index in (0, 1):
            with session.replicas(0, 1, 2, task_index) as replicas:
                assert isinstance(replicas.block(1), Block)
    assert len({port for port, _ in served}) == 2


def test_after_a_failed_archive_the_other_one_is_used(
    cluster: Cluster, everything: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    #: Shard and port of each archive that broke off, and of each that served a block after that.
    failed: set[tuple[int, int]] = set()
    served: set[tuple[int, int]] = set()
    real = ArchiveClient.block

    def block(self: ArchiveClient, gsn: int) -> Block | int:
        me = (self._shard, self._address[1])
        if not failed and gsn > 1:
            failed.add(me)
        if me in failed:
            raise UnavailableError("the archive breaks off")
        found = real(self, gsn)
        if failed and isinstance(found, Block):
            served.add(me)
        return found

    monkeypatch.setattr(ArchiveClient, "block", block)
    assert keys(read_range(asked(cluster))) == everything
    ((shard, port),) = failed
    assert any(other[0] == shard and other[1] != port for other in served)


@pytest.fixture
def outlined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shard of each outline that is asked for from now on."""
    found: list[int] = []
    real = ziplog.Log.outline

    def outline(self: Log, shard: int, start: int, stop: int) -> ShardOutline:
        found.append(shard)
        return real(self, shard, start, stop)

    monkeypatch.setattr(ziplog.Log, "outline", outline)
    return found


def apart(cluster: Cluster) -> list[Piece]:
    """The log in pieces, as small as is known."""
    with source_of(parse(asked(cluster))).open() as session:
        pinned = session.pin()
        return session.pieces_of(pinned.start, pinned.stop)


def test_a_task_requests_the_archives_of_a_shard_once(
    cluster: Cluster, everything: list[Key], outlined: list[int]
) -> None:
    pieces = apart(cluster)
    assert len(pieces) > 4
    outlined.clear()
    with source_of(parse(asked(cluster))).open() as session:
        assert keys(session.read(pieces, Projection(DEFAULT, "local"))) == everything
    assert sorted(outlined) == [0, 1]


def test_a_task_that_knows_the_archives_sends_no_other_request(
    cluster: Cluster,
    everything: list[Key],
    served: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with source_of(parse(asked(cluster))).open() as session:
        pinned = session.pin()
        # Nothing was ever a repetition there, and the last piece is not sealed.
        pieces = [p for p in session.pieces_of(pinned.start, pinned.stop) if p.shard == 1][:-1]
        source = as_sent(session.for_tasks())
    stop = pieces[-1].stop
    expected = [row for row in everything if row[1] == 1 and row[0] < stop]
    assert expected

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a task has connected to the cluster")

    monkeypatch.setattr(ziplog, "connect", refuse)
    with source.open() as session:
        assert keys(session.read(pieces, Projection(DEFAULT, "local"))) == expected
    assert served


def test_a_task_whose_archives_are_gone_requests_others(
    cluster: Cluster, everything: list[Key], outlined: list[int], served: list[tuple[int, int]]
) -> None:
    pieces = apart(cluster)
    with cluster.connect(timeout=TIMEOUT_S) as log:
        number = log.cluster_number
    nobody = {
        shard: [("127.0.0.1", port) for port in new_shard.free_ports(2, "127.0.0.1")]
        for shard in (0, 1)
    }
    outlined.clear()
    found = log_source._ClusterFacts(number, nobody)
    source = as_sent(log_source.LogSource(parse(asked(cluster)), found))
    with source.open() as session:
        assert keys(session.read(pieces, Projection(DEFAULT, "local"))) == everything
    assert sorted(outlined) == [0, 1]
    assert served


def test_a_closed_session_does_not_connect(cluster: Cluster) -> None:
    with source_of(parse(asked(cluster))).open() as session:
        session.pieces_of(1, session.pin().stop)
        source = session.for_tasks()
    session = source.open()
    session.close()
    with pytest.raises(ClosedError):
        session.topic()


def test_a_load_of_another_cluster_is_refused(cluster: Cluster) -> None:
    """At the address of the load, or in its directory, there is another cluster by then."""
    with cluster.connect(timeout=TIMEOUT_S) as log:
        found = log.cluster()["cluster_id"]
    for options in (asked(cluster), {"path": str(cluster.config.data_dir)}):
        with source_of(parse(options)).open() as session:
            pinned = session.pin()
        assert pinned.cluster == found
        other = msgspec.structs.replace(pinned, cluster="1" * 32)
        with pytest.raises(ConfigError, match=f"this load is of cluster 1+, but .* {found}: use"):
            Reader(parse(options), other, DEFAULT).partitions()
    source = log_source.LogSource(parse(asked(cluster)), log_source._ClusterFacts(1, {}))
    with source.open() as session, pytest.raises(ClusterMismatchError):
        session.topic()


@pytest.mark.parametrize("known", [WriterTable(), WriterTable([(WRITER, 0, 9)])])
def test_no_writer_table_is_invented_for_a_trimmed_position(
    cluster: Cluster, log: Log, monkeypatch: pytest.MonkeyPatch, known: WriterTable
) -> None:
    trimmed = msgspec.structs.replace(log.extents(1, 2), trim=1000)
    monkeypatch.setattr(ziplog.Log, "extents", lambda *_: trimmed)
    monkeypatch.setattr(ArchiveClient, "writers", lambda *_: (40, known))
    with (
        source_of(parse(asked(cluster))).open() as session,
        session.replicas(0, 1, 2, 0) as replicas,
    ):
        with pytest.raises(TrimmedError):
            replicas.table(100)
        assert replicas.table(1000)[0] == 1000


def test_rows_whose_history_was_trimmed_meanwhile_are_left_out(
    cluster: Cluster, log: Log, everything: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [row for row in everything if row[1] == 0]
    # In the first block, which comes from the archive in the earlier outline.
    trim = mine[20][0]
    pieces = [piece for piece in apart(cluster) if piece.shard == 0]
    trimmed = msgspec.structs.replace(log.extents(1, 2), trim=trim)
    monkeypatch.setattr(ziplog.Log, "extents", lambda *_: trimmed)
    monkeypatch.setattr(ArchiveClient, "writers", lambda *_: (0, WriterTable()))
    with source_of(parse(asked(cluster))).open() as session, pytest.raises(TrimmedError):
        list(session.read(pieces, Projection(DEFAULT, "local")))
    with source_of(parse(asked(cluster, failOnDataLoss="false"))).open() as session:
        found = keys(session.read(pieces, Projection(DEFAULT, "local")))
    assert found[0][0] >= trim
    assert {row for row in mine if row[0] >= trim} <= set(found)


def test_a_range_that_starts_at_a_trim_point_within_a_block_has_no_duplicates(
    cluster: Cluster, log: Log, everything: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [row for row in everything if row[1] == 0]
    # There are rows before the first block and duplicates after it; no writer is older.
    trim = mine[20][0]
    pieces = [
        msgspec.structs.replace(piece, start=max(piece.start, trim))
        for piece in apart(cluster)
        if piece.shard == 0 and piece.stop > trim
    ]
    trimmed = msgspec.structs.replace(log.extents(1, 2), trim=trim)
    monkeypatch.setattr(ziplog.Log, "extents", lambda *_: trimmed)
    with source_of(parse(asked(cluster))).open() as session:
        found = keys(session.read(pieces, Projection(DEFAULT, "local")))
    assert found == [row for row in mine if row[0] >= trim]


def starts_of_repeats(session: Session) -> list[int]:
    """Return the starts of the blocks of shard 0 that archives have and that contain origins."""
    at, starts = 1, []
    with session.replicas(0, 1, 2, 0) as replicas:
        while isinstance(block := replicas.block(at), Block):
            starts += [block.start] if block.origins else []
            at = block.stop
    return starts


def test_rows_of_trimmed_writers_are_still_known_within_a_block(
    cluster: Cluster, log: Log, everything: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block begins before the trim point, and repeats rows of blocks before it."""
    with source_of(parse(asked(cluster))).open() as session:
        wait_until(lambda: len(starts_of_repeats(session)) > 1, "archives have one block only")
        trim = starts_of_repeats(session)[-1] + 1
        pieces = session.pieces_of(trim, session.pin().stop)
        trimmed = msgspec.structs.replace(log.extents(1, 2), trim=trim)
        monkeypatch.setattr(ziplog.Log, "extents", lambda *_: trimmed)
        found = keys(session.read(pieces, Projection(DEFAULT, "local")))
    assert found == [row for row in everything if row[0] >= trim]


def test_after_all_archives_failed_the_current_ones_are_requested(
    cluster: Cluster,
    everything: list[Key],
    outlined: list[int],
    served: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = apart(cluster)
    outlined.clear()
    real = ziplog.Log.outline

    def moved(self: Log, shard: int, start: int, stop: int) -> ShardOutline:
        reported = real(self, shard, start, stop)
        if outlined.count(shard) > 1:
            return reported
        nobody = [("127.0.0.1", port) for port in new_shard.free_ports(2, "127.0.0.1")]
        return msgspec.structs.replace(reported, archives=nobody)

    monkeypatch.setattr(ziplog.Log, "outline", moved)
    with source_of(parse(asked(cluster))).open() as session:
        assert keys(session.read(pieces, Projection(DEFAULT, "local"))) == everything
    assert sorted(outlined) == [0, 0, 1, 1]
    assert len({port for port, _ in served}) >= 2


def test_reads_of_one_session_can_be_interleaved(cluster: Cluster, everything: list[Key]) -> None:
    options = parse(asked(cluster))
    with source_of(options).open() as session:
        pinned = session.pin()
        pieces = session.pieces_of(pinned.start, pinned.stop)
        what = Projection(DEFAULT, "local")
        streams = [
            session.read([piece for piece in pieces if piece.shard == shard], what)
            for shard in (0, 1)
        ]
        batches: list[pa.RecordBatch] = []
        while streams:
            for stream in list(streams):
                batch = next(stream, None)
                if batch is None:
                    streams.remove(stream)
                else:
                    batches.append(batch)
    assert keys(batches) == everything


def test_a_malformed_address_is_refused_with_the_name_of_the_option() -> None:
    with pytest.raises(ConfigError, match=r"ziplog\.bootstrap\.servers is 'nowhere'"):
        list(read_range({SERVERS: "nowhere"}))


def test_a_position_that_was_never_assigned_is_refused(cluster: Cluster) -> None:
    for options in ({"startingOffsets": 2**62}, {"endingOffsets": 2**62}):
        with pytest.raises(NoSuchRecordError, match="no shard owns a position"):
            list(read_range(asked(cluster, **options)))
    for name in ("startingEpoch", "endingEpoch"):
        with pytest.raises(ConfigError, match=rf"{name} is {2**40}; it must be an epoch"):
            list(read_range(asked(cluster, **{name: 2**40})))


def test_a_range_with_a_fixed_end_never_changes(cluster: Cluster, log: Log) -> None:
    stop = log.check_tail().gsn + 200
    before = keys(read_range(asked(cluster, endingOffsets=stop)))
    log.insert_many([b"after"] * 500)
    assert keys(read_range(asked(cluster, endingOffsets=stop))) == before


def test_a_load_with_a_given_end_does_not_request_the_tail(
    cluster: Cluster, everything: list[Key], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Log) -> RecordId:
        raise UnavailableError("a shard is away")

    monkeypatch.setattr(ziplog.Log, "check_tail", away)
    stop, *_, epoch = everything[len(everything) // 2]
    before = [row for row in everything if row[0] < stop]
    assert keys(read_range(asked(cluster, endingOffsets=stop))) == before
    assert keys(read_range(asked(cluster, endingEpoch=epoch)))[: len(before)] == before
    with pytest.raises(UnavailableError, match="a shard is away"):
        list(read_range(asked(cluster)))


def test_a_server_that_dies_during_a_read_costs_only_time(
    tmp_path: Path, served: list[tuple[int, int]]
) -> None:
    with small_cluster(tmp_path / "log") as cluster, cluster.connect(timeout=TIMEOUT_S) as log:
        assert list(read_range(asked(cluster))) == []
        fill(cluster, 600)
        await_archives(log)
        everything = all_rows(cluster)
        batches = read_range(asked(cluster, minPartitions=4))
        found = [next(batches)]
        assert served
        cluster.kill("shard-0-0")
        cluster.kill("shard-1-1")
        found += batches
        assert keys(found) == everything
        trim_and_read(cluster, log, everything)


def trim_and_read(cluster: Cluster, log: Log, everything: list[Key]) -> None:
    """A trimmed beginning is an error, or it is left out."""
    first = everything[len(everything) // 2]
    kept = [row for row in everything if row >= first]
    log.trim(RecordId(*first[:2]), timeout=TIMEOUT_S)
    assert keys(read_range(asked(cluster))) == kept
    with pytest.raises(TrimmedError) as refused:
        list(read_range(asked(cluster, startingOffsets=1)))
    assert refused.value.first == RecordId(*first[:2])
    lenient = asked(cluster, startingOffsets=1, failOnDataLoss="false")
    assert keys(read_range(lenient)) == kept
    with pytest.raises(TrimmedError):
        list(read_range(asked(cluster, startingEpoch=0)))
    lenient = asked(cluster, startingEpoch=0, failOnDataLoss="false")
    assert keys(read_range(lenient)) == kept
