"""The client process of a region: does what each message names, and returns what it measured."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from typing import TYPE_CHECKING, Any, Final

from wan import namespaces

import ziplog.aio
from ziplog import RID_RECENT, RecordId

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Answer = dict[str, Any]

_CALL_S: Final = 30.0
_BATCH: Final = 1000
_STAMP: Final = struct.Struct("<4sq")
_MARK: Final = b"pace"
#: Time between two inserts of a paced writer.
_PACE_S: Final = 0.02
#: Time in which a reader begins, and that it takes longer than the writer.
_LEAD_S: Final = 1.0


def run(router: int, region: int, name: str, bootstrap: str, pipe: Connection) -> None:
    """Enter a region, and serve messages (method, options) until the pipe ends."""
    namespaces.enter(router, region)
    os.environ["ZIPLOG_REGION"] = name
    asyncio.run(_serve(_Clients(bootstrap), pipe))


async def _serve(clients: _Clients, pipe: Connection) -> None:
    pipe.send("ready")
    while True:
        try:
            method, options = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        pipe.send(await getattr(clients, method)(**options))


class _Clients:
    """Clients of the cluster, each with connections of its own. Latencies are in ms."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap: Final = bootstrap
        self._logs: Final[list[ziplog.aio.AsyncLog]] = []

    async def _connected(self, count: int) -> list[ziplog.aio.AsyncLog]:
        while len(self._logs) < count:
            log = await ziplog.aio.connect(self._bootstrap, timeout=_CALL_S)
            await log.insert_after(b"warm")
            self._logs.append(log)
        return self._logs[:count]

    async def insert(
        self,
        seconds: float,
        clients: int = 1,
        size: int = 100,
        shard: int | None = None,
        min_regions: int | None = None,
    ) -> list[float]:
        """Insert one record after the other at each client; return the latencies."""
        latencies: list[float] = []
        logs = await self._connected(clients)
        end = time.monotonic() + seconds

        async def one(log: ziplog.aio.AsyncLog) -> None:
            while (began := time.monotonic()) < end:
                await log.insert_after(bytes(size), shard=shard, min_regions=min_regions)
                latencies.append(1000 * (time.monotonic() - began))

        await asyncio.gather(*map(one, logs))
        return latencies

    async def many(self, seconds: float, clients: int, size: int, batch: int) -> Answer:
        """Insert batches at each client; return the number of records and the seconds."""
        logs = await self._connected(clients)
        began = time.monotonic()

        async def one(log: ziplog.aio.AsyncLog) -> int:
            count = 0
            while time.monotonic() < began + seconds:
                count += len(await log.insert_many([bytes(size)] * batch))
            return count

        counts = await asyncio.gather(*map(one, logs))
        return {"records": sum(counts), "seconds": time.monotonic() - began}

    async def put(self, count: int, size: int, shard: int) -> list[tuple[int, int]]:
        """Insert records at a shard; return their positions."""
        (log,) = await self._connected(1)
        rids = await log.insert_many([bytes(size)] * count, shard=shard)
        return [(rid.gsn, rid.shard) for rid in rids]

    async def read(self, seconds: float, rids: list[tuple[int, int]]) -> list[float]:
        """Read records one after the other; return the latencies."""
        (log,) = await self._connected(1)
        latencies: list[float] = []
        end = time.monotonic() + seconds
        while (began := time.monotonic()) < end:
            await log.read_record(RecordId(*rids[len(latencies) % len(rids)]))
            latencies.append(1000 * (time.monotonic() - began))
        return latencies

    async def pace(self, seconds: float) -> list[float]:
        """Insert records with the times of their inserts, with pauses; return the latencies."""
        (log,) = await self._connected(1)
        latencies: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic_ns()
            await log.insert_after(_STAMP.pack(_MARK, began))
            latencies.append((time.monotonic_ns() - began) / 1e6)
            await asyncio.sleep(_PACE_S)
        return latencies

    async def follow(self, seconds: float) -> list[float]:
        """Follow the log; return from insert to delivery of each record of `pace`."""
        (log,) = await self._connected(1)
        latencies: list[float] = []
        end, start = time.monotonic() + seconds, time.monotonic_ns()
        async with log.subscribe(RID_RECENT) as subscription:
            while (left := end - time.monotonic()) > 0:
                for record in await subscription.fetch(_BATCH, timeout=left):
                    if record.payload.startswith(_MARK):
                        _, began = _STAMP.unpack(record.payload)
                        if began > start:  # the first one may be of an earlier writer
                            latencies.append((time.monotonic_ns() - began) / 1e6)
        return latencies

    async def pace_and_follow(self, seconds: float) -> tuple[list[float], list[float]]:
        """Pace, and follow meanwhile; return the latencies of both."""
        follow = asyncio.create_task(self.follow(seconds + 2 * _LEAD_S))
        await asyncio.sleep(_LEAD_S)
        inserted = await self.pace(seconds)
        return inserted, await follow

    async def idle(self, seconds: float) -> None:
        """Do nothing."""
        await asyncio.sleep(seconds)
