"""Which shard a call's records go to: the user's policy, and shards that let us wait left out.

Rule: the policy is offered the live shards but those avoided, unless that leaves none; what it
names counts, live or not. Invariant: no shard is avoided after `_avoid_until`.
See docs/protocol.md, sections 4 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.inserts import insert_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ziplog.client.common.requests import Policy
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import InsertCall, ShardWindow

_MS: Final = 1_000_000
#: A shard that let us wait gets no new unpinned records for so long, and twice the next pause.
_AVOID_NS: Final = 500 * _MS


class ShardSelector:
    """The policy, and what it is offered."""

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
        #: Lanes that began to be avoided, and were not looked at since.
        self.newly_avoided: list[ShardWindow] = []

    def avoid(self, window: ShardWindow, pause: int = 0) -> None:
        """Give a shard no new records for a while; `pause`: until its units are sent again, ns."""
        now = self._context.now
        if window.avoid_until <= now:
            self.newly_avoided.append(window)
            self._context.set_timer(now)
        window.avoid_until = now + _AVOID_NS + 2 * pause
        self._avoid_until = max(self._avoid_until, window.avoid_until)

    def __call__(self, call: InsertCall) -> int | Exception:
        """Ask the policy, unless the call names the shard, or is in the log in part.

        While no shard is live, a batch stays.
        """
        if call.is_partly_placed:
            if self._routing.is_removed(call.shard):
                why = "as the shard has no more positions"
                return insert_errors.not_inserted_error(call, self._routing, why)
            return call.shard
        if call.request.shard is not None:
            return call.request.shard
        live: Sequence[int] = self._routing.live
        if not live:
            return call.shard
        now, windows = self._context.now, self._windows
        if now < self._avoid_until:
            live = [s for s in live if s not in windows or windows[s].avoid_until <= now] or live
        request = call.request
        try:
            shard = self.policy(request.payloads[0], request.key_of(0), live)
        except Exception as error:  # noqa: BLE001 - the user's code; the user gets it back
            return error
        if type(shard) is not int:
            return TypeError(f"the policy chose {shard!r}; a shard id is an int")
        return shard
