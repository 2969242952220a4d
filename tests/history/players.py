"""Steps of players at their targets in a history, and their rules (docs/history.md).

A target *holds* a position once a step up to it is done. An open of a target that stores positions
returns what it holds. Rule: a step without a result, or that failed, may have had its effect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from tests.history import events
from tests.history.cursors import Era
from tests.history.highest import Highest
from tests.history.violation import END, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.history.cursors import Cursors

#: A step that failed so had no effect, and the target stands where it stood.
_NO_EFFECT: Final = "Rejected"


@dataclass
class Opening:
    """A call of `Target.open`; `at` is `END` unless it returned."""

    call: events.Open
    process: int
    source: int
    at: int = END
    #: Where the target stands; -1: it stores no position.
    position: int = -1

    @property
    def era(self) -> Era:
        """The cursor's era."""
        return Era(self.call.task, self.call.birth, self.call.seek)


@dataclass
class Delivery:
    """A call of `Target.deliver`; `at` is `END` unless it returned."""

    call: events.Deliver
    opening: Opening
    source: int
    at: int = END
    #: The exception that it raised.
    error: str = ""


@dataclass
class TaskSteps:
    """What was done with one task, in the order of the calls of each process."""

    openings: list[Opening] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)

    def done(self) -> dict[Era, list[Delivery]]:
        """Return the steps that are done, in the order of their positions."""
        found: dict[Era, list[Delivery]] = defaultdict(list)
        for one in self.deliveries:
            if one.at != END:
                found[one.opening.era].append(one)
        for steps in found.values():
            steps.sort(key=lambda one: (one.call.start, one.call.stop))
        return found


class Players:
    """What a history says of players."""

    def __init__(self) -> None:
        self.tasks: Final[dict[str, TaskSteps]] = defaultdict(TaskSteps)
        #: Tasks whose targets were replaced.
        self.replaced: Final[set[str]] = set()
        #: What targets have at the end, and the sources.
        self.holds: Final[list[tuple[events.Holds, int]]] = []
        self._opens: Final[dict[tuple[int, int], Opening]] = {}
        self._steps: Final[dict[tuple[int, int], Delivery]] = {}

    def on_event(self, event: events.PlayerEvent, process: int, source: int) -> None:
        """Take a line; `process`: a number of its file. A result without a call is a KeyError."""
        if isinstance(event, events.Replaced):
            self.replaced.add(event.task)
        elif isinstance(event, events.Holds):
            self.holds.append((event, source))
        elif isinstance(event, events.Open):
            self._opens[process, event.op] = opening = Opening(event, process, source)
            self.tasks[event.task].openings.append(opening)
        elif isinstance(event, events.Deliver):
            of = self._opens[process, event.of]
            self._steps[process, event.op] = delivery = Delivery(event, of, source)
            self.tasks[of.call.task].deliveries.append(delivery)
        elif isinstance(event, events.Opened):
            opening = self._opens[process, event.op]
            opening.at, opening.position = event.at, event.gsn
        elif isinstance(event, events.Done):
            self._steps[process, event.op].at = event.at
        elif (process, event.op) in self._steps:
            self._steps[process, event.op].error = event.error


def check(players: Players, cursors: Cursors) -> Iterator[Violation]:
    """Hold the steps of players against their rules."""
    positions = cursors.highest()
    for name, task in players.tasks.items():
        yield from _owners(task)
        yield from _sequence(task)
        if name in players.replaced:
            continue
        yield from _same_records(task)
        if any(one.call.is_exactly_once for one in task.openings):
            yield from _fence(task)
            yield from _once(task)
            yield from _held(task, positions)
        else:
            yield from _first_deliveries(task)
    for held, source in players.holds:
        yield from _contents(held, players.tasks[held.task], source)


def _owners(task: TaskSteps) -> Iterator[Violation]:
    """A term has one owner."""
    owners: dict[int, str] = {}
    for one in task.openings:
        owner, term = one.call.owner, one.call.term
        if owner and (known := owners.setdefault(term, owner)) != owner:
            text = f"{known} and {owner} have term {term} of {one.call.task}"
            yield Violation("term-order", text, one.source)


def _sequence(task: TaskSteps) -> Iterator[Violation]:
    """In a claim, a step starts where the last one stopped.

    After a step of unknown outcome, a target that stores positions is opened first.
    """
    calls: list[Opening | Delivery] = [*task.openings, *task.deliveries]
    calls.sort(key=lambda one: one.source)
    stands: dict[tuple[int, int, int], int | None] = {}
    for one in calls:
        opening = one if isinstance(one, Opening) else one.opening
        key = (opening.process, opening.call.birth, opening.call.term)
        if isinstance(one, Opening):
            position = one.position if one.position >= 0 else one.call.gsn
            stands[key] = position if one.at != END else None
            continue
        start, position_now = one.call.start, stands.get(key)
        stores = opening.call.is_exactly_once
        is_next = position_now is not None and (
            start == position_now if stores else start >= position_now
        )
        if not is_next:
            where = "unknown" if position_now is None else f"gsn {position_now}"
            text = f"a step of {opening.call.task} starts at {start}; its target stood at {where}"
            yield Violation("sequence", text, one.source, start)
        if one.at != END:
            stands[key] = one.call.stop
        elif one.error != _NO_EFFECT and stores:
            stands[key] = None


