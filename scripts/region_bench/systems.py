"""Other systems across the regions: their servers, and a client in a region (W11)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from metrics.waiting import wait_until
from region_trial.trial import REGIONS
from wan import namespaces

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from typing import Self

    from wan.network import Network

_PROGRAMS: Final = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
_START_S: Final = 30.0
#: Seconds between two checks of whether a server has started.
_CHECK_S: Final = 0.2
_CALL_S: Final = 2.0
_RETRY_S: Final = 0.05
_PAYLOAD: Final = bytes(100)


class System:
    """Servers in regions, from `with` on; the first is the leader's, in A."""

    name: ClassVar[str]
    module: ClassVar[str]
    program: ClassVar[str]
    #: Whether it has a leader again by itself after the loss of a region.
    fails_over: ClassVar[bool] = False
    #: Ends a server and all its processes at once.
    kill_signal: ClassVar[signal.Signals] = signal.SIGKILL

    @classmethod
    def is_installed(cls) -> bool:
        """Whether server and client are installed."""
        return shutil.which(cls.program) is not None and find_spec(cls.module) is not None

    def __init__(self, network: Network) -> None:
        """Prepare."""
        self._network: Final = network
        self._servers: Final[dict[str, subprocess.Popen[bytes]]] = {}
        self._folder: Final = Path(tempfile.mkdtemp(prefix="regions-"))

    def __enter__(self) -> Self:
        """Start the servers."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the servers."""
        for region in list(self._servers):
            self.kill(region)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        raise NotImplementedError

    def _serve(self, region: str, *command: str) -> None:
        self._servers[region] = subprocess.Popen(
            self._network.command(region, *command),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self, region: str) -> None:
        """Kill the server in a region."""
        server = self._servers.pop(region)
        server.send_signal(self.kill_signal)
        server.wait()

    @property
    def hosts(self) -> list[str]:
        """The addresses of all servers, the leader's first."""
        return [self._network.address(region) for region in REGIONS]


class Redis(System):
    """A primary in A, a replica in B."""

    name = "Redis XADD + WAIT 1"
    module = "redis"
    program = "redis-server"

    def _start(self) -> None:
        primary = self._network.address("A")
        for region in ("A", "B"):
            folder = self._folder / region
            folder.mkdir()
            of = [] if region == "A" else ["--replicaof", primary, "6379"]
            self._serve(
                region, "redis-server", "--bind", self._network.address(region),
                "--protected-mode", "no", "--dir", str(folder), "--save", "",
                "--repl-diskless-sync-delay", "0", *of,
            )  # fmt: skip


class Nats(System):
    """A JetStream server in each region, and a stream on all of them."""

    name = "NATS JetStream R3"
    module = "nats"
    program = "nats-server"
    fails_over = True

    def _start(self) -> None:
        routes = ", ".join(f"nats://{host}:6222" for host in self.hosts)
        for region, host in zip(REGIONS, self.hosts, strict=True):
            config = self._folder / f"{region}.conf"
            config.write_text(
                f'server_name: {region}\nhost: "{host}"\nport: 4222\n'
                f'jetstream {{ store_dir: "{self._folder / region}" }}\n'
                f'cluster {{ name: regions, host: "{host}", port: 6222, routes: [{routes}] }}\n'
            )
            self._serve(region, "nats-server", "-c", str(config))


class Postgres(System):
    """A primary in A, a synchronous standby in B."""

    name = "PostgreSQL remote_write"
    module = "psycopg"
    program = "psql"
    kill_signal = signal.SIGQUIT

    @classmethod
    def is_installed(cls) -> bool:
        """Whether server and client are installed, and the server can run as its user."""
        return super().is_installed() and bool(_PROGRAMS) and os.geteuid() == 0

    def _start(self) -> None:
        self._folder.chmod(0o755)
        primary, standby = self._network.address("A"), self._network.address("B")
        for region in ("A", "B"):
            (self._folder / region).mkdir(mode=0o700)
            shutil.chown(self._folder / region, "postgres")
        self._run("A", "initdb", "--no-sync", "--auth=trust", "-D", str(self._folder / "A"))
        with (self._folder / "A" / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.77.0.0/16 trust\nhost replication all 10.77.0.0/16 trust\n")
        names = "synchronous_standby_names=*", "synchronous_commit=remote_write"
        self._postgres("A", primary, *names)
        wait_until(lambda: self._run("A", "pg_isready", "-h", primary), _CHECK_S)
        backup = (
            "pg_basebackup",
            "-h",
            primary,
            "-D",
            str(self._folder / "B"),
            "-R",
            "-X",
            "stream",
        )
        self._run("B", *backup, "--no-sync", "--checkpoint=fast")
        self._postgres("B", standby)
        # `pg_basebackup` streams as well, under its own name.
        query = "select 1 from pg_stat_replication where application_name = 'walreceiver'"
        wait_until(lambda: self._run("A", "psql", "-h", primary, "-tAc", query), _CHECK_S)

    def _postgres(self, region: str, address: str, *settings: str) -> None:
        options = [f"-c{one}" for one in (f"listen_addresses={address}", *settings)]
        folder = str(self._folder / region)
        self._serve(region, *_as_user("postgres", "-D", folder, "-k", "", *options))

    def _run(self, region: str, *command: str) -> bool:
        command = tuple(self._network.command(region, *_as_user(*command)))
        done = subprocess.run(command, check=True, capture_output=True, cwd="/")
        return bool(done.stdout)


def _as_user(program: str, *arguments: str) -> list[str]:
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups",
            str(_PROGRAMS[-1] / program), *arguments]  # fmt: skip


