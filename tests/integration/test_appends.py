"""Appends against real servers: what begins after one returned gets a higher position."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

import ziplog
import ziplog.aio
from ziplog.errors import DeadlineError, OutcomeUnknownError, ZiplogError
from ziplog.local import Cluster
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

_SPAWN = multiprocessing.get_context("spawn")
#: Number of times that the two processes take turns.
TURNS = 500
NIGHTLY_TURNS = 10_000


def insert_on_request(endpoint: str, pipe: Connection) -> None:
    """Insert after each message on the pipe, and send back the gsn, 0 if the insert failed."""
    with ziplog.connect(endpoint, timeout=60.0) as log:
        pipe.send(0)
        while pipe.recv():
            try:
                pipe.send(log.insert_after(b"after").gsn)
            except ZiplogError:
                pipe.send(0)


def take_turns(endpoint: str, turns: int) -> None:
    """Append here, then insert in another process, and check that positions rise."""
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=insert_on_request, args=(endpoint, there), daemon=True)
    process.start()
    there.close()
    done = 0
    try:
        with ziplog.connect(endpoint, timeout=60.0) as log:
            here.recv()
            while done < turns:
                try:
                    appended = log.append(b"before")
                except ZiplogError:
                    continue
                here.send(True)
                assert here.poll(90.0), "the other process does not answer"
                inserted = here.recv()
                assert not inserted or inserted > appended.gsn, "a later insert came before it"
                done += bool(inserted)
        here.send(False)
    finally:
        process.join(10.0)
        process.kill()
        here.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), shards=3) as running:
        yield running


def test_positions_rise_from_an_append_to_a_later_insert(cluster: Cluster) -> None:
    take_turns(cluster.endpoint, TURNS)


def test_all_kinds_of_appends(cluster: Cluster) -> None:
    with cluster.connect() as log:
        start = log.check_tail(sealed=True)
        first = log.append(b"a", key="k", shard=1)
        many = log.append_many([b"b", b"c"], first, shard=2)
        last = log.append_nowait(b"d", shard=0).result()
        log.flush()
        assert start < first < many[0] < many[1] < last
        assert [first.shard, many[0].shard, last.shard] == [1, 2, 0]
        assert log.seal(last) == last
        assert log.seal(RID_GENESIS) == RID_GENESIS
        assert log.append_many([]) == []
        assert log.check_tail(sealed=True) == last
        assert log.stats()["appends"] == 4
        payloads = [record.payload for record in log.subscribe(first, follow=False)]
        assert payloads == [b"a", b"b", b"c", b"d"]


def test_appends_of_many_tasks_share_their_questions(cluster: Cluster) -> None:
    async def run() -> None:
        async with await ziplog.aio.connect(cluster.endpoint) as log:
            for _ in range(5):
                before = await log.check_tail(sealed=True)
                rids = await asyncio.gather(*(log.append(b"x") for _ in range(64)))
                assert min(rids) > before
                assert await log.insert_after(b"y") > max(rids)

    asyncio.run(run())


def test_barrier_covers_completed_appends(cluster: Cluster) -> None:
    with cluster.connect() as log, cluster.connect() as other:
        start = log.append(b"start")
        with log.subscribe(start) as subscription:
            assert next(subscription).rid == start
            rid = other.append(b"read me")
            barrier = subscription.barrier(timeout=10.0)
            assert barrier > rid
            found: list[ziplog.RecordId] = []
            while subscription.position < barrier:
                found += [record.rid for record in subscription.fetch(timeout=0.05)]
            assert rid in found


def test_barrier_of_a_subscription_that_ends(cluster: Cluster) -> None:
    with cluster.connect() as log:
        rids = [log.append(b"%d" % number) for number in range(5)]
        subscription = log.subscribe(rids[0], follow=False)
        assert subscription.barrier(timeout=10.0) > rids[-1]
        found: list[ziplog.RecordId] = []
        while len(found) < len(rids):
            found += [record.rid for record in subscription.fetch()]
        assert found == rids
        assert subscription.barrier(timeout=10.0) > rids[-1]
        assert subscription.fetch() == subscription.fetch() == []


def test_append_waits_for_a_silent_shard_and_says_so(tmp_path: Path) -> None:
    servers = ("shard-1-0", "shard-1-1")
    with Cluster(tmp_path, failure_handlers=0) as cluster, cluster.connect(timeout=30.0) as log:
        log.append(b"first", shard=0)
        for name in servers:
            cluster.pause(name)
        rid = log.insert_many([b"plain"] * 10, shard=0)[-1]
        with pytest.raises(DeadlineError, match="shard 1"):
            log.seal(rid, timeout=1.0)
        with pytest.raises(OutcomeUnknownError, match=r"shard 1 .* has not passed it") as raised:
            log.append(b"second", shard=0, timeout=1.0)
        (placed,) = raised.value.results
        assert log.read_record(placed).payload == b"second"
        for name in servers:
            cluster.resume(name)
        assert raised.value.resolve(60.0) == placed
        assert log.insert_after(b"later") > placed


def append_with_command(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "ziplog", "append", f"--bootstrap={cluster.endpoint}")
    return subprocess.run(
        [*command, *options], check=False, capture_output=True, text=True, input="one\ntwo\n"
    )


def test_the_command_prints_rids_and_its_error_names_them(tmp_path: Path) -> None:
    servers = ("shard-1-0", "shard-1-1")
    with Cluster(tmp_path, failure_handlers=0) as cluster, cluster.connect(timeout=30.0) as log:
        done = append_with_command(cluster, "--lines", "--shard=1", "--key=k")
        assert done.returncode == 0, done.stderr
        rids = [ziplog.RecordId.parse(line) for line in done.stdout.split()]
        assert [rid.shard for rid in rids] == [1, 1]
        assert [log.read_record(rid).payload for rid in rids] == [b"one", b"two"]
        assert log.insert_after(b"later", shard=0) > rids[1]
        for name in servers:
            cluster.pause(name)
        failed = append_with_command(cluster, "--lines", "--shard=0", "--timeout=3")
        for name in servers:
            cluster.resume(name)
        assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
        named = re.search(r"what the log has at (\S+) (\S+): once", failed.stderr)
        assert named is not None, failed.stderr
        found = [log.read_record(ziplog.RecordId.parse(text)).payload for text in named.groups()]
        assert found == [b"one", b"two"]
        assert "resolve()" not in failed.stderr
        assert append_with_command(cluster, "--after", named[2]).returncode == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_positions_rise_while_servers_are_killed_and_shards_come_and_go(tmp_path: Path) -> None:
    ended = threading.Event()

    def disturb(cluster: Cluster) -> None:
        draw = random.Random(1)
        while not ended.wait(3.0):
            cluster.kill(f"shard-{draw.randrange(2)}-{draw.randrange(2)}")
            if ended.wait(5.0):
                return
            cluster.remove_shard(cluster.add_shard())

    with Cluster(tmp_path, shards=2) as cluster:
        thread = threading.Thread(target=disturb, args=(cluster,))
        thread.start()
        try:
            take_turns(cluster.endpoint, NIGHTLY_TURNS)
        finally:
            ended.set()
            thread.join()
