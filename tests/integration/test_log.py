"""Real processes: several clients insert, several subscribers follow, and all agree."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import pytest

import ziplog
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)

_SPAWN = multiprocessing.get_context("spawn")


class Inserted(NamedTuple):
    """An acknowledged insert: its position, its predecessor and its payload."""

    rid: ziplog.RecordId
    after: ziplog.RecordId
    payload: bytes


def insert_chain(endpoint: str, name: str, count: int) -> tuple[list[Inserted], dict[str, int]]:
    """Insert `count` records, each after the one before, on whatever shard the policy says."""
    done: list[Inserted] = []
    with ziplog.connect(endpoint, timeout=60) as log:
        after = ziplog.RID_GENESIS
        for index in range(count):
            payload = f"{name}-{index}".encode()
            if index % 10 == 9:
                many = [payload + b"-%d" % part for part in range(5)]
                rids = log.insert_many(many, after)
                done += [Inserted(r, after, p) for r, p in zip(rids, many, strict=True)]
            else:
                done.append(Inserted(log.insert_after(payload, after), after, payload))
            after = done[-1].rid
        return done, log.stats()


def collect(endpoint: str, count: int) -> list[tuple[ziplog.RecordId, bytes]]:
    """Follow the log from its beginning for `count` records."""
    with ziplog.connect(endpoint, timeout=60) as log, log.subscribe(timeout=60) as records:
        return [(record.rid, record.payload) for record in islice(records, count)]


def run_clients(
    endpoint: str, clients: int, count: int
) -> tuple[list[Inserted], list[list[tuple[ziplog.RecordId, bytes]]], dict[str, int]]:
    """Insert from `clients` processes while two subscribers follow, one of them in a process."""
    total = clients * (count + 4 * (count // 10))
    with _SPAWN.Pool(clients + 1) as pool, ThreadPoolExecutor(1) as threads:
        followers = [
            pool.apply_async(collect, (endpoint, total)),
            threads.submit(collect, endpoint, total),
        ]
        chains = [
            pool.apply_async(insert_chain, (endpoint, f"client{index}", count))
            for index in range(clients)
        ]
        results = [chain.get(100) for chain in chains]
        sequences = [followers[0].get(100), followers[1].result(100)]
    inserted = [one for done, _ in results for one in done]
    stats = {key: sum(own[key] for _, own in results) for key in ("fast_path", "slow_path")}
    return inserted, sequences, stats


def assert_agreed(
    log: ziplog.Log,
    inserted: list[Inserted],
    sequences: list[list[tuple[ziplog.RecordId, bytes]]],
) -> None:
    expected = sorted((one.rid, one.payload) for one in inserted)
    for sequence in sequences:
        gsns = [rid.gsn for rid, _ in sequence]
        assert gsns == sorted(set(gsns)), "not strictly increasing"
        assert sequence == expected
    assert all(one.rid > one.after for one in inserted)
    assert all(log.read_record(one.rid).payload == one.payload for one in inserted[::7])


@pytest.mark.parametrize(("shards", "f", "count"), [(3, 1, 150), (2, 2, 60)])
def test_every_subscriber_delivers_each_record_once_in_one_order(
    tmp_path: Path, shards: int, f: int, count: int
) -> None:
    with (
        Cluster(tmp_path, shards=shards, f=f, timeout=100.0) as cluster,
        cluster.connect(timeout=60.0) as log,
    ):
        inserted, sequences, _ = run_clients(cluster.endpoint, 3, count)
        assert_agreed(log, inserted, sequences)
        assert {one.rid.shard for one in inserted} == set(range(shards))
        for one in inserted:
            assert log.read_record(one.rid).payload == one.payload


@pytest.mark.timeout(600)
def test_contention_takes_both_paths(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1) as cluster, cluster.connect(timeout=60.0) as log:
        fast = slow = 0
        for _ in range(10):
            inserted, sequences, stats = run_clients(cluster.endpoint, 4, 200)
            fast, slow = fast + stats["fast_path"], slow + stats["slow_path"]
            if fast and slow:
                break
        assert fast, "no insert took the fast path"
        assert slow, "no insert took the slow path"
        assert all(log.read_record(one.rid).payload == one.payload for one in inserted[::11])
        assert {payload for _, payload in sequences[0]} <= {
            record.payload for record in log.subscribe(follow=False)
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("log"), shards=2) as running:
        yield running


@pytest.fixture
def log(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect(timeout=60.0) as client:
        yield client


def test_insert_after_a_record_of_another_shard(log: ziplog.Log) -> None:
    rid = ziplog.RID_GENESIS
    for turn in range(40):
        log.set_policy(ziplog.policy.pin(turn % 2))
        following = log.insert_after(b"%d" % turn, rid)
        assert following > rid
        assert following.shard == turn % 2
        rid = following


def test_a_record_keeps_its_key_time_and_epoch(log: ziplog.Log) -> None:
    rid = log.insert_after(b"", key="clé")
    record = log.read_record(rid)
    assert (record.rid, record.payload, record.key) == (rid, b"", "clé".encode())
    assert record.timestamp.tzinfo is not None
    assert record.epoch >= 0


def test_insert_many_is_strictly_increasing_on_one_shard(log: ziplog.Log) -> None:
    payloads = [b"%d" % index for index in range(3000)]
    rids = log.insert_many(payloads)
    assert rids == sorted(set(rids))
    assert len({rid.shard for rid in rids}) == 1
    assert log.read_record(rids[1234]).payload == b"1234"


def test_insert_nowait_and_flush(log: ziplog.Log) -> None:
    futures = [log.insert_nowait(b"%d" % index) for index in range(500)]
    log.flush()
    assert all(future.done() for future in futures)
    assert len({future.result() for future in futures}) == 500


def test_many_threads_share_one_client(log: ziplog.Log) -> None:
    with ThreadPoolExecutor(8) as threads:
        rids = list(threads.map(lambda n: log.insert_after(b"%d" % n), range(400)))
    assert len(set(rids)) == 400
    for number in (0, 199, 399):
        assert log.read_record(rids[number]).payload == b"%d" % number


def test_a_subscription_can_be_continued_without_loss_or_repeat(log: ziplog.Log) -> None:
    start = log.insert_after(b"start")
    rids = [start]
    for index in range(50):
        rids.append(log.insert_after(b"%d" % index, rids[-1]))
    with log.subscribe(start, follow=False) as first:
        head = [record.rid for record in islice(first, 20)]
        position = first.position
    with log.subscribe(position, follow=False) as second:
        tail = [record.rid for record in second]
        assert second.caught_up
    delivered = head + tail
    assert delivered == sorted(set(delivered))
    # Records of other tests may lie in between: the order is not that of real time.
    assert [rid for rid in delivered if rid in set(rids)] == rids


def test_recent_starts_at_or_before_the_end(log: ziplog.Log) -> None:
    rid = log.insert_after(b"the last one")
    assert log.check_tail() >= rid
    with log.subscribe(follow=False):
        pass
    with log.subscribe(ziplog.RID_RECENT, timeout=20) as recent:
        later = log.insert_after(b"later", rid)
        assert any(record.rid == later for record in recent)


def test_trim_removes_what_is_before_and_keeps_the_rest(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=2) as cluster:
        with cluster.connect() as log:
            rids = [log.insert_after(b"%d" % n) for n in range(20)]
            rids.sort()
            with log.subscribe(rids[0], timeout=20) as reader:
                next(reader)
                log.trim(rids[10])
                log.trim(rids[10])
            with pytest.raises(ziplog.TrimmedError) as trimmed:
                log.read_record(rids[9])
            assert trimmed.value.first.gsn == rids[10].gsn
            with pytest.raises(ziplog.TrimmedError):
                next(log.subscribe(ziplog.RID_GENESIS))
            assert [r.rid for r in log.subscribe(rids[10], follow=False)] == rids[10:]
            assert log.insert_after(b"after a trimmed one", rids[3]) > rids[3]
        cluster.stop()
        with Cluster(tmp_path) as again, again.connect() as log:
            with pytest.raises(ziplog.TrimmedError):
                log.read_record(rids[9])
            assert log.read_record(rids[10]).payload
