"""`ziplog cursor`: named positions that the membership service keeps."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ziplog.cli import known_names, rendering
from ziplog.cli.options import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    Json,
    Timeout,
    connect,
    is_terminal,
    say,
)
from ziplog.cli.positions import FORMS, parse
from ziplog.cli.tables import stdout, table
from ziplog.cli.terminal import counted, print_json
from ziplog.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import ziplog
    from ziplog.types import CursorInfo

app: Final = typer.Typer(
    help="Named positions with an owner, for programs that read the log.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
#: A verb whose positions may begin with "-".
_SIGNED: Final = {"ignore_unknown_options": True}
#: Maximum number of records between two flushes, and time between two looks at the end.
_BATCH: Final = 1000
_POLL_S: Final = 0.2

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The cursor's name.", autocompletion=known_names.cursors),
]
Pattern = Annotated[
    str,
    typer.Argument(
        metavar="PATTERN",
        help="A name, or several: 'orders/*'.",
        autocompletion=known_names.cursors,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.command("list")
def list_cursors(
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", autocompletion=known_names.cursors)
    ] = "*",
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """List cursors; --json: one line for each.

    States: owned, free, paused. A cursor that holds keeps the records from its position on from
    being trimmed. A silent owner did not renew its claim for its lease: another client may claim
    the cursor.
    """
    with connect(bootstrap, timeout) as log:
        found = log.cursors(pattern)
    if json:
        for cursor in found:
            _print(cursor)
        return
    shown = table("name", "state", "position", "owner", "moved", "holds")
    for cursor in found:
        moved = cursor.moved_at.isoformat(timespec="seconds") if cursor.moved_at else "-"
        shown.add_row(
            cursor.name, cursor.state, str(cursor.position), _owner(cursor), moved,
            "yes" if cursor.is_holding else "no",
        )  # fmt: skip
    stdout().print(shown)


@app.command("create")
def create(
    name: Name,
    start: Annotated[str, typer.Option("--start", metavar=FORMS, help="Its position.")] = "genesis",
    hold_s: Annotated[
        int,
        typer.Option(
            "--hold-s",
            min=0,
            metavar="N",
            help="It holds trims until unused for N seconds; 0: it holds none.",
        ),
    ] = 604_800,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Create a cursor that no program owns yet. `recent` is after the last record."""
    find = parse(start, "--start")
    with connect(bootstrap, timeout) as log:
        made = log.create_cursor(name, find(log), hold_s=hold_s)
    _report(made, f"created cursor {name} at {made.position}", json=json)


@app.command("pause")
def pause(
    pattern: Pattern,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="POSITION", help="Go on up to this position. [default: none]"),
    ] = None,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Have the owners of cursors read no further, within a third of their leases."""
    find = None if at is None else parse(at, "--at", excluded=("recent",))
    with connect(bootstrap, timeout) as log:
        position = None if find is None else find(log)
        for name in _matching(log, pattern):
            _report(log.pause_cursor(name, position), f"paused cursor {name}", json=json)


@app.command("resume")
def resume(
    pattern: Pattern,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """End the pause of cursors."""
    with connect(bootstrap, timeout) as log:
        for name in _matching(log, pattern):
            _report(log.resume_cursor(name), f"resumed cursor {name}", json=json)


@app.command("release")
def release(
    name: Name,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Take a cursor from its owner, so that another program can claim it at once."""
    with connect(bootstrap, timeout) as log:
        _report(log.release_cursor(name), f"released cursor {name}", json=json)


