"""The description of a process of the cluster, for its `Driver`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.version import version
from ziplog.wire.node_info import VERSIONS, NodeInfo

if TYPE_CHECKING:
    from ziplog.config import ClusterConfig
    from ziplog.wire.node_info import Role


def node_info(config: ClusterConfig, role: Role, name: str, cluster: int, request: int) -> NodeInfo:
    """Return the description of the node `name` of a cluster file, for a request's number."""
    mms = [node.endpoint for node in config.mms]
    return NodeInfo(cluster, request, role, name, config.name, version(), *VERSIONS, mms)
