"""Rules of appends, seals, sealed tails and barriers (docs/protocol.md, section 17).

What begins after a position was sealed gets a higher position. That holds for lost records, too: a
recovery turns their positions into no-ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.history.highest import Highest
from tests.history.violation import END, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.history.observed import Observed
    from tests.history.rules import Judgement

_SHARD_MASK: Final = (1 << 31) - 1


def check(judgement: Judgement) -> Iterator[Violation]:
    """Hold a history against the rules; the positions of all records are known."""
    observed = judgement.observed
    seals = ((seal.at, seal.gsn) for seal in observed.seals if not seal.is_tail)
    appends = ((at, gsn) for at, gsn, _ in _appends(observed))
    yield from _later_is_higher(judgement, "real-time", Highest([*appends, *seals]))
    tails = ((seal.at, seal.gsn) for seal in observed.seals if seal.is_tail)
    yield from _later_is_higher(judgement, "sealed-tail", Highest(tails))
    yield from _barriers(judgement)


def _appends(observed: Observed) -> Iterator[tuple[int, int, int]]:
    """Yield (time of the return, gsn, shard) of the records of appends."""
    records = observed.records
    for index, at in enumerate(records.sealed):
        if at != END:
            yield at, records.gsn[index], records.shard[index]


def _later_is_higher(judgement: Judgement, rule: str, sealed: Highest) -> Iterator[Violation]:
    """A record whose insert began after a position was sealed is above it."""
    records = judgement.observed.records
    for index, gsn in enumerate(judgement.seen):
        if gsn and gsn <= (limit := sealed.before(records.called[index])):
            payload, source = records.payload[index], records.source[index]
            text = f"payload {payload} is at {gsn}; {limit} was sealed before its insert began"
            yield Violation(rule, text, source, gsn, payload)


def _barriers(judgement: Judgement) -> Iterator[Violation]:
    """A barrier is above all that was appended, or that readers of its shards received, before."""
    barriers = judgement.observed.barriers
    before = {only: _known_to_readers(judgement, only) for only in {b.only for b in barriers}}
    for barrier in barriers:
        highest = before[barrier.only].before(barrier.called)
        if barrier.gsn <= highest:
            text = f"the barrier is {barrier.gsn}, and {judgement.rid(highest)} was known before"
            yield Violation("barrier", text, barrier.source, highest)


def _known_to_readers(judgement: Judgement, only: frozenset[int]) -> Highest:
    """Return the positions of appends and deliveries, of all shards (`only` is empty) or some.

    A subscription of fewer shards may be ahead: it does not wait for the others.
    """
    rows = [
        (at, gsn) for at, gsn, shard in _appends(judgement.observed) if not only or shard in only
    ]
    for subscription in judgement.observed.subscriptions:
        if subscription.only and not (only and only <= subscription.only):
            continue
        start = 0
        for stop, at, _ in subscription.batches:
            gsns = subscription.gsns[start:stop]
            here = [g for g in gsns if not only or judgement.places[g] & _SHARD_MASK in only]
            if here:
                rows.append((at, here[-1]))
            start = stop
    return Highest(rows)
