"""Policies: the selection of a record's shard."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog import policy
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.policy import Policy

LIVE = st.lists(st.integers(0, 5000), min_size=1, max_size=20, unique=True).map(sorted)
MAKERS = [policy.random, policy.round_robin, policy.by_key_hash, policy.sticky]


@pytest.mark.parametrize("make", MAKERS)
@given(live=LIVE, keys=st.lists(st.none() | st.binary(max_size=8), max_size=20))
def test_every_choice_is_a_live_shard(make: Any, live: Sequence[int], keys: list[Any]) -> None:
    choose: Policy = make()
    for key in keys:
        assert choose(b"payload", key, live) in live


def test_random_and_keyless_hashing_use_all_shards_alike() -> None:
    for choose in (policy.random(), policy.by_key_hash()):
        counts = Counter(choose(b"", None, [3, 5, 8, 9]) for _ in range(4000))
        assert set(counts) == {3, 5, 8, 9}
        assert min(counts.values()) > 800


def test_round_robin_takes_turns() -> None:
    choose = policy.round_robin()
    assert [choose(b"", None, [2, 4, 6]) for _ in range(7)] == [2, 4, 6, 2, 4, 6, 2]


@given(live=LIVE, key=st.binary(), data=st.data())
def test_a_shard_that_goes_moves_only_its_own_keys(
    live: list[int], key: bytes, data: st.DataObject
) -> None:
    choose = policy.by_key_hash()
    before = choose(b"a", key, live)
    assert choose(b"b", key, list(reversed(live))) == before
    gone = data.draw(st.sampled_from(live))
    rest = [shard for shard in live if shard != gone]
    if rest:
        after = choose(b"c", key, rest)
        assert before in {after, gone}


def test_keys_are_spread_evenly() -> None:
    choose = policy.by_key_hash()
    counts = Counter(choose(b"", b"%d" % i, range(4)) for i in range(4000))
    assert min(counts.values()) > 800


def test_key_hashing_is_the_same_in_every_process() -> None:
    # A change of these values would move the keys of every running program.
    assert [policy.by_key_hash()(b"", b"user-%d" % i, range(8)) for i in range(8)] == PUBLISHED
    program = (
        "from ziplog import policy;"
        "print([policy.by_key_hash()(b'', b'user-%d' % i, range(8)) for i in range(8)])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout.decode().strip() == str(PUBLISHED)


PUBLISHED = [6, 2, 6, 0, 7, 7, 4, 6]


def test_sticky_stays_until_its_shard_is_gone() -> None:
    choose = policy.sticky()
    first = choose(b"", None, range(10))
    assert {choose(b"", None, range(10)) for _ in range(50)} == {first}
    others = [shard for shard in range(10) if shard != first]
    second = choose(b"", None, others)
    assert second != first
    assert choose(b"", None, range(10)) == second


def test_pin() -> None:
    assert policy.pin(7)(b"", None, [1, 2]) == 7
    for wrong in (-1, 2**31, "7", None, True, 1.0):
        with pytest.raises(ConfigError):
            policy.pin(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, 0, "random"])
def test_nearest_refuses_what_is_no_policy(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"then is .*; it must be a callable"):
        policy.nearest(wrong)


def test_policies_may_be_shared_by_threads() -> None:
    choose = policy.round_robin()
    with ThreadPoolExecutor(4) as pool:
        chosen = list(pool.map(lambda _: choose(b"", None, [0, 1]), range(2000)))
    assert Counter(chosen) == {0: 1000, 1: 1000}
