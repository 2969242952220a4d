"""Operators' calls about cursors: list them, create, change or delete one.

Each call is one request at a time to the membership service, which is retried until the deadline.
Copies of a change count once, by its nonce. See docs/protocol.md, section 19.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ziplog.client.common.pending_requests import PendingRequest, PendingRequests
from ziplog.client.common.requests import CursorsRequest, EditRequest
from ziplog.errors import (
    ConfigError,
    DeadlineError,
    NoSuchRecordError,
    UnavailableError,
)
from ziplog.types import CursorInfo, RecordId
from ziplog.wire import CursorEdit, CursorQuery

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.routing import Routing
    from ziplog.client.common.step_context import StepContext
    from ziplog.client.reads.tail import LogTail, TailQueries
    from ziplog.core.cursors import Cursor
    from ziplog.wire import CursorList, CursorReply

_US_PER_S: Final = 1_000_000


class PendingEdit(PendingRequest, kw_only=True):
    """One pending call."""

    #: The service has to confirm it; "": it has to list the cursors.
    what: str
    #: The cursors that the service has listed so far.
    found: list[CursorInfo] = msgspec.field(default_factory=list)


class Edits(PendingRequests[PendingEdit]):
    """The pending calls of operators."""

    def __init__(self, context: StepContext, routing: Routing, tail_queries: TailQueries) -> None:
        super().__init__(context, routing)
        self._tail_queries: Final = tail_queries

    @property
    def calls(self) -> dict[type, Callable[[int, Any], None]]:
        """The handler of each request."""
        return {CursorsRequest: self.start_list, EditRequest: self.start}

    @property
    def waiting(self) -> bool:
        """False: no such call waits for a shard."""
        return False

    # --- the list ---

    def start_list(self, call: int, request: CursorsRequest) -> None:
        """List all cursors."""
        pending = PendingEdit(call, request.deadline, what="")
        self._add(pending)
        self._query(pending, "")

    def _query(self, pending: PendingEdit, after: str) -> None:
        pending.service_request = self._membership.send_request(
            lambda cluster, number: CursorQuery(cluster, number, after),
            lambda reply: self._on_list(pending, reply),
        )

    def _on_list(self, pending: PendingEdit, reply: CursorList) -> None:
        # A service of an earlier release does not send `silent`.
        silent = reply.silent or [False] * len(reply.cursors)
        pending.found += [
            _info(cursor, shard)._replace(is_silent=is_silent)
            for cursor, shard, is_silent in zip(reply.cursors, reply.shards, silent, strict=True)
        ]
        if reply.has_more and reply.cursors:
            self._query(pending, reply.cursors[-1].name)
        else:
            self._finish(pending, pending.found)

    # --- changes ---

    def start(self, call: int, request: EditRequest) -> None:
        """Change a cursor."""
        what = f"the request to {request.edit} the cursor {request.name}"
        pending = PendingEdit(call, request.deadline, what=what)
        self._add(pending)
        if request.position.gsn < 0:
            self._tail_queries.query(
                call,
                request.deadline,
                lambda tail: self._on_tail(pending, request, tail),
                with_recent=False,
            )
        else:
            self._edit(pending, request, request.position.gsn)

    def _on_tail(
        self, pending: PendingEdit, request: EditRequest, tail: LogTail | DeadlineError
    ) -> None:
        if isinstance(tail, DeadlineError):
            self._finish(pending, tail)
        else:
            self._edit(pending, request, tail.last.gsn + 1)

    def _edit(self, pending: PendingEdit, request: EditRequest, position: int) -> None:
        nonce = self._context.client[:8] + pending.call.to_bytes(8, "big")
        pending.service_request = self._membership.send_request(
            lambda cluster, number: CursorEdit(
                cluster, number, request.name, request.edit, nonce, position, request.hold_s
            ),
            lambda reply: self._finish(pending, self._result(request, reply)),
        )

    def _result(self, request: EditRequest, reply: CursorReply) -> CursorInfo | Exception | None:
        name = request.name
        match reply.error:
            case "":
                return _info(reply.cursor, reply.shard) if reply.cursor is not None else None
            case "no-such-cursor" if request.edit == "delete":
                return None
            case "no-such-cursor":
                missing = f"there is no cursor {name}; `ziplog cursor list` shows all"
                return ConfigError("name", name, "the name of a cursor", message=missing)
            case "exists":
                return ConfigError("name", name, "new", message=f"there is a cursor {name} already")
            case "no-such-position":
                return NoSuchRecordError(request.position, "no shard owns the position yet")
            case _:
                why = f"{self._routing} has as many cursors as it can; delete one"
                return UnavailableError(why)

    def cancel(self, call: int) -> None:
        """Cancel a call."""
        self._tail_queries.cancel(call)
        super().cancel(call)

    def _result_at_deadline(self, pending: PendingEdit) -> DeadlineError:
        service = f"the membership service of {self._routing}"
        if not pending.what:
            return DeadlineError(f"{service} did not send its cursors before the deadline")
        return DeadlineError(
            f"{service} did not confirm {pending.what} before the deadline; it may still happen:"
            " try again"
        )


def _info(cursor: Cursor, shard: int) -> CursorInfo:
    """Return what callers see of a cursor."""
    moved_at = datetime.fromtimestamp(cursor.moved_us / _US_PER_S, UTC) if cursor.moved_us else None
    return CursorInfo(
        cursor.name,
        RecordId(cursor.position, shard),
        cursor.term,
        cursor.state,
        cursor.owner_text,
        moved_at,
        cursor.hold_s,
        cursor.is_holding,
        cursor.seek,
        cursor.mark,
    )
