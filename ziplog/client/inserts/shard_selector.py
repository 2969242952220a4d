"""Shard selection: the policy of the caller, applied to the shards that are not avoided.

Rules: the policy gets the live shards that span enough regions, except the avoided ones, unless
that leaves none; `nearest` gets the nearest of these. Its result counts, whether that shard is live
or not. If all shards are avoided because no replica has disk space, if the shard was removed, or if
it spans too few regions, the insert fails at once; the last one only if the placements are current.

Invariant: no shard is avoided after `_avoid_until`. See docs/protocol.md, sections 4 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.inserts import insert_errors
from ziplog.core.nearness import NearestPolicy, nearest
from ziplog.core.numbers import whole
from ziplog.core.units import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ziplog.client.common.requests import InsertRequest, Preferences
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.inserts.inflight import ShardWindow
    from ziplog.client.inserts.insert_calls import InsertCall
    from ziplog.errors import ConfigError, UnavailableError, ZiplogError

#: Time for which a shard that does not answer gets no new unpinned records, in addition to twice
#: its next backoff.
_AVOID_NS: Final = 500 * NS_PER_MS


class ShardSelector:
    """Selects the shard of each call."""

    def __init__(
        self,
        context: StepContext,
        routing: Routing,
        preferences: Preferences,
        windows: Mapping[int, ShardWindow],
        reassign: Callable[[], None],
    ) -> None:
        self._context: Final = context
        self._routing: Final = routing
        self._windows: Final = windows
        #: Selects the shards of the waiting calls again.
        self._reassign: Final = reassign
        #: It is called after the next reply about placements.
        self._is_reassign_due = False
        self.policy, self.region, self._min_regions = preferences
        self._avoid_until = 0
        #: Windows of shards that are avoided since the last tick.
        self.newly_avoided: list[ShardWindow] = []

    def avoid(self, window: ShardWindow, pause: int = 0, no_space: str = "") -> None:
        """Avoid a shard for a while.

        Args:
            window: the shard's window.
            pause: ns until its units are retransmitted.
            no_space: why no replica has disk space; "": they may have.

        """
        now = self._context.now
        if window.avoid_until <= now:
            self.newly_avoided.append(window)
            self._context.set_timer(now)
        window.avoid_until = now + _AVOID_NS + 2 * pause
        window.no_space = no_space
        self._avoid_until = max(self._avoid_until, window.avoid_until)

    def __call__(self, call: InsertCall) -> int | Exception:
        """Return the shard of a call: the pinned one, that of its placed part, or the policy's.

        Returns the error if the policy failed.
        """
        if call.is_partly_placed:
            if self._routing.is_removed(call.shard):
                why = "because the shard has no more positions"
                return insert_errors.not_inserted_error(call, self._routing, why)
            return self._unless_full([call.shard]) or call.shard
        return self.select(call.request, call.shard)

    def select(self, request: InsertRequest, former: int = -1) -> int | Exception:
        """Return the pinned shard of a request, or the policy's; without a live shard, `former`.

        Returns the error if the policy failed, if no shard has disk space, or if the shard was
        removed or spans too few regions.
        """
        count = self.required(request)
        now, windows, pinned = self._context.now, self._windows, request.shard
        is_any_avoided = now < self._avoid_until
        if pinned is not None:
            error = self._unless_full([pinned]) if is_any_avoided else None
            return error or self._unless_unfit(pinned, count)
        live: Sequence[int] = self._routing.live_in(count)
        if not live:
            return self._without_live(former, count)
        if is_any_avoided:
            unavoided = [s for s in live if s not in windows or windows[s].avoid_until <= now]
            if not unavoided and (error := self._unless_full(live)) is not None:
                return error
            live = unavoided or live
        if type(self.policy) is NearestPolicy:
            live = nearest(live, self.region, self._routing.regions, self.latency_ns)
        try:
            chosen = self.policy(request.payloads[0], request.key_of(0), live)
        except BaseException as error:  # noqa: BLE001 - a caller's policy may raise anything
            return insert_errors.policy_error(error)
        shard = whole(chosen)
        if shard is None or shard < 0:
            return TypeError(f"the policy returned {chosen!r}; a shard id is an int from 0 on")
        return shard if shard in live else self._unless_unfit(shard, count)

    def required(self, request: InsertRequest) -> int:
        """Return the least number of regions of the shard that gets the records."""
        return request.min_regions or self._min_regions or self._routing.limits.min_regions

    def is_too_narrow(self, window: ShardWindow) -> bool:
        """Whether a call that waits for a shard requires more regions than the shard spans now."""
        span = len(set(self._routing.regions(window.shard)))
        return any(self.required(call.request) > span for call in (*window.queue, *window.singles))

    def must_leave(self, window: ShardWindow, call: InsertCall) -> bool:
        """Whether a call at a shard requires more regions than the shard spans now.

        A call that is placed in part stays.
        """
        span = len(set(self._routing.regions(window.shard)))
        is_short = any(self.required(one.request) > span for one in call.calls)
        return is_short and not call.is_partly_placed

    def _without_live(self, former: int, count: int) -> int | ConfigError:
        """Return the former shard if the call may wait for it, else -1 if it may wait for others.

        Returns an error if no shard of whatever state spans enough regions.
        """
        routing = self._routing
        if count <= 1 or not routing.shards:
            return former
        shards = [s for s in routing.shards if not routing.is_removed(s)]
        if not any(routing.spans(shard, count) for shard in shards):
            return self._unless_outdated(shards, count)
        return former if routing.spans(former, count) else -1

    def latency_ns(self, shard: int) -> int:
        """Return the measured latency of inserts at a shard; 0: there is none."""
        window = self._windows.get(shard)
        return window.retransmit_timeout.smoothed_ns if window is not None else 0

    def _unless_unfit(self, shard: int, count: int) -> int | ZiplogError:
        """Return a shard, or an error if it was removed or spans too few regions."""
        routing = self._routing
        if routing.is_removed(shard):
            return insert_errors.removed_error(shard, routing)
        if count > 1 and routing.regions(shard) and not routing.spans(shard, count):
            return self._unless_outdated([shard], count)
        return shard

    def _unless_outdated(self, shards: Sequence[int], count: int) -> int | ConfigError:
        """Return the error of a call that requires more regions than these shards span.

        If the placements are old, return -1: the call waits for newer ones.
        """
        if self._routing.is_current:
            return insert_errors.too_few_regions_error(shards, count, self._routing)
        if not self._is_reassign_due:
            self._is_reassign_due = True
            self._routing.refresh(self._on_refreshed)
        return -1

    def _on_refreshed(self) -> None:
        self._is_reassign_due = False
        self._reassign()

    def _unless_full(self, shards: Sequence[int]) -> UnavailableError | None:
        """Return an error if no replica of these shards had disk space a moment ago."""
        now, reasons = self._context.now, []
        if now >= self._avoid_until:
            return None
        for shard in shards:
            window = self._windows.get(shard)
            if window is None or window.avoid_until <= now or not window.no_space:
                return None
            reasons.append(window.no_space)
        return insert_errors.no_space_error(shards, reasons[0])
