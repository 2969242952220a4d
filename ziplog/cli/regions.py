"""`ziplog region`: the regions of a cluster, what their loss leaves, lost ones, planned files."""

from __future__ import annotations

import re
import sys
from itertools import count
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import print_json
from ziplog.config import SUSPICION_ROUND_TRIPS, ClusterConfig, NodeConfig, ShardConfig, load
from ziplog.config_text import dump
from ziplog.core.nearness import named
from ziplog.errors import ConfigError
from ziplog.regions import layout_of, layout_of_status, survey, warnings
from ziplog.regions import plan as planned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

app: Final = typer.Typer(
    help="Show regions, check what their loss leaves, give lost ones up, plan a cluster file.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_RegionName = Annotated[
    str, typer.Argument(metavar="NAME", help='A region; "": the nodes without one.')
]

_HOST: Final = "127.0.0.1"
_FIRST_PORT: Final = 7400
_RTT: Final = re.compile(r"[^=]+-[^=]+=\d+(\.\d+)?", re.ASCII)


@app.command("list")
def list_regions(
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """List the regions of the cluster's nodes; --json: one line for each.

    States: up (all nodes are up), degraded (some are), away (none is), lost (`ziplog region lost`).
    """
    with connect(bootstrap, timeout) as log:
        found = log.regions()
    if json:
        for name, region in found.items():
            document = {"region": name, **region._asdict()}
            print_json(document)
        return
    shown = table("region", "state", "primary of", "replicas of")
    for name, region in found.items():
        numbers = [", ".join(map(str, shards)) for shards in (region.shards, region.replicas)]
        shown.add_row(*(cell(value) for value in (named([name]), region.state, *numbers)))
    stdout().print(shown)


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(help="A cluster file. [default: the running cluster]")
    ] = None,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Show what still works without each region, and each set of regions that may be lost.

    Exit code 1: without some region, inserts or readers stop until it is back.
    """
    if file is not None:
        layout = layout_of(load(file))
    else:
        with connect(bootstrap, timeout) as log:
            layout = layout_of_status(log.cluster())
    verdicts = survey(layout)
    if json:
        for verdict in verdicts:
            print_json(verdict)
    else:
        shown = table("lost", "services", "inserts", "records", "readers")
        for verdict in verdicts:
            checks = (verdict.services, verdict.writes, verdict.kept, verdict.readers)
            shown.add_row(cell(named(verdict.lost)), *("yes" if one else "no" for one in checks))
        stdout().print(shown)
    for warning in warnings(layout):
        say(warning)
    if not all(verdict.is_survived for verdict in verdicts if len(verdict.lost) == 1):
        raise typer.Exit(1)


@app.command()
def lost(
    name: _RegionName,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Give up a region, so that readers continue without its servers.

    Refused, with the names, if one of its storage servers was heard within the last 10 s. A shard
    with more than one server in lost regions then survives fewer failures. This ends with `ziplog
    region back`, or once all servers of the region are in service again.
    """
    with connect(bootstrap, timeout) as log:
        log.lose_region(name)
    if json:
        print_json({"region": name, "lost": True})
    else:
        say(f"region {named([name])} is given up; `ziplog region back` ends that")


@app.command()
def back(
    name: _RegionName,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Let a region count again that was given up; its servers need not run yet."""
    with connect(bootstrap, timeout) as log:
        log.restore_region(name)
    if json:
        print_json({"region": name, "lost": False})
    else:
        say(f"region {named([name])} is not given up; views need its servers again")


@app.command()
def plan(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The regions.")],
    *,
    f: Annotated[
        int, typer.Option("--f", min=1, max=15, help="Failures that a shard's records survive.")
    ] = 1,
    rtt: Annotated[
        list[str] | None,
        typer.Option("--rtt", metavar="A-B=MS", help="A round trip between two regions, in ms."),
    ] = None,
    shards_per_pair: Annotated[
        int, typer.Option("--shards-per-pair", min=1, help="Copies of each planned shard.")
    ] = 1,
) -> None:
    """Print a cluster file for regions: each has a primary, and pairs of near regions share shards.

    All hosts are 127.0.0.1: replace them by the machines of each region.
    """
    trips = dict(_round_trip(text, names) for text in rtt or ())
    rtt_ms = ceil(max(trips.values(), default=0))
    ports = count(_FIRST_PORT)
    shards = [shard for shard in planned(names, f, trips) for _ in range(shards_per_pair)]
    config = ClusterConfig(
        name="log",
        data_dir=Path("data"),
        f=f,
        rtt_ms=rtt_ms,
        suspicion_ms=max(ClusterConfig.suspicion_ms, SUSPICION_ROUND_TRIPS * rtt_ms),
        mms=tuple(_services("mms", names, ports)),
        failure_handlers=tuple(_services("fh", names, ports)),
        shards=tuple(
            ShardConfig(
                number,
                tuple(
                    NodeConfig(f"shard-{number}-{i}", _HOST, next(ports), region=region)
                    for i, region in enumerate(regions)
                ),
            )
            for number, regions in enumerate(shards)
        ),
    )
    sys.stdout.write(dump(config))
    for warning in warnings(layout_of(config)):
        say(warning)
    say("replace each host 127.0.0.1 by a machine of its region")
    if not rtt_ms:
        say("set rtt_ms to the longest round trip between two machines, or give it with --rtt")


def _services(kind: str, names: Sequence[str], ports: Iterator[int]) -> Iterator[NodeConfig]:
    """Return the nodes of a service: 5 in five or more regions, else 3."""
    for index in range(5 if len(names) >= 5 else 3):
        region = names[index % len(names)]
        yield NodeConfig(f"{kind}-{index}", _HOST, next(ports), next(ports), region=region)


def _round_trip(text: str, names: Sequence[str]) -> tuple[frozenset[str], float]:
    """Return two regions and their round trip in ms.

    Raises:
        ConfigError: it is not A-B=MS with two of the regions.

    """
    pairs = [(first, second) for first in names for second in names if first != second]
    ends, _, ms = text.rpartition("=")
    found = next((pair for pair in pairs if "-".join(pair) == ends), None)
    if found is None or _RTT.fullmatch(text) is None:
        raise ConfigError("--rtt", text, "A-B=MS, with two of the regions and milliseconds")
    return frozenset(found), float(ms)
