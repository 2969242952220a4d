"""Calls that change the set of shards: add, remove or finalize one.

    service asked --done--> placements asked --> completed
                  '-refused-> placements asked --> failed

Rules: the service replies when the change is complete; until then the client retries the request,
which is idempotent. The client updates its placements before it completes the call.

Invariant: a pending call has an open request. See docs/protocol.md, section 13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import ChangeRequest
from ziplog.errors import ConfigError, DeadlineError
from ziplog.wire import ChangeShard, Hello, ShardChanged

if TYPE_CHECKING:
    from ziplog.client.common.requests import Change
    from ziplog.errors import ZiplogError
    from ziplog.wire import ClusterInfo

_DONE: Final[dict[Change, str]] = {
    "add": "live",
    "remove": "out of the log's leases",
    "finalize": "finalized",
}


class PendingChange(PendingRequest, kw_only=True):
    """One pending change; to cancel it does not stop the service."""

    request: ChangeRequest
    #: The service's reply.
    reply: ShardChanged | None = None


class ShardChanges(PendingRequests[PendingChange]):
    """The pending shard changes of a client."""

    def start(self, call: int, request: ChangeRequest) -> None:
        """Start a call."""
        pending = PendingChange(call, request.deadline, request=request)
        self._add(pending)

        def on_reply(reply: ShardChanged) -> None:
            def on_cluster_info(info: ClusterInfo) -> None:
                self._routing.update(info)
                self._finish(pending, self._refusal_error(request, reply))

            pending.reply = reply
            pending.service_request = self._membership.send_request(Hello, on_cluster_info)

        pending.service_request = self._membership.send_request(
            lambda cluster, number: ChangeShard(
                cluster, number, request.shard, request.change, list(request.replicas)
            ),
            on_reply,
        )

    # --- errors ---

    def _refusal_error(self, request: ChangeRequest, reply: ShardChanged) -> ConfigError | None:
        """Return the error for a request that the service refused; None if it did not."""
        shard, routing = request.shard, self._routing
        where = f"cannot {request.change} shard {shard} of {routing}"
        unused = f"a number that no shard ever had, such as {max(routing.shards, default=-1) + 1}"
        match reply.error:
            case "":
                return None
            case "no-such-shard":
                return ConfigError("shard", shard, f"one of {routing.shards}", where)
            case "retired":
                sentence = f"a removed shard never comes back; use {unused}"
                return ConfigError("shard", shard, unused, where, message=sentence)
            case "last-shard":
                allowed = "another shard than the last one"
                sentence = "it is the last shard that accepts records; add another one first"
                return ConfigError("shard", shard, allowed, where, message=sentence)
            case "wrong-size" if reply.detail:
                regions = [replica.region for replica in request.replicas]
                return ConfigError(
                    "regions", regions, "servers in more regions", where, message=reply.detail
                )
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

    def _result_at_deadline(self, pending: PendingChange) -> ZiplogError | None:
        """Return the service's reply, or else an error with the state of the change."""
        request, routing = pending.request, self._routing
        if pending.reply is not None:
            return self._refusal_error(request, pending.reply)
        shard, change = request.shard, request.change
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

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        for pending in self._pending.values():
            assert self._membership.is_open(pending.service_request), "a call without a request"
