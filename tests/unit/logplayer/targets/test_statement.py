"""Statements of SQL targets: named parameters in every driver's notation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logplayer.contract import Rejected
from logplayer.targets.statement import (
    PARAMETER_RULE,
    PARAMETERS,
    PARAMSTYLES,
    Paramstyle,
    positional,
    positional_row,
    translate,
)
from tests.unit.logplayer.targets.databases import record
from ziplog.errors import ConfigError

SQL = "INSERT INTO t VALUES (:gsn, :key, :gsn, '50%')"


@pytest.mark.parametrize(
    ("paramstyle", "sql", "row"),
    [
        ("qmark", "INSERT INTO t VALUES (?, ?, ?, '50%')", (3, b"k", 3)),
        ("numeric", "INSERT INTO t VALUES (:1, :2, :3, '50%')", (3, b"k", 3)),
        ("named", "INSERT INTO t VALUES (:gsn, :key, :gsn, '50%')", {"gsn": 3, "key": b"k"}),
        ("format", "INSERT INTO t VALUES (%s, %s, %s, '50%%')", (3, b"k", 3)),
        (
            "pyformat",
            "INSERT INTO t VALUES (%(gsn)s, %(key)s, %(gsn)s, '50%%')",
            {"gsn": 3, "key": b"k"},
        ),
    ],
)
def test_parameters_become_the_drivers(paramstyle: Paramstyle, sql: str, row: Any) -> None:
    statement = translate(SQL, paramstyle, "")
    assert (statement.sql, statement.row(record(3))) == (sql, row)
    assert statement.is_change


def test_every_parameter_has_the_value_of_its_field() -> None:
    one = record(3, "grün".encode(), "schlüssel".encode())
    statement = translate(f"SELECT {', '.join(f':{name}' for name in PARAMETERS)}", "named", "")
    assert statement.row(one) == {
        "gsn": 3, "shard": 1, "epoch": 0, "timestamp_us": one.timestamp_us,
        "timestamp": one.timestamp, "key": one.key, "key_text": "schlüssel",
        "payload": one.payload, "text": "grün",
    }  # fmt: skip
    assert not statement.is_change


def test_record_without_a_key_has_null() -> None:
    statement = translate("SELECT :key, :key_text", "qmark", "")
    assert statement.row(record(3, b"", None)) == (None, None)


@pytest.mark.parametrize(("name", "what"), [("key_text", "key"), ("text", "payload")])
def test_text_must_be_utf_8(name: str, what: str) -> None:
    statement = translate(f"SELECT :{name}", "qmark", "")
    with pytest.raises(Rejected, match=f"the {what} is not UTF-8, which :{name} needs"):
        statement.row(record(3, b"\xff", b"\xff"))


@pytest.mark.parametrize(
    "literal",
    [
        "'it''s :gsn or :nothing ? %s'",
        "E'it\\'s :nothing'",
        '"a column :nothing ? %s"',
        "`a column :nothing`",
        "-- a comment; :nothing ?\n",
        "/* a comment\n; :nothing ? */",
        "$$ a body; :nothing ? $$",
        "$tag$ a body :nothing $1 $tag$",
        "payload::jsonb",
        "list[1:2]",
    ],
)
def test_literals_comments_and_casts_stay(literal: str) -> None:
    statement = translate(f"SELECT {literal} , :gsn", "qmark", "")
    assert (statement.sql, statement.parameters) == (f"SELECT {literal} , ?", ("gsn",))


@pytest.mark.parametrize(
    "parameter", [":nothing", ":GSN", "?", "?1", "%s", "%(gsn)s", "$1", ":1", "@gsn", "$gsn"]
)
def test_other_parameters_are_refused_with_a_list(parameter: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(f"INSERT INTO t VALUES ({parameter})", "qmark", "target warehouse")
    assert str(caught.value).startswith("target warehouse: the statement has the parameter ")
    assert str(caught.value).endswith(PARAMETER_RULE)


def test_operators_of_the_database_stay() -> None:
    statement = translate("SELECT a ? 'b' % 2, :gsn", "format", "", operators=frozenset("?"))
    assert statement.sql == "SELECT a ? 'b' %% 2, %s"


@pytest.mark.parametrize("sql", ["", "  ", None, 5, "SELECT 1; SELECT 2"])
def test_statement_must_be_one(sql: Any) -> None:
    with pytest.raises(ConfigError, match="statement"):
        translate(sql, "qmark", "")


def test_semicolon_at_the_end_is_left_out() -> None:
    assert translate("DELETE FROM t WHERE gsn = :gsn ;\n", "qmark", "").sql.endswith("gsn = ? ")


@pytest.mark.parametrize("paramstyle", PARAMSTYLES)
def test_own_statements_are_in_the_drivers_notation(paramstyle: Paramstyle) -> None:
    values: dict[str, Any] = {
        "qmark": ("a = ? AND b = ?", (1, 2)),
        "numeric": ("a = :1 AND b = :2", (1, 2)),
        "named": ("a = :p1 AND b = :p2", {"p1": 1, "p2": 2}),
        "format": ("a = %s AND b = %s", (1, 2)),
        "pyformat": ("a = %(p1)s AND b = %(p2)s", {"p1": 1, "p2": 2}),
    }
    found = positional("a = ? AND b = ?", paramstyle), positional_row((1, 2), paramstyle)
    assert found == values[paramstyle]


@given(st.lists(st.sampled_from([":gsn", "'", '"', "--", "\n", "$$", "E'", "%", "::", " x "])))
def test_parameters_outside_of_literals_are_counted(parts: list[str]) -> None:
    sql = " ".join(["x", *parts])
    statement = translate(sql, "pyformat", "")
    assert statement.sql.count("%(gsn)s") == len(statement.parameters) <= parts.count(":gsn")
    assert statement.sql.replace("%(gsn)s", ":gsn").replace("%%", "%") == sql.rstrip()
