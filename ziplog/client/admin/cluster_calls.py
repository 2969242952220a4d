"""Calls about the whole cluster: connect, trim, status document, end of an upgrade, lost regions.

Each call is one request that is retried until its deadline (`membership_client`).

See docs/protocol.md, section 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import (
    ChangeRegionRequest,
    ConnectRequest,
    FinishUpgradeRequest,
    StatusRequest,
    TrimRequest,
)
from ziplog.core.nearness import named
from ziplog.core.units import NEVER, NS_PER_MS
from ziplog.errors import (
    ConfigError,
    DeadlineError,
    NoSuchRecordError,
    TrimHeldError,
    UnavailableError,
)
from ziplog.types import RID_GENESIS, RecordId
from ziplog.wire import ChangeRegion, FinishUpgrade, Hello, StatusQuery, Trim

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.errors import VersionError
    from ziplog.wire import ClusterInfo, RegionChanged, StatusReply, TrimReply, UpgradeFinished

#: Within a shorter time, even a node of this machine may not reply.
_LEAST_CONTACT_NS: Final = 10 * NS_PER_MS
#: Interval between the reply to a trim that is not done, and the next request.
_TRIM_RETRY_NS: Final = 100 * NS_PER_MS


class PendingCall(PendingRequest, kw_only=True):
    """One pending call."""

    #: What the service has to do; empty: to connect.
    what: str = ""
    #: When it began to connect.
    began: int = 0
    #: The position of a trim.
    rid: RecordId = RID_GENESIS
    #: A trim goes past what cursors hold.
    force: bool = False
    #: What the service reported of a trim that is not done; "": nothing.
    known: str = ""


class ClusterCalls(PendingRequests[PendingCall]):
    """The pending cluster calls of a client."""

    @property
    def calls(self) -> dict[type, Callable[[int, Any], None]]:
        """The handler of each request."""
        return {
            ConnectRequest: self.connect,
            StatusRequest: self.status,
            FinishUpgradeRequest: self.finish_upgrade,
            ChangeRegionRequest: self.change_region,
            TrimRequest: self.trim,
        }

    @property
    def waiting(self) -> bool:
        """False: no such call waits for a shard."""
        return False

    def connect(self, call: int, request: ConnectRequest) -> None:
        """Get the cluster's description from the membership service."""
        pending = PendingCall(call, request.deadline, began=self._context.now)
        self._add(pending)
        if request.deadline <= pending.began:
            # A reply that comes before the deadline is noticed would be luck.
            self._finish(pending, self._first_contact_error(pending))
            return

        def on_refreshed() -> None:
            if call in self._pending:
                self._finish(pending, self._routing.limits)

        self._routing.refresh(on_refreshed)

    def end_if_unreachable(self) -> None:
        """End the first contact at once if no node of the service can be reached."""
        if self._membership.is_unreachable:
            for pending in [each for each in self._pending.values() if not each.what]:
                self._finish(pending, self._membership.first_contact_error)

    def status(self, call: int, request: StatusRequest) -> None:
        """Get the status document, or a part of the history."""
        pending = PendingCall(call, request.deadline, what="send the status")
        self._add(pending)

        def on_reply(reply: StatusReply) -> None:
            self._finish(pending, reply.document)

        pending.service_request = self._membership.send_request(
            lambda cluster, number: StatusQuery(
                cluster, number, request.part, request.start, request.stop
            ),
            on_reply,
        )

    def finish_upgrade(self, call: int, request: FinishUpgradeRequest) -> None:
        """Have the cluster use a wire version, if all nodes know it."""
        wire = request.wire
        pending = PendingCall(
            call, request.deadline, what=f"confirm the use of wire version {wire}"
        )
        self._add(pending)

        def on_reply(reply: UpgradeFinished) -> None:
            if reply.wire >= wire:
                self._finish(pending, reply.wire)
            else:
                self._finish(pending, self._obstacle_error(wire, reply))

        pending.service_request = self._membership.send_request(
            lambda cluster, number: FinishUpgrade(cluster, number, wire), on_reply
        )

    def _obstacle_error(self, wire: int, reply: UpgradeFinished) -> UnavailableError:
        return UnavailableError(
            f"{self._routing} still uses wire version {reply.wire}, because not all nodes know"
            f" version {wire}: {reply.obstacle}. Start a release there that knows it, and try again"
        )

    def change_region(self, call: int, request: ChangeRegionRequest) -> None:
        """Give up a region, or let it count again."""
        region, is_lost = request.region, request.is_lost
        what = f"confirm that {_named(region)} {'is given up' if is_lost else 'counts again'}"
        pending = PendingCall(call, request.deadline, what=what)
        self._add(pending)

        def on_reply(reply: RegionChanged) -> None:
            text = f"{self._routing} does not give up {_named(region)}: {reply.obstacle}"
            result = UnavailableError(text) if reply.obstacle else None

            def on_cluster_info(info: ClusterInfo) -> None:
                self._routing.update(info)
                self._finish(pending, self._unknown_region_error(region) or result)

            has_changed = is_lost and result is None
            if has_changed or self._unknown_region_error(region) is None:
                self._finish(pending, result)
            else:  # Perhaps a shard was added there.
                pending.service_request = self._membership.send_request(Hello, on_cluster_info)

        pending.service_request = self._membership.send_request(
            lambda cluster, number: ChangeRegion(cluster, number, region, is_lost), on_reply
        )

    def _unknown_region_error(self, region: str) -> ConfigError | None:
        """Return the error for a region without storage servers; None: there are some."""
        routing = self._routing
        known = {one for shard in routing.shards for one in routing.regions(shard)}
        if region in known:
            return None
        allowed = f"one with storage servers: {named(sorted(known))}"
        text = f"no storage server of {routing} is in {_named(region)}; give {allowed}"
        return ConfigError("region", region, allowed, message=text)

    def trim(self, call: int, request: TrimRequest) -> None:
        """Delete all records before a position, once it is stable."""
        rid = request.rid
        pending = PendingCall(call, request.deadline, what=f"confirm a trim before {rid}", rid=rid)
        pending.force = request.force
        self._add(pending)
        self._retry(pending)

    def _retry(self, pending: PendingCall) -> None:
        """Send a trim, for the first time or because it was not done yet."""

        def on_reply(reply: TrimReply) -> None:
            if reply.error == "no-such-position":
                self._finish(pending, NoSuchRecordError(rid, "no shard owns the position yet"))
            elif reply.held_by:
                position = RecordId(reply.held_at, 0)
                self._finish(pending, TrimHeldError(reply.held_by, position, reply.held_owner))
            elif reply.error == "not-stable":
                pending.known = _known_of(reply, rid)
                self._retry_at(pending, self._context.now + _TRIM_RETRY_NS)
            else:
                self._finish(pending, None)

        rid, pending.retry_at = pending.rid, NEVER
        pending.service_request = self._membership.send_request(
            lambda cluster, number: Trim(cluster, number, rid.gsn, pending.force), on_reply
        )

    def _result_at_deadline(self, pending: PendingCall) -> UnavailableError | VersionError:
        if not pending.what:
            return self._first_contact_error(pending)
        return DeadlineError(
            f"the membership service of {self._routing} did not {pending.what} before the"
            f" deadline{pending.known}"
        )

    def _first_contact_error(self, pending: PendingCall) -> UnavailableError | VersionError:
        """Return why there was no contact: the time-out, if it was too short to find out."""
        if pending.deadline - pending.began >= _LEAST_CONTACT_NS:
            return self._membership.first_contact_error
        endpoints = ", ".join(self._membership.endpoints)
        return DeadlineError(
            f"the time-out (below {_LEAST_CONTACT_NS // NS_PER_MS} ms) is too short to connect to"
            f" {endpoints}; allow more time"
        )


def _known_of(reply: TrimReply, rid: RecordId) -> str:
    """Return what is known of a trim that is not done, for its error."""
    if reply.trim >= rid.gsn:
        return f". It will happen, but {reply.obstacle}"
    return f". It may still happen, but {reply.obstacle}" if reply.obstacle else ""


def _named(region: str) -> str:
    return f"region {named([region])}"
