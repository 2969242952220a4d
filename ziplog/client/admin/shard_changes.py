"""Calls that change the set of shards: add, remove or finalize one.

    service asked --done--> placements asked --> completed
                  '-refused-> placements asked --> failed

Rules: the service replies when the change is complete; until then the client retries the request,
which is idempotent. The client updates its placements before it completes the call.

Invariant: a pending call has an open request. See docs/protocol.md, section 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.client.common.requests import ChangeRequest
from ziplog.errors import ConfigError, DeadlineError
from ziplog.wire import ChangeShard, Hello, ShardChanged

if TYPE_CHECKING:
    from ziplog.client.common.membership_client import MembershipClient
    from ziplog.client.common.requests import Change
    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.errors import ZiplogError
    from ziplog.wire import ClusterInfo

_DONE: Final[dict[Change, str]] = {
    "add": "live",
    "remove": "out of the log's leases",
    "finalize": "finalized",
}


class PendingChange(msgspec.Struct):
    """One pending change."""

    request: ChangeRequest
    #: Number of the open request.
    open_request: int = 0
    #: The service's reply.
    reply: ShardChanged | None = None


class ShardChanges:
    """The pending shard changes of a client."""

    def __init__(
        self, context: StepContext, membership: MembershipClient, routing: Routing
    ) -> None:
        self._context: Final = context
        self._membership: Final = membership
        self._routing: Final = routing
        #: By call.
        self._pending: Final[dict[int, PendingChange]] = {}

    @property
    def waiting(self) -> bool:
        """Whether a call is pending."""
        return bool(self._pending)

    def start(self, call: int, request: ChangeRequest) -> None:
        """Start a call."""
        pending = self._pending[call] = PendingChange(request)
        self._context.set_timer(request.deadline)

        def on_reply(reply: ShardChanged) -> None:
            pending.reply = reply
            pending.open_request = self._membership.send_request(Hello, on_cluster_info)

        def on_cluster_info(info: ClusterInfo) -> None:
            self._routing.update(info)
            self._finish(call)

        pending.open_request = self._membership.send_request(
            lambda cluster, number: ChangeShard(
                cluster, number, request.shard, request.change, list(request.replicas)
            ),
            on_reply,
        )

    def cancel(self, call: int) -> None:
        """Cancel a call; the service continues the change."""
        pending = self._pending.pop(call, None)
        if pending is not None:
            self._membership.cancel(pending.open_request)

    def _finish(self, call: int) -> None:
        pending = self._pending[call]
        self.cancel(call)
        result: ZiplogError | None = None
        if pending.reply is None:
            result = self._deadline_error(pending.request)
        elif pending.reply.error:
            result = self._refusal_error(pending.request, pending.reply)
        self._context.complete(call, result)

    # --- errors ---

    def _refusal_error(self, request: ChangeRequest, reply: ShardChanged) -> ConfigError:
        """Return the error for a request that the service refused."""
        shard, routing = request.shard, self._routing
        where = f"cannot {request.change} shard {shard} of {routing}"
        unused = f"a number that no shard ever had, such as {max(routing.shards, default=-1) + 1}"
        match reply.error:
            case "no-such-shard":
                return ConfigError("shard", shard, f"one of {routing.shards}", where)
            case "retired":
                sentence = f"a removed shard never comes back; use {unused}"
                return ConfigError("shard", shard, unused, where, message=sentence)
            case "last-shard":
                allowed = "another shard than the last one"
                sentence = "it is the last shard that accepts records; add another one first"
                return ConfigError("shard", shard, allowed, where, message=sentence)
            case "wrong-size":
                names = [replica.name for replica in request.replicas]
                sizes = {len(routing.servers(other)) for other in routing.shards}
                size = " or ".join(map(str, sorted(sizes - {0}))) or "f+1"
                sentence = (
                    f"it has the {len(names)} servers {names}, but every shard of the cluster"
                    f" has {size}"
                )
                return ConfigError("replicas", names, f"{size} servers", where, message=sentence)
            case "too-many":
                allowed = "a shard of another cluster"
                sentence = f"a cluster has at most {len(routing.shards)} shards"
                return ConfigError("shard", shard, allowed, where, message=sentence)
        return self._conflict_error(request, unused, where)

    def _conflict_error(self, request: ChangeRequest, unused: str, where: str) -> ConfigError:
        """Return the error for a shard number or a server that is in use."""
        routing, requested = self._routing, [(r.name, r.endpoint) for r in request.replicas]
        for other in routing.shards:
            existing = [(replica.name, replica.endpoint) for replica in routing.servers(other)]
            if other == request.shard:
                continue
            for name, endpoint in requested:
                if any(name == n or endpoint == e for n, e in existing):
                    given, allowed = f"{name}={endpoint}", "a server of no other shard"
                    sentence = f"{given} conflicts with shard {other}, which has {dict(existing)}"
                    return ConfigError("replica", given, allowed, where, message=sentence)
        existing = [(replica.name, replica.endpoint) for replica in routing.servers(request.shard)]
        sentence = (
            f"shard {request.shard} exists with the servers {dict(existing)}; give these servers,"
            f" or use {unused}"
        )
        return ConfigError("shard", request.shard, unused, where, message=sentence)

    def _deadline_error(self, request: ChangeRequest) -> DeadlineError:
        """Return the error at the deadline, with the state of the change."""
        routing, shard, change = self._routing, request.shard, request.change
        state = routing.state(shard)
        match change, state:
            case _, "recovering":
                why = "it must be recovered first"
            case "add", "joining":
                servers = ", ".join(f"{r.name} at {r.endpoint}" for r in routing.servers(shard))
                why = f"all its servers must run and reach the membership service: {servers}"
            case "remove" | "finalize", "leaving":
                why = "its servers have not yet confirmed that every record is on all of them"
                if change == "finalize":
                    why += ", on stable storage"
            case _:
                why = "the membership service did not confirm it"
        return DeadlineError(
            f"{routing.describe(shard)} was not {_DONE[change]} before the deadline: {why};"
            " the change continues, and the call may be repeated"
        )

    # --- time ---

    def tick(self) -> None:
        """End the calls at their deadlines."""
        for call, pending in list(self._pending.items()):
            if self._context.now >= pending.request.deadline:
                self._finish(call)
            else:
                self._context.set_timer(pending.request.deadline)

    def check(self) -> None:
        """Assert the invariant."""
        for pending in self._pending.values():
            assert self._membership.is_open(pending.open_request), "a call without an open request"
            assert self._context.next_timer <= pending.request.deadline, (
                "a deadline would be missed"
            )
