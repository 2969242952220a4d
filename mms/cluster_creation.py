"""Creation of the cluster: the first command of the membership service's log.

A new leader without state first waits for all servers of the cluster file. Rule: no cluster is
created while a server belongs to another one: then this service has only lost its directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mms import membership_rules
from mms.commands import CreateCluster
from mms.proposals import RETRY_NS
from ziplog.core.node import LogWarning, Propose
from ziplog.core.units import NS_PER_MS
from ziplog.types import cluster_id

if TYPE_CHECKING:
    from mms.servers import Servers
    from ziplog.config import ClusterConfig
    from ziplog.core.node import Effect

#: Time that a new cluster waits for all servers: they would know of an old cluster.
CREATE_NS: Final = 1500 * NS_PER_MS


class ClusterCreation:
    """Proposes the cluster's creation, until it is committed."""

    def __init__(self, config: ClusterConfig, servers: Servers, cluster: int) -> None:
        """`cluster`: the number that a new cluster gets."""
        self._config: Final = config
        self._servers: Final = servers
        self._new_cluster: Final = cluster
        self._leading_since = 0
        #: When to propose it, in ns.
        self.due_at = 0
        self._has_warned = False

    def start_leading(self, now: int) -> None:
        """Start to lead: the wait for the servers begins."""
        self._leading_since = now

    def on_heartbeat(self, now: int) -> None:
        """Wait no longer if all servers have reported."""
        if not self._servers.missing:
            self.due_at = now

    def advance(self, now: int) -> list[Effect]:
        """Propose the creation, or warn that another cluster exists."""
        if self._servers.missing and now < self._leading_since + CREATE_NS:
            self.due_at = self._leading_since + CREATE_NS
            return []
        self.due_at = now + RETRY_NS
        others = membership_rules.other_clusters(self._servers) - {self._new_cluster}
        if others:
            return self._warn(
                "no cluster is created: storage servers belong to cluster"
                f" {cluster_id(min(others))}. Restore the membership"
                " service's data directories, or run `ziplog membership rebuild`; or, to start"
                " without the old records, remove the data directories of all storage servers"
            )
        config = self._config
        if config.id is not None:
            return self._warn(
                f"no cluster is created: the cluster file belongs to cluster {config.id}, which had"
                " data. Restore the membership service's data directories, or run `ziplog"
                " membership rebuild`; or, to start without the old records, remove id from the"
                " cluster file (`ziplog up --found-again`)"
            )
        command = CreateCluster(
            self._new_cluster, config.name, membership_rules.configured(config), config.durability
        )
        return [Propose(command.encode())]

    def _warn(self, text: str) -> list[Effect]:
        """Warn once."""
        has_warned, self._has_warned = self._has_warned, True
        return [] if has_warned else [LogWarning(text)]