# --- clients ---


def run(router: int, region: int, system: str, hosts: list[str], pipe: Connection) -> None:
    """Enter a region, and serve messages until the pipe ends.

    ("insert", seconds): insert one record after the other; return the latencies in ms.
    ("until", seconds): insert until one is acknowledged; return the seconds, or None.
    """
    namespaces.enter(router, region)
    client = _CLIENTS[system](hosts)
    wait_until(client.insert, _CHECK_S)
    pipe.send("ready")
    while True:
        method, seconds = pipe.recv()
        began = time.monotonic()
        if method == "insert":
            pipe.send(_insert(client, began + seconds))
        else:
            pipe.send(_until_acknowledged(client, began, seconds))


def _insert(client: Any, end: float) -> list[float]:
    latencies = []
    while (began := time.monotonic()) < end:
        client.insert()
        latencies.append(1000 * (time.monotonic() - began))
    return latencies


def _until_acknowledged(client: Any, began: float, seconds: float) -> float | None:
    while time.monotonic() < began + seconds:
        try:
            client.insert()
        except Exception:  # noqa: BLE001 - whatever a client raises while it has no leader
            time.sleep(_RETRY_S)
        else:
            return round(time.monotonic() - began, 2)
    return None


class _RedisClient:
    def __init__(self, hosts: list[str]) -> None:
        import redis  # noqa: PLC0415 - an optional peer

        self._client = redis.Redis(host=hosts[0], socket_timeout=_CALL_S)

    def insert(self) -> bool:
        with self._client.pipeline(transaction=False) as batch:
            batch.xadd("log", {"p": _PAYLOAD}, maxlen=10_000, approximate=True)
            batch.wait(1, 1000)
            _, replicas = batch.execute()
        if replicas < 1:
            message = "no replica has it"
            raise RuntimeError(message)
        return True


class _PostgresClient:
    def __init__(self, hosts: list[str]) -> None:
        self._host: Final = hosts[0]
        self._connection: Any = None

    def insert(self) -> bool:
        import psycopg  # noqa: PLC0415 - an optional peer

        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                host=self._host, user="postgres", dbname="postgres", autocommit=True,
                connect_timeout=int(_CALL_S),
            )  # fmt: skip
            self._connection.execute("create table if not exists log (p bytea)")
        self._connection.execute("insert into log values (%s)", (_PAYLOAD,))
        return True


class _NatsClient:
    def __init__(self, hosts: list[str]) -> None:
        self._urls: Final = [f"nats://{host}:4222" for host in hosts]
        self._loop: Final = asyncio.new_event_loop()
        self._client: Any = None

    def insert(self) -> bool:
        self._loop.run_until_complete(self._publish())
        return True

    async def _publish(self) -> None:
        import nats  # noqa: PLC0415 - an optional peer

        if self._client is None:
            client = await nats.connect(self._urls, dont_randomize=True, connect_timeout=_CALL_S)
            await _make_stream(client)
            self._client = client
        await self._client.jetstream(timeout=_CALL_S).publish("log", _PAYLOAD)


async def _make_stream(client: Any) -> None:
    """Make the stream, if it is missing, and have its leader in A."""
    stream = client.jetstream(timeout=_START_S)
    await stream.add_stream(name="log", subjects=["log"], num_replicas=len(REGIONS))
    end = time.monotonic() + _START_S
    while (await _leader(client)) != REGIONS[0]:
        if time.monotonic() > end:
            message = f"the stream has no leader in {REGIONS[0]} after {_START_S:g} s"
            raise TimeoutError(message)
        await client.request("$JS.API.STREAM.LEADER.STEPDOWN.log", b"", timeout=_START_S)
        await asyncio.sleep(1.0)


async def _leader(client: Any) -> str | None:
    answer = await client.request("$JS.API.STREAM.INFO.log", b"", timeout=_START_S)
    found: str | None = json.loads(answer.data).get("cluster", {}).get("leader")
    return found


_CLIENTS: Final = {"redis": _RedisClient, "postgres": _PostgresClient, "nats": _NatsClient}
SYSTEMS: Final[dict[str, type[System]]] = {"nats": Nats, "redis": Redis, "postgres": Postgres}
