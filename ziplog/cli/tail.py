"""`ziplog tail`: records in log order, filtered and formatted."""

from __future__ import annotations

import itertools
import re
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

import ziplog
from ziplog.cli import known_names, rendering
from ziplog.cli.options import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    Json,
    Region,
    Timeout,
    connect,
    typed_bytes,
)
from ziplog.cli.positions import FORMS, is_fixed, parse, parse_stop
from ziplog.errors import ConfigError, TrimmedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ziplog.types import Event

T = TypeVar("T")

#: Interval between two checks whether `--follow` has reached the position of `--to`, in seconds.
_CHECK_S: Final = 0.25

Start = Annotated[
    str | None,
    typer.Option("--from", metavar=FORMS, help="Start here (inclusive), not at the first record."),
]
Stop = Annotated[
    str | None, typer.Option("--to", metavar="POSITION", help="Stop before this position.")
]
Last = Annotated[
    int | None, typer.Option("--last", min=1, metavar="N", help="Only the last N records.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="N", help="Stop after N records.")
]
Key = Annotated[str | None, typer.Option("--key", help="Only records with this key.")]
KeyPrefix = Annotated[
    str | None, typer.Option("--key-prefix", help="Only keys that begin with this.")
]
Grep = Annotated[str | None, typer.Option("--grep", metavar="RE", help="Only payloads that match.")]
Shards = Annotated[
    list[int] | None,
    typer.Option(
        "--shard",
        min=0,
        metavar="N",
        help="Only this shard's records; may be repeated.",
        autocompletion=known_names.shards,
    ),
]
Pattern = Annotated[
    str | None, typer.Option("--format", metavar="F", help="For example '%r %T %k %v'.")
]
KeysOnly = Annotated[bool, typer.Option("--keys-only", help="Print keys, without payloads.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for new records until Ctrl-C.")]
Speculative = Annotated[
    bool, typer.Option("--speculative", help="Print events of early delivery; needs --follow.")
]


def tail(
    start: Start = None,
    to: Stop = None,
    last: Last = None,
    limit: Limit = None,
    key: Key = None,
    key_prefix: KeyPrefix = None,
    grep: Grep = None,
    shard: Shards = None,
    pattern: Pattern = None,
    region: Region = None,
    *,
    keys_only: KeysOnly = False,
    follow: Follow = False,
    speculative: Speculative = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    r"""Print records in log order: rid, a tab, the payload as text.

    Control characters are escaped; --json is exact. A POSITION is a gsn, a rid, genesis, recent,
    end, -N (the last N records), @TIME (ISO 8601, or ago: @10m, @2h, @1d) or epoch:N.

    --format: %r rid, %g gsn, %s shard, %e epoch, %T time, %k key, %v payload, \t tab, \n new line.
    The client filters; --last and the positions count records before the filters, --limit after.

    Without --follow, all shards must report where the log ends; with --shard, only these. When a
    server has failed, the report comes once the next view of its shard has begun.

    --timeout limits the time to connect and to open the log, and without --follow, the time
    without a record. With --follow, the command waits for records without limit.

    --speculative prints records before they are final, from recent on if --from is not given. A
    line begins with: ? an early record, + a final one, = all records up to here are final, ! all
    records behind here are void.
    """
    if last is not None:
        if start is not None:
            raise ConfigError("--last", last, "left out if --from is given")
        start = f"-{last}"
    if speculative:
        _refuse_with_speculative(
            {
                "--to": to, "--last": last, "--limit": limit, "--key": key,
                "--key-prefix": key_prefix, "--grep": grep, "--format": pattern,
                "--keys-only": keys_only or None,
            },
            follow=follow,
        )  # fmt: skip
        start = start or "recent"
        find_start = parse(start, "--from")
        with connect(bootstrap, timeout, region) as log:
            speculate = partial(log.speculate, shards=shard)
            with _opened(speculate, find_start(log), must_exist=is_fixed(start)) as events:
                _print_events(events, rendering.event_as_json if json else rendering.event_as_text)
        return
    render = _renderer(pattern, keys_only=keys_only, json=json)
    accepts = _filters(key, key_prefix, grep)
    find = None if start is None else parse(start, "--from")
    find_stop = None if to is None else parse_stop(to)
    with connect(bootstrap, timeout, region) as log:
        end = None if find_stop is None else find_stop(log).gsn
        timeout_s = None if follow else timeout
        first = ziplog.RID_GENESIS if find is None else find(log)
        subscribe = partial(log.subscribe, follow=follow, shards=shard, timeout=timeout_s)
        must_exist = start is not None and is_fixed(start)
        with _opened(subscribe, first, must_exist=must_exist) as subscription:
            records = _until(_followed(subscription, end) if follow else subscription, end)
            chosen = (record for record in records if all(accept(record) for accept in accepts))
            sys.stdout.buffer.writelines(map(render, _first(chosen, limit)))


def _opened(
    open_at: Callable[[ziplog.RecordId], T], first: ziplog.RecordId, *, must_exist: bool
) -> T:
    """Open a reader at a position, or at the first one that was not trimmed."""
    while True:
        try:
            return open_at(first)
        except TrimmedError as error:
            if must_exist:
                raise
            first = error.first


def _renderer(
    pattern: str | None, *, keys_only: bool, json: bool
) -> Callable[[ziplog.Record], bytes]:
    given = [("--format", pattern is not None), ("--keys-only", keys_only), ("--json", json)]
    if pattern is not None:
        for name, is_given in given[1:]:
            if is_given:
                raise ConfigError(name, is_given, "left out if --format is given")
        return rendering.formatted(pattern)
    if keys_only:
        return rendering.key_as_json if json else rendering.key_as_text
    return rendering.as_json if json else rendering.as_text


def _filters(
    key: str | None, key_prefix: str | None, grep: str | None
) -> list[Callable[[ziplog.Record], bool]]:
    accepts: list[Callable[[ziplog.Record], bool]] = []
    if key is not None:
        wanted = typed_bytes(key)
        accepts.append(lambda record: record.key == wanted)
    if key_prefix is not None:
        prefix = typed_bytes(key_prefix)
        accepts.append(lambda record: record.key is not None and record.key.startswith(prefix))
    if grep is not None:
        try:
            expression = re.compile(typed_bytes(grep))
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError("--grep", grep, f"a regular expression ({error})") from None
        accepts.append(lambda record: expression.search(record.payload) is not None)
    return accepts


def _until(records: Iterable[ziplog.Record], end: int | None) -> Iterator[ziplog.Record]:
    if end is None:
        return iter(records)
    return itertools.takewhile(lambda record: record.rid.gsn < end, records)


def _first(records: Iterator[ziplog.Record], limit: int | None) -> Iterator[ziplog.Record]:
    """Yield the first `limit` records; None: all."""
    return itertools.islice(records, None if limit is None else min(limit, sys.maxsize))


def _followed(subscription: ziplog.Subscription, end: int | None) -> Iterator[ziplog.Record]:
    """Yield records, also after `end`; flush stdout before each wait for more of them.

    It stops once no record before `end` (None: never) can follow, if none comes after it.
    """
    pause_s = None if end is None else _CHECK_S
    while end is None or subscription.position.gsn < end:
        batch = subscription.fetch(timeout=pause_s)
        if not batch and end is None:
            return
        yield from batch
        sys.stdout.buffer.flush()


def _refuse_with_speculative(options: Mapping[str, object], *, follow: bool) -> None:
    """Refuse options that print no events.

    Raises:
        ConfigError: one of the options is given, or --follow is not.

    """
    for name, value in options.items():
        if value is not None:
            raise ConfigError(name, value, "left out if --speculative is given")
    if not follow:
        missing = "--speculative needs --follow"
        raise ConfigError("--follow", follow, "given with --speculative", message=missing)


def _print_events(events: ziplog.Speculation, render: Callable[[Event], bytes]) -> None:
    """Print events; flush after each batch."""
    out = sys.stdout.buffer
    while batch := events.fetch():
        out.writelines(map(render, batch))
        out.flush()
