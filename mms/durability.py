"""The durability level of the log: the level that all its storage servers keep to.

    memory --all servers report `disk`--> disk;  disk --a server reports `memory`--> memory

The cluster files request a level; each server changes to it alone, and reports the level that it
keeps to (shard/state/ack_level.py). Rule: the level in force is `disk` only while every server of
the shards that accept records keeps to `disk`. So what is acked from then on is on f+1 disks. See
docs/protocol.md, section 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mms.commands import SetDurability
from mms.proposals import NO_SHARD, Proposals

if TYPE_CHECKING:
    from mms.servers import Servers
    from mms.state import ClusterState
    from ziplog.core.node import Effect
    from ziplog.core.view import Placement
    from ziplog.types import Durability, Epoch


class DurabilityLevel:
    """The level as one node of the membership service sees it."""

    def __init__(self, state: ClusterState, servers: Servers) -> None:
        self._state: Final = state
        self._servers: Final = servers
        self._proposals: Final = Proposals()
        #: The change that is due. It is proposed again as it is: a later epoch would move the
        #: beginning of the level, and each proposal would be an event of its own.
        self._change: SetDurability | None = None

    def _levels(self) -> dict[str, str]:
        """Return the level that each server keeps to, by name; "": it reported none."""
        return {
            server.name: server.heartbeat.level if server.heartbeat is not None else ""
            for shard, placement in self._state.placements.items()
            if self._may_ack(placement)
            for server in self._servers.replicas(shard)
        }

    def _may_ack(self, placement: Placement) -> bool:
        """Whether a shard may ack records, now or after a recovery.

        A removed one does until all its positions are stable. In a recovery it does not: its
        servers may never return, and those that do report first.
        """
        retired = self._state.retired.get(placement.shard)
        if retired is None:
            return placement.state != "joining"
        has_left = 0 < retired.limit <= self._servers.frontier(placement.shard)
        return placement.state == "leaving" and not has_left

    def propose(self, epoch: Epoch, now: int) -> list[Effect]:
        """Propose the level in force, if it has changed. For the leader.

        Args:
            epoch: the epoch in which the servers are.
            now: monotonic nanoseconds.

        """
        levels = set(self._levels().values())
        if self._state.durability == "disk" and "memory" in levels:
            change = SetDurability("memory", epoch)
        elif self._state.durability == "memory" and levels == {"disk"}:
            change = SetDurability("disk", epoch + 1)
        else:
            self._change = None
            return []
        if self._change is None or self._change.level != change.level:
            self._change = change
        return self._proposals.propose(NO_SHARD, self._change, now)

    def forget(self) -> None:
        """Forget a proposal: consensus decided it, or this node begins to lead."""
        self._change = None
        self._proposals.on_decided(NO_SHARD, SetDurability)

    def status(self, requested: Durability) -> dict[str, Any]:
        """Return the part of the status document: the level in force, and a change under way.

        `requested`: the level in the cluster file.
        """
        state = self._state
        waits_for = [name for name, level in self._levels().items() if level != requested]
        return {
            "durability": state.durability,
            "durability_since_epoch": state.durability_epoch,
            "durability_change": (
                {"to": requested, "waits_for": sorted(waits_for)}
                if state.durability != requested
                else None
            ),
        }
