"""Clients that claim cursors, in a run (docs/protocol.md, section 19).

Owners claim a few cursors, read, commit and release them, and change them as an operator does. The
`Ledger` records what all of them learned as a history, whose rules judge it (docs/history.md: C1 to
C3 of the protocol); an owner checks C4, C5 and C7. What an owner receives is recorded as a
subscription from the claimed position on, so the rules of subscriptions judge it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tests.history import cursors, events
from tests.sim.workload import FETCH_NS, FETCH_RECORDS, Client
from tests.simulator.kernel import MS, S
from ziplog.client.common.requests import (
    ClaimQuery,
    ClaimRequest,
    CommitRequest,
    EditRequest,
    Fetched,
    FetchRequest,
    ProgressRequest,
    ReleaseRequest,
    SubscribeRequest,
    UnsubscribeRequest,
)
from ziplog.core.units import NEVER
from ziplog.errors import CursorLostError, TrimmedError
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from tests.sim.workload import Shared
    from ziplog.client.common.requests import ClaimState, Progress

#: The cursors, and the lease of each claim.
NAMES: Final = ("a", "b")
LEASE_MS: Final = 300
#: No run takes so long, so no hold lapses.
_HOLD_S: Final = 1_000_000
_CALL_NS: Final = 5 * S
#: Maximum of an owner's pause between two fetches.
_DAWDLE_NS: Final = 700 * MS
#: What an owner does after a fetch, with weights.
_ACTS: Final = {"read": 30, "commit": 30, "soon": 20, "dawdle": 10, "release": 8, "edit": 4}
_EDITS: Final = {"seek": 3, "release": 3, "pause": 2, "resume": 4, "delete": 1}
#: Those that end a claim.
_FREEING: Final = {"seek", "release", "delete"}


class Ledger:
    """What the owners of a run learned of their cursors, in the order of time."""

    def __init__(self) -> None:
        #: By cursor: the last committed position.
        self.ends: Final[dict[str, int]] = dict.fromkeys(NAMES, 0)
        #: The cursors that an operator took from their owners.
        self.freed: Final[set[str]] = set()
        #: Numbers of claims, and of claims that ended in another way than by a release.
        self.claims = self.losses = 0
        #: The same as a history, and the number of its last line.
        self._cursors: Final = cursors.Cursors()
        self._line = 0

    def record(self, event: events.CursorEvent) -> None:
        """Take a line of the history of all owners."""
        self._line += 1
        self._cursors.on_event(event, 0, self._line)

    def next_op(self) -> int:
        """Return the number of a new operation."""
        self._line += 1
        return self._line

    def check(self) -> None:
        """Assert the rules of histories."""
        found = list(cursors.check(self._cursors))
        assert not found, "; ".join(f"{one.rule}: {one.text}" for one in found[:5])

    def is_processed(self, last: int) -> bool:
        """Whether every cursor was committed behind the last record."""
        return all(end > last for end in self.ends.values())


class Owner(Client):
    """A client that claims one cursor after the other."""

    def __init__(self, shared: Shared, name: str, ledger: Ledger, *, has_faults: bool) -> None:
        super().__init__(shared, name)
        self._ledger: Final = ledger
        self._has_faults: Final = has_faults
        self._subscription = self._operation = self._claim = 0
        self._cursor = NAMES[0]
        #: The number of the cursor when the claim was sent; 0: there was none.
        self._birth = 0
        #: Where new cursors start.
        self._start = RID_GENESIS

    def next_call(self) -> None:
        name = self.random.choice(NAMES)
        self._cursor, self._claim = name, self._ledger.next_op()
        self._ledger.record(events.Claim(self._claim, self._now, name))
        self._birth = self._birth_of_cursor
        request = ClaimRequest(
            self.deadline(_CALL_NS), name, self._start, self.name, LEASE_MS, _HOLD_S, wait=True
        )
        self.program().call(request, self._claimed)

    @property
    def _now(self) -> int:
        return self.shared.cluster.kernel.now

    @property
    def _birth_of_cursor(self) -> int:
        cursor = self.shared.cluster.state.cursors.get(self._cursor)
        return cursor.birth if cursor is not None else 0

    def _claimed(self, result: Any) -> None:
        if isinstance(result, TrimmedError):
            existed = 0 < self._birth == self._birth_of_cursor
            assert not existed, f"C7: {self.name} cannot claim: {result}"
            self._start = result.first
        if isinstance(result, BaseException):
            self.next_call()
            return
        self._subscription = result
        self.program().call(ClaimQuery(NEVER, result), self._begin_to_read)

    def _begin_to_read(self, state: ClaimState) -> None:
        numbers = (state.birth, state.term, state.seek, state.position.gsn, state.mark.decode())
        self._ledger.record(events.Claimed(self._claim, self._now, *numbers))
        self._ledger.claims += 1
        history, kernel = self.shared.history, self.shared.cluster.kernel
        plain = SubscribeRequest(NEVER, state.position, True)
        self._operation = history.call(self.name, kernel.now, plain)
        history.returned(self._operation, kernel.now, self._subscription)
        self._fetch()

    def _fetch(self) -> None:
        request = FetchRequest(self.deadline(FETCH_NS), self._subscription, FETCH_RECORDS)
        self.program().call(request, self._fetched)

    def _fetched(self, result: Fetched | BaseException) -> None:
        if isinstance(result, CursorLostError):
            self._lose(result)
            return
        assert not isinstance(result, BaseException), f"C7: a fetch of {self.name}: {result!r}"
        if result.records:
            history, kernel = self.shared.history, self.shared.cluster.kernel
            request = FetchRequest(NEVER, self._subscription, len(result.records))
            operation = history.call(self.name, kernel.now, request)
            history.returned(operation, kernel.now, Fetched(result.records, ended=False))
        if self.shared.is_over:
            self._commit_and(self._resume, is_soon=False)
            return
        (act,) = self.random.choices(list(_ACTS), list(_ACTS.values()))
        match act:
            case "read":
                self._fetch()
            case "commit" | "soon":
                self._commit_and(self._fetch, is_soon=act == "soon")
            case "dawdle":
                pause = self.random.randrange(_DAWDLE_NS)
                self.shared.cluster.kernel.after(pause, self.unless_killed(self._fetch))
            case "release":
                self._release()
            case "edit":
                self._edit()

    # --- commits ---

    def _commit_and(self, then: Any, *, is_soon: bool) -> None:
        def commit(progress: Progress) -> None:
            position = progress.position
            op = self._ledger.next_op()
            self._ledger.record(events.Commit(op, self._now, self._claim, position.gsn))
            request = CommitRequest(
                self.deadline(_CALL_NS), self._subscription, position, b"%d" % position.gsn, is_soon
            )
            self.program().call(request, partial(self._committed, op, then, is_soon=is_soon))

        self.program().call(ProgressRequest(NEVER, self._subscription), commit)

    def _committed(self, op: int, then: Any, result: Any, *, is_soon: bool) -> None:
        if isinstance(result, CursorLostError):
            self._lose(result)
            return
        if isinstance(result, RecordId) and not is_soon:
            self._ledger.record(events.Committed(op, self._now, result.gsn))
            self._ledger.ends[self._cursor] = result.gsn
        then()

    # --- the end of a claim ---

    def _lose(self, error: CursorLostError) -> None:
        self._ledger.losses += 1
        may_be_taken = self._has_faults or error.name in self._ledger.freed
        is_taken = "claimed it" in error.reason
        assert may_be_taken or not is_taken, f"C5: {self.name}: {error}, without a fault"
        assert self.name not in error.reason, f"C4: {self.name} lost a cursor to itself"
        self._end()

    def _release(self) -> None:
        request = ReleaseRequest(self.deadline(_CALL_NS), self._subscription)
        self.program().call(request, lambda _result: self._end())

    def _end(self) -> None:
        end = UnsubscribeRequest(NEVER, self._subscription)
        self.program().call(end, lambda _result: self.next_call())

    # --- an operator's changes ---

    def _edit(self) -> None:
        (edit,) = self.random.choices(list(_EDITS), list(_EDITS.values()))
        name, known = self.random.choice(NAMES), self.shared.known
        if edit in _FREEING:
            self._ledger.freed.add(name)
        if edit == "seek":
            self._ledger.record(events.SeekCursor(self._ledger.next_op(), self._now, name))
        position = self.random.choice((RID_GENESIS, known[-1], known[len(known) // 2]))
        is_placed = edit == "seek" or (edit == "pause" and self.random.random() < 0.5)
        request = EditRequest(
            self.deadline(_CALL_NS),
            name,
            edit,  # type: ignore[arg-type]
            position if is_placed else RID_GENESIS,
        )
        self.program().call(request, lambda _result: self._fetch())

    def _resume(self) -> None:
        """End a pause, at the end of the run, and let the others claim the cursor."""
        request = EditRequest(self.deadline(_CALL_NS), self._cursor, "resume")
        self.program().call(request, lambda _result: self._release())
