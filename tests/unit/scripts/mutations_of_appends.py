"""Mutations of appends, seals, sealed tails and barriers; importing this module registers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.history import events
from tests.unit.scripts.mutations import (
    LATE,
    Lines,
    acks,
    breaks,
    call_of,
    delivery,
    pick,
    set_in,
)

if TYPE_CHECKING:
    from random import Random


def append(lines: Lines, random: Random) -> tuple[str, int] | None:
    """Choose the result of an append."""
    found = []
    for name, said in lines.items():
        calls = {e.op for e in said if isinstance(e, events.Insert) and e.sealed}
        found += [
            (name, index)
            for index, event in enumerate(said)
            if isinstance(event, events.Inserted) and event.op in calls
        ]
    return random.choice(found) if found else None


@breaks("unsealed")
def an_append_without_a_seal_is_elsewhere(lines: Lines, random: Random) -> bool:
    """An append reported its place when it raised; `resolve` returns another one."""
    chosen = append(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    lines[name][index : index + 1] = [
        events.Failed(
            event.op, event.at, "OutcomeUnknownError", retriable=False,
            gsns=event.gsns, shards=event.shards,
        ),
        events.Resolve(10**6, event.at, event.op),
        events.Resolved(10**6, event.at, set_in(event.gsns, 0, 10**9), event.shards),
    ]  # fmt: skip
    return True


@breaks("real-time")
def inserted_before_an_append_that_had_returned(lines: Lines, random: Random) -> bool:
    """An insert is called after all appends have returned; its record is below one of them."""
    chosen = append(lines, random)
    if chosen is None:
        return False
    last = max(lines[chosen[0]][chosen[1]].gsns)
    earlier = pick(lines, random, lambda e: isinstance(e, events.Inserted) and e.gsns[-1] < last)
    if earlier is None:
        return False
    name, index = earlier
    call = call_of(lines, name, lines[name][index].op)
    lines[name][call] = replace(lines[name][call], at=LATE)
    lines[name][index] = replace(lines[name][index], at=LATE + 1)
    return True


@breaks("real-time")
def a_seal_that_comes_too_early(lines: Lines, random: Random) -> bool:
    del random
    lines["final"] += [
        events.Seal(10**6, 1, max(acks(lines), default=0)),
        events.Sealed(10**6, 2),
    ]
    return True


@breaks("sealed-tail")
def a_sealed_tail_that_comes_too_early(lines: Lines, random: Random) -> bool:
    del random
    last = max(acks(lines), default=0)
    lines["final"] += [events.Tail(10**6, 1, sealed=True), events.TailIs(10**6, 2, last)]
    return True


@breaks("barrier")
def a_barrier_below_a_delivered_record(lines: Lines, random: Random) -> bool:
    chosen = delivery(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    lines[name] += [
        events.Barrier(10**6, LATE, event.op),
        events.Barred(10**6, LATE + 1, event.gsns[-1]),
    ]
    return True
