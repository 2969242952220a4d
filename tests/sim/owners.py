"""Clients that claim cursors, in a run (docs/protocol.md, section 19).

Owners claim a few cursors, read, commit and release them, and change them as an operator does. The
`Ledger` compares what all of them learned: C1 to C7 of the protocol. What an owner receives is
recorded as a subscription from the claimed position on, so the rules of the history judge it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.sim.workload import FETCH_NS, FETCH_RECORDS, Client
from tests.simulator.kernel import MS, S
from ziplog.client.common.requests import (
    NEVER,
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


class Era(NamedTuple):
    """A cursor from its creation or a seek to the next one: its position never goes back."""

    name: str
    birth: int
    seek: int


class Begun(NamedTuple):
    """What was known when a call began."""

    #: The highest term that was claimed.
    term: int
    #: The highest committed position of each era.
    committed: dict[Era, int]


class Ledger:
    """What the owners of a run learned of their cursors, in the order of time."""

    def __init__(self) -> None:
        #: By cursor and term: the claim's owner.
        self._owners: Final[dict[tuple[str, int], str]] = {}
        self._terms: Final[dict[str, int]] = dict.fromkeys(NAMES, 0)
        #: Positions that were committed, and the highest one that was requested or claimed.
        self._committed: Final[dict[Era, int]] = {}
        self._requested: Final[dict[Era, int]] = {}
        #: By cursor: the last committed position.
        self.ends: Final[dict[str, int]] = dict.fromkeys(NAMES, 0)
        #: The cursors that an operator took from their owners.
        self.freed: Final[set[str]] = set()
        #: Numbers of claims, and of claims that ended in another way than by a release.
        self.claims = self.losses = 0

    def begin(self, name: str) -> Begun:
        """Return what is known of a cursor when a call begins."""
        return Begun(self._terms[name], dict(self._committed))

    def claimed(self, owner: str, state: ClaimState, begun: Begun) -> Era:
        """Check a claim that was granted."""
        name, term, position = state.name, state.term, state.position.gsn
        era = Era(name, state.birth, state.seek)
        assert term > begun.term, f"C1: {name}: term {term} after term {begun.term}"
        other = self._owners.setdefault((name, term), owner)
        assert other == owner, f"C1: {name}: {owner} and {other} own term {term}"
        least = begun.committed.get(era, 0)
        assert position >= least, f"C3: {name} is at {position}; {least} was committed"
        most = self._requested.setdefault(era, position)
        assert position <= most, f"C2: {name} is at {position}, behind the last request, {most}"
        mark = state.mark
        assert mark in {b"", b"%d" % position}, f"C2: {name}: mark {mark!r} at {position}"
        self._terms[name] = max(self._terms[name], term)
        self.claims += 1
        return era

    def requested(self, era: Era, position: int) -> None:
        """Note that a commit was requested."""
        self._requested[era] = max(self._requested[era], position)

    def committed(self, era: Era, term: int, position: int, begun: Begun) -> None:
        """Check a commit that was confirmed."""
        assert term >= begun.term, (
            f"C2: {era.name}: term {term} committed {position}, after a claim of term {begun.term}"
        )
        self._committed[era] = max(self._committed.get(era, 0), position)
        self.ends[era.name] = position

    def is_processed(self, last: int) -> bool:
        """Whether every cursor was committed behind the last record."""
        return all(end > last for end in self.ends.values())


class Owner(Client):
    """A client that claims one cursor after the other."""

    def __init__(self, shared: Shared, name: str, ledger: Ledger, *, has_faults: bool) -> None:
        super().__init__(shared, name)
        self._ledger: Final = ledger
        self._has_faults: Final = has_faults
        self._subscription = self._operation = self._term = 0
        self._era = Era(NAMES[0], 0, 0)

    def next_call(self) -> None:
        name = self.random.choice(NAMES)
        begun = self._ledger.begin(name)
        request = ClaimRequest(
            self.deadline(_CALL_NS), name, RID_GENESIS, self.name, LEASE_MS, _HOLD_S, wait=True
        )
        self.program().call(request, partial(self._claimed, begun))

    def _claimed(self, begun: Begun, result: Any) -> None:
        assert not isinstance(result, TrimmedError), f"C7: {self.name} cannot claim: {result}"
        if isinstance(result, BaseException):
            self.next_call()
            return
        self._subscription = result
        self.program().call(ClaimQuery(NEVER, result), partial(self._begin_to_read, begun))

    def _begin_to_read(self, begun: Begun, state: ClaimState) -> None:
        self._era, self._term = self._ledger.claimed(self.name, state, begun), state.term
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
            self._ledger.requested(self._era, position.gsn)
            begun = self._ledger.begin(self._era.name)
            request = CommitRequest(
                self.deadline(_CALL_NS), self._subscription, position, b"%d" % position.gsn, is_soon
            )
            self.program().call(request, partial(self._committed, begun, then, is_soon=is_soon))

        self.program().call(ProgressRequest(NEVER, self._subscription), commit)

    def _committed(self, begun: Begun, then: Any, result: Any, *, is_soon: bool) -> None:
        if isinstance(result, CursorLostError):
            self._lose(result)
            return
        if isinstance(result, RecordId) and not is_soon:
            self._ledger.committed(self._era, self._term, result.gsn, begun)
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
        request = EditRequest(self.deadline(_CALL_NS), self._era.name, "resume")
        self.program().call(request, lambda _result: self._release())
