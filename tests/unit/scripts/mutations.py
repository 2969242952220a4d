"""Mutations of a history: each changes one thing, and names the rule that must find it.

A mutation returns False if it cannot be applied to the history.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from tests.history import events
from tests.history.payloads import FOREIGN

Lines = dict[str, list[events.Event]]
Mutation = Callable[[Lines, Random], bool]

MUTATIONS: dict[str, tuple[Mutation, set[str]]] = {}
#: Later than everything.
LATE = 10**18


def breaks(*rules: str) -> Callable[[Mutation], Mutation]:
    """Register a mutation that one of `rules` must see."""

    def register(mutation: Mutation) -> Mutation:
        MUTATIONS[mutation.__name__] = (mutation, set(rules))
        return mutation

    return register


def pick(lines: Lines, random: Random, wanted: Callable[[Any], bool]) -> tuple[str, int] | None:
    """Choose a line that is `wanted`."""
    found = [
        (name, index)
        for name, said in lines.items()
        for index, event in enumerate(said)
        if wanted(event)
    ]
    return random.choice(found) if found else None


def delivery(lines: Lines, random: Random, least: int = 1) -> tuple[str, int] | None:
    """Choose a delivery of at least `count` records."""
    return pick(lines, random, lambda e: isinstance(e, events.Delivered) and len(e.gsns) >= least)


def acks(lines: Lines) -> dict[int, int]:
    """Return the acknowledged positions, and their payloads."""
    found: dict[int, int] = {}
    for said in lines.values():
        calls = {e.op: e for e in said if isinstance(e, events.Insert)}
        for event in said:
            if isinstance(event, events.Inserted):
                found.update(zip(event.gsns, calls[event.op].payloads, strict=True))
    return found


def single_ack(lines: Lines, random: Random, *, seen: bool = True) -> tuple[str, int] | None:
    """Choose the result of an insert of one record, which others saw too."""
    known = delivered(lines)
    return pick(
        lines,
        random,
        lambda e: (
            isinstance(e, events.Inserted) and len(e.gsns) == 1 and (e.gsns[0] in known or not seen)
        ),
    )


def delivered(lines: Lines) -> set[int]:
    return {
        gsn
        for said in lines.values()
        for event in said
        if isinstance(event, events.Delivered)
        for gsn in event.gsns
    }


def is_lost(lines: Lines, gsn: int) -> bool:
    """Whether a position lies in a range that was reported as lost."""
    return any(
        start <= gsn < stop
        for event in lines["workload"]
        if isinstance(event, events.Losses)
        for _, start, stop in event.ranges
    )


def call_of(lines: Lines, name: str, op: int) -> int:
    """Return the index of the call of an operation."""
    return next(i for i, e in enumerate(lines[name]) if isinstance(e, events.Call) and e.op == op)


def without(event: events.Delivered, index: int) -> events.Delivered:
    columns = [list(column) for column in (event.gsns, event.shards, event.payloads)]
    for column in columns:
        del column[index]
    return replace(event, gsns=columns[0], shards=columns[1], payloads=columns[2])


def set_in(values: list[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


# --- deliveries ----------------------------------------------------------------------------------


@breaks("loss", "gap")
def drop_a_delivery(lines: Lines, random: Random) -> bool:
    """One record is missing in the middle; its neighbours and another reader show it."""
    chosen = delivery(lines, random, 3)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    middle = random.randrange(1, len(event.gsns) - 1)
    gsn = event.gsns[middle]
    lines[name][index] = without(event, middle)
    return gsn in acks(lines) or gsn in delivered(lines)


@breaks("loss")
def drop_an_acknowledged_record_everywhere(lines: Lines, random: Random) -> bool:
    known = delivered(lines)
    candidates = [gsn for gsn in acks(lines) if gsn in known and gsn < max(known)]
    if not candidates:
        return False
    gsn = random.choice(candidates)
    for said in lines.values():
        for index, event in enumerate(said):
            if isinstance(event, events.Delivered) and gsn in event.gsns:
                said[index] = without(event, event.gsns.index(gsn))
    return True


@breaks("loss")
def end_too_early(lines: Lines, random: Random) -> bool:
    """A scan ends before the last record that was acknowledged before it began."""
    del random
    said = lines["final"]
    last = max(acks(lines), default=0)
    for index, event in enumerate(said):
        if isinstance(event, events.Delivered):
            while last in event.gsns or (event.gsns and event.gsns[-1] > last):
                event = without(event, len(event.gsns) - 1)  # noqa: PLW2901
            said[index] = event
    return last > 0 and not is_lost(lines, last)


@breaks("order")
def swap_two_deliveries(lines: Lines, random: Random) -> bool:
    chosen = delivery(lines, random, 2)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    at = random.randrange(len(event.gsns) - 1)
    columns = [list(column) for column in (event.gsns, event.shards, event.payloads)]
    for column in columns:
        column[at], column[at + 1] = column[at + 1], column[at]
    lines[name][index] = events.Delivered(event.op, event.at, *columns)
    return True


@breaks("order")
def deliver_twice(lines: Lines, random: Random) -> bool:
    chosen = delivery(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    lines[name].insert(index + 1, lines[name][index])
    return True


@breaks("order")
def deliver_before_the_start(lines: Lines, random: Random) -> bool:
    firsts = {
        (name, e.op): e.gsns[0]
        for name, said in lines.items()
        for e in reversed(said)
        if isinstance(e, events.Delivered)
    }
    calls = [
        (name, index, firsts[name, e.op])
        for name, said in lines.items()
        for index, e in enumerate(said)
        if isinstance(e, events.Subscribe) and not e.resumes and (name, e.op) in firsts
    ]
    name, index, first = random.choice(calls)
    lines[name][index] = replace(lines[name][index], start=first + 1)
    return True


@breaks("agreement")
def deliver_other_payloads(lines: Lines, random: Random) -> bool:
    """Two positions have each other's payloads for one subscriber only."""
    chosen = delivery(lines, random, 2)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    first, *rest, last = event.payloads
    lines[name][index] = replace(event, payloads=[last, *rest, first])
    known = acks(lines)
    return event.gsns[0] in known or event.gsns[-1] in known