def _same_records(task: TaskSteps) -> Iterator[Violation]:
    """Steps of one range have the same records, whichever process takes them."""
    done = [one for one in task.deliveries if one.at != END]
    known = sorted({gsn for one in done for gsn in one.call.gsns})
    for one in done:
        call = one.call
        expected = known[bisect_left(known, call.start) : bisect_left(known, call.stop)]
        if call.gsns != expected:
            text = f"[{call.start}, {call.stop}) has the records {call.gsns}; others {expected}"
            yield Violation("records", text, one.source, call.start)


def _fence(task: TaskSteps) -> Iterator[Violation]:
    """Nothing of a term has an effect that was called after a later term had opened the target."""
    terms = Highest((one.at, one.call.term) for one in task.openings if one.at != END)
    for one in [*task.openings, *task.deliveries]:
        opening = one if isinstance(one, Opening) else one.opening
        term, later = opening.call.term, terms.before(one.call.at)
        if one.at != END and term < later:
            text = f"term {term} of {opening.call.task} has an effect after term {later} opened it"
            yield Violation("fence", text, one.source)


def _once(task: TaskSteps) -> Iterator[Violation]:
    """The steps that are done do not overlap."""
    for steps in task.done().values():
        moved = [one for one in steps if one.call.stop > one.call.start]
        for before, one in pairwise(moved):
            if one.call.start < before.call.stop:
                text = (
                    f"{one.opening.call.task} has [{before.call.start}, {before.call.stop}) and"
                    f" [{one.call.start}, {one.call.stop})"
                )
                yield Violation("exactly-once", text, one.source, one.call.start)


def _held(task: TaskSteps, cursors: dict[Era, Highest]) -> Iterator[Violation]:
    """An open returns a position that the target can hold, and no cursor is above it."""
    began: dict[Era, int] = {}
    done: dict[Era, list[tuple[int, int]]] = defaultdict(list)
    stops: dict[Era, dict[int, int]] = defaultdict(dict)
    for one in task.openings:
        began[one.era] = min(one.call.gsn, began.get(one.era, END))
    for step in task.deliveries:
        era, stop = step.opening.era, step.call.stop
        stops[era][stop] = min(step.call.at, stops[era].get(stop, END))
        if step.at != END:
            done[era].append((step.at, stop))
    highest = {era: Highest(rows) for era, rows in done.items()}
    terms = Highest((one.at, one.call.term) for one in task.openings if one.at != END)
    for one in task.openings:
        # What a fenced term reads has no effect.
        if one.at == END or one.position < 0 or one.call.term < terms.before(one.at):
            continue
        name, called = one.call.task, one.call.at
        least = highest[one.era].before(called) if one.era in highest else 0
        if one.position < least:
            text = f"the target of {name} is at {one.position}, and had {least} before"
            yield Violation("loss", text, one.source, one.position)
        if one.position != began[one.era] and stops[one.era].get(one.position, END) > one.at:
            text = f"the target of {name} is at {one.position}, where no step ends"
            yield Violation("exactly-once", text, one.source, one.position)
        seen = [cursors[era].before(called) for era in _eras(one.era) if era in cursors]
        if one.position < max([one.call.gsn, *seen]):
            text = f"the cursor {name} was at {max([one.call.gsn, *seen])}, and its target is at"
            yield Violation("cursor-ahead", f"{text} {one.position}", one.source, one.position)


def _eras(era: Era) -> tuple[Era, Era]:
    """Return the era, also as listings name it that do not know the birth."""
    return era, era._replace(birth=0)


def _first_deliveries(task: TaskSteps) -> Iterator[Violation]:
    """First deliveries are in order, and a claim repeats nothing below its position."""
    tops: dict[Era, list[tuple[int, int]]] = defaultdict(list)
    first: dict[tuple[Era, int], int] = {}
    for one in task.deliveries:
        era = one.opening.era
        if one.call.gsns and one.at != END:
            tops[era].append((one.at, one.call.gsns[-1]))
        for gsn in one.call.gsns:
            first[era, gsn] = min(one.call.at, first.get((era, gsn), END))
    highest = {era: Highest(rows) for era, rows in tops.items()}
    for one in task.deliveries:
        era, claimed = one.opening.era, one.opening.call.gsn
        top = highest[era].before(one.call.at) if era in highest else 0
        for gsn in one.call.gsns:
            if gsn < claimed:
                text = f"{gsn} is delivered to {era.name} again; the claim is at {claimed}"
                yield Violation("at-least-once", text, one.source, gsn)
            if gsn < top and first[era, gsn] == one.call.at:
                text = f"{gsn} is delivered to {era.name} first after {top}"
                yield Violation("at-least-once", text, one.source, gsn)


def _contents(held: events.Holds, task: TaskSteps, source: int) -> Iterator[Violation]:
    """A target has every record of a step that is done, and no other; once if it promises that."""
    is_exactly_once = any(one.call.is_exactly_once for one in task.openings)
    counts = Counter(held.gsns)
    done = {gsn for one in task.deliveries if one.at != END for gsn in one.call.gsns}
    called = {gsn for one in task.deliveries for gsn in one.call.gsns}
    for gsn in sorted(done - counts.keys()):
        yield Violation("loss", f"{held.task} lacks {gsn}, which it had", source, gsn)
    for gsn in sorted(counts.keys() - called):
        yield Violation("phantom", f"{held.task} has {gsn}, of no step", source, gsn)
    if is_exactly_once and held.gsns != sorted(counts):
        twice = [gsn for gsn, count in counts.items() if count > 1]
        yield Violation("exactly-once", f"{held.task} has {twice} twice, or no order", source)
