"""`ziplog check`: whether a cluster is well, one line for each check, for people and monitors."""

from __future__ import annotations

import enum
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, connect
from ziplog.cli.terminal import json_line, one_line
from ziplog.cli.upgrade import unfinished
from ziplog.core.units import NS_PER_S
from ziplog.errors import ZiplogError
from ziplog.monitor.rates import total
from ziplog.runtime.clock import now_ns
from ziplog.status_document import WELL, needed_shards, nodes_of, stalled_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ziplog.monitor.rates import NodeReply


class Level(enum.IntEnum):
    """How bad a finding is; the exit codes of monitoring plugins (Nagios)."""

    OK = 0
    WARNING = 1
    CRITICAL = 2


class Finding(NamedTuple):
    """The result of one check."""

    level: Level
    check: str
    text: str


class Format(enum.StrEnum):
    """The output's format."""

    TEXT = "text"
    JSON = "json"
    NAGIOS = "nagios"


#: Free space below this multiple of the reserve is a warning.
_LOW_DISK: Final = 2
#: Free space below which the disk of a node of the services is a warning.
_LOW_SERVICE_BYTES: Final = 256 << 20
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
#: How long to wait for the metrics of all nodes, in seconds.
_REPLIES_S: Final = 1.0
#: Lag of a server, and difference of a clock, above which it is a warning, in seconds.
_MAX_LAG_S: Final = 5.0
_MAX_CLOCK_S: Final = 2.0


def check(
    *,
    output: Annotated[
        Format, typer.Option("--format", help="One line for each check, or Nagios' one line.")
    ] = Format.TEXT,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, metavar="SECONDS", help="Time limit.")
    ] = 5.0,
) -> None:
    """Check the cluster: nodes, shards, disks, readers, losses, versions, files, lags, clocks.

    Exit code 0: all is well; 1: it is not. With --format nagios, 1: warning, 2: critical.
    """
    output = Format.JSON if json else output
    from ziplog.monitor.nodes import replies_of  # noqa: PLC0415 - slow to import

    try:
        with connect(bootstrap, timeout) as log:
            document = log.cluster()
        replies = replies_of(document, min(timeout, _REPLIES_S))
        clock_ns = time.time_ns() - now_ns()
        found = [*findings(document), *reply_findings(replies, clock_ns)]
    except ZiplogError as error:
        found = [Finding(Level.CRITICAL, "reachable", str(error))]
    worst = max(finding.level for finding in found)
    sys.stdout.write(_render(found, worst, output))
    raise typer.Exit(int(worst) if output is Format.NAGIOS else min(worst, 1))


def findings(document: dict[str, Any]) -> Iterator[Finding]:
    """Return the findings of all checks of a status document."""
    yield _services("membership", document["mms"])
    yield _services("failure handler", document["failure_handlers"])
    for shard in needed_shards(document):
        yield _shard(shard)
    yield from _disks(nodes_of(document))
    yield _readers(document)
    yield _losses(document)
    yield _versions(document)


def reply_findings(replies: Mapping[str, NodeReply | None], clock_ns: int) -> Iterator[Finding]:
    """Return the findings of what the nodes replied.

    Args:
        replies: of all nodes; None: it did not reply in time.
        clock_ns: the difference of this machine's clock to the times of the replies.

    """
    known = {name: reply for name, reply in replies.items() if reply is not None}
    yield from _files(known)
    name = "ziplog_replica_lag_seconds"
    lags = [
        (value.value, value.labels.get("peer", "a server"))
        for reply in known.values()
        for value in reply.metrics.values
        if value.name == name
    ]
    if lags:
        lag, server = max(lags)
        level = Level.WARNING if lag > _MAX_LAG_S else Level.OK
        yield Finding(level, "lags", f"backups are at most {lag:.1f} s behind ({server})")
    clocks = [
        (time_s - (reply.at + clock_ns) / NS_PER_S, node)
        for node, reply in known.items()
        if (time_s := total(reply.metrics, "ziplog_time_seconds")) is not None
    ]
    if clocks:
        ahead, node = max(clocks, key=lambda clock: abs(clock[0]))
        level = Level.WARNING if abs(ahead) > _MAX_CLOCK_S else Level.OK
        where = "ahead of" if ahead > 0 else "behind"
        text = f"at most {abs(ahead):.1f} s {where} this machine's ({node})"
        yield Finding(level, "clocks", text)


def _files(known: Mapping[str, NodeReply]) -> Iterator[Finding]:
    """Return a finding for each server with unreadable entries; if there is none, one for all."""
    counts = {node: total(reply.metrics, "ziplog_damaged_entries") for node, reply in known.items()}
    # A server counts no damage in sealed segments, but its attempts to repair that.
    failed = {
        node
        for node, reply in known.items()
        if total(reply.metrics, "ziplog_repairs_total", result="impossible")
    }
    damaged = {node: count for node, count in counts.items() if count or node in failed}
    for node, count in damaged.items():
        what = f"unreadable entries: {count:,.0f}" if count else "unreadable entries"
        outcome = ", and no other server could repair them" if node in failed else ""
        level = Level.CRITICAL if count and outcome else Level.WARNING
        yield Finding(level, f"files of {node}", f"{what}{outcome}; its log names them")
    if not damaged and any(count is not None for count in counts.values()):
        yield Finding(Level.OK, "files", "no server has found unreadable entries")


