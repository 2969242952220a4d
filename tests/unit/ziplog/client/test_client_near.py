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
    ConnectRequest,
    OutlineRequest,
    ReadRequest,
    SubscribeRequest,
    TailRequest,
)
from ziplog.core.nearness import replica_order
from ziplog.core.units import NEVER
from ziplog.core.view import run_of
from ziplog.errors import NoSuchRecordError
from ziplog.types import RID_GENESIS, RecordId

SERVERS = ("s0r0:1", "s0r1:1", "s0r2:1")


def client(*regions: str, region: str = "a") -> ClientHarness:
    """Return a client of a shard with a replica in each of these regions."""
    harness = ClientHarness(region=region)
    limits = wire.Limits(rtt_ms=100)
    harness.connect(placement(0, len(regions), regions=regions), limits=limits)
    return harness


def read(harness: ClientHarness) -> int:
    return harness.call(ReadRequest(harness.until(), RID))


def answer(harness: ClientHarness, server: int, after: int = 0, **fields: object) -> None:
    """Answer the last read from a server, after some time."""
    _, message = asked(harness)
    harness.pass_time(after)
    harness.give(reply(message, server, "record", **fields))


def names(harness: ClientHarness) -> list[str]:
    """Return the servers that were asked since the last time."""
    return [name for name, _ in harness.take(wire.Read)]


def measured(harness: ClientHarness, *round_trips_ms: int) -> None:
    """Measure the round trip to each replica, in this order of time, with a tail query."""
    call = harness.call(TailRequest(harness.until()))
    query = harness.take(wire.LeaseQuery)[-1][1]
    placements = [harness.core._routing._placements[0]]
    runs = [run_of(lease())]
    harness.give(wire.LeaseHistory(CLUSTER, query.request, runs, placements, 0))
    tail = harness.take(wire.Tail)[-1][1]
    passed = 0
    for ms, server in sorted((ms, server) for server, ms in enumerate(round_trips_ms)):
        harness.pass_time((ms - passed) * MS)
        passed = ms
        harness.give(wire.TailReply(CLUSTER, 0, 1, server, tail.request, 1, 1, 0))
    assert call in harness.answers


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
    harness = client("b", "a", "a")
    firsts = set()
    for number in range(20):
        harness.core._context.client = bytes([number]) * 16  # type: ignore[misc]
        read(harness)
        firsts.update(names(harness))
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
    harness = client(*regions, region=region)
    call = read(harness)
    (name, message), *more = harness.take(wire.Read)
    assert (name, more) == (expected, [])
    harness.give(reply(message, SERVERS.index(expected), "record"))
    assert harness.answers[call] == RECORD
    assert names(harness) == []


def test_a_silent_replica_is_followed_by_the_next_ones_with_doubled_intervals() -> None:
    harness = client("b", "c", "a")
    measured(harness, 40, 30, 8)
    read(harness)
    assert names(harness) == ["s0r2:1"]
    harness.pass_time(16 * MS - 1)
    assert names(harness) == []
    harness.pass_time(1)
    assert names(harness) == ["s0r1:1"]
    harness.pass_time(32 * MS - 1)
    assert names(harness) == []
    harness.pass_time(1)
    assert names(harness) == ["s0r0:1"]
    harness.pass_time(200 * MS)
    assert names(harness)[:3] == list(SERVERS)


def test_the_second_replica_is_asked_after_ten_milliseconds_at_least() -> None:
    harness = client("b", "a")
    for _ in range(2):
        call = read(harness)
        answer(harness, 1, after=1 * MS)
        assert call in harness.answers
    read(harness)
    names(harness)
    harness.pass_time(10 * MS - 1)
    assert names(harness) == []
    harness.pass_time(1)
    assert names(harness) == ["s0r0:1"]


def test_replies_of_servers_that_the_shard_does_not_have_measure_nothing() -> None:
    harness = client("a", "b")
    read(harness)
    answer(harness, 2)
    call = harness.call(TailRequest(harness.until()))
    query = harness.take(wire.LeaseQuery)[-1][1]
    placements = [harness.core._routing._placements[0]]
    harness.give(wire.LeaseHistory(CLUSTER, query.request, [run_of(lease())], placements, 0))
    tail = harness.take(wire.Tail)[-1][1]
    for server in (2, 7):
        harness.give(wire.TailReply(CLUSTER, 0, 1, server, tail.request, 1, 1, 0))
    assert call not in harness.answers


def test_without_a_replica_in_the_region_the_one_with_the_shortest_round_trip_is_first() -> None:
    harness = client("b", "c")
    measured(harness, 40, 30)
    read(harness)
    assert names(harness) == ["s0r1:1"]
    harness.pass_time(60 * S)
    measured(harness, 20, 30)
    read(harness)
    assert names(harness)[-1:] == ["s0r0:1"]


def test_a_replica_that_another_one_overtook_is_last_until_it_answers() -> None:
    harness = client("b", "a")
    call = read(harness)
    _, first = asked(harness)
    harness.pass_time(10 * MS)
    answer(harness, 0, after=1 * MS)
    assert harness.answers[call] == RECORD
    read(harness)
    assert names(harness) == ["s0r0:1"]
    harness.give(reply(first, 1, "record"))  # late, and of a read that is complete
    read(harness)
    assert names(harness) == ["s0r1:1"]


def test_a_replica_that_failed_is_first_again_after_five_seconds() -> None:
    harness = client("b", "a")
    read(harness)
    harness.take(wire.Read)
    harness.pass_time(10 * MS)
    answer(harness, 0)
    harness.pass_time(5 * S - 1)
    read(harness)
    assert names(harness) == ["s0r0:1"]
    harness.pass_time(1)
    assert names(harness) == []
    read(harness)
    assert names(harness) == ["s0r1:1"]


