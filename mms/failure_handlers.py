"""The failure handlers' last heartbeats, for the status document.

Only received heartbeats count, never expectations. See docs/protocol.md, section 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms.servers import SUSPECT_NS, UP_NS
from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.config import NodeConfig
    from ziplog.wire import HandlerHeartbeat


class FailureHandlers:
    """All nodes of the failure handler."""

    def __init__(self, nodes: Sequence[NodeConfig]) -> None:
        self._nodes: Final = nodes
        self._names: Final = {node.name for node in nodes}
        #: By name: the last heartbeat, and when it came.
        self._last_heartbeats: dict[str, tuple[HandlerHeartbeat, int]] = {}

    def on_heartbeat(self, heartbeat: HandlerHeartbeat, now: int) -> bool:
        """Store a heartbeat; return whether the cluster file has its node."""
        if heartbeat.node not in self._names:
            return False
        self._last_heartbeats[heartbeat.node] = (heartbeat, now)
        return True

    def status(self, now: int) -> list[dict[str, Any]]:
        """Return their part of the status document."""
        return [self._status(node, now) for node in self._nodes]

    def _status(self, node: NodeConfig, now: int) -> dict[str, Any]:
        heartbeat, last_at = self._last_heartbeats.get(node.name, (None, now - SUSPECT_NS))
        silence = now - last_at
        state = "up" if silence < UP_NS else "suspect" if silence < SUSPECT_NS else "down"
        return {
            "name": node.name,
            "endpoint": node.endpoint,
            "pid": heartbeat.pid if heartbeat is not None else None,
            "state": state,
            "leader": heartbeat is not None and heartbeat.leader and state != "down",
            "heartbeat_age_ms": silence // NS_PER_MS if heartbeat is not None else None,
        }
