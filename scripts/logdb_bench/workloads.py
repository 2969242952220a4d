"""Workloads of a benchmark client, one operation at a time, on LogDB or Redis.

Attempts in vain (`metrics.closed_loop`) are those that conflicts aborted. Other errors are raised.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import logdb.aio
from logdb import TransactionAborted
from logdb_bench import delayed_inserts
from logdb_bench.zipfian import ScrambledZipfian, Uniform

if TYPE_CHECKING:
    from metrics.closed_loop import Done, Session

#: The thesis' keys (4.4.6), and the number of keys in YCSB's workloads.
COUNTERS: Final = 10
YCSB_KEYS: Final = 100_000
#: Size of a YCSB value in bytes: one field of 100 bytes (YCSB has ten of them).
YCSB_BYTES: Final = 100
#: Shares of reads and of updates; the rest reads, modifies and writes.
MIXES: Final = {"A": (0.5, 0.5), "B": (0.95, 0.05), "C": (1.0, 0.0), "F": (0.5, 0.0)}
DISTRIBUTIONS: Final = {"zipfian": ScrambledZipfian, "uniform": Uniform}
_HOST: Final = "127.0.0.1"
_TIMEOUT_S: Final = 30.0
_WAIT_MS: Final = 10_000


@dataclass(frozen=True)
class Plan:
    """Workload, target and seed that all clients of a run share."""

    #: "logdb" or "redis".
    target: str
    #: The coordinators, or the port of Redis.
    endpoint: str
    #: "counters", or a mix and a distribution of YCSB: "A zipfian".
    workload: str = "counters"
    #: LogDB: the commit record contains small writes.
    is_inline: bool = True
    #: LogDB: the minimum duration of an insert in microseconds; 0: no delay.
    hold_us: int = 0
    #: LogDB: the endpoints of an ordering layer; empty: no gate.
    layer: tuple[str, ...] = ()
    #: Redis: the client waits until the replica has the write.
    is_waiting: bool = False
    keys: int = YCSB_KEYS
    seed: int = 1

    def prepare(self) -> None:
        """Delay or gate inserts, and make each write a record of its own, if planned."""
        if self.hold_us:
            delayed_inserts.install(self.hold_us)
        if self.layer:
            from logdb_bench import gated_inserts  # noqa: PLC0415 - only behind a gate

            gated_inserts.install(self.layer)
        if not self.is_inline:
            import logdb.client.operations  # noqa: PLC0415 - not for Redis

            logdb.client.operations.INLINE_BYTES = 0  # type: ignore[misc]

    def session(self, number: int) -> Session:
        """Return client `number`."""
        rng = random.Random(f"{self.seed} {number}")  # noqa: S311 - no secret
        if self.target == "redis":
            return RedisCounters(self, rng)
        if self.workload == "counters":
            return Counters(self, rng)
        return Ycsb(self, rng)


def key_of(number: int) -> str:
    """Return a key's name in YCSB's workloads."""
    return f"user{number:08}"


class _OnLogDB:
    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._endpoint: Final = plan.endpoint
        self._rng: Final = rng
        self._db: logdb.aio.Database

    async def connect(self) -> None:
        self._db = await logdb.aio.connect(self._endpoint, timeout=_TIMEOUT_S)

    async def close(self) -> None:
        await self._db.close()


class Counters(_OnLogDB):
    """The thesis' transaction: read one of ten keys, and write one more."""

    async def act(self) -> Done:
        """Try once; the next one has another key."""
        key = str(self._rng.randrange(COUNTERS))
        transaction = self._db.transaction()
        try:
            transaction.put(key, await transaction.get(key, 0) + 1)
            await transaction.commit()
        except TransactionAborted:
            return "transaction", False, 1
        return "transaction", True, 0


class Ycsb(_OnLogDB):
    """A core workload of YCSB."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        super().__init__(plan, rng)
        mix, _, distribution = plan.workload.partition(" ")
        self._reads, self._updates = MIXES[mix]
        self._keys: Final = DISTRIBUTIONS[distribution](rng, plan.keys)

    async def act(self) -> Done:
        """Do one operation; a read-modify-write is repeated until it commits."""
        key, chance = key_of(self._keys.draw()), self._rng.random()
        if chance < self._reads:
            found = await self._db.get(key)
            assert found is not None, f"{key} is gone"
            return "read", True, 0
        if chance < self._reads + self._updates:
            await self._db.put(key, self._rng.randbytes(YCSB_BYTES))
            return "update", True, 0
        return "read-modify-write", True, await self._modify(key)

    async def _modify(self, key: str) -> int:
        aborted = 0
        while True:
            transaction = self._db.transaction()
            try:
                found = await transaction.get(key)
                transaction.put(key, found[1:] + self._rng.randbytes(1))
                await transaction.commit()
            except TransactionAborted:
                aborted += 1
            else:
                return aborted


class RedisCounters:
    """The thesis' transaction by WATCH and MULTI: two round trips, the second one with WAIT."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._port: Final = int(plan.endpoint)
        self._rng: Final = rng
        self._last: Final = [("WAIT", 1, _WAIT_MS)] if plan.is_waiting else []
        self._connection: Any

    async def connect(self) -> None:
        """Connect."""
        from redis.asyncio.connection import Connection  # noqa: PLC0415 - an optional peer

        self._connection = Connection(host=_HOST, port=self._port)
        await self._connection.connect()

    async def act(self) -> Done:
        """Try once; the next one has another key."""
        key = str(self._rng.randrange(COUNTERS))
        _, value = await self._request(("WATCH", key), ("GET", key))
        write = ("SET", key, int(value or 0) + 1)
        answers = await self._request(("MULTI",), write, ("EXEC",), *self._last)
        if answers[2] is None:
            return "transaction", False, 1
        assert not self._last or answers[3] >= 1, "no replica has it"
        return "transaction", True, 0

    async def _request(self, *commands: tuple[Any, ...]) -> list[Any]:
        connection = self._connection
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await connection.read_response() for _ in commands]

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.disconnect()
