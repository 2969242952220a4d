"""Policies: functions that select the shard of a record.

A policy is a callable (payload, key, live) -> shard: `live` holds the ids of the shards that take
records, in increasing order, never empty. Slow shards are left out of it while there are others. A
policy that names a shard that is not live makes the insert wait for it. An `insert_many` calls the
policy once, with its first payload. An insert raises what its policy raises; in the place of
`SystemExit` and other exceptions that no future can have, it raises a RuntimeError.

Policies may be shared between clients; all of them are thread-safe.
"""

from __future__ import annotations

import itertools
import random as _random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import cast

from ziplog.core.nearness import NearestPolicy
from ziplog.core.numbers import whole_in
from ziplog.errors import ConfigError

#: Selects a shard: (payload, key, ids of the live shards) -> id.
Policy = Callable[[bytes, bytes | None, Sequence[int]], int]


def random() -> Policy:
    """Return the default policy: every live shard is equally likely."""
    draw = _random.Random().random  # noqa: S311 - spreads load, keeps no secret

    def choose(_payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
        return live[int(draw() * len(live))]

    return choose


def round_robin() -> Policy:
    """Return a policy that cycles through the live shards."""
    turns = itertools.count()

    def choose(_payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
        return live[next(turns) % len(live)]

    return choose


def by_key_hash() -> Policy:
    """Return a policy that sends equal keys to one shard, the same one in every process.

    Rendezvous hashing with BLAKE2b: when a shard is added or removed, only its own keys move.
    Records without a key go to random shards.
    """
    any_shard = random()

    def choose(payload: bytes, key: bytes | None, live: Sequence[int]) -> int:
        if key is None:
            return any_shard(payload, key, live)
        return max(live, key=lambda shard: (_weight(key, shard), shard))

    return choose


def nearest(then: Policy | None = None) -> Policy:
    """Return a policy that prefers shards near the client, the default of a client with a region.

    Of the live shards, `then` selects one of those whose primary is in the client's region; without
    any, one with a replica there; without any, one with the least measured latency of inserts, or
    up to 1.5 times of that.

    Args:
        then: selects among the nearest shards; None: `random()`. `by_key_hash()` keeps the records
            of a key together as long as the nearest shards are the same.

    Raises:
        ConfigError: `then` is not callable.

    """
    return NearestPolicy(random() if then is None else checked("then", then))


def _weight(key: bytes, shard: int) -> bytes:
    return blake2b(key, digest_size=8, salt=shard.to_bytes(8, "big")).digest()


def sticky() -> Policy:
    """Return a policy that stays at one (random) shard while it is live."""
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
    """Return a policy that always selects `shard`, and waits for it if it is not live.

    Raises:
        ConfigError: `shard` is not a shard id.

    """
    number = whole_in(shard, 0, 2**31)
    if number is None:
        raise ConfigError("shard", shard, "a shard id: a whole number, 0 to 2**31 - 1")
    chosen: int = number

    def choose(_payload: bytes, _key: bytes | None, _live: Sequence[int]) -> int:
        return chosen

    return choose


def checked(name: str, policy: object) -> Policy:
    """Return a policy unchanged; `name` is the argument's, for the error.

    Raises:
        ConfigError: it is not callable.

    """
    if not callable(policy):
        allowed = "a callable (payload, key, live shard ids) -> shard id, as in ziplog.policy"
        raise ConfigError(name, policy, allowed)
    return cast("Policy", policy)
