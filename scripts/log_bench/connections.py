"""Clients with connections of their own beside other systems: 4 KB, one insert at a time each.

Asyncio clients in two processes; one shard, f=1, Redis with a replica, and NATS with three servers,
each if it is installed. The systems take turns in each round.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from metrics.closed_loop import ClientProcesses, medians
from metrics.picture import BLUE, GREY, OCHRE, RED, axes
from metrics.rounds import alternate, ratio
from metrics.setup import progress
from metrics.steady_state import steady_cluster

from log_bench.clients import InsertSession
from log_bench.other_systems import Nats, Redis, append_to_redis

if TYPE_CHECKING:
    from pathlib import Path

    from metrics.closed_loop import Done, Session

Figures = dict[str, Any]

_COUNTS: Final = (1, 4, 16, 64)
_SIZE: Final = 4096
_PROCESSES: Final = 2
_ROUNDS: Final = 3
_HOST: Final = "127.0.0.1"
#: Redis with a client that does as little as possible.
_BARE: Final = f"{Redis.name}, bare connection"


def measure(seconds: float) -> Figures:
    """Return rates and times of each system, and of the same clients in turns, the ratios."""
    rows = []
    with ExitStack() as stack:
        systems = {"Ziplog": Plan(ZiplogSession, stack.enter_context(steady_cluster()).endpoint)}
        if Redis.is_installed():
            port = str(stack.enter_context(Redis()).port)
            systems[Redis.name] = Plan(RedisSession, port)
            systems[_BARE] = Plan(BareRedisSession, port)
        if Nats.is_installed():
            systems[Nats.name] = Plan(NatsSession, str(stack.enter_context(Nats()).port))
        processes = {
            name: stack.enter_context(ClientProcesses(plan, _PROCESSES))
            for name, plan in systems.items()
        }
        for clients in progress(_COUNTS, "connections"):
            rows += _step(processes, clients, seconds)
    return {"size": _SIZE, "rounds": _ROUNDS, "systems": rows}


def _step(processes: dict[str, ClientProcesses], clients: int, seconds: float) -> list[Figures]:
    found: dict[str, list[Figures]] = {name: [] for name in processes}

    def run(name: str) -> float:
        tally = processes[name].run(clients, seconds, 0.2 * seconds).all
        found[name].append(tally.figures(seconds))
        return len(tally.took_us) / seconds

    rates = alternate({name: partial(run, name) for name in processes}, _ROUNDS, warm=0)
    return [
        {
            "system": name,
            "clients": clients,
            **medians(found[name], ("per_s", "p50_us", "p99_us")),
            "ziplog_ratio": ratio(rates["Ziplog"], rates[name]),
        }
        for name in processes
    ]


class Plan(NamedTuple):
    """What the clients of a system do."""

    kind: type[InsertSession]
    endpoint: str

    def prepare(self) -> None:
        """Change nothing."""

    def session(self, _number: int) -> Session:
        """Return a client."""
        return self.kind(self.endpoint, _SIZE)


class ZiplogSession(InsertSession):
    """A client of Ziplog; nothing is counted besides, as at the other systems."""

    async def act(self) -> Done:
        """Insert once."""
        await self._log.insert_after(self._payload)
        return "insert", True, 0


class RedisSession(InsertSession):
    """A client of Redis: a pipeline of the package `redis`, in one round trip."""

    async def connect(self) -> None:
        """Connect."""
        from redis.asyncio import Redis as AsyncRedis  # noqa: PLC0415 - an optional peer

        self._client = AsyncRedis(
            host=_HOST, port=int(self._endpoint), single_connection_client=True
        )
        await self._client.ping()

    async def act(self) -> Done:
        """Append, and wait for the replica's acknowledgement."""
        await append_to_redis(self._client, self._payload)
        return "insert", True, 0

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


class BareRedisSession(InsertSession):
    """A client of Redis: the packed commands on a bare connection, in one round trip."""

    async def connect(self) -> None:
        """Connect."""
        from redis.asyncio.connection import Connection  # noqa: PLC0415 - an optional peer

        self._client = Connection(host=_HOST, port=int(self._endpoint))
        await self._client.connect()

    async def act(self) -> Done:
        """Append, and wait for the replica's acknowledgement."""
        client = self._client
        append = ("XADD", "log", "MAXLEN", "~", 10_000, "*", "p", self._payload)
        await client.send_packed_command(client.pack_commands((append, ("WAIT", 1, 1000))))
        await client.read_response()
        assert await client.read_response() >= 1, "no replica has it"
        return "insert", True, 0

    async def close(self) -> None:
        """Close the connection."""
        await self._client.disconnect()


class NatsSession(InsertSession):
    """A client of NATS."""

    async def connect(self) -> None:
        """Connect."""
        import nats  # noqa: PLC0415 - an optional peer

        self._client = await nats.connect(f"nats://{_HOST}:{self._endpoint}")
        self._stream = self._client.jetstream()

    async def act(self) -> Done:
        """Publish, and wait for the stream's acknowledgement."""
        await self._stream.publish("log", self._payload)
        return "insert", True, 0

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def draw(figures: Figures, path: Path) -> None:
    """Draw the rates, and the median times, over the number of clients."""
    colours = {"Ziplog": BLUE, Redis.name: RED, _BARE: OCHRE, Nats.name: GREY}
    with axes(path) as (left, right):
        for name, colour in colours.items():
            rows = [row for row in figures["systems"] if row["system"] == name]
            clients = [row["clients"] for row in rows]
            left.plot(clients, [row["per_s"] for row in rows], "o-", color=colour, label=name)
            right.plot(clients, [row["p50_us"] for row in rows], "o-", color=colour, label=name)
        x = {"xlabel": "clients with a connection each", "xscale": "log"}
        left.set(**x, ylabel="inserts of 4 KB a second", ylim=(0, None))
        right.set(**x, ylabel="µs, p50 of an insert", yscale="log")
        left.legend(fontsize="small")
