"""Row placement: the shards and writer ids of rows are deterministic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader.placement import RowPlacement, check_policy, members
from ziplog import policy
from ziplog.errors import ConfigError, UnavailableError

shard_sets = st.sets(st.integers(0, 100), min_size=1, max_size=6).map(sorted).map(tuple)


def status(**states: str) -> dict[str, Any]:
    shards = [{"id": int(name[1:]), "state": state} for name, state in states.items()]
    return {"cluster": "c", "shards": shards}


def test_a_repeatable_write_includes_parked_and_recovering_shards() -> None:
    mixed = status(s3="live", s0="recovering", s1="joining", s2="leaving", s4="parked")
    assert members(mixed, include_absent=True) == (0, 3, 4)
    assert members(mixed, include_absent=False) == (3,)


def test_a_write_without_a_live_shard_waits_for_one() -> None:
    """A cluster of one shard has none for some seconds after the failure of a server."""
    assert members(status(s0="recovering", s1="left"), include_absent=False) == (0,)


def test_a_write_without_a_shard_fails() -> None:
    for include_absent in (True, False):
        with pytest.raises(UnavailableError, match="no shard of cluster 'c'"):
            members(status(s1="leaving"), include_absent=include_absent)


def test_writer_ids_and_shards_never_change() -> None:
    """Checkpoints outlive releases: rows under another name, or elsewhere, are there twice."""
    place, by_key = (RowPlacement("q", 3, policy, (0, 1)) for policy in ("partition", "key"))
    assert place.writer_id(0).hex() == "67b2408e992338af8a86efeb318d3bbe"
    assert by_key.writer_id(1).hex() == "a55d920faaa5c5c35db028a04b3ba8f2"
    assert [RowPlacement("q", n, "partition", (0, 1, 2)).default_shard for n in range(4)] == [
        2,
        0,
        1,
        2,
    ]
    assert [by_key.writer_of(key) for key in (None, b"", b"a", b"b", b"c")] == [0, 0, 1, 1, 1]


@given(st.text(), st.integers(0, 50), st.text(), st.integers(0, 50))
def test_each_partition_of_each_query_has_its_own_writer_id(
    query: str, partition: int, other: str, another: int
) -> None:
    mine = RowPlacement(query, partition, "partition", (0,)).writer_id(0)
    theirs = RowPlacement(other, another, "partition", (0,)).writer_id(0)
    assert (mine == theirs) == ((query, partition) == (other, another))
    assert len(mine) == 16


def test_with_policy_key_a_writer_id_depends_on_the_index_and_the_shards() -> None:
    """Else a row that moved to a lane would be taken for one that is there."""
    places = [RowPlacement("q", 0, "key", shards) for shards in ((0, 1), (0, 1, 2))]
    names = {place.writer_id(index) for place in places for index in range(len(place.shards))}
    assert len(names) == sum(len(place.shards) for place in places)
    assert RowPlacement("q", 0, "partition", (0, 1)).writer_id(0) not in names


def test_a_partition_that_moves_to_another_shard_keeps_its_writer_id() -> None:
    """All of its rows go with it, so none is taken for another."""
    names = {
        RowPlacement("q", 0, policy, shards).writer_id(0)
        for policy in ("partition", 1)
        for shards in ((0, 1), (0, 1, 2))
    }
    assert len(names) == 1


@given(st.text(), shard_sets)
def test_partitions_are_spread_over_all_shards(query: str, shards: tuple[int, ...]) -> None:
    homes = [RowPlacement(query, n, "partition", shards).default_shard for n in range(len(shards))]
    assert sorted(homes) == list(shards)


@given(st.text(), shard_sets, st.binary())
def test_policy_key_uses_the_clients_key_hash(
    query: str, shards: tuple[int, ...], key: bytes
) -> None:
    place = RowPlacement(query, 0, "key", shards)
    assert place.shards[place.writer_of(key)] == policy.by_key_hash()(b"", key, shards)
    assert place.shards[place.writer_of(None)] == place.default_shard
    assert place.shards == shards


@given(st.binary())
def test_a_policy_with_a_shard_sends_all_rows_there(key: bytes) -> None:
    place = RowPlacement("q", 5, 7, (3, 7))
    assert (place.default_shard, place.shards, place.writer_of(key)) == (7, (7,), 0)


def test_an_unknown_shard_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy is 2.*a shard that takes records: 0, 1"):
        check_policy(2, (0, 1))
    for allowed in (0, 1, "partition", "key"):
        check_policy(allowed, (0, 1))  # type: ignore[arg-type]