def _services(check: str, nodes: list[dict[str, Any]]) -> Finding:
    if not nodes:
        return Finding(Level.WARNING, check, "there is none, so failed shards are not recovered")
    absent = [node["name"] for node in nodes if node["state"] != "up"]
    leader = next((node["name"] for node in nodes if node["leader"]), None)
    up = f"{len(nodes) - len(absent)} of {len(nodes)} up"
    if 2 * len(absent) >= len(nodes):
        return Finding(Level.CRITICAL, check, f"{up}, not a majority: without {', '.join(absent)}")
    if absent or leader is None:
        problem = f"not {', '.join(absent)}" if absent else "no leader"
        return Finding(Level.WARNING, check, f"{up}, {problem}")
    return Finding(Level.OK, check, f"{up}, leader {leader}")


def _shard(shard: dict[str, Any]) -> Finding:
    name, state, replicas = f"shard {shard['id']}", shard["state"], shard["replicas"]
    absent = [f"{one['name']} is {one['state']}" for one in replicas if one["state"] != "up"]
    text = f"{state}, view {shard['view']}" + (f", {', '.join(absent)}" if absent else "")
    if shard.get("obstacle"):
        return Finding(Level.CRITICAL, name, f"{text}; not recovered: {shard['obstacle']}")
    if state == "recovering" or shard.get("refusing") or stalled_by(shard):
        return Finding(Level.CRITICAL, name, f"{text}; it takes no records")
    is_well = state in WELL and not absent
    return Finding(Level.OK if is_well else Level.WARNING, name, text)


def _disks(nodes: list[dict[str, Any]]) -> Iterator[Finding]:
    known = [node for node in nodes if node.get("disk")]
    low = 0
    for node in known:
        level, text = _disk(node["disk"], node.get("full"))
        if level:
            low += 1
            yield Finding(level, f"disk of {node['name']}", text)
    if known and not low:
        least = min(node["disk"]["free_bytes"] for node in known) / _GIB
        yield Finding(Level.OK, "disks", f"at least {least:.1f} GiB free")


def _disk(disk: dict[str, Any], reason: str | None) -> tuple[Level, str]:
    """Return how well the disk of a node is, and why; a node of the services reserves nothing."""
    free, reserve = disk["free_bytes"], disk["reserve_bytes"]
    if disk["full"]:
        return Level.CRITICAL, reason or "full; the node halts at the next write"
    if reserve and free < _LOW_DISK * reserve:
        limit = f"{reserve / _GIB:.1f} GiB (disk_reserve_bytes)"
        return Level.WARNING, f"{free / _GIB:.1f} GiB free; below {limit} it refuses records"
    if not reserve and free < _LOW_SERVICE_BYTES:
        return Level.WARNING, f"{free / _MIB:.0f} MiB free; once it is full, the node halts"
    return Level.OK, ""


def _readers(document: dict[str, Any]) -> Finding:
    shard = document.get("blocked_by")
    if shard is None:
        return Finding(Level.OK, "readers", "no shard holds them back")
    return Finding(Level.WARNING, "readers", f"shard {shard} holds them back")


def _losses(document: dict[str, Any]) -> Finding:
    shards = sorted({loss["shard"] for loss in document["losses"]})
    if not shards:
        return Finding(Level.OK, "losses", "no record was lost in a recovery")
    names = ", ".join(map(str, shards))
    return Finding(
        Level.WARNING, "losses", f"records of shard {names} may be lost (`ziplog status`)"
    )


def _versions(document: dict[str, Any]) -> Finding:
    found = sorted({node["version"] for node in nodes_of(document) if node.get("version")})
    advice = unfinished(document)
    level = Level.OK if len(found) < 2 and not advice else Level.WARNING
    text = ", ".join(found) or "unknown"
    return Finding(level, "versions", f"{text}; {advice}" if advice else text)


def _render(found: list[Finding], worst: Level, output: Format) -> str:
    if output is Format.NAGIOS:
        bad = [f"{each.check}: {each.text}" for each in found if each.level is not Level.OK]
        return f"ZIPLOG {worst.name} - {one_line('; '.join(bad) or f'{len(found)} checks')}\n"
    if output is Format.JSON:
        lines = [
            {"check": each.check, "level": each.level.name.lower(), "text": each.text}
            for each in found
        ]
        return "".join(map(json_line, lines))
    return "".join(
        f"{each.level.name.lower():8}  {each.check:18}  {one_line(each.text)}\n" for each in found
    )
