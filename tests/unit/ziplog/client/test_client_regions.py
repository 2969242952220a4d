"""Regions: which shards an insert may use, and which are near."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.ziplog.client.fakes import CLUSTER, ClientHarness, S, ack, placement, refused
from ziplog import policy, wire
from ziplog.client import arguments, placement_arguments
from ziplog.client.common.requests import InsertRequest
from ziplog.client.inserts import insert_calls
from ziplog.core.nearness import nearest
from ziplog.core.node import BatchEnd
from ziplog.errors import ConfigError, DeadlineError
from ziplog.types import RID_GENESIS

#: By shard: the regions of its replicas.
MIXED = {0: ("a", "a"), 1: ("a", "b"), 2: ("b", "c")}


def client(
    regions: dict[int, tuple[str, str]] | None = None,
    *,
    of_cluster: int = 1,
    states: dict[int, str] | None = None,
    **options: Any,
) -> ClientHarness:
    harness = ClientHarness(**options)
    found = regions or MIXED
    harness.connect(
        *(placement(s, regions=r, state=(states or {}).get(s, "live")) for s, r in found.items()),
        limits=wire.Limits(min_regions=of_cluster),
    )
    return harness


def insert(
    harness: ClientHarness, regions: int = 0, shard: int | None = None, **options: Any
) -> int:
    deadline = harness.until(options.pop("timeout", 10 * S))
    return harness.call(
        InsertRequest(
            deadline, [b"x"], RID_GENESIS, None, 0, shard=shard, min_regions=regions, **options
        )
    )


def shards(harness: ClientHarness) -> list[int]:
    return [message.shard for name, message in harness.take(wire.Insert) if name.endswith("r0:1")]


def show(harness: ClientHarness, *placements: Any) -> None:
    harness.core._inserts.take_over_plain()
    harness.core._routing.update_placements(placements)
    harness.step(BatchEnd())


@pytest.mark.parametrize(
    ("of_call", "of_client", "of_cluster", "expected"),
    [(0, 0, 1, 0), (2, 0, 1, 1), (0, 2, 1, 1), (0, 0, 2, 1), (1, 2, 2, 0), (2, 1, 1, 1)],
)
def test_an_insert_goes_to_a_shard_that_spans_enough_regions(
    of_call: int, of_client: int, of_cluster: int, expected: int
) -> None:
    harness = client(of_cluster=of_cluster, min_regions=of_client)
    insert(harness, of_call)
    assert shards(harness) == [expected]


def test_the_policy_gets_the_live_shards_that_span_enough() -> None:
    offered: list[list[int]] = []

    def choose(_payload: bytes, _key: bytes | None, live: Any) -> int:
        offered.append(list(live))
        return int(live[-1])

    harness = client(policy=choose)
    for regions in (1, 2, 1):
        insert(harness, regions)
    assert offered == [[0, 1, 2], [1, 2], [0, 1, 2]]


def test_a_moved_record_goes_to_a_shard_that_spans_enough() -> None:
    harness = client({0: ("a", "b"), 1: ("c", "c"), 2: ("b", "c")})
    call = insert(harness, 2)
    message = harness.take(wire.Insert)[0][1]
    assert message.shard == 0
    harness.give(refused(message, 0, "full"), refused(message, 1, "full"))
    moved = harness.take(wire.Insert)[0][1]
    assert moved.shard == 2
    harness.give(*(ack(moved, server, [2]) for server in (0, 1)))
    assert harness.answers[call][0].shard == 2


def test_records_of_a_group_move_each_to_a_shard_that_spans_enough() -> None:
    harness = client(
        {0: ("a", "b"), 1: ("c", "c"), 2: ("b", "c")}, policy=lambda _p, _k, live: live[0]
    )
    harness.core._routing.limits = wire.Limits(max_unsettled_units=1)
    first = insert(harness)
    (message,) = {m.seq: m for _, m in harness.take(wire.Insert)}.values()
    insert(harness, 1)
    insert(harness, 2)
    harness.give(*(ack(message, server, [1]) for server in (0, 1)))
    assert harness.answers[first]
    (group,) = {m.seq: m for _, m in harness.take(wire.Insert)}.values()
    assert (group.shard, group.count) == (0, 2)
    harness.give(refused(group, 0, "full"), refused(group, 1, "full"))
    assert sorted(shards(harness)) == [1, 2]


def test_no_shard_of_any_state_that_spans_enough_fails_at_once() -> None:
    harness = client(states={1: "recovering"})
    call = insert(harness, 3)
    error = harness.answers[call]
    assert isinstance(error, ConfigError)
    assert "min_regions is 3, but the widest, shard 1, of" in str(error)
    assert "spans 2 (a, b)" in str(error)
    assert not harness.take(wire.Insert)


def test_an_insert_waits_for_a_shard_that_spans_enough_and_is_not_live() -> None:
    harness = client({0: ("a", "a"), 1: ("a", "b")}, states={1: "recovering"})
    call = insert(harness, 2)
    assert not harness.take(wire.Insert)
    show(harness, placement(1, regions=("a", "b"), view=2))
    assert shards(harness) == [1]
    assert call not in harness.answers


def test_the_error_at_the_deadline_names_the_shards_that_would_do() -> None:
    harness = client({0: ("a", "a"), 1: ("a", "b")}, states={1: "recovering"})
    call = insert(harness, 2, timeout=S)
    harness.pass_time(2 * S)
    error = harness.answers[call]
    assert isinstance(error, DeadlineError)
    assert "that spans 2 regions is live (shard 1 (recovering))" in str(error)


def test_a_pinned_insert_at_a_narrow_shard_fails_at_once() -> None:
    harness = client()
    by_call, by_policy = insert(harness, 2, shard=0), client(policy=policy.pin(0))
    assert "shard 0 of" in str(harness.answers[by_call])
    found = by_policy.answers[insert(by_policy, 2)]
    assert isinstance(found, ConfigError)
    assert "spans 1 (a)" in str(found)
    insert(harness, 2, shard=2)
    assert shards(harness) == [2]


def test_a_sent_insert_is_not_sent_in_a_view_that_spans_too_few_regions() -> None:
    harness = client({0: ("a", "b"), 1: ("c", "b")})
    call = insert(harness, 2)
    message = harness.take(wire.Insert)[0][1]
    show(harness, placement(0, regions=("a", "a"), view=2))
    harness.pass_time(S // 1000)
    assert not harness.take(wire.Insert)
    harness.give(wire.Located(CLUSTER, 0, 2, 1, message.client, message.seq, "absent", []))
    moved = harness.take(wire.Insert)[0][1]
    assert moved.shard == 1
    harness.give(*(ack(moved, server, [2]) for server in (0, 1)))
    assert harness.answers[call][0].shard == 1


def test_a_sent_insert_that_is_placed_stays_where_a_view_spans_too_few_regions() -> None:
    harness = client({0: ("a", "b"), 1: ("c", "b")})
    call = insert(harness, 2)
    message = harness.take(wire.Insert)[0][1]
    show(harness, placement(0, regions=("a", "a"), view=2))
    harness.give(wire.Located(CLUSTER, 0, 2, 1, message.client, message.seq, "present", [2]))
    assert harness.answers[call][0].shard == 0
    assert not harness.take(wire.Insert)


def test_a_sent_insert_that_requires_one_region_is_sent_in_the_new_view() -> None:
    harness = client({0: ("a", "b"), 1: ("c", "b")})
    insert(harness, 1)
    harness.take(wire.Insert)
    show(harness, placement(0, regions=("a", "a"), view=2))
    harness.pass_time(S // 1000)
    assert {(m.shard, m.view) for _, m in harness.take(wire.Insert)} == {(0, 2)}


def test_the_rest_of_a_call_that_is_placed_in_part_stays_at_its_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(insert_calls, "UNIT_RECORDS", 1)
    harness = client({0: ("a", "b"), 1: ("c", "b")})
    harness.call(
        InsertRequest(
            harness.until(10 * S), [b"x", b"y"], RID_GENESIS, None, 0, many=True, min_regions=2
        )
    )
    first, second = {message.seq: message for _, message in harness.take(wire.Insert)}.values()
    harness.give(*(ack(first, server, [1]) for server in (0, 1)))
    show(harness, placement(0, regions=("a", "a"), view=2))
    harness.pass_time(S // 1000)
    sent = {(message.shard, message.view, message.seq) for _, message in harness.take(wire.Insert)}
    assert sent == {(0, 2, second.seq)}


def test_a_waiting_insert_leaves_a_shard_that_became_narrow() -> None:
    harness = client({0: ("a", "b"), 1: ("b", "c")})
    harness.core._routing.limits = wire.Limits(max_unsettled_units=1)
    insert(harness)
    (message,) = {m.seq: m for _, m in harness.take(wire.Insert)}.values()
    insert(harness, 2)
    assert not harness.take(wire.Insert)
    show(harness, placement(0, regions=("a", "a")))
    assert message.shard == 0
    assert shards(harness) == [1]


def test_without_labels_the_same_messages_are_sent() -> None:
    sent = []
    for number in (0, 1):
        harness = client({0: ("", ""), 1: ("", "")}, min_regions=number)
        insert(harness, number)
        sent.append(harness.take(wire.Insert))
    assert sent[0] == sent[1]


# --- near shards ---


@pytest.mark.parametrize(
    ("live", "here", "expected"),
    [
        ([0, 1, 2], "a", [0, 1]),
        ([1, 2], "b", [2]),
        ([0, 1], "b", [1]),
        ([0, 1, 2], "c", [2]),
        ([0, 1, 2], "", [0, 1, 2]),
        ([0, 1, 2], "mars", [0, 1, 2]),
    ],
)
def test_near_shards_are_the_first_class_that_is_not_empty(
    live: list[int], here: str, expected: list[int]
) -> None:
    assert nearest(live, here, MIXED.__getitem__, lambda _: 0) == expected


def test_the_quickest_shards_are_near_where_no_server_is() -> None:
    latencies = {0: 100, 1: 149, 2: 151}
    assert nearest([0, 1, 2], "mars", MIXED.__getitem__, latencies.__getitem__) == [0, 1]
    latencies[2] = 0
    assert nearest([0, 1, 2], "mars", MIXED.__getitem__, latencies.__getitem__) == [0, 1, 2]


def test_the_nearest_policy_uses_near_shards_that_span_enough() -> None:
    harness = client(
        {0: ("a", "a"), 1: ("b", "a"), 2: ("b", "c")}, policy=policy.nearest(), region="a"
    )
    for regions, expected in ((1, 0), (2, 1)):
        for _ in range(5):
            insert(harness, regions)
        assert set(shards(harness)) <= {expected}
    show(harness, placement(1, regions=("b", "a"), state="parked"))
    insert(harness, 2)
    assert shards(harness) == [2]


# --- arguments ---


def test_a_client_with_a_region_has_the_nearest_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    nearest_kind = type(policy.nearest())
    assert type(placement_arguments.preferences(None, None, None).policy) is not nearest_kind
    found = placement_arguments.preferences(None, "eu", 2)
    assert (type(found.policy), found.region, found.min_regions) == (nearest_kind, "eu", 2)
    monkeypatch.setenv("ZIPLOG_REGION", "us")
    assert placement_arguments.preferences(policy.pin(3), None, None).region == "us"
    assert placement_arguments.region("eu") == "eu"


@pytest.mark.parametrize("region", ["", " ", "a b", 3])
def test_what_is_no_region_is_refused(region: Any) -> None:
    with pytest.raises(ConfigError, match="region"):
        placement_arguments.region(region)


@pytest.mark.parametrize(("number", "kind"), [(0, ConfigError), (17, ConfigError)])
def test_a_number_of_regions_out_of_range_is_refused(number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="min_regions"):
        arguments.insert(b"", RID_GENESIS, None, wire.Limits(), 1, regions=number)


@pytest.mark.parametrize("number", [True, "2", 2.0])
def test_what_is_no_number_of_regions_is_refused(number: Any) -> None:
    with pytest.raises(TypeError, match="min_regions"):
        arguments.insert_many([b""], RID_GENESIS, None, None, wire.Limits(), 1, regions=number)


def test_servers_to_add_get_their_regions() -> None:
    servers = {"s-0": "h:1", "s-1": "h:2"}
    request = placement_arguments.change(3, "add", 1, servers, {"s-1": "eu"})
    assert [replica.region for replica in request.replicas] == ["", "eu"]
    with pytest.raises(ConfigError, match="regions"):
        placement_arguments.change(3, "add", 1, servers, {"s-2": "eu"})


def test_a_region_to_give_up_has_a_name_or_is_the_one_without_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZIPLOG_REGION", "us")
    for name in ("eu", ""):
        for is_lost in (True, False):
            request = placement_arguments.change_region(name, 1, is_lost=is_lost)
            assert (request.region, request.is_lost) == (name, is_lost)
    for wrong in ("-", "a b", "a" * 65, None, 3):
        with pytest.raises(ConfigError, match="region"):
            placement_arguments.change_region(wrong, 1, is_lost=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("pinned", [None, 1])
@pytest.mark.parametrize("is_wide", [True, False])
def test_old_placements_do_not_fail_an_insert(pinned: int | None, is_wide: bool) -> None:
    """A client that makes no call asks for no placements, and a shard may have joined or moved."""
    narrow = [placement(0, regions=("a", "a")), placement(1, regions=("a", "a"))]
    harness = client({0: ("a", "a"), 1: ("a", "a")})
    harness.pass_time(60 * S)
    call = insert(harness, 2, shard=pinned)
    assert call not in harness.answers
    assert not shards(harness)
    wide = placement(1, view=2, regions=("a", "b"))
    harness.inform(narrow[0], wide if is_wide else narrow[1])
    assert shards(harness) == ([1] if is_wide else [])
    assert isinstance(harness.answers.get(call), ConfigError) is not is_wide
