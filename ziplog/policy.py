"""Which shard a record goes to.

A policy is a callable (payload, key, live) -> shard: `live` holds the ids of the shards that take
records, in increasing order, never empty. Shards that answer slowly are left out of it while
others are there. A policy that names a shard that is not live makes the insert wait for it. An
`insert_many` asks once, with its first payload.

Policies may be shared between clients; all of them are safe to call from several threads.
"""

from __future__ import annotations

import itertools
import random as _random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from ziplog.errors import ConfigError

#: Chooses a shard: (payload, key, ids of the live shards) -> id.
Policy = Callable[[bytes, bytes | None, Sequence[int]], int]


def random() -> Policy:
    """Return the default policy: every live shard is as likely."""
    draw = _random.Random().random  # noqa: S311 - spreads load, keeps no secret

    def choose(_payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
        return live[int(draw() * len(live))]

    return choose


def round_robin() -> Policy:
    """Return a policy that takes the live shards in turn."""
    turns = itertools.count()

    def choose(_payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
        return live[next(turns) % len(live)]

    return choose


def by_key_hash() -> Policy:
    """Return a policy that sends equal keys to one shard: the same in every process.

    Rendezvous hashing with BLAKE2b: when a shard comes or goes, only the keys that it gains or
    loses move. Records without a key go to random shards.
    """
    any_shard = random()

    def choose(payload: bytes, key: bytes | None, live: Sequence[int]) -> int:
        if key is None:
            return any_shard(payload, key, live)
        return max(live, key=lambda shard: (_weight(key, shard), shard))

    return choose


def _weight(key: bytes, shard: int) -> bytes:
    return blake2b(key, digest_size=8, salt=shard.to_bytes(8, "big")).digest()


def sticky() -> Policy:
    """Return a policy that stays at one (random) shard for as long as it is live."""
    any_shard = random()
    chosen: list[int] = []

    def choose(payload: bytes, key: bytes | None, live: Sequence[int]) -> int:
        shard = chosen[0] if chosen else -1
        if shard not in live:
            shard = any_shard(payload, key, live)
            chosen[:] = [shard]
        return shard

    return choose


def pin(shard: int) -> Policy:
    """Return a policy that always takes `shard`, and waits for it if it is not live.

    Raises:
        ConfigError: `shard` is no shard id.

    """
    if not isinstance(shard, int) or not 0 <= shard < 2**31:
        raise ConfigError("shard", shard, "a shard id, a whole number from 0 on")

    def choose(_payload: bytes, _key: bytes | None, _live: Sequence[int]) -> int:
        return shard

    return choose
