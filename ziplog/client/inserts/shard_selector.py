"""Shard selection: the policy of the caller, applied to the shards that are not avoided.

Rule: the policy gets the live shards except the avoided ones, unless that leaves none. Its result
counts, whether that shard is live or not.

Invariant: no shard is avoided after `_avoid_until`. See docs/protocol.md, sections 4 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.inserts import insert_errors
from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ziplog.client.common.requests import InsertRequest, Policy
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import ShardWindow
    from ziplog.client.inserts.insert_calls import InsertCall

#: Time for which a shard that does not answer gets no new unpinned records, in addition to twice
#: its next backoff.
_AVOID_NS: Final = 500 * NS_PER_MS


class ShardSelector:
    """Selects the shard of each call."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        policy: Policy,
        windows: Mapping[int, ShardWindow],
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._windows: Final = windows
        self.policy = policy
        self._avoid_until = 0
        #: Windows of shards that are avoided since the last tick.
        self.newly_avoided: list[ShardWindow] = []

    def avoid(self, window: ShardWindow, pause: int = 0) -> None:
        """Avoid a shard for a while; `pause`: ns until its units are retransmitted."""
        now = self._context.now
        if window.avoid_until <= now:
            self.newly_avoided.append(window)
            self._context.set_timer(now)
        window.avoid_until = now + _AVOID_NS + 2 * pause
        self._avoid_until = max(self._avoid_until, window.avoid_until)

    def __call__(self, call: InsertCall) -> int | Exception:
        """Return the shard of a call: the pinned one, that of its placed part, or the policy's.

        Returns the error if the policy failed.
        """
        if call.is_partly_placed:
            if self._routing.is_removed(call.shard):
                why = "because the shard has no more positions"
                return insert_errors.not_inserted_error(call, self._routing, why)
            return call.shard
        return self.select(call.request, call.shard)

    def select(self, request: InsertRequest, former: int = -1) -> int | Exception:
        """Return the pinned shard of a request, or the policy's; without a live shard, `former`.

        Returns the error if the policy failed.
        """
        if request.shard is not None:
            return request.shard
        live: Sequence[int] = self._routing.live
        if not live:
            return former
        now, windows = self._context.now, self._windows
        if now < self._avoid_until:
            live = [s for s in live if s not in windows or windows[s].avoid_until <= now] or live
        try:
            shard = self.policy(request.payloads[0], request.key_of(0), live)
        except Exception as error:  # noqa: BLE001 - raised by the caller's policy, returned to the caller
            return error
        if type(shard) is not int:
            return TypeError(f"the policy returned {shard!r}; a shard id is an int")
        return shard
