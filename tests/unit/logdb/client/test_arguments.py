"""Validation of user arguments before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdb import records
from logdb.client import arguments
from logdb.client.backoff import Backoff
from logdb.errors import TransactionAborted, UnsupportedValueError
from ziplog.errors import ClosedError, ConfigError, OutcomeUnknownError, RecordTooLargeError


@given(prefix=st.binary(max_size=6), key=st.binary(max_size=8))
def test_a_prefix_gives_the_bounds_of_its_keys(prefix: bytes, key: bytes) -> None:
    bounds = arguments.bounds(None, None, prefix, None)
    is_in = bounds.start <= key and (bounds.stop is None or key < bounds.stop)
    assert is_in == key.startswith(prefix)


@pytest.mark.parametrize(
    "wrong",
    [("a", None, "p", None), (None, "b", "p", None), (None, None, None, -1)],
)
def test_contradictory_bounds_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        arguments.bounds(*wrong)


def test_keys_have_the_type_of_the_bounds() -> None:
    assert arguments.bounds("a", None, None, None).key(b"x\xff") == "x\udcff"
    assert arguments.bounds(None, b"z", None, None).key(b"x\xff") == b"x\xff"
    assert arguments.bounds(None, None, b"x", None).key(b"x\xff") == b"x\xff"
    assert arguments.bounds(None, None, None, None).key(b"x") == "x"


def test_empty_bounds() -> None:
    assert arguments.bounds("b", "a", None, None).is_empty
    assert arguments.bounds("a", "a", None, None).is_empty
    assert arguments.bounds(None, None, None, 0).is_empty
    assert not arguments.bounds("a", "b", None, 1).is_empty


def test_a_limit_is_sent_as_a_number() -> None:
    assert type(arguments.bounds(None, None, None, True).limit) is int


def test_several_keys_are_a_list() -> None:
    assert arguments.keys(["a", b"b"]) == [b"a", b"b"]
    for one in ("ab", b"ab"):
        with pytest.raises(TypeError):
            arguments.keys(one)
    with pytest.raises(TypeError):
        arguments.keys([1])  # type: ignore[list-item]
    with pytest.raises(ConfigError):
        arguments.keys(map(str, range(10_001)))


def test_keys_with_values_are_a_dictionary() -> None:
    for wrong in ([("a", 1)], ["a"], "a", None):
        with pytest.raises(TypeError, match="must be a dictionary"):
            arguments.writes(wrong, 4096)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a dictionary"):
            arguments.expected(wrong)  # type: ignore[arg-type]


@given(key=st.binary(max_size=1024), largest=st.integers(3000, 4000))
def test_the_largest_value_fits_into_a_record(key: bytes, largest: int) -> None:
    room = largest - len(key) - records.OVERHEAD_BYTES
    # The value's own head is a part of it: 3 bytes for these sizes.
    _, encoded = arguments.write(key, b"x" * (room - 3), largest)
    assert len(encoded) == room
    assert len(records.encode(records.Value(key, encoded))) <= largest
    with pytest.raises(RecordTooLargeError):
        arguments.write(key, b"x" * (room - 2), largest)


@pytest.mark.parametrize("value", [object(), {1, 2}, 2**64, lambda: 0])
def test_values_that_cannot_be_stored(value: object) -> None:
    with pytest.raises(UnsupportedValueError):
        arguments.write("k", value, 1 << 20)
    with pytest.raises(TypeError):
        arguments.writes({"k": value}, 1 << 20)


def test_writes_fit_into_one_record() -> None:
    assert arguments.writes({"a": 1, b"a": 2}, 1 << 20) == {b"a": b"\x02"}
    with pytest.raises(RecordTooLargeError):
        arguments.writes({f"{number:01000}": 0 for number in range(1200)}, 1 << 20)


def test_expected_values_are_compared_in_their_stored_form() -> None:
    assert arguments.expected({"a": (1, 2)}) == {b"a": [1, 2]}
    with pytest.raises(ConfigError):
        arguments.expected(dict.fromkeys(map(str, range(10_001))))


def test_an_error_of_another_library_cannot_be_resolved() -> None:
    with pytest.raises(ClosedError):
        arguments.unknown_commit(OutcomeUnknownError("?", shard=0, seq=0))


def test_the_delay_between_retries_doubles_and_retries_end() -> None:
    error = TransactionAborted([b"k"])
    attempts = Backoff(9)
    pauses = [attempts.next_delay_s(error, 1.0, 0) for _ in range(9)]
    assert pauses[:3] == [0.002, 0.004, 0.008]
    assert pauses[-1] == 0.1
    with pytest.raises(TransactionAborted) as caught:
        attempts.next_delay_s(error, 1.0, 0)
    assert caught.value is error
    # At least half of a delay is kept: an immediate retry would meet the same rivals.
    assert Backoff(1).next_delay_s(error, 0.0, 0) == 0.001
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ConfigError):
            Backoff(wrong)  # type: ignore[arg-type]


def test_retries_end_at_the_deadline() -> None:
    error = TransactionAborted([b"k"])
    attempts = Backoff(None, 1000)
    for _ in range(10_000):
        attempts.next_delay_s(error, 0.5, 999)
    with pytest.raises(TransactionAborted):
        attempts.next_delay_s(error, 0.5, 1000)
