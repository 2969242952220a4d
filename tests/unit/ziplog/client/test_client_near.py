"""A client with a region reads near: the order of replicas, reads, streams, and `Hello`."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.ziplog.client.fakes import (
    CLUSTER,
    MS,
    ClientHarness,
    S,
    info,
    lease,
    placement,
    refused,
)
from tests.unit.ziplog.client.test_client_read import RECORD, RID, asked, reply
from ziplog import wire
from ziplog.client.common.requests import (
    NEVER,
    ConnectRequest,
    OutlineRequest,
    ReadRequest,
    SubscribeRequest,
    TailRequest,
)
from ziplog.core.nearness import replica_order
from ziplog.core.view import run_of
from ziplog.errors import NoSuchRecordError
from ziplog.types import RID_GENESIS, RecordId

SERVERS = ("s0r0:1", "s0r1:1", "s0r2:1")


def client(*regions: str, region: str = "a") -> ClientHarness:
    """Return a client of a shard with a replica in each of these regions."""
    glass = ClientHarness(region=region)
    limits = wire.Limits(rtt_ms=100)
    glass.connect(placement(0, len(regions), regions=regions), limits=limits)
    return glass


def read(glass: ClientHarness) -> int:
    return glass.call(ReadRequest(glass.until(), RID))


def answer(glass: ClientHarness, server: int, after: int = 0, **fields: object) -> None:
    """Answer the last read from a server, after some time."""
    _, message = asked(glass)
    glass.pass_time(after)
    glass.give(reply(message, server, "record", **fields))


def names(glass: ClientHarness) -> list[str]:
    """Return the servers that were asked since the last time."""
    return [name for name, _ in glass.take(wire.Read)]


def measured(glass: ClientHarness, *round_trips_ms: int) -> None:
    """Measure the round trip to each replica, in this order of time, with a tail query."""
    call = glass.call(TailRequest(glass.until()))
    query = glass.take(wire.LeaseQuery)[-1][1]
    placements = [glass.core._routing._placements[0]]
    runs = [run_of(lease())]
    glass.give(wire.LeaseHistory(CLUSTER, query.request, runs, placements, 0))
    tail = glass.take(wire.Tail)[-1][1]
    passed = 0
    for ms, server in sorted((ms, server) for server, ms in enumerate(round_trips_ms)):
        glass.pass_time((ms - passed) * MS)
        passed = ms
        glass.give(wire.TailReply(CLUSTER, 0, 1, server, tail.request, 1, 1, 0))
    assert call in glass.answers


# --- the order -----------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 99), st.booleans(), st.integers(0, 9)),
        min_size=1,
        max_size=5,
    )
)
def test_the_order_has_failed_ones_last_and_near_ones_first(
    nodes: list[tuple[str, int, bool, int]],
) -> None:
    regions, round_trips, failures, ties = zip(*nodes, strict=True)
    failed = {index for index, is_failed in enumerate(failures) if is_failed}
    order = replica_order(regions, "a", round_trips, failed, ties)
    assert sorted(order) == list(range(len(nodes)))
    for one, other in pairwise(order):
        assert (one in failed) <= (other in failed)
        if (one in failed) == (other in failed):
            assert (regions[one] != "a") <= (regions[other] != "a")
            if regions[one] != "a":
                assert round_trips[one] <= round_trips[other]


def test_of_several_replicas_in_the_region_clients_choose_differently() -> None:
    found = {
        replica_order(["a", "a"], "a", [0, 0], (), ties)[0] for ties in ([1, 2], [2, 1])
    }  # fmt: skip
    assert found == {0, 1}
    glass = client("b", "a", "a")
    firsts = set()
    for number in range(20):
        glass.core._context.client = bytes([number]) * 16  # type: ignore[misc]
        read(glass)
        firsts.update(names(glass))
    assert firsts == {"s0r1:1", "s0r2:1"}


# --- reads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regions", "region", "expected"),
    [
        (("b", "a"), "a", "s0r1:1"),
        (("b", "c", "a"), "a", "s0r2:1"),
        (("b", "a"), "", "s0r0:1"),
        (("", ""), "a", "s0r0:1"),
    ],
    ids=["near backup", "near one of three", "client without region", "cluster without regions"],
)
def test_a_read_asks_the_replica_in_the_region_of_the_client(
    regions: tuple[str, ...], region: str, expected: str
) -> None:
    glass = client(*regions, region=region)
    call = read(glass)
    (name, message), *more = glass.take(wire.Read)
    assert (name, more) == (expected, [])
    glass.give(reply(message, SERVERS.index(expected), "record"))
    assert glass.answers[call] == RECORD
    assert names(glass) == []


def test_a_silent_replica_is_followed_by_the_next_ones_with_doubled_intervals() -> None:
    glass = client("b", "c", "a")
    measured(glass, 40, 30, 8)
    read(glass)
    assert names(glass) == ["s0r2:1"]
    glass.pass_time(16 * MS - 1)
    assert names(glass) == []
    glass.pass_time(1)
    assert names(glass) == ["s0r1:1"]
    glass.pass_time(32 * MS - 1)
    assert names(glass) == []
    glass.pass_time(1)
    assert names(glass) == ["s0r0:1"]
    glass.pass_time(200 * MS)
    assert names(glass)[:3] == list(SERVERS)


def test_the_second_replica_is_asked_after_ten_milliseconds_at_least() -> None:
    glass = client("b", "a")
    for _ in range(2):
        call = read(glass)
        answer(glass, 1, after=1 * MS)
        assert call in glass.answers
    read(glass)
    names(glass)
    glass.pass_time(10 * MS - 1)
    assert names(glass) == []
    glass.pass_time(1)
    assert names(glass) == ["s0r0:1"]


def test_replies_of_servers_that_the_shard_does_not_have_measure_nothing() -> None:
    glass = client("a", "b")
    read(glass)
    answer(glass, 2)
    call = glass.call(TailRequest(glass.until()))
    query = glass.take(wire.LeaseQuery)[-1][1]
    placements = [glass.core._routing._placements[0]]
    glass.give(wire.LeaseHistory(CLUSTER, query.request, [run_of(lease())], placements, 0))
    tail = glass.take(wire.Tail)[-1][1]
    for server in (2, 7):
        glass.give(wire.TailReply(CLUSTER, 0, 1, server, tail.request, 1, 1, 0))
    assert call not in glass.answers


def test_without_a_replica_in_the_region_the_one_with_the_shortest_round_trip_is_first() -> None:
    glass = client("b", "c")
    measured(glass, 40, 30)
    read(glass)
    assert names(glass) == ["s0r1:1"]
    glass.pass_time(60 * S)
    measured(glass, 20, 30)
    read(glass)
    assert names(glass)[-1:] == ["s0r0:1"]


def test_a_replica_that_another_one_overtook_is_last_until_it_answers() -> None:
    glass = client("b", "a")
    call = read(glass)
    _, first = asked(glass)
    glass.pass_time(10 * MS)
    answer(glass, 0, after=1 * MS)
    assert glass.answers[call] == RECORD
    read(glass)
    assert names(glass) == ["s0r0:1"]
    glass.give(reply(first, 1, "record"))  # late, and of a read that is complete
    read(glass)
    assert names(glass) == ["s0r1:1"]


def test_a_replica_that_failed_is_first_again_after_five_seconds() -> None:
    glass = client("b", "a")
    read(glass)
    glass.take(wire.Read)
    glass.pass_time(10 * MS)
    answer(glass, 0)
    glass.pass_time(5 * S - 1)
    read(glass)
    assert names(glass) == ["s0r0:1"]
    glass.pass_time(1)
    assert names(glass) == []
    read(glass)
    assert names(glass) == ["s0r1:1"]


@pytest.mark.parametrize("kind", ["record", "not-yet", "unknown"])
def test_an_unstable_answer_of_the_near_replica_asks_all_at_once(kind: wire.Answer) -> None:
    glass = client("b", "c", "a")
    call = read(glass)
    _, message = asked(glass)
    glass.give(reply(message, 2, kind, stable=False))
    assert call not in glass.answers
    assert names(glass) == list(SERVERS)


def test_a_replica_that_refused_or_cannot_know_is_last() -> None:
    glass = client("b", "a")
    read(glass)
    _, message = asked(glass)
    glass.give(refused(message, 1, "not-ready"))
    glass.take(wire.Read)
    read(glass)
    assert names(glass) == ["s0r0:1"]
    glass = client("b", "a")
    read(glass)
    _, message = asked(glass)
    glass.give(reply(message, 1, "unknown", stable=False))
    glass.take(wire.Read)
    read(glass)
    assert names(glass) == ["s0r0:1"]


# --- streams and archives ------------------------------------------------------------------------


def opened(glass: ClientHarness) -> list[str]:
    """Open a subscription; return the servers of its streams."""
    glass.call(SubscribeRequest(NEVER, RID_GENESIS, follow=True))
    glass.pass_time(1)
    for _, query in glass.take(wire.LeaseQuery):
        placements = [glass.core._routing._placements[0]]
        runs = [run_of(lease())]
        glass.give(wire.LeaseHistory(CLUSTER, query.request, runs, placements, 0))
    return [name for name, _ in glass.take(wire.Subscribe)]


@pytest.mark.parametrize(
    ("regions", "region", "expected"),
    [
        (("a", "b"), "a", "s0r0:1"),
        (("b", "a"), "a", "s0r1:1"),
        (("b", "c"), "a", "s0r1:1"),
        (("b", "c", "a"), "a", "s0r2:1"),
        (("b", "c", "b"), "a", "s0r0:1"),
        (("a", "b"), "", "s0r1:1"),
        (("", ""), "a", "s0r1:1"),
    ],
)
def test_a_stream_is_opened_in_the_region_or_where_it_is_known_first_what_is_stable(
    regions: tuple[str, ...], region: str, expected: str
) -> None:
    assert opened(client(*regions, region=region)) == [expected]


@pytest.mark.parametrize(("round_trip_ms", "expected"), [(80, "s0r1:1"), (81, "s0r0:1")])
def test_a_stream_avoids_a_replica_more_than_twice_as_far_as_the_nearest(
    round_trip_ms: int, expected: str
) -> None:
    glass = client("b", "c")
    measured(glass, 40, round_trip_ms)
    assert opened(glass) == [expected]


def test_a_silent_stream_is_reopened_at_the_next_replica() -> None:
    glass = client("b", "c", "a")
    assert opened(glass) == ["s0r2:1"]
    for expected in ("s0r0:1", "s0r1:1", "s0r2:1"):
        glass.pass_time(1 * S)
        assert [name for name, _ in glass.take(wire.Subscribe)] == [expected]


def test_archives_are_in_the_order_of_nearness() -> None:
    for region, expected in (("a", ["s0r1", "s0r0"]), ("", ["s0r0", "s0r1"])):
        glass = client("b", "a", region=region)
        call = glass.call(OutlineRequest(glass.until(), 0, 1, 9))
        query = glass.take(wire.Outline)[-1][1]
        steps = [wire.Step(9, 100)]
        for server in (0, 1):
            glass.give(wire.Outlined(CLUSTER, 0, 1, server, query.request, 0, steps, 9000))
        assert [host for host, _ in glass.answers[call].archives] == expected


# --- the membership service ----------------------------------------------------------------------


def hello(glass: ClientHarness) -> tuple[str, wire.Hello]:
    """Return the node that gets the next `Hello`, and the message."""
    glass.core._routing.refresh()
    glass.pass_time(100 * MS)
    ((name, message),) = glass.take(wire.Hello)
    return name, message


def knows(glass: ClientHarness, request: int, regions: list[str]) -> None:
    found = info(request, [placement(0, 2, regions=("a", "b"))], [])
    glass.give(msgspec.structs.replace(found, mms=["m0:1", "m1:1", "m2:1"], regions=regions))


@pytest.mark.parametrize(
    ("regions", "region", "expected"),
    [
        (["b", "c", "a"], "a", ["m2:1", "m0:1", "m2:1", "m0:1"]),
        (["b", "c", "a"], "", ["m0:1"] * 4),
        (["", "", ""], "a", ["m0:1"] * 4),
        ([], "a", ["m0:1"] * 4),
    ],
    ids=["in the region", "client without region", "no regions", "an earlier release"],
)
def test_every_other_hello_goes_to_the_nearest_node(
    regions: list[str], region: str, expected: list[str]
) -> None:
    glass = ClientHarness(region=region)
    glass.call(ConnectRequest(glass.until()))
    knows(glass, glass.take(wire.Hello)[-1][1].request, regions)
    found = []
    for _ in expected:
        name, message = hello(glass)
        found.append(name)
        knows(glass, message.request, regions)
    assert found == expected


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_node_that_lags_does_not_decide_whether_a_shard_exists(is_under_way: bool) -> None:
    glass = ClientHarness(region="a")
    glass.call(ConnectRequest(glass.until()))
    regions = ["b", "c", "a"]
    knows(glass, glass.take(wire.Hello)[-1][1].request, regions)
    if is_under_way:
        name, near = hello(glass)
        assert name == "m2:1"
    else:
        glass.pass_time(100 * MS)
    call = glass.call(ReadRequest(glass.until(), RecordId(5, 1)))
    if is_under_way:
        knows(glass, near.request, regions)
        assert call not in glass.answers
    ((name, message),) = glass.take(wire.Hello)
    assert name == "m0:1"
    knows(glass, message.request, regions)
    assert isinstance(glass.answers[call], NoSuchRecordError)


def test_a_hello_without_a_reply_goes_to_all_nodes_and_the_silent_one_is_last() -> None:
    glass = ClientHarness(region="a")
    glass.call(ConnectRequest(glass.until()))
    regions = ["b", "c", "a"]
    knows(glass, glass.take(wire.Hello)[-1][1].request, regions)
    name, message = hello(glass)
    assert name == "m2:1"
    glass.pass_time(100 * MS)
    assert {name for name, _ in glass.take(wire.Hello)} >= {"m0:1", "m1:1", "m2:1"}
    knows(glass, message.request, regions)
    knows(glass, hello(glass)[1].request, regions)
    assert hello(glass)[0] in {"m0:1", "m1:1"}


def test_placements_of_a_node_that_lags_change_nothing() -> None:
    glass = client("a", "b")
    routing = glass.core._routing
    newest = routing.lease
    routing.frontiers[0] = 50
    old = info(1, [placement(0, 2, view=0)], [run_of(lease(number=1, base=1, size=10))])
    routing.update(msgspec.structs.replace(old, frontiers=[20]))
    assert routing.lease == newest
    assert routing.frontiers[0] == 50
    assert routing._placements[0].view == 1
