"""`ziplog kv`: a database's keys and values from and to the shell.

Rules are those of `ziplog.cli`: stdout carries data and nothing else. A value that is text is
printed as it is, any other as JSON (`logdb/cli/json_values.py`); --json prints all as JSON, and
is exact.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import logdb
from logdb.cli import json_values
from logdb.cli.transaction_script import ABSENT, CheckFailedError, Operation, execute, parse
from logdb.defaults import COORDINATOR, VARIABLE
from logdb.values import encode_key
from ziplog.cli.options import Timeout, say
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import one_line, shown, shown_json

if TYPE_CHECKING:
    from collections.abc import Sequence

#: A word that begins with "-" may be a value: -5.
_ANY_WORD: Final = {"ignore_unknown_options": True}

app: Final = typer.Typer(
    help="Keys and values of LogDB, the database on the log.",
    epilog='JSON of values that it has no form for: bytes are {"$base64": ...}; see docs/logdb.md.',
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Coordinators = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar=VARIABLE,
        metavar="HOST:PORT",
        help="Coordinators (python -m logdb), separated by commas.",
    ),
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]
Exact = Annotated[bool, typer.Option("--json", help="Print JSON, whatever the value is.")]
Given = Annotated[bool, typer.Option("--json", help="Values are JSON, not text.")]


def connect(coordinators: str, timeout: float) -> logdb.Database:
    """Return a client for one verb."""
    return logdb.connect(coordinators, timeout=timeout)


@app.command()
def get(
    key: Key,
    *,
    json: Exact = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Print a key's value, and a line's end. Exit code 1: there is no such key.

    On a terminal, control characters in text are escaped.
    """
    with connect(coordinator, timeout) as db:
        value = db.get(key, ABSENT)
    if value is ABSENT:
        say(f"there is no key {key!r}")
        raise typer.Exit(1)
    _print(_json(value) if json else shown(_text(value)))


@app.command(context_settings=_ANY_WORD)
def put(
    key: Key,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Its value, as text.")],
    *,
    json: Given = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Set a key's value, whatever it was; prints the position of the commit."""
    given = _parse_value(value, "VALUE", json=json)
    with connect(coordinator, timeout) as db:
        position = db.put(key, given)
    _print(str(position))


@app.command()
def delete(key: Key, coordinator: Coordinators = COORDINATOR, timeout: Timeout = 10.0) -> None:
    """Make a key absent, whether or not it is; prints the position of the commit."""
    with connect(coordinator, timeout) as db:
        position = db.delete(key)
    _print(str(position))


@app.command(context_settings=_ANY_WORD)
def cas(
    key: Key,
    expected: Annotated[str, typer.Argument(metavar="EXPECTED", help="What it must be.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="What it becomes.")],
    *,
    json: Given = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Set a key's value if it is EXPECTED. Exit code 1: it is another one, and stays.

    With --json, an EXPECTED of null is a key that is absent, too.
    """
    before = _parse_value(expected, "EXPECTED", json=json)
    after = _parse_value(new, "NEW", json=json)
    name = encode_key(key)
    _execute(
        [Operation("check", name, before), Operation("put", name, after)], coordinator, timeout
    )


@app.command()
def scan(
    start: Annotated[str | None, typer.Option("--start", help="The first key.")] = None,
    stop: Annotated[str | None, typer.Option("--stop", help="Before this key.")] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="Instead: keys that begin with this.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, metavar="N", help="At most N keys.")
    ] = None,
    *,
    json: Exact = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Print keys and values in key order, all of one state: the key, a tab, the value.

    --json: {"key": ..., "value": ...} a line.
    """
    first, last, common = (
        None if key is None else encode_key(key) for key in (start, stop, prefix)
    )
    if common is None and first is None:
        first = b""  # so that keys come as bytes
    with connect(coordinator, timeout) as db:
        for key, value in db.scan(first, last, prefix=common, limit=limit):
            _print(_row(key, value, json=json))


@app.command()
def watch(
    key: Key,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Stop after N states.")
    ] = None,
    *,
    json: Exact = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Print a key's state, and each later one that is seen: its version, a tab, the value.

    Of a key that is absent: 0 alone. --json: {"version": ..., "value": ...}, or without the value.
    Ctrl-C ends it; --timeout is that of connecting.
    """
    with connect(coordinator, timeout) as db, db.watch(key, ABSENT) as states:
        for value in itertools.islice(states, limit):
            fields = {"version": states.version} | _value_field(value)
            _print(_json(fields) if json else _columns(str(states.version), value))
            sys.stdout.flush()


@app.command()
def txn(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The script; '-': stdin.")] = Path(
        "-"
    ),
    *,
    json: Exact = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Do a script as one transaction; prints what it read, once it is committed.

    One JSON object a line: {"get": KEY}, {"put": [KEY, VALUE]}, {"delete": KEY}, and {"check":
    [KEY, VALUE]}: if it is another value then (null: or is not absent), nothing is done, exit code
    1. If others were faster, it is done again.

    Prints the key, a tab, the value for each get, of one that is absent the key alone; --json:
    {"key": ..., "value": ...}, or without the value.
    """
    with sys.stdin.buffer if file == Path("-") else file.open("rb") as source:
        name = "stdin" if file == Path("-") else str(file)
        script = parse(source.read().decode(errors="surrogateescape"), name)
    for key, value in _execute(script, coordinator, timeout):
        _print(_row(key, value, json=json))


@app.command()
def status(
    *,
    json: Annotated[bool, typer.Option("--json", help="The document itself.")] = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Show how the coordinator is that answers; docs/logdb.md says what each line means."""
    with connect(coordinator, timeout) as db:
        document = db.status()
    if json:
        _print(_json(document))
        return
    shown = table("what", "is")
    for name, value in document.items():
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for part, one in parts:
            shown.add_row(name if part is None else f"{name}.{part}", cell(one))
    stdout().print(shown)


def _execute(
    script: Sequence[Operation], coordinators: str, timeout: float
) -> list[tuple[bytes, Any]]:
    """Do a script as one transaction; returns what it read, or raises the check that failed."""
    with connect(coordinators, timeout) as db:
        read = db.run(lambda transaction: execute(script, transaction))
    if isinstance(read, CheckFailedError):
        raise read
    return read


def _print(line: str) -> None:
    sys.stdout.buffer.write(f"{line}\n".encode())


def _parse_value(text: str, name: str, *, json: bool) -> Any:
    return json_values.decode(text, name) if json else text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return shown_json(json_values.encode(value))


def _columns(first: str, value: Any) -> str:
    """Return one line, whatever the value holds; --json is the exact form."""
    return first if value is ABSENT else f"{first}\t{one_line(_text(value))}"


def _value_field(value: Any) -> dict[str, Any]:
    return {} if value is ABSENT else {"value": value}


def _row(key: bytes, value: Any, *, json: bool) -> str:
    if not json:
        name = one_line(key.decode(errors="backslashreplace")).replace("\t", "\\t")
        return _columns(name, value)
    try:
        shown: str | bytes = key.decode()
    except UnicodeDecodeError:
        shown = key
    return _json({"key": shown} | _value_field(value))
