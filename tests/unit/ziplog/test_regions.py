"""Regions: the labels of a cluster file, what is survived, and planned shards."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig, parse
from ziplog.config_text import dump
from ziplog.errors import ConfigError
from ziplog.regions import (
    Layout,
    config_warnings,
    layout_of,
    layout_of_status,
    plan,
    survey,
    warnings,
)

TRIANGLE = {0: ("a", "b"), 1: ("b", "c"), 2: ("c", "a")}


def layout(**changes: object) -> Layout:
    return dataclasses.replace(
        Layout(("a", "b", "c"), ("a", "b", "c"), TRIANGLE, 2),
        **changes,  # type: ignore[arg-type]
    )


def config(shards: dict[int, tuple[str | None, ...]], **changes: object) -> ClusterConfig:
    ports = iter(range(7400, 7600))
    agreeing = [
        NodeConfig(f"{kind}-{i}", "127.0.0.1", next(ports), next(ports), region=region)
        for kind in ("mms", "fh")
        for i, region in enumerate(("a", "b", "c"))
    ]
    found = tuple(
        ShardConfig(
            shard,
            tuple(
                NodeConfig(f"shard-{shard}-{i}", "127.0.0.1", next(ports), region=region)
                for i, region in enumerate(regions)
            ),
        )
        for shard, regions in shards.items()
    )
    return ClusterConfig(
        name="demo",
        data_dir=Path("/tmp/demo"),
        mms=tuple(agreeing[:3]),
        failure_handlers=tuple(agreeing[3:]),
        shards=found,
        **changes,  # type: ignore[arg-type]
    )


def test_a_file_keeps_its_labels() -> None:
    labelled = config(TRIANGLE)
    assert parse(dump(labelled), Path("/tmp/cluster.toml")) == labelled
    assert layout_of(labelled) == layout()


def test_a_file_without_labels_has_one_region_and_warns_of_nothing() -> None:
    plain = config({0: (None, None), 1: (None, None)})
    bare = tuple(dataclasses.replace(node, region=None) for node in plain.mms)
    plain = dataclasses.replace(plain, mms=bare, failure_handlers=())
    assert plain.required_regions == 1
    assert layout_of(plain).regions == ("",)
    assert warnings(layout_of(plain)) == []
    assert "region =" not in dump(plain)


def test_a_shard_within_one_region_is_refused_where_there_are_several() -> None:
    with pytest.raises(ConfigError, match=r"servers of shard 1 are in 1 of the 2 regions.*\(b\)"):
        config({0: ("a", "b"), 1: ("b", "b")})
    assert config({0: ("a", "b"), 1: ("b", "b")}, min_regions=1).required_regions == 1
    with pytest.raises(ConfigError, match="shard 0 are in 2 of the 3 regions"):
        config(TRIANGLE, min_regions=3)


@pytest.mark.parametrize("region", ["", "-a", "a b", "ä", "a" * 65, 3])
def test_what_is_no_name_is_no_region(region: object) -> None:
    with pytest.raises(ConfigError, match="region of node 'one'"):
        NodeConfig("one", "127.0.0.1", 7400, region=region)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, 17, True])
def test_a_number_of_regions_has_its_range(number: int) -> None:
    with pytest.raises(ConfigError, match="min_regions in \\[cluster\\]"):
        config(TRIANGLE, min_regions=number)


def test_the_triangle_survives_the_loss_of_each_region() -> None:
    verdicts = survey(layout())
    assert [verdict.lost for verdict in verdicts] == [("a",), ("b",), ("c",)]
    assert all(verdict.is_survived for verdict in verdicts)
    assert warnings(layout()) == []


def test_a_service_in_one_region_has_no_majority_without_it() -> None:
    found = {verdict.lost: verdict for verdict in survey(layout(mms=("a", "a", "b")))}
    assert not found["a",].services
    assert "1 of 3 nodes of the membership service are left" in found["a",].why[0]
    assert found["b",].is_survived
    handlers = layout(failure_handlers=("c",))
    assert [verdict.services for verdict in survey(handlers)] == [True, True, False]
    assert any("if c is lost: 0 of 1 nodes of the failure" in text for text in warnings(handlers))


def test_writes_need_a_shard_without_a_server_in_the_lost_region() -> None:
    found = survey(layout(shards={0: ("a", "b", "c"), 1: ("b", "c", "a")}))
    assert [(one.services, one.writes, one.kept, one.readers) for one in found] == [
        (True, False, True, True)
    ] * 3
    leaving = survey(layout(removed=frozenset({1})))
    assert [verdict.writes for verdict in leaving] == [False, True, True]


def test_a_shard_within_a_lost_region_stops_readers() -> None:
    found = survey(layout(shards={**TRIANGLE, 3: ("b", "b")}, min_regions=1))
    lost = {verdict.lost: verdict for verdict in found}
    assert (lost["b",].kept, lost["b",].readers) == (False, False)
    assert "all servers of shard 3 are in b" in lost["b",].why[0]
    assert lost["a",].is_survived


def test_two_lost_servers_of_three_leave_no_confirmed_view() -> None:
    five = ("a", "b", "c", "d", "e")
    shards = {i: tuple(five[(i + j) % 5] for j in range(3)) for i in range(5)}
    found = survey(Layout(five, five, shards, 3))
    assert len(found) == 5 + 10
    assert all(verdict.is_survived for verdict in found[:5])
    ab = next(verdict for verdict in found if verdict.lost == ("a", "b"))
    assert (ab.services, ab.writes, ab.kept, ab.readers) == (True, True, True, False)


def test_unlabelled_nodes_beside_labelled_ones_are_warned_of() -> None:
    found = warnings(layout_of(config({0: ("a", "b"), 1: ("b", "c"), 2: ("c", None)})))
    assert found == ["some nodes have no region: they count as one region of their own"]


@pytest.mark.parametrize(("epoch_ms", "rtt_ms", "count"), [(1, 40, 1), (2, 40, 0), (1, 0, 0)])
def test_epochs_of_a_millisecond_over_a_wan_are_warned_of(
    epoch_ms: int, rtt_ms: int, count: int
) -> None:
    assert len(config_warnings(config(TRIANGLE, epoch_ms=epoch_ms, rtt_ms=rtt_ms))) == count


def test_a_shard_that_is_over_does_not_count() -> None:
    node = {"region": "b"}
    former = {"id": 0, "state": "finalized", "replicas": [{"region": "a"}] * 2}
    document = {"mms": [node], "failure_handlers": [node], "min_regions": 1}
    assert layout_of_status(document | {"shards": [former]}).regions == ("a", "b")
    over = layout_of_status(document | {"shards": [former | {"is_over": True}]})
    assert (over.regions, over.shards) == (("b",), {})


def test_a_shard_that_became_narrow_is_warned_of() -> None:
    found = warnings(layout(shards={**TRIANGLE, 3: ("b", "b")}))
    assert any("shard 3 spans 1 of 2 regions (b)" in text for text in found)


def test_three_regions_are_planned_as_a_triangle() -> None:
    assert plan(["a", "b", "c"], 1, {}) == list(TRIANGLE.values())


def test_the_nearest_regions_are_paired() -> None:
    rtt = {frozenset("ab"): 40.0, frozenset("bc"): 80.0, frozenset("ac"): 120.0}
    assert plan(["a", "b", "c"], 1, rtt) == [("a", "b"), ("b", "a"), ("c", "b"), ("c", "a")]


@given(st.integers(1, 3), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_plan_leaves_a_shard_whichever_region_is_lost(f: int, more: int, rng: object) -> None:
    names = [f"r{i}" for i in range(f + 1 + more)]
    pairs = [(a, b) for a in names for b in names if a < b]
    rtt = {frozenset(pair): rng.uniform(1, 200) for pair in pairs}  # type: ignore[attr-defined]
    shards = plan(names, f, rtt)
    assert [shard[0] for shard in shards[: len(names)]] == names
    assert all(len(set(shard)) == f + 1 for shard in shards)
    found = survey(Layout(tuple(names), (), dict(enumerate(shards)), 1))
    for verdict in found[: len(names)]:
        assert verdict.kept
        assert verdict.readers
        assert verdict.writes == (more > 0)


@pytest.mark.parametrize(("names", "f"), [(["a", "b"], 2), (["a"], 1), (["a", "a", "b"], 1)])
def test_a_plan_needs_enough_different_regions(names: list[str], f: int) -> None:
    with pytest.raises(ConfigError, match="regions"):
        plan(names, f, {})
