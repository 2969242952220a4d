"""Arguments of a client."""

from __future__ import annotations

from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest

from ziplog.client import arguments, cursor_arguments
from ziplog.client.common.requests import ClaimState
from ziplog.errors import ConfigError
from ziplog.types import RID_GENESIS, RID_RECENT, RecordId, cluster_id
from ziplog.wire import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

LAST = 2**63 - 1


@pytest.mark.parametrize("number", [1, LAST])
def test_a_demanded_cluster_is_its_number_in_messages(number: int) -> None:
    given = cluster_id(number)
    assert arguments.log_address("a:1", given) == (["a:1"], number)
    assert arguments.log_address(f"ziplog://a:1/?cluster={given}", None) == (["a:1"], number)


@pytest.mark.parametrize("given", ["0" * 32, cluster_id(LAST + 1), "a" * 32, "f" * 33, "A" * 32])
def test_an_id_that_no_cluster_has_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("ZIPLOG_CLUSTER_ID", given)
    with pytest.raises(ConfigError, match=r"cluster_id is .*; it must be 32 hexadecimal digits"):
        arguments.log_address("a:1", None)


@pytest.mark.parametrize("given", ["ziplog://a:1/?shard=1", "ziplog://a:1?cluster=1"])
def test_an_address_with_another_query_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"optionally with '/\?cluster=ID'"):
        arguments.log_address(given, None)


def test_an_empty_id_admits_any_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIPLOG_CLUSTER_ID", "7" * 32)
    assert arguments.log_address("a:1", "") == (["a:1"], 0)


def test_a_key_without_a_utf_8_form_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"key is '\\udcff'; it must be bytes, or a str that"):
        arguments.insert(b"x", RID_GENESIS, "\udcff", Limits(), 0)
    with pytest.raises(ConfigError, match="key is"):
        arguments.insert_many([b"x"], RID_GENESIS, None, ["\udcff"], Limits(), 0)


@pytest.mark.parametrize("given", [b"abc", b"", "abc", memoryview(b"abc"), 5, None])
def test_one_payload_or_key_in_the_place_of_several_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"payloads must be an iterable, .*; insert_after inserts"):
        arguments.insert_many(given, RID_GENESIS, None, None, Limits(), 0)
    if given is not None:
        with pytest.raises(TypeError, match=r"keys must be an iterable, .*; key is the key of all"):
            arguments.insert_many([b"x"] * 3, RID_GENESIS, None, given, Limits(), 0)


def test_recent_is_no_position_of_an_insert() -> None:
    with pytest.raises(
        ConfigError, match="RID_RECENT is for subscriptions, speculations and cursors"
    ):
        arguments.insert(b"x", RID_RECENT, None, Limits(), 0)


class Number:
    """A whole number of another library's type, as NumPy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Real:
    """A number of another library's type that is not whole."""

    def __float__(self) -> float:
        return 2.5


#: A position whose fields no message can carry as they are.
NUMBERS: Any = RecordId(Number(5), Number(3))  # type: ignore[arg-type]
REQUESTS: list[Callable[[Any], Any]] = [
    lambda rid: arguments.insert(b"x", rid, None, Limits(), 0).after,
    lambda rid: arguments.insert_many([b"x"], rid, None, None, Limits(), 0).after,
    lambda rid: arguments.read(rid, 0).rid,
    lambda rid: arguments.seal(rid, 0).rid,
    lambda rid: arguments.trim(rid, 0, force=False).rid,
    lambda rid: arguments.subscribe(rid, 0, follow=True).start,
    lambda rid: arguments.subscribe(rid, 0, follow=True, shards=[0]).start,
    lambda rid: arguments.speculate(rid, 0, shards=None, max_pending=1).start,
    lambda rid: cursor_arguments.claim("x", rid, 10, 60, 0, wait=True).start,
    lambda rid: cursor_arguments.edit("x", "seek", 0, rid).position,
    lambda rid: (
        cursor_arguments.commit(
            1, ClaimState("x", 1, RecordId(1, 0), b"", False, ""), RecordId(9, 0), rid, None, 0
        ).position
    ),
]


@pytest.mark.parametrize("request_of", REQUESTS)
def test_a_position_has_plain_ints_in_every_request(request_of: Callable[[Any], Any]) -> None:
    found = request_of(NUMBERS)
    assert found == RecordId(5, 3)
    assert (type(found.gsn), type(found.shard)) == (int, int)
    for wrong in (RecordId(5.0, 0), RecordId("5", 0), RecordId(True, 0)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"the gsn of .* must be a whole number, not \w+: "):
            request_of(wrong)
    with pytest.raises(TypeError, match=r"the shard of .* must be a whole number, not NoneType"):
        request_of(RecordId(5, None))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"RecordId\(gsn=-9, shard=0\); it must be a gsn from 0"):
        request_of(RecordId(-9, 0))


def test_numbers_are_plain_in_every_request() -> None:
    zero: Any = Number(0)
    shard = arguments.insert(b"x", RID_GENESIS, None, Limits(), 0, zero, regions=Number(2))  # type: ignore[arg-type]
    assert (type(shard.shard), type(shard.min_regions)) == (int, int)
    wanted = arguments.subscribe(RID_GENESIS, 0, follow=True, shards=[zero]).shards
    assert wanted is not None
    assert [type(one) for one in wanted] == [int]
    pending: Any = Number(7)
    speculation = arguments.speculate(RID_GENESIS, 0, shards=None, max_pending=pending)
    assert type(speculation.max_pending) is int
    rows = arguments.rows([b"x"], None, zero, (bytes(16), zero, zero), Limits(), 0)
    assert rows.origin is not None
    assert [type(one) for one in (rows.shard, rows.origin.batch)] == [int, int]
    assert type(arguments.count("max_records", pending, 1)) is int
    scan = arguments.scan(zero, zero, pending, 0)
    assert [type(one) for one in (scan.shard, scan.start, scan.stop)] == [int, int, int]


@pytest.mark.parametrize("shards", [[], [0, 0], (0, Number(0)), "0", b"0", 0])
def test_shards_are_one_or_more_different_ones(shards: Any) -> None:
    with pytest.raises(ConfigError, match=r"shards is .* one or more different shard ids"):
        arguments.subscribe(RID_GENESIS, 0, follow=True, shards=shards)


@pytest.mark.parametrize(("given", "seconds"), [(Number(3), 3.0), (Real(), 2.5), (10**400, inf)])
def test_a_timeout_may_be_a_number_of_any_type(given: Any, seconds: float) -> None:
    assert arguments.timeout_s(given, 10.0) == seconds


@pytest.mark.parametrize("given", [True, "5", -1, Real, nan, -(10**400), 1j])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout is .*; it must be seconds from 0 on"):
        arguments.timeout_s(given, 10.0)


@pytest.mark.parametrize("given", [0, True, 1.5, "5", None])
def test_a_number_of_records_is_whole_and_at_least_one(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"max_records is .*; it must be a whole number from 1 on"
    ):
        arguments.count("max_records", given, 1)
