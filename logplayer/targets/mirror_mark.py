"""The mark of a mirror: where in the target log the rows of a task are, at the cursor's position.

    rows below `rows`: of records below the position      rows below `placed`: in the target log
    rows from `placed` on: nowhere, or in `shard` behind `base`; most of them behind `gsn`

The number of a row is the count of the task's rows before it, from the cursor's start on. So it is
a function of that start and of the source log, and every owner gives every row the same number. See
docs/player.md, section 9.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logplayer.contract import Task

_CLUSTER_BYTES: Final = 16
#: A writer is that of a mirror, and of a task in it; together 16 bytes.
_PART_BYTES: Final = 8
_MIRROR: Final = re.compile(r"([0-9a-f]{32})/([A-Za-z0-9._-]{1,48})/([A-Za-z0-9._-]{1,48})")
MIRROR_RULE: Final = (
    "a list of mirrors 'CLUSTER/PLAYER/TARGET'; CLUSTER is the cluster_id of `ziplog status --json`"
)


class Mark(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a mirror commits with a position of its cursor."""

    #: The number of the target log's cluster, as bytes.
    cluster: bytes
    #: The shard of the target log that gets the next rows.
    shard: int
    #: Every row from `placed` on that is in the shard is behind this position.
    base: int
    #: The position of the last row that was written: a search for further rows begins here.
    gsn: int
    #: Number of rows of the records below the cursor's position.
    rows: int = 0
    #: Number of rows, from the first one on, that are in the target log.
    placed: int = 0
    #: The limits when the cursor was new: which rows are rejected must never change.
    max_payload_bytes: int
    max_key_bytes: int

    def encode(self) -> bytes:
        """Return the bytes for the cursor."""
        return msgspec.msgpack.encode(self)

    def moved(self, shard: int, base: int, placed: int) -> Mark:
        """Return the mark with another shard, which has none of the rows yet.

        Args:
            shard: the number of that shard.
            base: a position before everything that will be written there.
            placed: the number of rows that are in the former shard for good.

        """
        return msgspec.structs.replace(self, shard=shard, base=base, gsn=base, placed=placed)


def decode_mark(task: Task) -> Mark:
    """Return the mark of a task's cursor.

    Raises:
        ConfigError: it is not the mark of a mirror.

    """
    try:
        return msgspec.msgpack.decode(task.mark, type=Mark)
    except msgspec.DecodeError as error:
        problem = (
            f"the cursor {task.cursor} has moved to gsn {task.position} without a mirror's mark:"
            f" {new_cursor_advice(task)}"
        )
        raise ConfigError("mark", task.mark, "that of a mirror", message=problem) from error


def new_cursor_advice(task: Task) -> str:
    """Return how an operator lets a mirror begin at another position."""
    return (
        f"stop the player, `ziplog cursor delete {task.cursor}`, then `ziplog cursor create"
        f" {task.cursor} --start POSITION`; the mirror gets the records from there on under a new"
        " name, so those that it has already are there twice"
    )


def cluster_bytes(number: int) -> bytes:
    """Return the number of a cluster as bytes."""
    return number.to_bytes(_CLUSTER_BYTES, "big")


def writer_id(task: Task) -> bytes:
    """Return the writer of a task's rows: another one for each creation of its cursor."""
    return mirror_id(task.cluster, task.player, task.target) + _hash(task.cursor, task.birth)


def mirror_id(cluster: int, player: str, target: str) -> bytes:
    """Return the beginning of the writers of a mirror; `cluster`: the number of its source."""
    return _hash(cluster_bytes(cluster), player, target)


def _hash(*parts: bytes | str | int) -> bytes:
    return blake2b(msgspec.msgpack.encode(parts), digest_size=_PART_BYTES).digest()


def mirror_ids(names: Sequence[str], where: str) -> tuple[bytes, ...]:
    """Return the beginnings of the writers of mirrors, by names "CLUSTER/PLAYER/TARGET".

    Raises:
        ConfigError: one is no such name.

    """
    found = []
    for name in [names] if isinstance(names, str) else names:
        parts = _MIRROR.fullmatch(name) if isinstance(name, str) else None
        if parts is None:
            raise ConfigError("not_from", name, MIRROR_RULE, where)
        cluster, player, target = parts.groups()
        found.append(mirror_id(int(cluster, 16), player, target))
    return tuple(found)


def choose_shard(task: Task, live: Sequence[int]) -> int:
    """Return the shard of a task among the live ones: the tasks of a target go round robin."""
    name = blake2b(f"{task.player}/{task.target}".encode(), digest_size=8).digest()
    return sorted(live)[(int.from_bytes(name, "big") + task.partition) % len(live)]
