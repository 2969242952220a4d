"""Keys in order, and digests of ranges (docs/logdb.md, sections 2 and 4)."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb.records import Entry
from logdb.versions import Versions, digest_of
from ziplog.types import RecordId

KEYS = [b"", b"a", b"a\0", b"ab", b"b", b"\xff\xff", b"z"]
keys = st.sampled_from(KEYS)
changes = st.lists(st.tuples(keys, st.one_of(st.none(), st.integers(1, 9))), max_size=30)


def entry(version: int) -> Entry:
    return Entry(version, RecordId(version + 100, 0), version * 2)


@given(changes, keys, st.one_of(st.none(), keys), st.integers(0, 4))
def test_versions_behave_like_a_sorted_dictionary(
    history: list[tuple[bytes, int | None]], start: bytes, stop: bytes | None, limit: int
) -> None:
    versions = Versions()
    oracle: dict[bytes, Entry] = {}
    for key, version in history:
        if version is None:
            versions.remove(key)
            oracle.pop(key, None)
        else:
            versions.put(key, entry(version))
            oracle[key] = entry(version)
        versions.check()
    rows = [(key, oracle[key]) for key in sorted(oracle)]
    inside = [row for row in rows if row[0] >= start and (stop is None or row[0] < stop)]
    assert len(versions) == len(oracle)
    assert versions.range(start, stop, limit) == inside[:limit]
    assert versions.digest(start, stop) == digest_of(inside)
    assert versions.after(None, limit) == rows[:limit]
    assert versions.after(start, limit) == [row for row in rows if row[0] > start][:limit]
    for key in KEYS:
        assert versions.get(key) == oracle.get(key)
        assert versions.version(key) == (oracle[key].version if key in oracle else 0)
    assert versions.data_bytes == sum(len(key) + each.size for key, each in rows)

    loaded = Versions()
    loaded.load(rows)
    loaded.check()
    assert loaded.after(None, 99) == rows
    assert loaded.data_bytes == versions.data_bytes


@given(st.dictionaries(keys, st.integers(1, 3)), st.dictionaries(keys, st.integers(1, 3)))
def test_a_digest_differs_with_any_key_or_version(
    one: dict[bytes, int], other: dict[bytes, int]
) -> None:
    def digest(what: dict[bytes, int]) -> bytes:
        return digest_of((key, entry(what[key])) for key in sorted(what))

    assert len(digest(one)) == 16
    assert (digest(one) == digest(other)) == (one == other)


def test_a_digest_depends_on_where_a_key_ends() -> None:
    # The same bytes behind one another, parted otherwise.
    one, other = entry(1), entry(1)
    assert digest_of([(b"a", one), (b"bc", other)]) != digest_of([(b"ab", one), (b"c", other)])
    for length in (0, 1):
        imitation = b"a" + struct.pack(">HQ", length, 1) + b"b"
        assert digest_of([(b"a", one), (b"b", other)]) != digest_of([(imitation, one)])


def test_a_digest_does_not_depend_on_places() -> None:
    rows: list[Any] = [[(b"k", Entry(1, RecordId(place, 0), 1))] for place in (1, 2)]
    assert digest_of(rows[0]) == digest_of(rows[1])


def test_an_overwrite_does_not_change_the_sorted_index() -> None:
    versions = Versions()
    versions.put(b"k", entry(1))
    versions._order = None  # any access would fail
    versions.put(b"k", entry(2))
    assert versions.version(b"k") == 2


def test_only_an_empty_state_is_loaded() -> None:
    versions = Versions()
    versions.put(b"k", entry(1))
    with pytest.raises(AssertionError):
        versions.load([])
