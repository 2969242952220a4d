"""Options of a load: read, refused with the nearest name, and free of contradictions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader.options import SERVERS, Options, parse
from ziplog.errors import ConfigError

HERE = {SERVERS: "127.0.0.1:7400"}
#: All options, in the order in which errors list them.
NAMES = (
    SERVERS, "path", "startingOffsets", "endingOffsets", "startingEpoch", "endingEpoch",
    "startingTimestamp", "endingTimestamp", "failOnDataLoss", "minPartitions", "maxBytesPerBatch",
    "timeout",
)  # fmt: skip


def asked(mode: Any = "batch", **options: str) -> Options:
    return parse(HERE | options, mode)


def test_without_options_the_whole_log_is_read() -> None:
    assert parse(HERE) == Options(servers="127.0.0.1:7400")


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("startingOffsets", "earliest", "start", None),
        ("startingOffsets", "17", "start", 17),
        ("startingOffsets", " 17@3 ", "start", 17),
        ("endingOffsets", "latest", "stop", None),
        ("endingOffsets", "18@0", "stop", 18),
        ("startingEpoch", "0", "first_epoch", 0),
        ("endingEpoch", "7", "last_epoch", 7),
        ("startingTimestamp", "1700000000123", "since_us", 1_700_000_000_123_000),
        ("startingTimestamp", "-1", "since_us", -1000),
        ("endingTimestamp", "1970-01-01T00:00:01.000001Z", "until_us", 1_000_001),
        ("endingTimestamp", "1970-01-01 01:00:00+01:00", "until_us", 0),
        ("endingTimestamp", "1970-01-02", "until_us", 86_400_000_000),
        ("failOnDataLoss", "FALSE", "fail_on_data_loss", False),
        ("minPartitions", "12", "min_partitions", 12),
        ("maxBytesPerBatch", "64m", "max_bytes_per_batch", 64 * 1024 * 1024),
        ("maxBytesPerBatch", "2G", "max_bytes_per_batch", 2 * 1024**3),
        ("maxBytesPerBatch", "4096", "max_bytes_per_batch", 4096),
        ("timeout", "2.5", "timeout_s", 2.5),
    ],
)
def test_each_option_is_read(name: str, text: str, field: str, value: object) -> None:
    for spelt in (name, name.lower(), name.upper()):
        assert getattr(parse(HERE | {spelt: text}), field) == value


def test_a_path_stands_for_the_servers() -> None:
    assert parse({"path": "/data"}) == Options(path="/data")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("startingOffsets", "first"),
        ("startingOffsets", "latest"),
        ("startingOffsets", "-1"),
        ("startingOffsets", "recent"),
        ("startingOffsets", str(2**63)),
        ("endingOffsets", "earliest"),
        ("endingOffsets", "7@"),
        ("startingEpoch", "-1"),
        ("endingEpoch", "1.0"),
        ("startingTimestamp", "yesterday"),
        ("failOnDataLoss", "no"),
        ("minPartitions", "0"),
        ("maxBytesPerBatch", "0"),
        ("maxBytesPerBatch", "64x"),
        ("timeout", "0"),
        ("timeout", "nan"),
        ("timeout", "soon"),
        ("path", " "),
    ],
)
def test_an_invalid_value_is_refused_with_the_name_of_its_option(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(HERE | {name: text})
    assert str(refused.value).startswith(f"{name} is {text!r}; it must be ")


@pytest.mark.parametrize(
    ("given_name", "closest_name"),
    [
        ("startingOfsets", "startingOffsets"),
        ("endingoffset", "endingOffsets"),
        ("kafka.bootstrap.servers", "ziplog.bootstrap.servers"),
        ("maxOffsetsPerTrigger", "maxBytesPerBatch"),
        ("min_partitions", "minPartitions"),
        ("failondataloos", "failOnDataLoss"),
    ],
)
def test_an_unknown_option_is_refused_with_the_closest_name(
    given_name: str, closest_name: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(HERE | {given_name: "x"})
    assert given_name in str(refused.value)
    assert repr(closest_name) in str(refused.value)


def test_an_option_without_a_similar_name_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match="unknown option 'includeHeaders'") as refused:
        parse(HERE | {"includeHeaders": "true"})
    assert refused.value.allowed == f"left out; there are {', '.join(NAMES)}"


@pytest.mark.parametrize("name", ["subscribe", "subscribePattern", "assign", "topic"])
def test_topic_options_are_refused_because_a_log_has_none(name: str) -> None:
    with pytest.raises(ConfigError, match="left out, because a cluster is one log without topics"):
        parse(HERE | {name: "events"})


@pytest.mark.parametrize(
    "options",
    [
        {"path": "/data"},
        {"startingOffsets": "1", "startingEpoch": "0"},
        {"endingOffsets": "9", "endingEpoch": "0"},
        {"startingOffsets": "9", "endingOffsets": "8"},
        {"startingEpoch": "9", "endingEpoch": "8"},
        {"startingTimestamp": "9", "endingTimestamp": "8"},
    ],
)
def test_contradictions_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        asked(**options)


def test_errors_show_times_in_the_given_unit() -> None:
    with pytest.raises(ConfigError, match=r"endingTimestamp is 8; .* 'startingTimestamp', 9 ms"):
        asked(startingTimestamp="9", endingTimestamp="8")


def test_an_empty_range_is_allowed() -> None:
    assert asked(startingOffsets="9", endingOffsets="9").stop == 9


def test_servers_or_a_path_are_required() -> None:
    with pytest.raises(ConfigError, match=r"ziplog\.bootstrap\.servers"):
        parse({})


def test_a_stream_may_start_at_latest_and_has_no_end() -> None:
    assert asked("stream", startingOffsets="Latest").starts_at_latest
    assert asked("stream", startingOffsets="5").start == 5
    for ending in ({"endingOffsets": "0"}, {"endingEpoch": "5"}):
        with pytest.raises(ConfigError, match=next(iter(ending))):
            asked("stream", **ending)
    with pytest.raises(ConfigError, match="startingOffsets"):
        asked("stream", startingOffsets="latest", startingEpoch="1")


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=20)))
def test_any_options_are_accepted_or_refused(options: dict[str, str]) -> None:
    try:
        found = parse(options)
    except ConfigError:
        return
    assert bool(found.servers) != bool(found.path)
    assert found.start is None or found.first_epoch is None
    assert found.stop is None or found.last_epoch is None
    assert found.stop is None or found.start is None or found.start <= found.stop
