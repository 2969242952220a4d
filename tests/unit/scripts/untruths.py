"""Mutations that turn a correct history of transactions into an incorrect one.

Each gets the transactions and a random source, and changes one thing so that no correct store could
produce the history; it returns None if it cannot be applied.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from tests.history.events import Step
    from tests.unit.scripts.transacting import Done

    Untruth = Callable[[list[Done], Random], list[Done] | None]


def _with(done: list[Done], place: int, **changes: Any) -> list[Done]:
    return [*done[:place], done[place]._replace(**changes), *done[place + 1 :]]


def _with_step(done: list[Done], place: int, index: int, value: Any) -> list[Done]:
    steps = list(done[place].steps)
    steps[index] = (steps[index][0], steps[index][1], value)
    return _with(done, place, steps=steps)


def _reads(done: list[Done], *, of_lists: bool) -> Iterator[tuple[int, int, str, Any]]:
    """Go through the only steps on a key of committed transactions that are reads."""
    for place, one in enumerate(done):
        keys = [key for _, key, _ in one.steps]
        for index, (kind, key, value) in enumerate(one.steps):
            is_wanted = key.startswith("list") == of_lists and keys.count(key) == 1
            if one.state == "ok" and kind == "r" and is_wanted:
                yield place, index, key, value


def _writers(done: list[Done]) -> dict[tuple[str, int], Done]:
    """Return the writer of each write that certainly took effect."""
    return {
        (key, value): one
        for one in done
        for kind, key, value in one.steps
        if one.state == "ok" and kind != "r"
    }


def old_list(done: list[Done], chance: Random) -> list[Done] | None:
    """Let a read miss an append that had returned before it was called."""
    writers = _writers(done)
    found = [
        (place, index, value[:cut])
        for place, index, key, value in _reads(done, of_lists=True)
        for cut in range(len(value))
        if (by := writers.get((key, value[cut]))) and by.at < done[place].called
    ]
    return _with_step(done, *chance.choice(found)) if found else None


def old_value(done: list[Done], chance: Random) -> list[Done] | None:
    """Let a read return a value that was replaced by a write that had returned before."""
    writers = _writers(done)
    found = []
    for (key, old), first in writers.items():
        for (again, new), second in writers.items():
            if key == again and old != new and first.at < second.called:
                found += [
                    (place, index, old)
                    for place, index, of, _ in _reads(done, of_lists=False)
                    if of == key and second.at < done[place].called
                ]
    return _with_step(done, *chance.choice(found)) if found else None


def missing_value(done: list[Done], chance: Random) -> list[Done] | None:
    """Let a read find nothing where a write had returned before."""
    writers = _writers(done)
    found = [
        (place, index, None)
        for place, index, key, value in _reads(done, of_lists=False)
        if value is not None
        and any(of == key and by.at < done[place].called for (of, _), by in writers.items())
    ]
    return _with_step(done, *chance.choice(found)) if found else None


def dropped(done: list[Done], chance: Random) -> list[Done] | None:
    """Take an append out of all reads, one of which began after it had returned."""
    writers = _writers(done)
    seen = {
        (key, element)
        for place, _, key, value in _reads(done, of_lists=True)
        for element in value
        if (by := writers.get((key, element))) and by.at < done[place].called
    }
    if not seen:
        return None
    key, gone = chance.choice(sorted(seen))

    def without(step: Step) -> Step:
        if step[:2] != ("r", key):
            return step
        return ("r", key, [element for element in step[2] if element != gone])

    return [one._replace(steps=[without(step) for step in one.steps]) for one in done]


def swapped_elements(done: list[Done], chance: Random) -> list[Done] | None:
    """Swap two elements of a read that another transaction has read too."""
    reads = list(_reads(done, of_lists=True))
    found = [
        (place, index, at, value)
        for place, index, key, value in reads
        for at in range(len(value) - 1)
        if any(
            other != place and of == key and theirs[at : at + 2] == value[at : at + 2]
            for other, _, of, theirs in reads
        )
    ]
    if not found:
        return None
    place, index, at, value = chance.choice(found)
    swapped = [*value[:at], value[at + 1], value[at], *value[at + 2 :]]
    return _with_step(done, place, index, swapped)


def doubled(done: list[Done], chance: Random) -> list[Done] | None:
    """Let a read find the last element twice."""
    found = [
        (place, index, [*value, value[-1]])
        for place, index, _, value in _reads(done, of_lists=True)
        if value
    ]
    return _with_step(done, *chance.choice(found)) if found else None


def swapped_positions(done: list[Done], chance: Random) -> list[Done] | None:
    """Swap the positions of two, of which one had returned before the other was called."""
    found = [
        (first, second)
        for first, second in combinations(range(len(done)), 2)
        if done[first].position and done[second].position
        if done[first].at < done[second].called
    ]
    if not found:
        return None
    first, second = chance.choice(found)
    positions = done[first].position, done[second].position
    return _with(_with(done, first, position=positions[1]), second, position=positions[0])


def denied(done: list[Done], chance: Random) -> list[Done] | None:
    """Mark a transaction as aborted although another one read its write."""
    read = {
        (key, value if isinstance(value, int) else value[-1])
        for of_lists in (True, False)
        for _, _, key, value in _reads(done, of_lists=of_lists)
        if value
    }
    found = [
        place
        for place, one in enumerate(done)
        if one.state == "ok" and any((k, v) in read for kind, k, v in one.steps if kind != "r")
    ]
    return _with(done, chance.choice(found), state="fail", position=0) if found else None


#: By name; with the rules of which one must be broken (empty: any).
UNTRUTHS: dict[str, tuple[Untruth, set[str]]] = {
    "old list": (old_list, set()),
    "old value": (old_value, set()),
    "missing value": (missing_value, set()),
    "dropped": (dropped, {"lost-append"}),
    "swapped elements": (swapped_elements, {"incompatible-order"}),
    "doubled": (doubled, {"duplicate-append", "incompatible-order"}),
    "swapped positions": (swapped_positions, set()),
    "denied": (denied, {"G1a"}),
}
