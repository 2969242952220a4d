"""The status document as metrics, in Prometheus' text format.

Rules: labels come from small fixed sets: names of nodes, numbers of shards, states. A position is a
gauge for graphs only, because a double holds 53 bits. A node that is not up has no series but
`ziplog_up` and `ziplog_node_state`. See docs/operating.md, section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from ziplog.core.view import ShardState
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The media type of the text format.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
NODE_STATES: Final = ("starting", "up", "full", "suspect", "limbo", "down")
SHARD_STATES: Final = get_args(ShardState)
#: States of nodes that report.
_REPORTING: Final = frozenset({"up", "full", "starting", "limbo"})

_Sample = tuple[dict[str, object], float]


class Family(NamedTuple):
    """A metric: its name, type, help text and samples."""

    name: str
    kind: str
    text: str
    samples: list[_Sample]


def render(document: dict[str, Any] | None) -> str:
    """Return the metrics of a status document; None: the cluster does not reply."""
    reachable = Family(
        "ziplog_cluster_up", "gauge", "Whether the membership service replies.",
        [({}, float(document is not None))],
    )  # fmt: skip
    families = [reachable, *(families_of(document) if document is not None else ())]
    return "".join(_lines(family) for family in families)


def families_of(document: dict[str, Any]) -> Iterator[Family]:
    """Return all metrics of a status document."""
    shards = document["shards"]
    replicas = [(shard["id"], one) for shard in shards for one in shard["replicas"]]
    nodes = [*document["mms"], *document["failure_handlers"], *(one for _, one in replicas)]
    yield Family(
        "ziplog_cluster_info", "gauge", "1; the cluster's name, id and durability level.",
        [({k: document[k] for k in ("cluster", "cluster_id", "durability")}, 1)],
    )  # fmt: skip
    yield from _nodes(nodes)
    yield from _positions(document)
    yield from _shards(document)
    yield from _disks(replicas)


def _nodes(nodes: list[dict[str, Any]]) -> Iterator[Family]:
    up = [({"node": one["name"]}, float(one["state"] in ("up", "full"))) for one in nodes]
    yield Family("ziplog_up", "gauge", "Whether the node reports and works.", up)
    states: list[_Sample] = [
        ({"node": one["name"], "state": state}, float(one["state"] == state))
        for one in nodes
        for state in NODE_STATES
    ]
    yield Family("ziplog_node_state", "gauge", "1 for the present state of the node.", states)
    versions: list[_Sample] = [
        ({"node": one["name"], "version": one["version"]}, 1)
        for one in nodes
        if one.get("version") and one["state"] in _REPORTING
    ]
    yield Family("ziplog_build_info", "gauge", "1; the version that the node runs.", versions)
    ages: list[_Sample] = [
        ({"node": one["name"]}, one["heartbeat_age_ms"] / 1000)
        for one in nodes
        if one.get("heartbeat_age_ms") is not None
    ]
    yield Family("ziplog_heartbeat_age_seconds", "gauge", "Age of the last heartbeat.", ages)
    leaders: list[_Sample] = [
        ({"node": one["name"]}, float(one["leader"])) for one in nodes if "leader" in one
    ]
    yield Family("ziplog_raft_leader", "gauge", "Whether the node leads its Raft group.", leaders)


def _positions(document: dict[str, Any]) -> Iterator[Family]:
    yield Family("ziplog_epoch", "gauge", "The present epoch.", [({}, document["epoch"])])
    finalized = document["finalized_epoch"]
    yield Family(
        "ziplog_finalized_epoch", "gauge", "The last finalized epoch; -1: none.", [({}, finalized)]
    )
    trim = RecordId.parse(document["trimmed_before"]).gsn
    yield Family(
        "ziplog_trim_position", "gauge", "All positions before it were deleted.", [({}, trim)]
    )
    losses: dict[int, int] = {shard["id"]: 0 for shard in document["shards"]}
    for loss in document["losses"]:
        losses[loss["shard"]] = losses.get(loss["shard"], 0) + loss["stop"] - loss["start"]
    yield Family(
        "ziplog_possible_loss_positions_total", "counter",
        "Positions whose records may have been lost in a recovery.",
        [({"shard": shard}, count) for shard, count in losses.items()],
    )  # fmt: skip


def _shards(document: dict[str, Any]) -> Iterator[Family]:
    shards = document["shards"]
    states: list[_Sample] = [
        ({"shard": one["id"], "state": state}, float(one["state"] == state))
        for one in shards
        for state in SHARD_STATES
    ]
    yield Family("ziplog_shard_state", "gauge", "1 for the present state of the shard.", states)
    for name, kind, key, text in (
        ("ziplog_shard_view", "gauge", "view", "The shard's view; each recovery raises it."),
        ("ziplog_shard_weight", "gauge", "weight", "The shard's share of positions."),
        ("ziplog_shard_insert_rate", "gauge", "rate_per_s", "Inserted records a second."),
        ("ziplog_shard_stable_position", "gauge", "stable_gsn", "The last stable record."),
        ("ziplog_shard_refusing", "gauge", "refusing", "Whether it refuses records: a full disk."),
        ("ziplog_holes_total", "counter", "holes", "Positions given up for waiting readers."),
    ):
        yield Family(name, kind, text, [({"shard": one["id"]}, float(one[key])) for one in shards])
    yield Family(
        "ziplog_shard_blocks_readers", "gauge", "Whether it holds back records of other shards.",
        [({"shard": one["id"]}, float(bool(one["blocks"]))) for one in shards],
    )  # fmt: skip


def _disks(replicas: list[tuple[int, dict[str, Any]]]) -> Iterator[Family]:
    known = [
        (shard, one) for shard, one in replicas if one.get("disk") and one["state"] in _REPORTING
    ]
    for name, key, text in (
        ("ziplog_disk_free_bytes", "free_bytes", "Free space of the server's disk."),
        ("ziplog_disk_reserve_bytes", "reserve_bytes", "Free space below which it is full."),
        ("ziplog_disk_full", "full", "Whether the server refuses records for lack of space."),
    ):
        samples: list[_Sample] = [
            ({"node": one["name"], "shard": shard}, float(one["disk"][key])) for shard, one in known
        ]
        yield Family(name, "gauge", text, samples)


def _lines(family: Family) -> str:
    head = f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}\n"
    return head + "".join(
        f"{family.name}{_labels(labels)} {_number(value)}\n" for labels, value in family.samples
    )


def _labels(labels: dict[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