@breaks("agreement")
def deliver_from_another_shard(lines: Lines, random: Random) -> bool:
    chosen = delivery(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    lines[name][index] = replace(event, shards=set_in(event.shards, 0, event.shards[0] + 1))
    return event.gsns[0] in acks(lines)


@breaks("duplicate")
def a_second_copy(lines: Lines, random: Random) -> bool:
    """The last record of a delivery comes once more, further along, where nothing was."""
    chosen = delivery(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    gsn = event.gsns[-1] + 1
    if gsn in delivered(lines) or gsn in acks(lines):
        return False
    lines[name][index] = replace(
        event,
        gsns=[*event.gsns, gsn],
        shards=[*event.shards, 0],
        payloads=[*event.payloads, event.payloads[-1]],
    )
    return True


@breaks("phantom")
def a_payload_that_nobody_inserted(lines: Lines, random: Random) -> bool:
    chosen = delivery(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    number = random.choice([FOREIGN, 77, 10**15])
    lines[name][index] = replace(event, payloads=set_in(event.payloads, 0, number))
    return True


@breaks("phantom")
def seen_before_it_was_inserted(lines: Lines, random: Random) -> bool:
    known = delivered(lines)
    seen = {payload for gsn, payload in acks(lines).items() if gsn in known}
    chosen = pick(
        lines, random, lambda e: isinstance(e, events.Insert) and seen.intersection(e.payloads)
    )
    if chosen is None:
        return False
    name, index = chosen
    lines[name][index] = replace(lines[name][index], at=LATE)
    return True


# --- inserts -------------------------------------------------------------------------------------


@breaks("insert-after")
def not_after_what_it_names(lines: Lines, random: Random) -> bool:
    chosen = pick(lines, random, lambda e: isinstance(e, events.Inserted))
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    at = call_of(lines, name, event.op)
    lines[name][at] = replace(lines[name][at], after=event.gsns[0])
    return True


def _several(lines: Lines, random: Random) -> tuple[str, int] | None:
    return pick(lines, random, lambda e: isinstance(e, events.Inserted) and len(e.gsns) > 1)


@breaks("batch-order")
def not_in_the_order_of_the_call(lines: Lines, random: Random) -> bool:
    chosen = _several(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    at = call_of(lines, name, event.op)
    lines[name][at] = replace(lines[name][at], payloads=lines[name][at].payloads[::-1])
    lines[name][index] = replace(event, gsns=event.gsns[::-1], shards=event.shards[::-1])
    return True


@breaks("batch-order")
def one_call_at_two_shards(lines: Lines, random: Random) -> bool:
    chosen = _several(lines, random)
    if chosen is None:
        return False
    gsn = lines[chosen[0]][chosen[1]].gsns[0]
    for said in lines.values():
        for index, event in enumerate(said):
            if gsn in getattr(event, "gsns", ()):
                at = event.gsns.index(gsn)
                said[index] = replace(event, shards=set_in(event.shards, at, 99))
            elif isinstance(event, events.Read) and event.gsn == gsn:
                said[index] = replace(event, shard=99)
    return True


@breaks("results")
def a_rid_too_few(lines: Lines, random: Random) -> bool:
    chosen = pick(lines, random, lambda e: isinstance(e, events.Inserted))
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    lines[name][index] = replace(event, gsns=event.gsns[1:], shards=event.shards[1:])
    return True


@breaks("duplicate", "agreement")
def a_forged_rid(lines: Lines, random: Random) -> bool:
    chosen = single_ack(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    lines[name][index] = replace(event, gsns=[event.gsns[0] + 1])
    return True


@breaks("agreement")
def two_records_at_one_position(lines: Lines, random: Random) -> bool:
    chosen = single_ack(lines, random)
    other = single_ack(lines, random, seen=False)
    if chosen is None or other is None or chosen == other:
        return False
    event = lines[other[0]][other[1]]
    taken = lines[chosen[0]][chosen[1]]
    lines[other[0]][other[1]] = replace(event, gsns=taken.gsns, shards=taken.shards)
    return True


@breaks("phantom")
def it_certainly_did_not_happen(lines: Lines, random: Random) -> bool:
    chosen = single_ack(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    error = random.choice(["UnavailableError", "DeadlineError", "RecordTooLargeError"])
    lines[name][index] = events.Failed(event.op, event.at, error, retriable=True)
    return True


@breaks("refusal")
def refused_after_a_known_position(lines: Lines, random: Random) -> bool:
    chosen = single_ack(lines, random)
    if chosen is None:
        return False
    gsn = lines[chosen[0]][chosen[1]].gsns[0]
    lines["final"] += [
        events.Insert(10**6, LATE, gsn, [10**15]),
        events.Failed(10**6, LATE, "NoSuchRecordError", retriable=False),
    ]
    return True


@breaks("errors")
def an_error_that_nobody_mapped(lines: Lines, random: Random) -> bool:
    chosen = pick(lines, random, lambda e: isinstance(e, events.TailIs))
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    lines[name][index] = events.Failed(event.op, event.at, "ZMQError", retriable=False)
    return True


def _in_doubt(lines: Lines, random: Random, gsns: list[int], shards: list[int]) -> bool:
    chosen = single_ack(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    op = 10**6
    lines[name][index : index + 1] = [
        events.Failed(event.op, event.at, "OutcomeUnknownError", retriable=False),
        events.Resolve(op, event.at, event.op),
        events.Resolved(op, event.at, gsns, shards),
    ]
    return True


@breaks("phantom")
def resolved_as_never(lines: Lines, random: Random) -> bool:
    return _in_doubt(lines, random, [0], [0])


@breaks("duplicate")
def resolved_as_somewhere_else(lines: Lines, random: Random) -> bool:
    return _in_doubt(lines, random, [10**9], [0])


@breaks("resolve", "unsealed")
def resolved_in_two_ways(lines: Lines, random: Random) -> bool:
    chosen = pick(lines, random, lambda e: isinstance(e, events.Resolved) and e.gsns[0])
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    call = lines[name][call_of(lines, name, event.op)]
    other = random.choice([0, event.gsns[0] + 10**9])
    lines[name] += [
        events.Resolve(10**6, event.at, call.of),
        events.Resolved(10**6, event.at, set_in(event.gsns, 0, other), event.shards),
    ]
    return True


# --- reads, tails, syncs, trims ------------------------------------------------------------------


@breaks("agreement", "duplicate")
def read_another_payload(lines: Lines, random: Random) -> bool:
    chosen = pick(lines, random, lambda e: isinstance(e, events.Found))
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    others = set(acks(lines).values()) - {event.payload}
    lines[name][index] = replace(event, payload=random.choice(sorted(others)))
    return True


@breaks("loss")
def read_nothing_where_a_record_is(lines: Lines, random: Random) -> bool:
    known = acks(lines)
    chosen = single_ack(lines, random)
    if chosen is None:
        return False
    gsn = lines[chosen[0]][chosen[1]].gsns[0]
    assert gsn in known
    shard = lines[chosen[0]][chosen[1]].shards[0]
    lines["final"] += [
        events.Read(10**6, LATE, gsn, shard),
        events.Failed(10**6, LATE, "NoSuchRecordError", retriable=False),
    ]
    return True


@breaks("tail")
def a_tail_before_the_end(lines: Lines, random: Random) -> bool:
    del random
    last = max(acks(lines), default=0)
    lines["final"] += [events.Tail(10**6, LATE), events.TailIs(10**6, LATE, last - 1)]
    return last > 0 and not is_lost(lines, last)


@breaks("sync")
def a_sync_before_the_end(lines: Lines, random: Random) -> bool:
    chosen = single_ack(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    gsn = lines[name][index].gsns[0]
    lines[name] += [events.Sync(10**6, LATE), events.Synced(10**6, LATE, gsn - 1)]
    return True


@breaks("trim")
def trimmed_by_nobody(lines: Lines, random: Random) -> bool:
    highest = max(
        (e.gsn for said in lines.values() for e in said if isinstance(e, events.Trim)), default=0
    )
    candidates = [gsn for gsn in acks(lines) if gsn > highest]
    if not candidates:
        return False
    lines["final"] += [
        events.Read(10**6, LATE, random.choice(candidates), 0),
        events.Failed(10**6, LATE, "TrimmedError", retriable=False, first=LATE),
    ]
    return True


@breaks("trim")
def a_subscription_trimmed_by_nobody(lines: Lines, random: Random) -> bool:
    del random
    lines["final"] += [
        events.Subscribe(10**6, LATE, 1, follow=False),
        events.Failed(10**6, LATE, "TrimmedError", retriable=False, first=LATE),
    ]
    return True


@breaks("trim")
def a_trim_below_a_subscription(lines: Lines, random: Random) -> bool:
    """A subscription fails because of a trim up to a position that it has passed."""
    chosen = delivery(lines, random)
    if chosen is None:
        return False
    gsn = lines[chosen[0]][chosen[1]].gsns[0]  # type: ignore[union-attr]
    lines["workload"] += [events.Trim(10**6, 0, gsn), events.Trimmed(10**6, LATE)]
    lines["final"] += [
        events.Subscribe(10**6, LATE - 1, gsn, follow=False),
        events.Failed(10**6, LATE, "TrimmedError", retriable=False, first=gsn),
    ]
    return True


@breaks("trim")
def read_what_was_trimmed(lines: Lines, random: Random) -> bool:
    known = acks(lines)
    chosen = pick(lines, random, lambda e: isinstance(e, events.Found))
    if chosen is None or not known:
        return False
    name, index = chosen
    event = lines[name][index]
    call = lines[name][call_of(lines, name, event.op)]
    lines["workload"] += [events.Trim(10**6, 0, call.gsn + 1), events.Trimmed(10**6, 0)]
    return True


@breaks("trim")
def subscribe_to_what_was_trimmed(lines: Lines, random: Random) -> bool:
    del random
    known = delivered(lines)
    lines["workload"] += [events.Trim(10**6, 0, max(known) + 1), events.Trimmed(10**6, 0)]
    return True


@breaks("left")
def inserted_at_a_shard_that_had_left(lines: Lines, random: Random) -> bool:
    chosen = single_ack(lines, random)
    if chosen is None:
        return False
    name, index = chosen
    event = lines[name][index]
    call = next(e for e in lines[name] if isinstance(e, events.Insert) and e.op == event.op)
    lines["workload"].append(events.Left(call.at - 1, event.shards[0]))
    return True
