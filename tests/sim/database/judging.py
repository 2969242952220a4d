"""Checks what clients of a database observed against the model of its log.

A committed transaction read the state before its commit record, and the record holds all of its
writes. An aborted one has no effect; its reads are of one state. No read misses an operation that
had returned before the read began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logdb.client.requests import KeyState
    from tests.sim.database.deeds import Deed
    from tests.sim.database.model import Model

_END: Final = 2**63 - 1


def judge(model: Model, deeds: Sequence[Deed]) -> None:
    """Check all operations, which must be over."""
    # Committed operations with a result so far, in the order of the results.
    events = sorted([(d.called, d) for d in deeds] + [(d.returned, d) for d in deeds], key=_moment)
    least: dict[int, int] = {}
    greatest = 0
    places = {id(deed): _place(model, deed) for deed in deeds}
    for moment, deed in events:
        if moment == deed.called:
            least[id(deed)] = greatest
        elif deed.outcome == "committed":
            greatest = max(greatest, places[id(deed)])
    for deed in deeds:
        _judge(model, deed, places[id(deed)], least[id(deed)])


def _moment(event: tuple[int, Deed]) -> int:
    return event[0]


def _place(model: Model, deed: Deed) -> int:
    """Return the gsn of a deed's commit record, 0 if it has none; check that it is the only one."""
    found = {
        model.writers[key, value]
        for key, value in deed.writes.items()
        if value is not None and (key, value) in model.writers
    }
    assert len(found) <= 1, f"{deed} took effect at {sorted(found)}"
    gsn = min(found, default=0)
    if not gsn and all(value is None for value in deed.writes.values()):
        # (A deletion does not identify its writer.)
        gsn = deed.gsn if deed.writes and deed.outcome == "committed" else 0
    if deed.outcome == "aborted":
        assert not gsn, f"{deed} took effect, at {gsn}"
    if deed.outcome == "committed" and deed.writes:
        assert gsn, f"{deed} is lost: no such transaction was committed"
        assert deed.gsn in {0, gsn}, f"{deed} is at {gsn}"
        for key, value in deed.writes.items():
            held = model.at(key, gsn)
            assert (held.value if held else None) == value, f"{deed} wrote other than {held}"
    return gsn


def _judge(model: Model, deed: Deed, place: int, least: int) -> None:
    """Check an operation's reads, and that it follows all operations that had returned."""
    if place:
        assert place > least, f"{deed} is at {place}; what had returned before it began, at {least}"
        first = last = place - 1
    elif deed.outcome == "committed" and deed.gsn:
        assert deed.gsn >= least, f"{deed} is of {deed.gsn}; it should be of {least} or later"
        first = last = deed.gsn
    else:
        # Reads inside a transaction may be slightly old, but are of one state.
        is_fresh = deed.outcome == "committed"
        first, last = (least if is_fresh else 0), _END
    spans = [(first, last + 1)]
    for key, value in deed.reads.items():
        spans = list(_common(spans, model.when(key, value)))
        assert spans, (
            f"{deed} read {key!r} as {value!r}, which at no moment of {first} to {last} was there"
            f" together with what it read before; it was so at {list(model.when(key, value))}"
        )


def _common(
    spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    others = list(others)
    for start, stop in spans:
        for begin, end in others:
            if max(start, begin) < min(stop, end):
                yield max(start, begin), min(stop, end)


def judge_watch(model: Model, key: bytes, states: Sequence[KeyState]) -> None:
    """Check the states that a watcher received: each is later than the one before."""
    changes = iter([None, *(change.held for change in model.changes.get(key, ()))])
    former: KeyState | None = None
    for state in states:
        assert former is None or former.version != state.version, f"{key!r} comes twice: {state}"
        former = state
        for held in changes:
            if (held.version if held else 0, held.value if held else None) == (
                state.version, state.value,
            ):  # fmt: skip
                break
        else:
            raise AssertionError(f"{key!r} never was {state} after what was given before")
