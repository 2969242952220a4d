"""The status document, which `cluster()` of a client returns: its nodes, and what is well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A shard in one of these states works as intended.
WELL: Final = frozenset({"live", "finalized"})


def nodes_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all nodes: of the membership service, failure handlers, then storage servers."""
    return [*services_of(document), *replicas_of(document)]


def services_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes of the membership service, then the failure handlers."""
    return [*document["mms"], *document["failure_handlers"]]


def replicas_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the storage servers, shard by shard."""
    return [replica for shard in document["shards"] for replica in shard["replicas"]]
