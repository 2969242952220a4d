"""The value cache: lookups by version, within bounds (docs/logdb.md, section 5)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logdb.coordinator.cache import CACHE_ENTRY_BYTES, ValueCache

keys = st.sampled_from([b"a", b"b", b"c", b"dd"])
uses = st.lists(
    st.one_of(
        st.tuples(st.just("put"), keys, st.integers(1, 5), st.integers(0, 400)),
        st.tuples(st.just("get"), keys, st.integers(1, 5), st.just(0)),
        st.tuples(st.just("drop"), keys, st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(uses, st.integers(0, 1500))
def test_the_cache_is_bounded_and_evicts_the_least_recently_used(
    history: list[tuple[str, bytes, int, int]], most: int
) -> None:
    cache = ValueCache(most)
    oracle: list[tuple[bytes, int, bytes]] = []  # in the order of use
    for what, key, version, size in history:
        found = next((each for each in oracle if each[0] == key), None)
        if what == "put":
            value = bytes([version]) * size
            cache.put(key, version, value)
            if found is not None and found[1] > version:
                continue
            oracle = [each for each in oracle if each[0] != key]
            if len(key) + size + CACHE_ENTRY_BYTES <= most:
                oracle.append((key, version, value))
            while sum(_cost(each) for each in oracle) > most:
                del oracle[0]
        elif what == "drop":
            cache.drop(key)
            oracle = [each for each in oracle if each[0] != key]
        else:
            value_found = cache.get(key, version)
            if found is None or found[1] != version:
                assert value_found is None
            else:
                assert value_found == found[2]
                oracle.remove(found)
                oracle.append(found)
        assert cache.bytes == sum(_cost(each) for each in oracle) <= most
        assert len(cache) == len(oracle)
    for key, version, value in oracle:
        assert cache.get(key, version) == value


def _cost(kept: tuple[bytes, int, bytes]) -> int:
    return len(kept[0]) + len(kept[2]) + CACHE_ENTRY_BYTES


def test_a_lookup_never_returns_the_value_of_another_version() -> None:
    cache = ValueCache(10_000)
    cache.put(b"k", 5, b"five")
    assert cache.get(b"k", 6) is None
    cache.put(b"k", 6, b"six")
    cache.put(b"k", 5, b"five")  # read late
    assert cache.get(b"k", 6) == b"six"
    assert cache.get(b"k", 5) is None


def test_a_cache_of_size_zero_stays_empty() -> None:
    cache = ValueCache(0)
    cache.put(b"k", 1, b"")
    assert cache.get(b"k", 1) is None
    assert not len(cache)


def test_the_most_recently_used_value_stays() -> None:
    cache = ValueCache(2 * (CACHE_ENTRY_BYTES + 2))
    cache.put(b"a", 1, b"x")
    cache.put(b"b", 2, b"x")
    assert cache.get(b"a", 1) == b"x"
    cache.put(b"c", 3, b"x")
    assert cache.get(b"b", 2) is None
    cache.put(b"a", 4, b"y")
    cache.put(b"d", 5, b"x")
    assert cache.get(b"c", 3) is None
    assert cache.get(b"a", 4) == b"y"
