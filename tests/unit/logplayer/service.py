"""A membership service in memory that answers requests about cursors, beside a log in memory.

`Service` holds the production table of cursors, and which owners were heard. `PlayerCore` is one
client; it stands where a `ClientCore` does. A client counts as heard while its node is stepped.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from mms.commands import ClaimCursor, EditCursor, ReleaseCursor
from mms.cursor_table import CursorTable
from tests.unit.logdb import fakelog
from tests.unit.logdb.fakelog import FakeCore, FakeLog
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    ClaimState,
    CommitRequest,
    CursorsRequest,
    EditRequest,
    Progress,
    ProgressRequest,
    ReleaseRequest,
    Request,
    UnsubscribeRequest,
    WatchClaimRequest,
)
from ziplog.client.cursors.edits import _info
from ziplog.core.cursors import Cursor, CursorMove
from ziplog.core.node import Call, Effect, Event
from ziplog.errors import (
    ClosedError,
    ConfigError,
    CursorHeldError,
    CursorLostError,
    DeadlineError,
    NoSuchRecordError,
    TrimmedError,
    ZiplogError,
)
from ziplog.types import CursorInfo, RecordId

CLUSTER: Final = 77
_STOP: Final = 2**62
_WAITS: Final = fakelog._WAITS


class Service:
    """The cursors of a cluster."""

    def __init__(self, log: FakeLog) -> None:
        self.log: Final = log
        self.table: Final = CursorTable([])
        self.now = 0
        self.heard: Final[dict[bytes, int]] = {}
        #: It has no leader: requests about cursors wait.
        self.is_down = False
        self._nonces = 0

    def nonce(self) -> bytes:
        self._nonces += 1
        return self._nonces.to_bytes(8, "big")

    def get(self, name: str) -> Cursor:
        cursor = self.table.get(name)
        assert cursor is not None, name
        return cursor

    def edit(self, name: str, what: Any, position: int = 0, hold_s: int = 0) -> str:
        """Change a cursor as an operator does."""
        command = EditCursor(name, what, self.nonce(), position, hold_s, self.now // 1000 + 1)
        return self.table.edit(command, self.log.first, _STOP)

    def trim(self, gsn: int) -> None:
        """Trim by force."""
        self.table.stop_holding(gsn)
        self.log.trim(gsn)

    def is_silent(self, cursor: Cursor) -> bool:
        heard = self.heard.get(cursor.owner, -(10**18))
        return self.now - heard >= cursor.lease_ms * 1_000_000


class _Claim(msgspec.Struct):
    cursor: Cursor
    moves: int = 0


class PlayerCore(FakeCore):
    """One client of the log and of the service."""

    def __init__(self, service: Service, client: bytes) -> None:
        super().__init__(service.log, at_once=True)
        self.service: Final = service
        self.client: Final = client
        #: It reaches the log's shards, but not the membership service.
        self.is_isolated = False
        #: Its renewals are not answered, so it does not learn that it lost a claim.
        self.is_unaware = False
        #: Its claims of tasks, or of member cursors, are not answered yet.
        self.holds_claims = self.holds_members = False
        self.cluster = 0
        self.endpoints: Final = ["fake:1"]
        self.claims: Final[dict[int, _Claim]] = {}
        self._cursor_calls: Final[dict[type[Request], Any]] = {
            ClaimRequest: self._claim,
            ClaimQuery: lambda _call, request: self._state(request.subscription),
            WatchClaimRequest: self._watch,
            CommitRequest: self._commit,
            ReleaseRequest: self._release,
            CursorsRequest: lambda _call, _request: self._list(),
            EditRequest: self._edit,
        }
        self._answer.update(self._cursor_calls)

    @property
    def cut_off(self) -> bool:
        return self.service.is_down or self.is_isolated

    def step(self, event: Event, now: int) -> list[Effect]:
        self.service.now = max(self.service.now, now)
        if not self.cut_off:
            self.service.heard[self.client] = now
            self.cluster = CLUSTER
        effects = super().step(event, now)
        if isinstance(event, Call):
            return effects
        return effects

    def _is_due(self, call: int) -> bool:
        request = self.pending[call]
        if isinstance(request, WatchClaimRequest):
            return self._news(request) is not None
        if isinstance(request, ClaimQuery | ProgressRequest):
            return True
        if isinstance(request, ClaimRequest) and self._is_held(request.name):
            return False
        if type(request) in self._cursor_calls:
            return not self.cut_off
        return super()._is_due(call)

    def _last_reply(self, call: int, request: Request) -> Any:
        is_local = isinstance(request, ClaimQuery | WatchClaimRequest)
        if type(request) in self._cursor_calls and not is_local and self.cut_off:
            return DeadlineError("silence") if self.now >= request.deadline else _WAITS
        return super()._last_reply(call, request)

    def _progress(self, call: int, request: ProgressRequest) -> Progress | ZiplogError:
        result = super()._progress(call, request)
        if isinstance(result, Progress) and not result.caught_up:
            # As a real subscription: what was not returned yet is not passed.
            sub = self.subscriptions[request.subscription]
            return Progress(self.log.owner(sub.position), caught_up=False, blocked_on=None)
        return result

    # --- cursors ---

    def _claim(self, call: int, request: ClaimRequest) -> int | ZiplogError:
        assert not request.wait
        assert not request.reads
        service, name = self.service, request.name
        if self._is_held(name):
            return _WAITS  # type: ignore[return-value]
        cursor = service.table.get(name)
        if cursor is not None and cursor.owner and not service.is_silent(cursor):
            return CursorHeldError(name, cursor.owner_text)
        command = ClaimCursor(
            name, self.client, request.owner, service.nonce(), max(request.start.gsn, 0),
            request.lease_ms, request.hold_s, cursor.term if cursor is not None else 0, 1,
        )  # fmt: skip
        if request.start.gsn < 0:
            command = msgspec.structs.replace(command, start=self.log.tail.gsn + 1)
        refusal = service.table.claim(command, self.log.first, _STOP)
        if refusal == "trimmed":
            return TrimmedError(RecordId(self.log.first, 0))
        assert not refusal, refusal
        self.claims[call] = _Claim(service.get(name))
        return call

    def _is_held(self, name: str) -> bool:
        return self.holds_members if "/members/" in name else self.holds_claims

    def _lost(self, claim: _Claim) -> str:
        now = self.service.table.get(claim.cursor.name)
        if self.cut_off or self.is_unaware:
            return ""
        if now is None:
            return "it was deleted"
        return "" if now.term == claim.cursor.term and now.owner else "it has another term"

    def _state(self, number: int) -> ClaimState | ZiplogError:
        claim = self.claims.get(number)
        if claim is None:
            return ClosedError("this cursor")
        own = claim.cursor
        now = self.service.table.get(own.name)
        if now is not None and now.term == own.term and not self.cut_off:
            own = claim.cursor = now
        return ClaimState(
            own.name, own.term, RecordId(own.position, 0), own.mark, own.is_paused,
            self._lost(claim), own.birth, own.seek, own.has_moved, own.pause_at,
        )  # fmt: skip

    def _news(self, request: WatchClaimRequest) -> ClaimState | ZiplogError | None:
        state, known = self._state(request.subscription), request.known
        if isinstance(state, ZiplogError):
            return state
        is_same = (state.is_paused, state.pause_at, state.lost) == (
            known.is_paused, known.pause_at, known.lost,
        )  # fmt: skip
        return None if is_same else state

    def _watch(self, _call: int, request: WatchClaimRequest) -> Any:
        news = self._news(request)
        return _WAITS if news is None else news

    def _commit(self, _call: int, request: CommitRequest) -> RecordId | ZiplogError:
        claim = self.claims.get(request.subscription)
        if claim is None:
            return ClosedError("this cursor")
        claim.moves += 1
        own = claim.cursor
        step = CursorMove(own.name, own.term, claim.moves, request.position.gsn, request.mark)
        refusal = self.service.table.move(step, _STOP, self.service.now // 1000)
        if refusal in {"stale-term", "no-such-cursor"}:
            return CursorLostError(own.name, own.term, "it has another term")
        if refusal == "no-such-position":
            return NoSuchRecordError(request.position, "no shard owns the position yet")
        assert not refusal, refusal
        return request.position

    def _release(self, _call: int, request: ReleaseRequest) -> None:
        claim = self.claims.pop(request.subscription, None)
        if claim is not None:
            self.service.table.release(ReleaseCursor(claim.cursor.name, claim.cursor.term))

    def _unsubscribe(self, call: int, request: UnsubscribeRequest) -> None:
        if not self.cut_off:
            self._release(call, ReleaseRequest(request.deadline, request.subscription))
        super()._unsubscribe(call, request)

    def _list(self) -> list[CursorInfo]:
        return [_info(cursor, 0) for cursor in self.service.table.in_order()]

    def _edit(self, _call: int, request: EditRequest) -> CursorInfo | ZiplogError | None:
        position = request.position.gsn
        if position < 0:
            position = self.log.tail.gsn + 1
        refusal = self.service.edit(request.name, request.edit, position, request.hold_s)
        if refusal:
            return ConfigError("name", request.name, "new", message=refusal)
        cursor = self.service.table.get(request.name)
        return cast("CursorInfo", _info(cursor, 0)) if cursor is not None else None
