"""A task of a player: its cursor, its processes, its target, and steps that arrive late or never.

The steps, rules and invariants are those of docs/spec/Player.tla, under the same names. A target
carries out each step once or never, at any time, also after the process that sent it has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tests.model.player.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

#: A step's name, and its details.
Step = tuple[object, ...]


class Bounds(NamedTuple):
    """How large the searched model is."""

    records: int = 2
    processes: int = 2
    #: Number of claims and seeks.
    terms: int = 3
    seeks: int = 1
    #: How often the target loses all that it has.
    losses: int = 0


class Cursor(NamedTuple):
    """What the membership service stores."""

    term: int = 0
    position: int = 0
    has_moved: bool = False
    #: Where the cursor was created, and where each seek put it.
    origins: tuple[int, ...] = (0,)


class Row(NamedTuple):
    """What the target stores with the effects."""

    term: int
    position: int
    seek: int


class Process(NamedTuple):
    """A process with a claim, which it may have lost without knowing."""

    term: int
    #: The number of seeks, and the cursor's position and `has_moved`, as of the claim.
    seek: int
    claimed: int
    has_moved: bool
    #: The target is "closed", "opening", "open" or "delivering".
    stage: str = "closed"
    #: Where the target stands, and the end of the batch under way; 0 while it is closed.
    position: int = 0
    stop: int = 0


class Sent(NamedTuple):
    """A step on its way to the target: `start` and `stop` of a batch, both -1: an opening."""

    process: int
    term: int
    seek: int
    claimed: int
    has_moved: bool
    start: int = -1
    stop: int = -1


class State(NamedTuple):
    """A state of the model."""

    cursor: Cursor
    processes: tuple[Process | None, ...]
    sent: frozenset[Sent]
    row: Row | None
    #: The records at the target, in the order in which they came there.
    effects: tuple[int, ...]
    #: The greatest term that opened the target, and whether a lower one had an effect after that.
    opened: int
    was_late: bool
    #: The first position that is not trimmed.
    trim: int
    losses: int


class PlayerModel:
    """The state space within bounds, with some rules switched off."""

    def __init__(self, bounds: Bounds | None = None, off: Collection[str] = ()) -> None:
        """Switch the rules of `off` off."""
        self.bounds: Final = bounds or Bounds()
        self.on: Final = {name: name not in off for name in RULES}

    def initial(self) -> State:
        """Return the state with a new cursor at position 0."""
        none = (None,) * self.bounds.processes
        return State(Cursor(), none, frozenset(), None, (), 0, was_late=False, trim=0, losses=0)

    def canonical(self, state: State) -> State:
        """Return a state without the steps that the target would refuse, and nothing waits for."""
        if not all(self.on.values()) or state.row is None or state.losses < self.bounds.losses:
            return state
        sent = frozenset(one for one in state.sent if not _is_dead(state, state.row, one))
        return state._replace(sent=sent)

    def violated(self, state: State) -> str | None:
        """Return the name of an invariant that does not hold."""
        return next((name for name, holds in INVARIANTS.items() if not holds(state)), None)

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Return all steps, with the states after them."""
        for number, process in enumerate(state.processes):
            if process is None:
                yield from self._claim(state, number)
            else:
                yield ("End", number), _with(state, number, None)
                yield from self._act(state, number, process)
        for sent in state.sent:
            gone = state._replace(sent=state.sent - {sent})
            yield from self._open(gone, sent) if sent.start < 0 else self._deliver(gone, sent)
        yield from self._operate(state)

    # --- the membership service ---

    def _claim(self, state: State, number: int) -> Iterator[tuple[Step, State]]:
        """A free cursor is claimed, or one whose owner is silent, rightly or not."""
        cursor = state.cursor
        if cursor.term == self.bounds.terms or cursor.position < state.trim:
            return
        term = cursor.term + 1 if self.on["terms-grow"] or not cursor.term else cursor.term
        seek = len(cursor.origins) - 1
        process = Process(term, seek, cursor.position, cursor.has_moved)
        state = state._replace(cursor=cursor._replace(term=term))
        yield ("Claim", number), _with(state, number, process)

    def _move(self, state: State, number: int, to: int) -> Iterator[tuple[Step, State]]:
        cursor, process = state.cursor, state.processes[number]
        assert process is not None
        is_owner = process.term == cursor.term or not self.on["move-in-term"]
        if is_owner and to > cursor.position:
            moved = cursor._replace(position=to, has_moved=True)
            yield ("Move", number, to), state._replace(cursor=moved)

    def _operate(self, state: State) -> Iterator[tuple[Step, State]]:
        cursor, bounds = state.cursor, self.bounds
        if len(cursor.origins) <= bounds.seeks and cursor.term < bounds.terms:
            for to in range(state.trim, bounds.records + 1):
                sought = Cursor(cursor.term + 1, to, origins=(*cursor.origins, to))
                yield ("Seek", to), state._replace(cursor=sought)
        last = cursor.position if self.on["hold"] else bounds.records
        for to in range(state.trim + 1, last + 1):
            yield ("Trim", to), state._replace(trim=to)
        if state.losses < bounds.losses and state.row is not None:
            lost = state._replace(row=None, effects=(), opened=0, losses=state.losses + 1)
            yield ("Lose",), lost

    # --- processes ---

    def _act(self, state: State, number: int, process: Process) -> Iterator[tuple[Step, State]]:
        claim = (number, process.term, process.seek, process.claimed, process.has_moved)
        if process.stage == "closed":
            sent = state._replace(sent=state.sent | {Sent(*claim)})
            yield ("SendOpen", number), _with(sent, number, process._replace(stage="opening"))
        elif process.stage == "open":
            yield from self._move(state, number, process.position)
            if process.position >= state.trim:
                for stop in range(process.position + 1, self.bounds.records + 1):
                    batch = Sent(*claim, process.position, stop)
                    after = state._replace(sent=state.sent | {batch})
                    playing = process._replace(stage="delivering", stop=stop)
                    yield ("Send", number, stop), _with(after, number, playing)
        else:
            closed = process._replace(stage="closed", position=0, stop=0)
            if process.stage == "delivering":
                if not self.on["effect-first"]:
                    yield from self._move(state, number, process.stop)
                if not self.on["open-again"]:
                    closed = process._replace(stage="open", position=process.stop, stop=0)
            yield ("TimeOut", number), _with(state, number, closed)

    # --- the target ---

    def _open(self, state: State, sent: Sent) -> Iterator[tuple[Step, State]]:
        row = state.row
        if row is None:
            if sent.has_moved and self.on["empty-is-lost"]:
                yield from self._answer(state, sent, None, "Refuse")
                return
            row = Row(sent.term, sent.claimed, sent.seek)
        elif row.term > sent.term:
            yield from self._answer(state, sent, None, "Refuse")
            return
        elif row.seek < sent.seek:
            position = sent.claimed if self.on["count-seeks"] else row.position
            row = Row(row.term, position, sent.seek)
            state = state._replace(effects=())
        if self.on["open-stores-term"]:
            row = row._replace(term=sent.term)
        opened = state._replace(row=row, opened=max(state.opened, sent.term))
        yield from self._answer(opened, sent, row.position, "Open")

    def _deliver(self, state: State, sent: Sent) -> Iterator[tuple[Step, State]]:
        row = state.row
        if row is None or not self._is_accepted(row, sent):
            yield from self._answer(state, sent, None, "Refuse")
            return
        after = state._replace(
            row=Row(max(row.term, sent.term), sent.stop, row.seek),
            effects=state.effects + tuple(range(sent.start, sent.stop)),
            was_late=state.was_late or sent.term < state.opened,
        )
        yield from self._answer(after, sent, sent.stop, "Deliver")
        if not self.on["one-transaction"]:
            yield ("Tear", sent.process), after._replace(row=row)

    def _is_accepted(self, row: Row, sent: Sent) -> bool:
        if row.position != sent.start and self.on["compare-start"]:
            return False
        if not self.on["compare-term"]:
            return True
        return row.term == sent.term if self.on["open-stores-term"] else row.term <= sent.term

    def _answer(
        self, state: State, sent: Sent, position: int | None, name: str
    ) -> Iterator[tuple[Step, State]]:
        """The answer is lost, or arrives; a refusal (`position`: None) ends the task."""
        yield (name, sent.process, "lost"), state
        process = state.processes[sent.process]
        if process is None or not _is_awaited(state, sent):
            return
        after = None
        if position is not None:
            after = process._replace(stage="open", position=position, stop=0)
        yield (name, sent.process), _with(state, sent.process, after)


