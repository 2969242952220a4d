"""Recovery requests: the failure handler takes shards out of the leases, and back in.

    Remove -> `RemoveShard` committed -> Removed (the limit)
    Reinsert -> a loss, if there is one, committed -> a lease with the shard committed -> Reinserted

Rule: every reply follows a commit. The failure handler repeats requests, so one that is lost with a
leader costs time only. Invariant: at most one request of each kind waits for a shard.

See docs/protocol.md, sections 11 and 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from mms.commands import RecordLoss, RemoveShard
from mms.proposals import RETRY_NS, Proposals
from ziplog.core.node import Send
from ziplog.wire import Refused, Reinserted, Removed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mms.commands import Refusal
    from mms.state import ClusterState
    from ziplog.core.node import Effect
    from ziplog.core.view import Placement
    from ziplog.wire import Reinsert, Remove

#: Minimum number of leases sent again with the limit: the server may have missed the last ones.
_RUN_LEASES: Final = 64

_WHY: Final[dict[Refusal, str]] = {
    "no-such-shard": "the shard does not exist, or there is no lease yet",
    "other-view": "the shard is in another view, or a later recovery has begun",
}


class Recoveries:
    """All recoveries, as far as the membership service takes part in them."""

    def __init__(self, state: ClusterState) -> None:
        self._state: Final = state
        self._removes: dict[int, tuple[bytes, Remove]] = {}
        self._reinserts: dict[int, tuple[bytes, Reinsert]] = {}
        self._proposals: Final = Proposals()
        #: By shard and view: when a lease that returns the shard was last claimed.
        self._lease_claimed_at: dict[tuple[int, int], int] = {}

    # --- removal ---

    def on_remove(self, route: bytes, message: Remove, now: int) -> list[Effect]:
        """Handle the failure handler's `Remove`; the reply may have to wait."""
        if message.shard not in self._state.placements:
            return [self._refusal(route, message, _WHY["no-such-shard"])]
        recovering = self._state.recovering.get(message.shard)
        if recovering is not None and recovering.recovery == message.recovery:
            return [self._removed_reply(route, message)]
        self._removes[message.shard] = (route, message)
        command = RemoveShard(message.shard, message.view, message.recovery)
        return self._proposals.propose(message.shard, command, now)

    def _removed_reply(self, route: bytes, message: Remove) -> Effect:
        state = self._state
        found = state.recovering[message.shard]
        runs = state.runs_until(found.limit, _RUN_LEASES)
        return Send(
            route,
            Removed(state.cluster, message.request, found.shard, found.recovery, found.limit, runs),
        )

    def on_remove_command(self, command: RemoveShard, refusal: Refusal) -> list[Effect]:
        """Answer the request that led to this command."""
        self._proposals.on_decided(command.shard, RemoveShard)
        route, message = self._removes.get(command.shard, (b"", None))
        if not refusal:
            self._reinserts.pop(command.shard, None)  # of an older recovery
        if message is None or message.recovery != command.recovery:
            return []
        del self._removes[command.shard]
        if refusal:
            return [self._refusal(route, message, _WHY.get(refusal, refusal))]
        return [self._removed_reply(route, message)]

    # --- reinsertion ---

    def on_reinsert(self, route: bytes, message: Reinsert, now: int) -> list[Effect]:
        """Handle the failure handler's `Reinsert`; the reply may have to wait."""
        state = self._state
        placement = state.placements.get(message.shard)
        is_back = placement is not None and placement.state not in {"recovering", "joining"}
        if placement is not None and is_back and placement.view == message.view:
            return [self._reinserted_reply(route, message)]
        placement_after = self._placement_after(message)
        if placement_after is None or not state.may_become(placement_after):
            why = "the shard is not in this recovery, or has other servers"
            return [self._refusal(route, message, why)]
        self._reinserts[message.shard] = (route, message)
        loss = self._loss(message)
        if loss is None or loss in state.losses:
            return []
        return self._proposals.propose(loss.shard, loss, now)

    def _placement_after(self, message: Reinsert) -> Placement | None:
        """Return the placement that the shard would return with."""
        placement = self._state.placements.get(message.shard)
        if placement is None or placement.state != "recovering":
            return None
        found = message.fingerprints
        if len(found) != len(placement.replicas) or not all(0 < len(one) <= 64 for one in found):
            return None
        regions = message.regions or [replica.region for replica in placement.replicas]
        if len(regions) != len(placement.replicas):
            return None
        replicas = tuple(
            msgspec.structs.replace(replica, fingerprint=one, region=region)
            for replica, one, region in zip(placement.replicas, found, regions, strict=True)
        )
        state = self._state.returns_as(message.shard)
        return msgspec.structs.replace(placement, view=message.view, state=state, replicas=replicas)

    def _loss(self, message: Reinsert) -> RecordLoss | None:
        limit = self._state.recovering[message.shard].limit
        if not 0 < message.lost_from < limit or limit <= self._state.trim:
            return None
        return RecordLoss(message.shard, message.view, message.lost_from, limit)

    def claim_lease(self, now: int) -> bool:
        """Return whether to propose a lease now, so that a shard can return; remember the claim."""
        ready = [(placement.shard, placement.view) for placement in self.changes()]
        waits = any(
            now >= self._lease_claimed_at.get(one, now - RETRY_NS) + RETRY_NS for one in ready
        )
        if waits:
            self._lease_claimed_at = dict.fromkeys(ready, now)
        return waits

    def changes(self) -> list[Placement]:
        """Return the placements of the shards that return with the next lease."""
        changes: list[Placement] = []
        for _, message in self._reinserts.values():
            placement_after, loss = self._placement_after(message), self._loss(message)
            if placement_after is not None and (loss is None or loss in self._state.losses):
                changes.append(placement_after)
        return changes

    def on_loss_recorded(self, loss: RecordLoss) -> None:
        """Forget the proposal of a loss that consensus applied or refused."""
        self._proposals.on_decided(loss.shard, RecordLoss)

    def on_lease_granted(self, placements: Iterable[Placement]) -> list[Effect]:
        """Answer the requests for the shards that a lease returned."""
        effects: list[Effect] = []
        for placement in placements:
            route, message = self._reinserts.pop(placement.shard, (b"", None))
            if message is not None and placement.view == message.view:
                effects.append(self._reinserted_reply(route, message))
        return effects

    def _reinserted_reply(self, route: bytes, message: Reinsert) -> Effect:
        cluster = self._state.cluster
        return Send(route, Reinserted(cluster, message.request, message.shard, message.view))

    # --- shared ---

    def abandon(self) -> None:
        """Forget all requests: this node no longer leads."""
        self._removes.clear()
        self._reinserts.clear()
        self._proposals.clear()
        self._lease_claimed_at.clear()

    def _refusal(self, route: bytes, message: Remove | Reinsert, why: str) -> Effect:
        state = self._state
        placement = state.placements.get(message.shard)
        view = placement.view if placement is not None else 0
        return Send(
            route,
            Refused(state.cluster, message.shard, view, 0, message.request, "wrong-view", why),
        )

    def check(self) -> None:
        """Assert the invariant."""
        for shard, (_, message) in self._reinserts.items():
            assert message.shard == shard
            assert self._state.recovering[shard].recovery == message.view, "an older recovery waits"