@app.command("seek", context_settings=_SIGNED)
def seek(
    pattern: Pattern,
    position: Annotated[str, typer.Argument(metavar="POSITION", help=f"{FORMS}.")],
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Set the positions of cursors, forward or back; their owners lose them.

    `genesis` is the first position that is not trimmed, `recent` is after the last record.
    """
    find = parse(position, "POSITION")
    with connect(bootstrap, timeout) as log:
        rid = find(log)
        for name in _matching(log, pattern):
            moved = log.seek_cursor(name, rid)
            _report(moved, f"set cursor {name} to {moved.position}", json=json)


@app.command("delete")
def delete(
    pattern: Pattern,
    *,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Delete cursors; ask on a terminal. Their owners lose them."""
    with connect(bootstrap, timeout) as log:
        names = _matching(log, pattern)
        if not yes and is_terminal():
            question = f"Delete {counted(len(names), 'cursor')}: {', '.join(names)}?"
            typer.confirm(question, abort=True, err=True)
        for name in names:
            log.delete_cursor(name)
            say(f"deleted cursor {name}")


@app.command("read")
def read(
    name: Name,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Stop after N records.")
    ] = None,
    *,
    commit: Annotated[
        bool, typer.Option("--commit", help="Move the cursor behind what stdout took.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for new records until Ctrl-C.")
    ] = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Claim a cursor, and print the records from its position on, as `ziplog tail` does.

    A cursor that does not exist is created at the first record; a message names it. Without
    --follow, the command ends at the end of the log, and fails after --timeout without a record,
    for example because the cursor is paused.
    """
    render = rendering.as_json if json else rendering.as_text
    out = sys.stdout.buffer
    with connect(bootstrap, timeout) as log:
        last = None if follow else log.check_tail().gsn
        is_new = not log.cursors(name)
        with log.cursor(name) as cursor:
            if is_new:
                say(
                    f"created cursor {name} at {cursor.position}, which holds trims;"
                    f" `ziplog cursor delete {name}` removes it"
                )
            for records in _batches(cursor, last, limit, timeout):
                out.writelines(map(render, records))
                out.flush()
                if commit:
                    cursor.commit_soon()


def _batches(
    cursor: ziplog.Cursor, last: int | None, limit: int | None, timeout: float
) -> Iterator[list[ziplog.Record]]:
    """Yield records up to position `last` (None: without end), at most `limit` of them.

    Raises:
        DeadlineError: position `last` was not reached, and no record came within `timeout` seconds.

    """
    left = limit
    heard = time.monotonic()
    while left != 0 and (last is None or cursor.reached.gsn <= last):
        most = _BATCH if left is None else min(_BATCH, left)
        records = cursor.fetch(most, timeout=_POLL_S)
        if records:
            yield records
            heard = time.monotonic()
        elif last is not None and time.monotonic() - heard > timeout:
            raise _silence(cursor, timeout)
        if left is not None:
            left -= len(records)


def _silence(cursor: ziplog.Cursor, timeout: float) -> DeadlineError:
    text = f"no record came within {timeout:g} s; the cursor {cursor.name} is at {cursor.reached}"
    if cursor.is_paused:
        text += f", and is paused: `ziplog cursor resume {cursor.name}` ends the pause"
    return DeadlineError(text)


def _matching(log: ziplog.Log, pattern: str) -> list[str]:
    """Return the names of the matching cursors.

    Raises:
        ConfigError: there is none.

    """
    names = [cursor.name for cursor in log.cursors(pattern)]
    if not names:
        missing = f"no cursor is named {pattern}; `ziplog cursor list` shows all"
        raise ConfigError("PATTERN", pattern, "the name of a cursor", message=missing)
    return names


def _report(cursor: CursorInfo, text: str, *, json: bool) -> None:
    if json:
        _print(cursor)
    else:
        say(text)


def _owner(cursor: CursorInfo) -> str:
    return f"{cursor.owner} (silent)" if cursor.is_silent else cursor.owner or "-"


def _print(cursor: CursorInfo) -> None:
    print_json(_document(cursor))


def _document(cursor: CursorInfo) -> dict[str, Any]:
    return {
        "name": cursor.name,
        "position": str(cursor.position),
        "gsn": cursor.position.gsn,
        "term": cursor.term,
        "state": cursor.state,
        "owner": cursor.owner or None,
        "moved_at": cursor.moved_at.isoformat() if cursor.moved_at is not None else None,
        "hold_s": cursor.hold_s,
        "is_holding": cursor.is_holding,
        "is_silent": cursor.is_silent,
        "seek": cursor.seek,
        "mark": cursor.mark.hex(),
    }
