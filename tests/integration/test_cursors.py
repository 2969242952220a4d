"""Cursors against real servers: ownership, commits, losses, holds, and the command line."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest

import ziplog
import ziplog.aio
from tests.unit.ziplog.cli.fakes import run
from tests.waiting import next_turn, wait_until
from ziplog import CursorHeldError, CursorLostError, RecordId, TrimHeldError
from ziplog.errors import ConfigError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_SPAWN = multiprocessing.get_context("spawn")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cursors"), shards=2, mms=3) as running:
        yield running


@pytest.fixture
def log(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect(timeout=60.0) as client:
        yield client


@pytest.fixture
def other(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect(timeout=60.0) as client:
        yield client


@pytest.fixture
def name(cluster: Cluster) -> Iterator[str]:
    yield f"test/{uuid.uuid4().hex}"
    with cluster.connect(timeout=60.0) as log:
        for cursor in log.cursors():
            log.delete_cursor(cursor.name)


def insert(log: ziplog.Log, count: int) -> list[RecordId]:
    """Insert records one after the other, so that their order is known."""
    rid = log.check_tail()
    rids = []
    for number in range(count):
        rid = log.insert_after(b"%d" % number, rid)
        rids.append(rid)
    return rids


def take(cursor: ziplog.Cursor, count: int) -> list[RecordId]:
    got: list[RecordId] = []
    while len(got) < count:
        got += [record.rid for record in cursor.fetch(count - len(got))]
    return got


def test_next_owner_continues_at_the_committed_position(
    log: ziplog.Log, other: ziplog.Log, name: str
) -> None:
    rids = insert(log, 10)
    with log.cursor(name, start=rids[0]) as cursor:
        assert take(cursor, 4) == rids[:4]
        # What is reached grows while no records come.
        assert rids[3] < cursor.commit(mark=b"four") <= cursor.reached
        assert take(cursor, 3) == rids[4:7]
    with other.cursor(name) as cursor:
        assert cursor.mark == b"four"
        assert take(cursor, 6) == rids[4:]
        cursor.commit_soon()
    with log.cursor(name) as cursor:
        assert cursor.position > rids[-1]
        (rid,) = insert(log, 1)
        assert take(cursor, 1) == [rid]


def test_iteration_commits_what_was_handled(log: ziplog.Log, name: str) -> None:
    rids = insert(log, 5)
    with log.cursor(name, start=rids[0]) as cursor:
        for record in cursor:
            cursor.commit()
            if record.rid == rids[2]:
                break
    assert rids[2] < log.cursors(name)[0].position <= rids[3]


def test_one_client_owns_a_cursor(log: ziplog.Log, other: ziplog.Log, name: str) -> None:
    with log.cursor(name) as cursor:
        with pytest.raises(CursorHeldError, match=str(os.getpid())):
            other.cursor(name, wait=False)
        with pytest.raises(CursorHeldError):
            other.cursor(name, timeout=0.5)
        with pytest.raises(CursorHeldError, match="this client"):
            log.cursor(name)
        cursor.commit()
    other.cursor(name, wait=False).close()


def test_waiting_client_gets_a_released_cursor(
    log: ziplog.Log, other: ziplog.Log, name: str
) -> None:
    cursor = log.cursor(name)
    terms: list[int] = []

    def wait() -> None:
        with other.cursor(name, timeout=float("inf")) as claimed:
            terms.append(claimed.term)

    thread = threading.Thread(target=wait)
    thread.start()
    cursor.close()
    thread.join(60)
    assert terms
    assert terms[0] > cursor.term


def test_owner_that_computes_between_calls_keeps_its_cursor(
    log: ziplog.Log, other: ziplog.Log, name: str
) -> None:
    with log.cursor(name, lease_s=3.0) as cursor:
        with pytest.raises(CursorHeldError):
            other.cursor(name, timeout=7.0)
        cursor.commit()


def _own(endpoint: str, name: str, pipe: Connection) -> None:
    with ziplog.connect(endpoint, timeout=60.0) as log, log.cursor(name, lease_s=1.0) as cursor:
        pipe.send(cursor.term)
        pipe.recv()
        try:
            cursor.commit()
        except CursorLostError as error:
            pipe.send(error.reason)
        pipe.recv()


def test_cursor_of_a_stopped_process_is_claimed_by_another_one(
    cluster: Cluster, log: ziplog.Log, name: str
) -> None:
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_own, args=(cluster.endpoint, name, there), daemon=True)
    process.start()
    try:
        assert here.poll(60)
        term = here.recv()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with log.cursor(name, timeout=60.0) as cursor:
            assert cursor.term > term
            os.kill(process.pid, signal.SIGCONT)
            here.send("commit")
            assert here.poll(60)
            assert str(os.getpid()) in here.recv()
            cursor.commit()
    finally:
        process.kill()
        process.join()


def test_dropped_cursor_is_released(log: ziplog.Log, other: ziplog.Log, name: str) -> None:
    cursor = log.cursor(name, lease_s=300.0)
    del cursor
    gc.collect()
    other.cursor(name).close()


def test_seek_ends_the_claim_and_moves_the_cursor(
    log: ziplog.Log, other: ziplog.Log, name: str
) -> None:
    rids = insert(log, 4)
    with log.cursor(name, start=rids[0], lease_s=1.0) as cursor:
        take(cursor, 4)
        cursor.commit()
        assert other.seek_cursor(name, rids[1]).seek == 1
        with pytest.raises(CursorLostError, match="position was set"):
            next(cursor)
        with pytest.raises(CursorLostError):
            cursor.commit()
    with log.cursor(name) as cursor:
        assert take(cursor, 3) == rids[1:]
    assert other.seek_cursor(name, ziplog.RID_RECENT).position > rids[-1]


def test_deleted_cursor_begins_anew(log: ziplog.Log, other: ziplog.Log, name: str) -> None:
    rids = insert(log, 3)
    with log.cursor(name, start=rids[1], lease_s=1.0) as cursor:
        term = cursor.term
        other.delete_cursor(name)
        with pytest.raises(CursorLostError, match="deleted"):
            list(cursor)
    other.delete_cursor(name)
    with log.cursor(name, start=rids[2]) as cursor:
        assert cursor.term > term
        assert take(cursor, 1) == [rids[2]]


def test_paused_owner_reads_no_further(log: ziplog.Log, other: ziplog.Log, name: str) -> None:
    rids = insert(log, 4)
    with log.cursor(name, start=rids[0], lease_s=1.0) as cursor:
        other.pause_cursor(name, rids[2])
        wait_until(lambda: cursor.is_paused, "the owner learns of the pause")
        assert take(cursor, 2) == rids[:2]
        assert cursor.fetch(timeout=0.5) == []
        assert other.resume_cursor(name).state == "owned"
        assert take(cursor, 2) == rids[2:]


def test_held_records_are_not_trimmed(log: ziplog.Log, name: str) -> None:
    rids = insert(log, 4)
    with log.cursor(name, start=rids[1]) as cursor:
        with pytest.raises(TrimHeldError) as held:
            log.trim(rids[2])
        assert (held.value.cursor, held.value.position.gsn) == (name, rids[1].gsn)
        assert str(os.getpid()) in held.value.owner
        take(cursor, 2)
        cursor.commit(rids[2])
        log.trim(rids[2])
    log.trim(rids[3], force=True)
    with pytest.raises(ziplog.TrimmedError):
        log.cursor(name)
    log.seek_cursor(name, ziplog.RID_GENESIS)
    with log.cursor(name) as cursor:
        assert take(cursor, 1) == rids[3:]
    log.delete_cursor(name)


def test_cursors_survive_the_nodes_of_the_service(cluster: Cluster, name: str) -> None:
    with cluster.connect(timeout=60.0) as log, log.cursor(name) as cursor:
        rids = insert(log, 20)
        for rid in rids:
            leader = next(node for node in log.cluster()["mms"] if node["leader"])
            if rid in rids[5::7]:
                os.kill(leader["pid"], signal.SIGKILL)
            while take(cursor, 1) != [rid]:
                pass
            cursor.commit()
        assert log.cursors(name)[0].position > rids[-1]


def test_asyncio_cursor(cluster: Cluster, name: str) -> None:
    async def use() -> None:
        async with await ziplog.aio.connect(cluster.endpoint, timeout=60.0) as log:
            rid = await log.insert_after(b"1", await log.check_tail())
            async with log.cursor(name, start=rid) as cursor:
                async for record in cursor:
                    assert record.rid == rid
                    break
                async with await ziplog.aio.connect(cluster.endpoint) as other:
                    held = other.cursor(name, wait=False)
                    with pytest.raises(CursorHeldError):
                        await held
                    await held.close()
                assert rid < await cursor.commit(mark=b"m") <= cursor.reached
                assert cursor.position > rid
            (found,) = await log.cursors(name)
            assert (found.state, found.mark) == ("free", b"m")
            waiting = asyncio.create_task(_claim(log, name))
            cursor = await log.cursor(f"{name}/2")
            await cursor.close()
            assert await waiting > found.term

    asyncio.run(use())


def test_asyncio_cursor_whose_claim_is_under_way_is_released(
    cluster: Cluster, other: ziplog.Log, name: str
) -> None:
    async def drop(*, is_closed: bool) -> None:
        async with await ziplog.aio.connect(cluster.endpoint, timeout=60.0) as log:
            cursor = log.cursor(name, lease_s=300.0)
            del cursor
            gc.collect()
            if not is_closed:
                await asyncio.to_thread(lambda: other.cursor(name).close())

    asyncio.run(drop(is_closed=True))
    other.cursor(name).close()
    asyncio.run(drop(is_closed=False))


async def _claim(log: ziplog.aio.AsyncLog, name: str) -> int:
    async with log.cursor(name) as cursor:
        return cursor.term


def test_invalid_arguments_are_refused(log: ziplog.Log, name: str) -> None:
    with pytest.raises(ConfigError, match="letter or a digit"):
        log.cursor("-")
    with pytest.raises(ConfigError, match="no cursor"):
        log.pause_cursor(name)
    (rid,) = insert(log, 1)
    with pytest.raises(ziplog.NoSuchRecordError):
        log.cursor(name, start=RecordId(rid.gsn + 2**40, 0))


# --- the command line ---


def ziplog_cursor(cluster: Cluster, *arguments: str, code: int = 0) -> str:
    done = run("cursor", *arguments, "--bootstrap", cluster.endpoint)
    assert done.exit_code == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_command_line_reads_and_commits(cluster: Cluster, log: ziplog.Log, name: str) -> None:
    rids = insert(log, 5)
    ziplog_cursor(cluster, "create", name, "--start", str(rids[0]), "--hold-s", "0")
    ziplog_cursor(cluster, "read", name, "--limit", "2")
    first = ziplog_cursor(cluster, "read", name, "--commit", "--limit", "2", "--json")
    rest = ziplog_cursor(cluster, "read", name, "--commit", "--json")
    got = [json.loads(line)["rid"] for line in (first + rest).splitlines()]
    assert got == [str(rid) for rid in rids]


def test_command_line_reports_that_a_paused_cursor_returns_no_record(
    cluster: Cluster, log: ziplog.Log, name: str
) -> None:
    (rid,) = insert(log, 1)
    ziplog_cursor(cluster, "create", name, "--start", str(rid))
    ziplog_cursor(cluster, "pause", name)
    error = ziplog_cursor(cluster, "read", name, "--timeout", "5", code=1)
    assert f"no record came within 5 s; the cursor {name} is at {rid}, and is paused" in error
    assert f"`ziplog cursor resume {name}` ends the pause" in error


def test_command_line_says_that_a_read_creates_a_cursor(
    cluster: Cluster, log: ziplog.Log, name: str
) -> None:
    insert(log, 1)
    first, second = (
        run("cursor", "read", name, "--limit", "1", "--bootstrap", cluster.endpoint).stderr
        for _ in range(2)
    )
    assert f"created cursor {name} at " in first
    assert f"`ziplog cursor delete {name}` removes it" in first
    assert second == ""


def test_command_line_changes_cursors(cluster: Cluster, log: ziplog.Log, name: str) -> None:
    (rid,) = insert(log, 1)

    def listed() -> dict[str, Any]:
        document: dict[str, Any] = json.loads(ziplog_cursor(cluster, "list", name, "--json"))
        return document

    ziplog_cursor(cluster, "create", name)
    assert (listed()["state"], listed()["is_holding"]) == ("free", True)
    ziplog_cursor(cluster, "pause", name)
    assert listed()["state"] == "paused"
    ziplog_cursor(cluster, "resume", name)
    ziplog_cursor(cluster, "seek", name, str(rid))
    assert (listed()["position"], listed()["seek"]) == (str(rid), 1)
    ziplog_cursor(cluster, "release", name)
    assert name in ziplog_cursor(cluster, "list")
    ziplog_cursor(cluster, "delete", name, "--yes")
    assert "no cursor is named" in ziplog_cursor(cluster, "pause", name, code=2)


def test_cancelled_entry_gives_its_claim_up(cluster: Cluster, other: ziplog.Log, name: str) -> None:
    async def main() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            # The object stays, as it does in the traceback of a cancellation.
            cancelled = log.cursor(name)
            entering = asyncio.ensure_future(cancelled.__aenter__())
            await next_turn()
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            held.close()
            async with asyncio.timeout(30):
                while log._core.has_cursor_calls:
                    await log.cursors(name)
            async with log.cursor(name, timeout=30) as cursor:
                assert cursor.term > held.term

    held = other.cursor(name)
    asyncio.run(main())


def test_cancelled_close_ends_the_ownership(cluster: Cluster, other: ziplog.Log, name: str) -> None:
    async def main() -> None:
        async with ziplog.aio.connect(cluster.endpoint) as log:
            cursor = await log.cursor(name)
            cursor.commit_soon()
            closing = asyncio.ensure_future(cursor.close())
            await next_turn()
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            claimed = await asyncio.to_thread(other.cursor, name, timeout=30)
            assert claimed.term > cursor.term
            claimed.close()

    asyncio.run(main())
