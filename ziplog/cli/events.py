"""`ziplog events`: what happened in the cluster, with time, shard and node."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ziplog.cli import moments
from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect
from ziplog.cli.terminal import one_line, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable

_FOLLOW_S: Final = 1.0


def events(
    *,
    since: Annotated[
        str, typer.Option("--since", metavar=moments.FORMS, help="Only events from then on.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more.")] = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Print recoveries, views, losses, shards, trims, leaders, restarts and states of nodes.

    The membership service records the latest 500 events, with the time of its leader's clock.

    Example: ziplog events --since 1h
    """
    since_us = moments.moment_us("--since", since, time.time_ns() // 1000) if since else 0
    with connect(bootstrap, timeout) as log:
        last = 0
        while True:
            found = log.events(after=last)
            last = max((event["number"] for event in found), default=last)
            _print([event for event in found if event["at_us"] >= since_us], json=json)
            if not follow:
                return
            time.sleep(_FOLLOW_S)


def _print(found: Iterable[dict[str, Any]], *, json: bool) -> None:
    for event in found:
        at = moments.iso(event["at_us"])
        if json:
            line = {"number": event["number"], "time": at} | {
                name: event[name] for name in ("kind", "shard", "node", "text")
            }
            print_json(line)
        else:
            shard = f"shard {event['shard']}" if event["shard"] is not None else ""
            about = one_line(", ".join(filter(None, (shard, event["node"]))))
            sys.stdout.write(f"{at}  {event['kind']:9}{about:20}  {one_line(event['text'])}\n")
    sys.stdout.flush()
