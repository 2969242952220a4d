"""Other logs, for comparison: used if their servers and Python clients are installed.

Redis: `XADD` then `WAIT 1`, one replica (asynchronous replication, no consensus). NATS JetStream:
a stream with three replicas (Raft, no fsync per message). All on loopback, in temporary folders.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from metrics.waiting import wait_until

from ziplog.deploy.new_shard import free_ports

_HOST = "127.0.0.1"
#: Seconds between two checks of whether a server has started.
_CHECK_S = 0.05


class Peer:
    """Servers of another log, and a client."""

    name = ""
    server = ""
    module = ""

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its server and its Python client are installed."""
        return shutil.which(cls.server) is not None and (
            importlib.util.find_spec(cls.module) is not None
        )

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> None:
        """Start a server in a session of its own, as Ziplog's are.

        Linux may divide the processors among sessions first (`sched_autogroup_enabled`).
        """
        null = subprocess.DEVNULL
        self._processes.append(
            subprocess.Popen(command, stdout=null, stderr=null, start_new_session=True)
        )

    @property
    def pids(self) -> list[int]:
        """The servers' processes, in the order of their starts."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Redis(Peer):
    """A primary and a replica."""

    name = "Redis XADD + WAIT 1"
    server = "redis-server"
    module = "redis"
    #: Further options of both servers.
    options: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        import redis  # noqa: PLC0415  an optional peer

        ports = list(free_ports(2, _HOST))
        for index, port in enumerate(ports):
            options = [*self.options, *(["--replicaof", _HOST, str(ports[0])] if index else [])]
            folder = self._folder / str(index)
            folder.mkdir()
            self.start(
                "redis-server", "--bind", _HOST, "--port", str(port), "--dir", str(folder),
                "--save", "", "--repl-diskless-sync-delay", "0", *options,
            )  # fmt: skip
        #: The primary's.
        self.port = ports[0]
        self._client = redis.Redis(host=_HOST, port=self.port)
        wait_until(lambda: self._client.wait(1, 100) >= 1, _CHECK_S)

    def values(self, keys: list[str]) -> list[bytes | None]:
        """Return the values of keys."""
        found: list[bytes | None] = self._client.mget(keys)
        return found

    def insert(self, payload: bytes) -> None:
        """Append, and wait for the replica's acknowledgement."""
        with self._client.pipeline(transaction=False) as batch:
            batch.xadd("log", {"p": payload}, maxlen=10_000, approximate=True)
            batch.wait(1, 1000)
            batch.execute()


class DurableRedis(Redis):
    """Each server flushes an entry before it replies or acknowledges it."""

    name = "Redis XADD + WAIT 1, appendfsync always"
    options = ("--appendonly", "yes", "--appendfsync", "always")


async def append_to_redis(client: Any, payload: bytes) -> None:
    """Append with a `redis.asyncio.Redis`, and wait for the replica's acknowledgement."""
    async with client.pipeline(transaction=False) as batch:
        batch.xadd("log", {"p": payload}, maxlen=10_000, approximate=True)
        batch.wait(1, 1000)
        _, replicas = await batch.execute()
    assert replicas >= 1, "no replica has it"


class Nats(Peer):
    """Three JetStream servers, a stream on all of them."""

    name = "NATS JetStream R3"
    server = "nats-server"
    module = "nats"

    def __init__(self) -> None:
        super().__init__()
        free = list(free_ports(6, _HOST))
        ports, routes = free[:3], free[3:]
        urls = ",".join(f"nats://{_HOST}:{port}" for port in routes)
        for index in range(3):
            config = self._folder / f"{index}.conf"
            config.write_text(
                f'server_name: n{index}\nhost: "{_HOST}"\nport: {ports[index]}\n'
                f'jetstream {{ store_dir: "{self._folder / str(index)}" }}\n'
                f'cluster {{ name: bench, host: "{_HOST}", port: {routes[index]}, '
                f"routes: [{', '.join(urls.split(','))}] }}\n"
            )
            self.start("nats-server", "-c", str(config))
        #: The first server's.
        self.port = ports[0]
        self._loop = asyncio.new_event_loop()
        # The three need a while to elect a leader.
        wait_until(lambda: self._loop.run_until_complete(self._open(ports[0])), _CHECK_S)

    async def _open(self, port: int) -> bool:
        import nats  # noqa: PLC0415  an optional peer

        self._client = await nats.connect(f"nats://{_HOST}:{port}", max_reconnect_attempts=1)
        self._stream = self._client.jetstream()
        try:
            await self._stream.add_stream(name="log", subjects=["log"], num_replicas=3)
        except nats.errors.Error:
            await self._client.close()
            raise
        return True

    def insert(self, payload: bytes) -> None:
        """Publish, and wait for the stream's acknowledgement."""
        self._loop.run_until_complete(self._stream.publish("log", payload))

    def __exit__(self, *details: object) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
        super().__exit__(*details)
