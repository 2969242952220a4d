"""A target that copies records into Redis streams: each exactly once, in order.

    [[target]]
    name = "copy"
    kind = "function"
    function = "player_redis:RedisStream"

An entry has the id GSN-0. Redis refuses an id that is not above the last one, so a repetition has
no effect, whichever process repeats it. Redis must keep what it acknowledged: `appendfsync always`.
A `map` must return at most one record. Needs `pip install redis`. REDIS_URL says where the server
is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import redis

from logplayer import Batch, Opened, Task

if TYPE_CHECKING:
    from ziplog import Record

URL = "redis://127.0.0.1:6379"


class RedisStream:
    """The stream of one task: PLAYER/TARGET/PARTITION, the name of its cursor."""

    stores_position = True

    def __init__(self) -> None:
        self._client = redis.Redis.from_url(os.environ.get("REDIS_URL", URL))

    def open(self, task: Task) -> Opened:
        """Continue at the cursor: what is there already is refused."""
        return Opened(task.position)

    def deliver(self, batch: Batch) -> None:
        """Append the records in one transaction, so that none is missing between two others."""
        with self._client.pipeline(transaction=True) as pipeline:
            for record in batch.records:
                pipeline.xadd(batch.task.cursor, fields_of(record), id=f"{record.rid.gsn}-0")
            for result in pipeline.execute(raise_on_error=False):
                if isinstance(result, Exception) and "equal or smaller" not in str(result):
                    raise result

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def fields_of(record: Record) -> dict[str, bytes | int]:
    """Return the fields of a record's entry."""
    fields: dict[str, bytes | int] = {"payload": record.payload, "shard": record.rid.shard}
    return fields if record.key is None else fields | {"key": record.key}
