"""Write options: allowed values, and errors."""

from __future__ import annotations

import pytest

from spark_reader.write_options import Columns, columns, parse
from ziplog.errors import ConfigError

SERVERS = {"ziplog.bootstrap.servers": "127.0.0.1:7400"}


def test_a_write_needs_only_servers() -> None:
    options = parse(SERVERS, stream=False)
    assert (options.servers, options.timeout_s) == ("127.0.0.1:7400", 10)
    assert (options.value_column, options.key_column) == ("value", None)
    assert (options.policy, options.exactly_once, options.identity) == (None, True, None)


def test_option_names_are_case_insensitive() -> None:
    given = {
        "ZIPLOG.Bootstrap.Servers": "h:1",
        "VALUECOLUMN": "a",
        "keycolumn": "b",
        "Policy": "KEY",
    }
    options = parse(given, stream=False)
    assert (options.value_column, options.key_column, options.policy) == ("a", "b", "key")


@pytest.mark.parametrize(
    ("text", "policy"), [("partition", "partition"), ("key", "key"), ("0", 0), (" 17 ", 17)]
)
def test_policies(text: str, policy: object) -> None:
    assert parse({**SERVERS, "policy": text}, stream=False).policy == policy


def test_options_that_spark_adds_are_ignored() -> None:
    assert parse({**SERVERS, "checkpointlocation": "/x"}, stream=True).timeout_s == 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "ziplog.bootstrap.servers is None"),
        ({"ziplog.bootstrap.servers": "nowhere"}, "ziplog.bootstrap.servers is 'nowhere'"),
        ({**SERVERS, "keycolum": "k"}, "unknown option 'keycolum'.*'keyColumn' is meant"),
        (
            {**SERVERS, "startingOffsets": "1"},
            "option 'startingOffsets' is '1'.*only reads have it",
        ),
        ({**SERVERS, "path": "/d"}, "option 'path' is '/d'.*left out, because only reads have it"),
        ({**SERVERS, "policy": "round"}, "policy is 'round'.*'partition', 'key' or the number"),
        ({**SERVERS, "policy": "-1"}, "policy is '-1'"),
        ({**SERVERS, "policy": str(2**31)}, "policy is '2147483648'"),
        ({**SERVERS, "timeout": "0"}, "timeout is '0'"),
        ({**SERVERS, "timeout": "nan"}, "timeout is 'nan'"),
        ({**SERVERS, "timeout": "86401"}, "timeout is '86401'.*at most 86400"),
        ({**SERVERS, "timeout": "soon"}, "timeout is 'soon'"),
        ({**SERVERS, "exactlyOnce": "no"}, "exactlyOnce is 'no'.*true or false"),
        (
            {**SERVERS, "queryId": "q", "batchId": "1", "exactlyOnce": "False"},
            "queryId is 'q'.*left out if exactlyOnce is false",
        ),
        ({**SERVERS, "queryId": "q"}, "batchId is None.*together with queryId"),
        ({**SERVERS, "batchId": "1"}, "queryId is None.*together with batchId"),
        ({**SERVERS, "queryId": "q", "batchId": "one"}, "batchId is 'one'"),
        ({**SERVERS, "queryId": "q", "batchId": str(2**63)}, "batchId is '9223372036854775808'"),
    ],
)
def test_an_invalid_option_is_reported_in_one_line(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(options, stream=False)
    assert "\n" not in str(caught.value)


def test_a_query_id_is_allowed_for_batches_only() -> None:
    named = {**SERVERS, "queryId": "nightly", "batchId": "7"}
    assert parse(named, stream=False).identity == ("nightly", 7)
    with pytest.raises(ConfigError, match=r"queryId is 'nightly'.*left out"):
        parse(named, stream=True)


SCHEMA = [("id", "bigint"), ("Key", "string"), ("value", "binary")]


def test_columns_are_found_by_name() -> None:
    assert columns(parse(SERVERS, stream=False), SCHEMA) == Columns(2, 1)
    assert columns(parse(SERVERS, stream=False), SCHEMA[2:]) == Columns(0, None)
    swapped = parse({**SERVERS, "valueColumn": "KEY", "keyColumn": "value"}, stream=False)
    assert columns(swapped, SCHEMA) == Columns(1, 2)


@pytest.mark.parametrize(
    ("options", "schema", "says"),
    [
        ({}, SCHEMA[:2], "valueColumn is 'value'.*there are id, Key"),
        ({"valueColumn": "id"}, SCHEMA, "the type of column id is 'bigint'.*binary or string"),
        ({"keyColumn": "k"}, SCHEMA, "keyColumn is 'k'.*there are id, Key, value"),
        ({"keyColumn": "id"}, SCHEMA, "the type of column id is 'bigint'"),
        ({"policy": "key"}, SCHEMA[2:], "policy is 'key'.*there are value"),
        ({}, [*SCHEMA, ("VALUE", "string")], "valueColumn is 'value'.*exactly one column"),
    ],
)
def test_invalid_columns_are_reported(
    options: dict[str, str], schema: list[tuple[str, str]], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        columns(parse(SERVERS | options, stream=False), schema)
