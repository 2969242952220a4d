"""Admission control: the size of a micro-batch, and its plan in the checkpoint (docs/spark.md, 2).

Rule: the offset that ends a micro-batch contains the whole plan of the micro-batch, so Spark stores
the plan in the checkpoint before the run. Invariant: a repeated micro-batch has the same partitions
with the same rows in the same order, whatever the servers report by then. Sinks recognize a
repetition by this.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from spark_reader.planning import Piece
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TASKS: Final = re.compile(r"\d+:\d+-\d+([,;]\d+:\d+-\d+)*", re.ASCII)


def admissible_stop(pieces: Sequence[Piece], limit: int) -> int:
    """Return the last end of a piece before which at most `limit` bytes are stored.

    The result is after at least one piece, so a stream always advances.

    Args:
        pieces: the pieces of all shards in a range; none is empty.
        limit: in stored bytes.

    """
    stops = sorted({piece.stop for piece in pieces})
    by_start = sorted(pieces, key=lambda piece: piece.start)
    best, total, at = stops[0], 0, 0
    for stop in stops:
        while at < len(by_start) and by_start[at].start < stop:
            total += by_start[at].size
            at += 1
        if total > limit:
            break
        best = stop
    return best


def position(offset: Mapping[str, Any]) -> int:
    """Return the position of an offset; everything before it was read.

    Raises:
        ConfigError: the checkpoint belongs to another source.

    """
    gsn = offset.get("gsn")
    if not isinstance(gsn, int) or gsn < 0:
        raise ConfigError(
            "the checkpoint's offset", dict(offset), "one of this source's, {'gsn': n}"
        )
    return gsn


def cluster(offset: Mapping[str, Any]) -> str:
    """Return the id of an offset's cluster; "" if the offset does not contain it."""
    return str(offset.get("cluster", ""))


def offset(
    gsn: int, tasks: Sequence[Sequence[Piece]] | None = None, cluster: str = ""
) -> dict[str, Any]:
    """Return the offset at a position, with the plan of the micro-batch that ends there.

    Args:
        gsn: the position.
        tasks: the plan; an empty list if the whole range was trimmed; None: there is no plan.
        cluster: the id of the cluster; "": unknown.

    """
    found: dict[str, Any] = {"gsn": gsn}
    if cluster:
        found["cluster"] = cluster
    if tasks is not None:
        texts = (",".join(f"{p.shard}:{p.start}-{p.stop}" for p in task) for task in tasks)
        found["tasks"] = ";".join(texts)
    return found


def tasks(offset: Mapping[str, Any]) -> list[list[Piece]]:
    """Return the plan of the micro-batch that ends at an offset.

    The first micro-batch of a query that finds no rows ends at the query's start, without a plan.

    Raises:
        ConfigError: the checkpoint belongs to another source.

    """
    if "tasks" not in offset:
        position(offset)
        return []
    text = offset["tasks"]
    if text == "":
        return []
    if not isinstance(text, str) or _TASKS.fullmatch(text) is None:
        raise ConfigError("the checkpoint's plan", text, "'shard:start-stop,...;...'")
    return [[_piece(piece) for piece in task.split(",")] for task in text.split(";")]


def _piece(text: str) -> Piece:
    shard, _, span = text.partition(":")
    start, _, stop = span.partition("-")
    return Piece(int(shard), int(start), int(stop), 0)
