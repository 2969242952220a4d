"""The descriptions of a process of the cluster: its release, and what it replies to strangers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.core.wire_use import Release
from ziplog.version import version
from ziplog.wire.node_info import VERSIONS, NodeInfo

if TYPE_CHECKING:
    from ziplog.config import ClusterConfig
    from ziplog.core.wire_use import WireUse
    from ziplog.wire.node_info import Role


def this_release() -> Release:
    """Return the release that this process runs."""
    return Release(version(), VERSIONS)


def node_info(
    config: ClusterConfig,
    role: Role,
    name: str,
    cluster: int,
    request: int,
    wire_use: WireUse,
    free_bytes: int | None = None,
) -> NodeInfo:
    """Return the description of the node `name` of a cluster file, for a request's number."""
    mms, release = [node.endpoint for node in config.mms], wire_use.release
    return NodeInfo(
        cluster, request, role, name, config.name, release.version, *release.wires, mms,
        wire_use.wire, free_bytes,
    )  # fmt: skip
