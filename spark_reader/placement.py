"""To which shards a task's rows go, and under whose name (docs/spark.md, section 3).

A task's rows take *lanes*, each of which goes to one shard: a single one, or by key one to each.
A lane has a name, and its rows have numbers in it. Rule: the same query, partition and shards give
the same answer, in every process and for ever, as what a task wrote is told from its repetition by
nothing else.
Invariant: under one name goes all that a partition has, or, if rows are shared out by key, what the
same shards would leave to it. So a change of the shards leaves copies, and loses nothing.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from ziplog import policy as policies
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: How rows are shared out; a number is a shard's.
Policy = Literal["partition", "key"] | int

#: Shards in these states have their place in the log, or get it back.
_MEMBERS: Final = frozenset({"live", "parked", "recovering"})


def members(status: Mapping[str, Any], *, include_absent: bool) -> tuple[int, ...]:
    """Return the shards that records may go to.

    Args:
        status: the status document.
        for_ever: those too that are away for a while: who writes again finds the same ones then.

    Raises:
        UnavailableError: there is none.

    """
    states = _MEMBERS if include_absent else {"live"}
    found = sorted(shard["id"] for shard in status["shards"] if shard["state"] in states)
    if not found:
        raise UnavailableError(f"no shard of cluster {status['cluster']!r} takes records now")
    return tuple(found)


def check_policy(policy: Policy, shards: Sequence[int]) -> None:
    """Refuse a policy that names a shard which takes no records.

    Raises:
        ConfigError: it does; says which do.

    """
    if isinstance(policy, int) and policy not in shards:
        known = ", ".join(map(str, shards))
        raise ConfigError("policy", policy, f"a shard that takes records: {known}")


class RowPlacement:
    """Where the rows of one partition of one query go. Immutable."""

    def __init__(
        self,
        query: str,
        partition: int,
        policy: Policy,
        shards: Sequence[int],
    ) -> None:
        self._query, self._partition = query, partition
        #: Where all rows go, or those without a key.
        self.default_shard: Final = (
            policy if isinstance(policy, int) else _default_shard(query, partition, shards)
        )
        self.by_key: Final = policy == "key"
        #: The shard of each lane.
        self.lanes: Final = tuple(shards) if self.by_key else (self.default_shard,)
        self._by_key_hash: Final = policies.by_key_hash()

    def lane_of(self, key: bytes | None) -> int:
        """Return which lane a row with this key takes."""
        if not self.by_key:
            return 0
        shard = self.default_shard if key is None else self._by_key_hash(b"", key, self.lanes)
        return self.lanes.index(shard)

    def writer(self, lane: int) -> bytes:
        """Return under which name the rows of a lane go to its shard."""
        plan_tasks = (lane, self.lanes) if self.by_key else None
        return _digest((self._query, self._partition, plan_tasks))


def _default_shard(query: str, partition: int, shards: Sequence[int]) -> int:
    """Return the shard of a partition: neighbours have different ones, queries begin anywhere."""
    return shards[(_start(query) + partition) % len(shards)]


@lru_cache(maxsize=64)
def _start(query: str) -> int:
    return int.from_bytes(_digest(query), "big")


def _digest(what: object) -> bytes:
    return blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()
