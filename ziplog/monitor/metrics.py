"""The metrics of a cluster: from its status document, its nodes' replies and its cursors.

Rules: labels come from bounded sets: names of nodes and cursors, numbers of shards, states. A
position is a gauge for graphs only, because a double holds 53 bits. A node that does not reply has
no series but `ziplog_up` and `ziplog_node_state`. See docs/monitoring.md.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, get_args

from ziplog.core.view import ShardState
from ziplog.monitor import cursors as cursor_metrics
from ziplog.monitor.catalogue import CATALOGUE
from ziplog.monitor.exposition import Counted, Family
from ziplog.status_document import replicas_of
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ziplog.core.first_seen import FirstSeen
    from ziplog.monitor.cursors import ListedCursor
    from ziplog.monitor.exposition import Sample
    from ziplog.wire import Metrics

NODE_STATES: Final = ("starting", "up", "full", "suspect", "limbo", "down")
SHARD_STATES: Final = get_args(ShardState)
_LABEL: Final = re.compile(r"[a-z_]+", re.ASCII)


def families(
    document: dict[str, Any] | None,
    replies: Mapping[str, Metrics | None],
    cursors: Sequence[ListedCursor] | None,
    times: FirstSeen,
    now: int,
) -> Iterator[Family]:
    """Yield all metrics.

    Args:
        document: the status document; None: the cluster does not reply.
        replies: the metrics of each node; None: it does not reply.
        cursors: the last list of the cursors; None: there is no recent one.
        times: when the latest epochs began.
        now: monotonic nanoseconds.

    """
    yield Family(
        "ziplog_cluster_up", "gauge", "Whether the membership service replies.",
        [({}, float(document is not None))],
    )  # fmt: skip
    up: list[Sample] = [
        ({"node": name}, float(reply is not None)) for name, reply in replies.items()
    ]
    yield Family("ziplog_up", "gauge", "Whether the node replied to one of the last queries.", up)
    if document is not None:
        yield from _of_document(document, {name for name, reply in replies.items() if reply})
        yield from _ages(document, times, now)
        yield from cursor_metrics.families(cursors)
    yield from _of_nodes(replies)


def _of_nodes(replies: Mapping[str, Metrics | None]) -> Iterator[Family]:
    """Yield what the nodes count, in the order of the catalogue."""
    samples: dict[str, list[Sample]] = {name: [] for name in CATALOGUE}
    for node, reply in replies.items():
        if reply is None:
            continue
        for value in reply.values:
            _add(samples, node, value.name, value.labels, value.value)
        for durations in reply.durations:
            counted = Counted(durations.counts, durations.sum_ns)
            _add(samples, node, durations.name, durations.labels, counted)
    for name, (kind, text) in CATALOGUE.items():
        yield Family(name, kind, text, samples[name])


def _add(
    samples: dict[str, list[Sample]],
    node: str,
    name: str,
    labels: dict[str, str],
    value: float | Counted,
) -> None:
    """Add a sample of a node, unless its release knows a metric that this one does not."""
    is_known = name in samples and all(map(_LABEL.fullmatch, labels))
    if is_known and isinstance(value, Counted) is (CATALOGUE[name].kind == "histogram"):
        samples[name].append(({"node": node, **labels}, value))


def _of_document(document: dict[str, Any], reporting: set[str]) -> Iterator[Family]:
    known = {one["name"] for one in replicas_of(document)}
    replicas = [
        (shard["id"], one)
        for shard in document["shards"]
        for one in shard["replicas"]
        if one["name"] in known
    ]
    nodes = [
        *(one | {"role": "mms"} for one in document["mms"]),
        *(one | {"role": "handler"} for one in document["failure_handlers"]),
        *(one for _, one in replicas),
    ]
    yield Family(
        "ziplog_cluster_info", "gauge", "1; the cluster's name, id and durability level.",
        [({k: document[k] for k in ("cluster", "cluster_id", "durability")}, 1)],
    )  # fmt: skip
    yield from _nodes(nodes, reporting)
    yield from _positions(document)
    yield from _shards(document)
    yield from _disks([(shard, one) for shard, one in replicas if one["name"] in reporting])


def _nodes(nodes: list[dict[str, Any]], reporting: set[str]) -> Iterator[Family]:
    states: list[Sample] = [
        ({"node": one["name"], "role": one["role"], "state": state}, float(one["state"] == state))
        for one in nodes
        for state in NODE_STATES
    ]
    yield Family("ziplog_node_state", "gauge", "1 for the present state of the node.", states)
    ages: list[Sample] = [
        ({"node": one["name"]}, one["heartbeat_age_ms"] / 1000)
        for one in nodes
        if one.get("heartbeat_age_ms") is not None and one["name"] in reporting
    ]
    yield Family("ziplog_heartbeat_age_seconds", "gauge", "Age of the last heartbeat.", ages)


def _positions(document: dict[str, Any]) -> Iterator[Family]:
    yield Family("ziplog_epoch", "gauge", "The present epoch.", [({}, document["epoch"])])
    finalized = document["finalized_epoch"]
    yield Family(
        "ziplog_finalized_epoch", "gauge", "The last finalized epoch; -1: none.", [({}, finalized)]
    )
    trim = RecordId.parse(document["trimmed_before"]).gsn
    tail = max((shard["stable_gsn"] for shard in document["shards"]), default=0)
    yield Family("ziplog_tail_position", "gauge", "The last stable record.", [({}, tail)])
    yield Family(
        "ziplog_trim_position", "gauge", "All positions before it were deleted.", [({}, trim)]
    )
    losses: dict[int, int] = {shard["id"]: 0 for shard in document["shards"]}
    for loss in document["losses"]:
        losses[loss["shard"]] = losses.get(loss["shard"], 0) + loss["stop"] - loss["start"]
    yield Family(
        "ziplog_possible_loss_positions_total", "gauge",
        "Positions whose records may have been lost in a recovery, until they are trimmed.",
        [({"shard": shard}, count) for shard, count in losses.items()],
    )  # fmt: skip


def _shards(document: dict[str, Any]) -> Iterator[Family]:
    shards = document["shards"]
    states: list[Sample] = [
        ({"shard": one["id"], "state": state}, float(one["state"] == state))
        for one in shards
        for state in SHARD_STATES
    ]
    yield Family("ziplog_shard_state", "gauge", "1 for the present state of the shard.", states)
    for name, key, text in (
        ("ziplog_shard_view", "view", "The shard's view; each recovery raises it."),
        ("ziplog_shard_weight", "weight", "The shard's share of positions."),
        ("ziplog_shard_insert_rate", "rate_per_s", "Inserted records a second."),
        ("ziplog_shard_stable_position", "stable_gsn", "The last stable record."),
        ("ziplog_shard_has_readers", "is_watched", "Whether readers follow the shard."),
        ("ziplog_shard_refusing", "refusing", "Whether it refuses records: a full disk."),
    ):
        values: list[Sample] = [({"shard": one["id"]}, float(one[key])) for one in shards]
        yield Family(name, "gauge", text, values)
    yield Family(
        "ziplog_holes_total", "counter", "Positions given up for waiting readers.",
        [({"shard": one["id"]}, one["holes"]) for one in shards],
    )  # fmt: skip
    yield Family(
        "ziplog_shard_blocks_readers", "gauge", "Whether it holds back records of other shards.",
        [({"shard": one["id"]}, float(bool(one["blocks"]))) for one in shards],
    )  # fmt: skip


def _disks(replicas: list[tuple[int, dict[str, Any]]]) -> Iterator[Family]:
    known = [(shard, one) for shard, one in replicas if one.get("disk")]
    for name, key, text in (
        ("ziplog_disk_free_bytes", "free_bytes", "Free space of the server's disk."),
        ("ziplog_disk_reserve_bytes", "reserve_bytes", "Free space below which it is full."),
        ("ziplog_disk_full", "full", "Whether the server refuses records for lack of space."),
    ):
        samples: list[Sample] = [
            ({"node": one["name"], "shard": shard}, float(one["disk"][key])) for shard, one in known
        ]
        yield Family(name, "gauge", text, samples)


def _ages(document: dict[str, Any], times: FirstSeen, now: int) -> Iterator[Family]:
    """Yield how long positions have been open, from the times of epochs."""
    oldest = times.age_s(document["finalized_epoch"] + 1, now)
    yield Family(
        "ziplog_unfinalized_seconds", "gauge",
        "Age of the oldest epoch that is not finalized, to the second. It grows while no record"
        " comes and no reader waits.",
        [({}, oldest)],
    )  # fmt: skip
    open_for: list[Sample] = [
        ({"shard": shard["id"]}, times.age_s(shard["epoch"], now))
        for shard in document["shards"]
        if shard["state"] != "finalized"
    ]
    yield Family(
        "ziplog_shard_open_seconds", "gauge",
        "How long the shard's first open position has been open, to the second. It grows while no"
        " record comes and no reader waits.",
        open_for,
    )  # fmt: skip
