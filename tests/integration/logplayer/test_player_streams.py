"""The examples with Redis and NATS: streams get each record, whatever fails.

Each test starts a server of its own, and is skipped where the server or its client is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import subprocess
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

import logplayer
from logplayer import targets
from tests.integration.logplayer.playing import history, insert
from tests.integration.ports import consecutive_ports
from tests.unit.logplayer.targets.databases import GSNS, batch, record, task
from tests.waiting import wait_until
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import ziplog


def why_not(server: str, module: str, package: str) -> str:
    """Return why a server cannot be used here; "": it can."""
    if shutil.which(server) is None:
        return f"no {server} is installed: apt-get install {server}"
    if find_spec(module) is None:
        return f"{module} is not installed: pip install {package}"
    return ""


NO_REDIS = why_not("redis-server", "redis", "redis")
NO_NATS = why_not("nats-server", "nats", "nats-py")


@contextlib.contextmanager
def running(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def tail(log: ziplog.Log) -> RecordId:
    return RecordId(log.check_tail().gsn + 1, 0)


# --- Redis ---


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a client of a new server."""
    module, port = importlib.import_module("redis"), consecutive_ports(1)
    options = ["--port", str(port), "--dir", str(tmp_path), "--save", "", "--appendonly", "yes"]
    with running("redis-server", "--bind", "127.0.0.1", *options):
        client = module.Redis(port=port)

        def replies() -> bool:
            with contextlib.suppress(module.exceptions.ConnectionError):
                return bool(client.ping())
            return False

        wait_until(replies, "Redis replies")
        monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{port}")
        yield client
        client.close()


def entries(redis: Any, cursor: str) -> list[tuple[int, str, str]]:
    return [
        (int(name.decode().partition("-")[0]), fields[b"key"].decode(), fields[b"payload"].decode())
        for name, fields in redis.xrange(cursor)
    ]


@pytest.mark.skipif(bool(NO_REDIS), reason=NO_REDIS)
def test_redis_gets_each_record_once(log: ziplog.Log, redis: Any) -> None:
    from player_redis import RedisStream  # noqa: PLC0415 - it needs Redis's client

    start, target = tail(log), targets.function("copy", RedisStream, batch_records=20)
    for _ in range(2):
        rids = insert(log, 100)
        with logplayer.Player(log, "redis", [target], start=start) as player:
            player.wait_until(rids[-1], timeout=60)
    assert entries(redis, "redis/copy/0") == history(log, start)


@pytest.mark.skipif(bool(NO_REDIS), reason=NO_REDIS)
def test_redis_refuses_what_another_process_added(redis: Any) -> None:
    from player_redis import RedisStream  # noqa: PLC0415 - it needs Redis's client

    former, successor = RedisStream(), RedisStream()
    former.open(task(1))
    former.deliver(batch(task(1), 1, 9))
    assert successor.open(task(2, position=4, has_moved=True)).position == 4
    successor.deliver(batch(task(2), 4, 15))
    former.deliver(batch(task(1), 9, 15))
    found = [gsn for gsn, _, _ in entries(redis, "orders/warehouse/0")]
    assert found == [gsn for gsn in GSNS if gsn < 15]
    for one in (former, successor):
        one.close()


@pytest.mark.skipif(bool(NO_REDIS), reason=NO_REDIS)
def test_redis_that_refuses_a_record_adds_none_after_it(redis: Any) -> None:
    from player_redis import RedisStream  # noqa: PLC0415 - it needs Redis's client

    target = RedisStream()
    redis.set("orders/warehouse/0", "no stream")
    with pytest.raises(Exception, match="WRONGTYPE"):
        target.deliver(batch(task(), 1, 4, [record(1), record(2)]))
    target.close()


# --- NATS ---


@pytest.fixture
def nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a new server with a stream."""
    port = consecutive_ports(1)
    url = f"nats://127.0.0.1:{port}"
    options = ["-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(tmp_path)]
    with running("nats-server", *options):

        def has_stream() -> bool:
            with contextlib.suppress(OSError, TimeoutError):
                asyncio.run(with_stream(url, add=True))
                return True
            return False

        wait_until(has_stream, "NATS replies")
        monkeypatch.setenv("NATS_URL", url)
        yield url


async def with_stream(url: str, *, add: bool = False) -> list[tuple[str, bytes]]:
    """Add the stream, or return the ids and payloads of its messages."""
    module = importlib.import_module("nats")
    client = await module.connect(url, allow_reconnect=False, connect_timeout=1)
    stream, found = client.jetstream(), []
    if add:
        await stream.add_stream(name="ziplog", subjects=["ziplog.*"])
    else:
        count = (await stream.stream_info("ziplog")).state.messages
        for number in range(1, count + 1):
            message = await stream.get_msg("ziplog", number)
            found.append((message.headers["Nats-Msg-Id"], message.data))
    await client.close()
    return found


@pytest.mark.skipif(bool(NO_NATS), reason=NO_NATS)
def test_nats_drops_repetitions_within_its_window(log: ziplog.Log, nats: str) -> None:
    from player_nats import NatsStream  # noqa: PLC0415 - it needs NATS's client

    start, target = tail(log), targets.function("copy", NatsStream, batch_records=20)
    rids = insert(log, 100)
    for name in ("nats", "repeated"):
        with logplayer.Player(log, name, [target], start=start) as player:
            player.wait_until(rids[-1], timeout=60)
    found = asyncio.run(with_stream(nats))
    assert [payload.decode() for _, payload in found] == [row[2] for row in history(log, start)]
    assert [name.partition("-")[2] for name, _ in found] == [str(rid) for rid in rids]
