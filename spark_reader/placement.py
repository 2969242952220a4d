"""Row placement: the shards of a task's rows, and the writer ids (docs/spark.md, section 3).

A task has one *writer* per shard that it inserts into: a single one, or with the policy `key` one
for each shard. A writer has an id, and numbers its rows. Rule: the same query, partition and shards
always give the same shards and ids, in every process. Readers recognize the duplicates of a
repeated task only by the writer id and the row number.
Invariant: a writer id covers either all rows of a partition, or the share of one shard among a
given set of shards. If the set of shards changes, duplicates can stay, but no row is lost.
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

#: Distribution of rows over shards; a number is a shard id.
Policy = Literal["partition", "key"] | int

#: States of shards that are members of the log, or will be again.
_MEMBERS: Final = frozenset({"live", "parked", "recovering"})


def members(status: Mapping[str, Any], *, include_absent: bool) -> tuple[int, ...]:
    """Return the shards that rows may be inserted into.

    Args:
        status: the status document.
        include_absent: include shards that are parked or recovering, so that a repeated write
            uses the same shards. Without this, they are returned if there are no others: an insert
            waits for its shard.

    Raises:
        UnavailableError: there is no such shard.

    """
    states = {shard["id"]: shard["state"] for shard in status["shards"]}
    found = sorted(shard for shard, state in states.items() if state in _MEMBERS)
    live = [shard for shard in found if states[shard] == "live"]
    if live and not include_absent:
        return tuple(live)
    if not found:
        raise UnavailableError(f"no shard of cluster {status['cluster']!r} takes records now")
    return tuple(found)


def check_policy(policy: Policy, shards: Sequence[int]) -> None:
    """Refuse a policy that names a shard which accepts no records.

    Raises:
        ConfigError: the shard is not in `shards`; the message lists `shards`.

    """
    if isinstance(policy, int) and policy not in shards:
        known = ", ".join(map(str, shards))
        raise ConfigError("policy", policy, f"a shard that takes records: {known}")


class RowPlacement:
    """Shards and writer ids for the rows of one partition of one query. Immutable."""

    def __init__(
        self,
        query: str,
        partition: int,
        policy: Policy,
        shards: Sequence[int],
    ) -> None:
        self._query, self._partition = query, partition
        #: The shard of all rows; with the policy `key`, of rows without a key.
        self.default_shard: Final = (
            policy if isinstance(policy, int) else _default_shard(query, partition, shards)
        )
        self.by_key: Final = policy == "key"
        #: The shard of each writer.
        self.shards: Final = tuple(shards) if self.by_key else (self.default_shard,)
        self._by_key_hash: Final = policies.by_key_hash()

    def writer_of(self, key: bytes | None) -> int:
        """Return the index of the writer for a row with this key."""
        if not self.by_key:
            return 0
        shard = self.default_shard if key is None else self._by_key_hash(b"", key, self.shards)
        return self.shards.index(shard)

    def writer_id(self, index: int) -> bytes:
        """Return the id of a writer, by its index."""
        distribution = (index, self.shards) if self.by_key else None
        return _digest((self._query, self._partition, distribution))


def _default_shard(query: str, partition: int, shards: Sequence[int]) -> int:
    """Return the shard of a partition: round robin over partitions, from a shard per query."""
    return shards[(_start(query) + partition) % len(shards)]


@lru_cache(maxsize=64)
def _start(query: str) -> int:
    return int.from_bytes(_digest(query), "big")


def _digest(what: object) -> bytes:
    return blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()
