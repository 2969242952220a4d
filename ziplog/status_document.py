"""The status document, which `cluster()` of a client returns: its nodes, and what is well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A shard in one of these states works as intended.
WELL: Final = frozenset({"live", "finalized"})

#: States of a server with which a live shard may take records. A full backup stores what the
#: primary places; a suspect server has been silent for a moment only.
_PRESENT: Final = frozenset({"up", "full", "suspect"})


def nodes_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all nodes: of the membership service, failure handlers, then storage servers.

    Servers of shards that are over are left out, unless they run.
    """
    return [*services_of(document), *replicas_of(document)]


def services_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes of the membership service, then the failure handlers."""
    return [*document["mms"], *document["failure_handlers"]]


def needed_shards(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the shards that need their servers: all but those that are over.

    A shard is over once it is finalized, and all its positions are trimmed.
    """
    return [shard for shard in document["shards"] if not shard.get("is_over")]


def replicas_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the storage servers, shard by shard; of shards that are over, those that run."""
    return [
        replica
        for shard in document["shards"]
        for replica in shard["replicas"]
        if not shard.get("is_over") or replica["state"] in {"up", "full"}
    ]


def stalled_by(shard: Mapping[str, Any]) -> list[str]:
    """Return how the servers are without which a live shard takes no records: "NAME is down".

    A shard stays live until a recovery begins, or for good if no failure handler leads.
    """
    if shard["state"] != "live":
        return []
    replicas = shard["replicas"]
    return [f"{one['name']} is {one['state']}" for one in replicas if one["state"] not in _PRESENT]
