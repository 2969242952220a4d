"""Cursors of a history, and their rules (docs/protocol.md, section 19; docs/history.md).

A claim and a listing are *sightings*: the service had this state at some time between the call and
the return. An *era* of a cursor lasts from its creation or a seek to the next one; in it, the
position never goes back.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.history import events
from tests.history.highest import Highest
from tests.history.violation import END, Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Era(NamedTuple):
    """A cursor from its creation or a seek to the next one."""

    name: str
    birth: int
    seek: int


class Sighting(NamedTuple):
    """A claim that was granted, or a cursor in a listing."""

    era: Era
    term: int
    gsn: int
    called: int
    at: int
    source: int
    #: Of a claim: the mark; None: a listing.
    mark: str | None


class Commit(NamedTuple):
    """A `commit`; `at` is `END` unless it returned."""

    claim: Sighting
    #: The position that it requested, and the one that it returned.
    requested: int
    gsn: int
    called: int
    at: int
    source: int


class Cursors:
    """What a history says of cursors."""

    def __init__(self) -> None:
        self.sightings: Final[list[Sighting]] = []
        #: By process and operation: a claim that was granted, and a commit.
        self.claims: Final[dict[tuple[int, int], Sighting]] = {}
        self.commits: Final[dict[tuple[int, int], Commit]] = {}
        #: The name of each cursor that was sought, and when that was requested.
        self.seeks: Final[list[tuple[str, int]]] = []
        #: The calls, with their sources.
        self.open: Final[dict[tuple[int, int], tuple[events.Call, int]]] = {}

    def on_event(self, event: events.CursorEvent, process: int, source: int) -> None:
        """Take a line; `process`: a number of its file. A result without a call is a KeyError."""
        if isinstance(event, events.CursorIs):
            era = Era(event.name, event.birth, event.seek)
            seen = Sighting(era, event.term, event.gsn, event.called, event.at, source, None)
            self.sightings.append(seen)
            return
        key = (process, event.op)
        if isinstance(event, events.Call):
            self.open[key] = event, source
        if isinstance(event, events.SeekCursor):
            self.seeks.append((event.name, event.at))
        elif isinstance(event, events.Commit):
            claim = self.claims[process, event.of]
            self.commits[key] = Commit(claim, event.gsn, event.gsn, event.at, END, source)
        elif isinstance(event, events.Claimed):
            self._on_claimed(event, key)
        elif isinstance(event, events.Committed):
            self.commits[key] = self.commits[key]._replace(gsn=event.gsn, at=event.at)

    def _on_claimed(self, event: events.Claimed, key: tuple[int, int]) -> None:
        call, source = self.open[key]
        assert isinstance(call, events.Claim), "the result of another call"
        era = Era(call.name, event.birth, event.seek)
        self.claims[key] = claim = Sighting(
            era, event.term, event.gsn, call.at, event.at, source, event.mark
        )
        self.sightings.append(claim)

    def requested(self) -> dict[Era, Highest]:
        """Return the positions that commits requested in each era."""
        rows: dict[Era, list[tuple[int, int]]] = defaultdict(list)
        for commit in self.commits.values():
            rows[commit.claim.era].append((commit.called, commit.requested))
        return {era: Highest(found) for era, found in rows.items()}

    def highest(self) -> dict[Era, Highest]:
        """Return the positions that were committed or sighted in each era."""
        rows: dict[Era, list[tuple[int, int]]] = defaultdict(list)
        for commit in self.commits.values():
            if commit.at != END:
                rows[commit.claim.era].append((commit.at, commit.gsn))
        for seen in self.sightings:
            rows[seen.era].append((seen.at, seen.gsn))
        return {era: Highest(found) for era, found in rows.items()}


def check(cursors: Cursors) -> Iterator[Violation]:
    """Hold cursors against their rules."""
    yield from _terms(cursors)
    yield from _positions(cursors)
    yield from _commits(cursors)
    yield from _seeks(cursors)


def _terms_of(sightings: Iterable[Sighting]) -> dict[str, Highest]:
    rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for seen in sightings:
        rows[seen.era.name].append((seen.at, seen.term))
    return {name: Highest(found) for name, found in rows.items()}


def _terms(cursors: Cursors) -> Iterator[Violation]:
    """A claim takes a term of its own, and no term is below one that was seen before."""
    terms = _terms_of(cursors.sightings)
    owners: dict[tuple[str, int], Sighting] = {}
    for seen in cursors.sightings:
        name = seen.era.name
        before = terms[name].before(seen.called)
        is_claim = seen.mark is not None
        if seen.term < before or (is_claim and seen.term == before):
            text = f"{name} has term {seen.term}, and had term {before} before"
            yield Violation("term-order", text, seen.source)
        if is_claim and owners.setdefault((name, seen.term), seen) is not seen:
            text = f"two claims of {name} have term {seen.term}"
            yield Violation("term-order", text, seen.source)


def _positions(cursors: Cursors) -> Iterator[Violation]:
    """A position goes back by a seek only, and forward by commits only."""
    highest = cursors.highest()
    first: dict[Era, Sighting] = {}
    for seen in cursors.sightings:
        known = first.setdefault(seen.era, seen)
        first[seen.era] = min(known, seen, key=lambda one: one.at)
    most = cursors.requested()
    #: The lowest term that committed a position, with a mark. Claims of later terms see the mark.
    marked: dict[tuple[Era, int], int] = {}
    for commit in cursors.commits.values():
        if commit.at != END:
            place, term = (commit.claim.era, commit.gsn), commit.claim.term
            marked[place] = min(term, marked.get(place, term))
    claimed = {claim.era.name for claim in cursors.claims.values()}
    for seen in cursors.sightings:
        least = highest[seen.era].before(seen.called)
        if seen.gsn < least:
            text = f"{seen.era.name} is at {seen.gsn}, and was at {least} before"
            yield Violation("position-order", text, seen.source, seen.gsn)
        limit = first[seen.era].gsn
        if seen.era in most:
            limit = max(limit, most[seen.era].before(seen.at))
        if seen.era.name in claimed and seen.gsn > limit:
            text = f"{seen.era.name} is at {seen.gsn}; no commit was above {limit}"
            yield Violation("position-order", text, seen.source, seen.gsn)
        is_marked = marked.get((seen.era, seen.gsn), seen.term) < seen.term
        if seen.mark not in {None, str(seen.gsn)} and (seen.mark or is_marked):
            text = f"{seen.era.name} has the mark {seen.mark!r} at {seen.gsn}"
            yield Violation("mark", text, seen.source, seen.gsn)


def _commits(cursors: Cursors) -> Iterator[Violation]:
    """A commit has no effect once a later term was seen, and returns what was requested."""
    terms, most = _terms_of(cursors.sightings), cursors.requested()
    for commit in cursors.commits.values():
        name, term = commit.claim.era.name, commit.claim.term
        highest = most[commit.claim.era].before(commit.at)
        if commit.at != END and not commit.requested <= commit.gsn <= highest:
            text = f"a commit of {name} requested {commit.requested}, and returned {commit.gsn}"
            yield Violation("position-order", text, commit.source, commit.gsn)
        later = terms[name].before(commit.called)
        if commit.at != END and later > term:
            text = f"term {term} of {name} committed {commit.gsn} after a claim of term {later}"
            yield Violation("fence", text, commit.source, commit.gsn)


def _seeks(cursors: Cursors) -> Iterator[Violation]:
    """The number of seeks of a cursor is at most that of the calls."""
    for seen in cursors.sightings:
        name, number = seen.era.name, seen.era.seek
        count = sum(one == name and called <= seen.at for one, called in cursors.seeks)
        if number > count:
            text = f"{name} was sought {number} times, by {count} calls"
            yield Violation("seek", text, seen.source)
