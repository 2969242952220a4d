"""The commands `ziplog kv`: read and write a LogDB database from the shell.

As in `ziplog.cli`, stdout carries data only. A text value is printed as it is, any other value as
JSON (`logdb/cli/json_values.py`). --json prints every value as JSON, without loss.
"""

from __future__ import annotations

import enum
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import logdb
from logdb.cli import json_values, status_text
from logdb.cli.transaction_script import ABSENT, CheckFailedError, Operation, execute, parse
from logdb.defaults import COORDINATOR, VARIABLE
from logdb.values import encode_key
from ziplog.cli.options import Timeout, say, stdin
from ziplog.cli.progress import waiting
from ziplog.cli.terminal import one_line, shown, shown_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.types import RecordId

#: Allows arguments that begin with "-", such as the value -5.
_ANY_WORD: Final = {"ignore_unknown_options": True}

app: Final = typer.Typer(
    help="Keys and values of LogDB, the database on the log.",
    epilog='JSON of other types: bytes are {"$base64": ...}; see docs/logdb.md.',
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
Exact = Annotated[bool, typer.Option("--json", help="Print every value as JSON.")]
#: Everywhere else --json is about what is printed; the former spelling stays.
Given = Annotated[
    bool, typer.Option("--json-values", "--json", help="Values given are JSON, not text.")
]


class Format(enum.StrEnum):
    """The form of a write's result; --json-values is the form of its value."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Format, typer.Option("--format", help="Form of the result.")]


def connect(coordinators: str, timeout: float) -> logdb.Database:
    """Connect a command's client."""
    with waiting(f"connecting to {coordinators}"):
        return logdb.connect(coordinators, timeout=timeout)


@app.command()
def get(
    key: Key,
    *,
    json: Exact = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Print a key's value and a newline. Exit code 1: the key does not exist.

    On a terminal, control characters in text are escaped.
    """
    with connect(coordinator, timeout) as db:
        value = db.get(key, ABSENT)
    if value is ABSENT:
        say(f"key {key!r} does not exist")
        raise typer.Exit(1)
    _print(_json(value) if json else shown(_text(value)))


@app.command(context_settings=_ANY_WORD)
def put(
    key: Key,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Its value, as text.")],
    *,
    json: Given = False,
    output: Output = Format.TEXT,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Set a key's value; print the position of the commit."""
    given = _parse_value(value, "VALUE", json=json)
    with connect(coordinator, timeout) as db:
        position = db.put(key, given)
    _print_commit(position, output)


@app.command()
def delete(
    key: Key,
    *,
    output: Output = Format.TEXT,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Delete a key, whether or not it exists; print the position of the commit."""
    with connect(coordinator, timeout) as db:
        position = db.delete(key)
    _print_commit(position, output)


@app.command(context_settings=_ANY_WORD)
def cas(
    key: Key,
    expected: Annotated[str, typer.Argument(metavar="EXPECTED", help="The value required now.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new value.")],
    *,
    json: Given = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Set a key's value if it is EXPECTED. Exit code 1: it is not, and nothing changes.

    With --json-values, an EXPECTED of null also matches an absent key.
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
        str | None,
        typer.Option("--prefix", help="Keys that begin with this, instead of --start and --stop."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, metavar="N", help="At most N keys.")
    ] = None,
    *,
    json: Exact = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Print keys and values of one state in key order: the key, a tab, the value.

    --json prints one object {"key": ..., "value": ...} per line.
    """
    first, last, common = (
        None if key is None else encode_key(key) for key in (start, stop, prefix)
    )
    if common is None and first is None:
        first = b""  # a bytes bound returns keys as bytes
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
    """Print a key's present state, and each later one: its version, a tab, the value.

    An absent key is printed as 0 alone. --json prints {"version": ..., "value": ...}, without the
    value if the key is absent. Ctrl-C stops it; --timeout applies to connecting.
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
    """Run a script as one transaction; print what it read once it has committed.

    One JSON object per line: {"get": KEY}, {"put": [KEY, VALUE]}, {"delete": KEY}, or {"check":
    [KEY, VALUE]}. If a checked key has another value (null: if it exists), nothing is written, and
    the exit code is 1. After a conflict the script is run again.

    For each get it prints the key, a tab, and the value; for an absent key, the key alone. --json
    prints {"key": ..., "value": ...}, without the value if the key is absent.
    """
    with stdin() if file == Path("-") else file.open("rb") as source:
        name = "stdin" if file == Path("-") else str(file)
        script = parse(source.read().decode(errors="surrogateescape"), name)
    for key, value in _execute(script, coordinator, timeout):
        _print(_row(key, value, json=json))


@app.command()
def status(
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the JSON document.")] = False,
    coordinator: Coordinators = COORDINATOR,
    timeout: Timeout = 10.0,
) -> None:
    """Show the status of the coordinator that replies; its fields are in docs/logdb.md."""
    with connect(coordinator, timeout) as db:
        document = db.status()
    if json:
        _print(_json(document))
        return
    for line in status_text.lines(document):
        _print(one_line(line))


def _execute(
    script: Sequence[Operation], coordinators: str, timeout: float
) -> list[tuple[bytes, Any]]:
    """Run a script as one transaction; return what it read, or raise the check that failed."""
    with connect(coordinators, timeout) as db:
        read = db.run(lambda transaction: execute(script, transaction))
    if isinstance(read, CheckFailedError):
        raise read
    return read


def _print_commit(position: RecordId, output: Format) -> None:
    line = {"position": str(position), "gsn": position.gsn, "shard": position.shard}
    _print(_json(line) if output is Format.JSON else str(position))


def _print(line: str) -> None:
    sys.stdout.buffer.write(f"{line}\n".encode())


def _parse_value(text: str, name: str, *, json: bool) -> Any:
    return json_values.decode(text, name) if json else text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return shown_json(json_values.encode(value))


def _columns(first: str, value: Any) -> str:
    """Return one line for any value; --json is the exact form."""
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
