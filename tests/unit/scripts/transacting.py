"""Histories of transactions, written by hand or by a store that does one thing after the other."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.history import events
from tests.history.observed import gather
from tests.history.rules import check

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.history.violation import Violation


class Done(NamedTuple):
    """One transaction: when it was called, when its result came, and what that was."""

    called: int
    at: int
    steps: list[events.Step]
    #: 0: a process that does nothing else.
    process: int = 0
    #: "ok", "fail", "info" or "" (no result).
    state: str = "ok"
    position: int = 0

    def lines(self, op: int) -> list[tuple[int, events.Event]]:
        """Return the lines of it, with their times."""
        asked = [(kind, key, None if kind == "r" else what) for kind, key, what in self.steps]
        invoke = events.Invoke(op, self.called, self.process or 1000 + op, asked)
        results: dict[str, events.Event] = {
            "ok": events.Ok(op, self.at, self.steps, self.position),
            "fail": events.Fail(op, self.at, "TransactionAborted", self.steps),
            "info": events.Info(op, self.at, "OutcomeUnknownError", self.steps),
        }
        found: list[tuple[int, events.Event]] = [(self.called, invoke)]
        return [*found, (self.at, results[self.state])] if self.state else found


def did(text: str, called: int = 0, at: int = 100, **more: Any) -> Done:
    """Read a transaction: "a x 1, r x [1 2], w y 3, r y 3, r y -"."""
    steps = [_step(*part.split(maxsplit=2)) for part in text.split(", ")]
    return Done(called, at, steps, **more)


def _step(kind: str, key: str, value: str) -> events.Step:
    if value.startswith("["):
        return ("r", key, [int(element) for element in value[1:-1].split()])
    return ("append" if kind == "a" else kind, key, None if value == "-" else int(value))


def lines_of(transactions: Sequence[Done]) -> list[events.Event]:
    """Return the lines of a history, each at its time."""
    lines = [line for op, done in enumerate(transactions, 1) for line in done.lines(op)]
    return [event for _, event in sorted(lines, key=lambda row: row[0])]


def judged(directory: Path, lines: list[events.Event]) -> list[Violation]:
    """Write a history and hold it against the rules."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"clients{events.SUFFIX}"
    path.unlink(missing_ok=True)
    with events.Recorder(path, "clients") as recorder:
        for line in lines:
            recorder.result(line)
    return check(gather(events.files_of([directory]))).violations


def named(directory: Path, transactions: Sequence[Done]) -> list[str]:
    """Return the rules that transactions break, in alphabetical order."""
    return sorted(violation.rule for violation in judged(directory, lines_of(transactions)))


class Serial:
    """A store that commits one transaction at a time, at a moment between its call and its end.

    Some are aborted, some are in doubt (and took effect, or not), some have no result.
    """

    def __init__(self, seed: int, count: int, *, threads: int = 8, positions: float = 0.9) -> None:
        self.random = Random(seed)
        self.lists: dict[str, list[int]] = {}
        self.registers: dict[str, int] = {}
        self.done: list[Done] = []
        self._value = 0
        self._time = 0
        self._positions = positions
        free = [0] * threads
        for _ in range(count):
            process = min(range(threads), key=free.__getitem__)
            free[process] = self._transact(process + 1, free[process])

    def _transact(self, process: int, free: int) -> int:
        chance = self.random
        called = free + chance.randint(1, 30)
        commit = self._time = max(self._time, called) + 1
        at = commit + chance.randint(1, chance.choice([5, 100, 1000]))
        outcome = chance.random()
        takes_effect = outcome < 0.9
        state = "ok" if outcome < 0.8 else "info" if outcome < 0.95 else "fail"
        if state == "info" and chance.random() < 0.3:
            state = ""
        before = ({k: list(v) for k, v in self.lists.items()}, dict(self.registers))
        steps = [self._do() for _ in range(chance.randint(1, 5))]
        if not takes_effect:
            self.lists, self.registers = before
        wrote = any(kind != "r" for kind, _, _ in steps)
        has_position = state == "ok" and wrote and chance.random() < self._positions
        position = commit if has_position else 0
        self.done.append(Done(called, at, steps, process, state, position))
        return at

    def _do(self) -> events.Step:
        chance = self.random
        if chance.random() < 0.5:
            return self._use_list(f"list{chance.randrange(4)}")
        return self._use_register(f"register{chance.randrange(4)}")

    def _use_list(self, key: str) -> events.Step:
        elements = self.lists.setdefault(key, [])
        if self.random.random() < 0.5:
            return ("r", key, list(elements))
        self._value += 1
        elements.append(self._value)
        return ("append", key, self._value)

    def _use_register(self, key: str) -> events.Step:
        if self.random.random() < 0.5:
            return ("r", key, self.registers.get(key))
        self._value += 1
        self.registers[key] = self._value
        return ("w", key, self._value)