def _is_awaited(state: State, sent: Sent) -> bool:
    """Whether the process that sent a step waits for the answer."""
    process = state.processes[sent.process]
    if process is None or process.term != sent.term:
        return False
    if sent.start < 0:
        return process.stage == "opening"
    return process.stage == "delivering" and process[-2:] == (sent.start, sent.stop)


def _is_dead(state: State, row: Row, sent: Sent) -> bool:
    """Whether a step can have no effect any more."""
    is_refused = row.term > sent.term or (row.term == sent.term and 0 <= sent.start < row.position)
    return is_refused and not _is_awaited(state, sent)


def _with(state: State, number: int, process: Process | None) -> State:
    processes = list(state.processes)
    processes[number] = process
    return state._replace(processes=tuple(processes))


def _exactly_once(state: State) -> bool:
    """The target has the records from the sought position to its own, each once, in order."""
    row = state.row
    if row is None:
        return not state.effects
    return state.effects == tuple(range(state.cursor.origins[row.seek], row.position))


def _fence(state: State) -> bool:
    """No batch has an effect once a later term has opened the target."""
    return not state.was_late


def _cursor_behind(state: State) -> bool:
    """A cursor that has moved is not above the position of a target that has lost nothing."""
    row, cursor = state.row, state.cursor
    if not cursor.has_moved or state.losses:
        return True
    is_of_cursor = row is not None and row.seek == len(cursor.origins) - 1
    return is_of_cursor and cursor.position <= row.position


def _one_owner(state: State) -> bool:
    """No two processes have the same term."""
    terms = [process.term for process in state.processes if process is not None]
    return len(set(terms)) == len(terms)


def _held(state: State) -> bool:
    """The records from the cursor on are in the log."""
    return state.trim <= state.cursor.position


INVARIANTS: Final[dict[str, Callable[[State], bool]]] = {
    "ExactlyOnce": _exactly_once,
    "Fence": _fence,
    "CursorBehind": _cursor_behind,
    "OneOwner": _one_owner,
    "Held": _held,
}