@pytest.mark.parametrize("kind", ["record", "not-yet", "unknown"])
def test_an_unstable_answer_of_the_near_replica_asks_all_at_once(kind: wire.Answer) -> None:
    harness = client("b", "c", "a")
    call = read(harness)
    _, message = asked(harness)
    harness.give(reply(message, 2, kind, stable=False))
    assert call not in harness.answers
    assert names(harness) == list(SERVERS)


def test_a_replica_that_refused_or_cannot_know_is_last() -> None:
    harness = client("b", "a")
    read(harness)
    _, message = asked(harness)
    harness.give(refused(message, 1, "not-ready"))
    harness.take(wire.Read)
    read(harness)
    assert names(harness) == ["s0r0:1"]
    harness = client("b", "a")
    read(harness)
    _, message = asked(harness)
    harness.give(reply(message, 1, "unknown", stable=False))
    harness.take(wire.Read)
    read(harness)
    assert names(harness) == ["s0r0:1"]


# --- streams and archives ------------------------------------------------------------------------


def opened(harness: ClientHarness) -> list[str]:
    """Open a subscription; return the servers of its streams."""
    harness.call(SubscribeRequest(NEVER, RID_GENESIS, follow=True))
    harness.pass_time(1)
    for _, query in harness.take(wire.LeaseQuery):
        placements = [harness.core._routing._placements[0]]
        runs = [run_of(lease())]
        harness.give(wire.LeaseHistory(CLUSTER, query.request, runs, placements, 0))
    return [name for name, _ in harness.take(wire.Subscribe)]


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
    harness = client("b", "c")
    measured(harness, 40, round_trip_ms)
    assert opened(harness) == [expected]


def test_a_silent_stream_is_reopened_at_the_next_replica() -> None:
    harness = client("b", "c", "a")
    assert opened(harness) == ["s0r2:1"]
    for expected in ("s0r0:1", "s0r1:1", "s0r2:1"):
        harness.pass_time(1 * S)
        assert [name for name, _ in harness.take(wire.Subscribe)] == [expected]


def test_archives_are_in_the_order_of_nearness() -> None:
    for region, expected in (("a", ["s0r1", "s0r0"]), ("", ["s0r0", "s0r1"])):
        harness = client("b", "a", region=region)
        call = harness.call(OutlineRequest(harness.until(), 0, 1, 9))
        query = harness.take(wire.Outline)[-1][1]
        steps = [wire.Step(9, 100)]
        for server in (0, 1):
            harness.give(wire.Outlined(CLUSTER, 0, 1, server, query.request, 0, steps, 9000))
        assert [host for host, _ in harness.answers[call].archives] == expected


# --- the membership service ----------------------------------------------------------------------


def hello(harness: ClientHarness) -> tuple[str, wire.Hello]:
    """Return the node that gets the next `Hello`, and the message."""
    harness.core._routing.refresh()
    harness.pass_time(100 * MS)
    ((name, message),) = harness.take(wire.Hello)
    return name, message


def knows(harness: ClientHarness, request: int, regions: list[str]) -> None:
    found = info(request, [placement(0, 2, regions=("a", "b"))], [])
    harness.give(msgspec.structs.replace(found, mms=["m0:1", "m1:1", "m2:1"], regions=regions))


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
    harness = ClientHarness(region=region)
    harness.call(ConnectRequest(harness.until()))
    knows(harness, harness.take(wire.Hello)[-1][1].request, regions)
    found = []
    for _ in expected:
        name, message = hello(harness)
        found.append(name)
        knows(harness, message.request, regions)
    assert found == expected


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_node_that_lags_does_not_decide_whether_a_shard_exists(is_under_way: bool) -> None:
    harness = ClientHarness(region="a")
    harness.call(ConnectRequest(harness.until()))
    regions = ["b", "c", "a"]
    knows(harness, harness.take(wire.Hello)[-1][1].request, regions)
    if is_under_way:
        name, near = hello(harness)
        assert name == "m2:1"
    else:
        harness.pass_time(100 * MS)
    call = harness.call(ReadRequest(harness.until(), RecordId(5, 1)))
    if is_under_way:
        knows(harness, near.request, regions)
        assert call not in harness.answers
    assert [name for name, _ in harness.sent] == ["m0:1"]
    harness.list_shards(placement(0))
    assert isinstance(harness.answers[call], NoSuchRecordError)


def test_a_hello_without_a_reply_goes_to_all_nodes_and_the_silent_one_is_last() -> None:
    harness = ClientHarness(region="a")
    harness.call(ConnectRequest(harness.until()))
    regions = ["b", "c", "a"]
    knows(harness, harness.take(wire.Hello)[-1][1].request, regions)
    name, message = hello(harness)
    assert name == "m2:1"
    harness.pass_time(100 * MS)
    assert {name for name, _ in harness.take(wire.Hello)} >= {"m0:1", "m1:1", "m2:1"}
    knows(harness, message.request, regions)
    knows(harness, hello(harness)[1].request, regions)
    assert hello(harness)[0] in {"m0:1", "m1:1"}


def test_placements_of_a_node_that_lags_change_nothing() -> None:
    harness = client("a", "b")
    routing = harness.core._routing
    newest = routing.lease
    routing.frontiers[0] = 50
    old = info(1, [placement(0, 2, view=0)], [run_of(lease(number=1, base=1, size=10))])
    routing.update(msgspec.structs.replace(old, frontiers=[20]))
    assert routing.lease == newest
    assert routing.frontiers[0] == 50
    assert routing._placements[0].view == 1
