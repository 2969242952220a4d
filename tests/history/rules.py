"""Rules that a history must obey (docs/history.md lists them; docs/protocol.md, section 1).

All clients must agree on the log: a map from positions to payloads, built from all records that
were acknowledged, delivered or read. Rule: what a history leaves open is decided in the system's
favour (a call without a result may have had any result), so a correct system is never blamed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from tests.history import cursors, isolation, players, regions, seals
from tests.history.events import Failed
from tests.history.highest import Highest
from tests.history.observed import ACKED, NEVER
from tests.history.payloads import FOREIGN
from tests.history.violation import END, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.history.observed import Observed, Reading, Subscription, TailBound

_SHARD_BITS: Final = 31
_SHARD_MASK: Final = (1 << _SHARD_BITS) - 1


def check(observed: Observed, *, allow_loss: bool = False) -> Judgement:
    """Hold a history against all rules.

    Args:
        observed: the history.
        allow_loss: positions in the ranges that the cluster reported as lost may be missing.

    """
    judgement = Judgement(observed, allow_loss=allow_loss)
    judgement.violations.extend(observed.violations)
    for rule in (
        _acknowledged,
        _delivered,
        _read,
        _calls_in_order,
        _complete,
        _reads_after,
        _lost_for_good,
        _refusals,
        _tails,
        _syncs,
        _trims,
        _left,
        regions.check,
        seals.check,
    ):
        judgement.violations.extend(rule(judgement))
    judgement.violations.extend(isolation.check(observed))
    judgement.violations.extend(cursors.check(observed.cursors))
    judgement.violations.extend(players.check(observed.players, observed.cursors))
    return judgement


class Judgement:
    """The log as reconstructed from all clients, and its violations."""

    def __init__(self, observed: Observed, *, allow_loss: bool) -> None:
        self.observed: Final = observed
        self.violations: Final[list[Violation]] = []
        #: From a gsn to its payload and shard in one integer.
        self.places: Final[dict[int, int]] = {}
        #: The position of each record, from any source; 0: never seen.
        self.seen: Final[list[int]] = list(observed.records.gsn)
        self._lost_ranges: Final = sorted(observed.losses) if allow_loss else []
        #: Missing positions that may be lost, with the latest possible time of the loss.
        self.lost: Final[dict[int, int]] = {}
        self._known: list[int] | None = None

    @property
    def known(self) -> list[int]:
        """All positions that hold a record, sorted. Asked for once all are known."""
        if self._known is None:
            self._known = sorted(self.places)
        return self._known

    def rid(self, gsn: int) -> str:
        """Return the rid of a known position."""
        return f"{gsn}@{self.places[gsn] & _SHARD_MASK}"

    def payload_at(self, gsn: int) -> int:
        """Return the payload at a known position."""
        return self.places[gsn] >> _SHARD_BITS

    def place(self, gsn: int, shard: int, payload: int) -> str:
        """Record an observed position of a record; return the violation, or ""."""
        key = payload << _SHARD_BITS | shard
        held = self.places.setdefault(gsn, key)
        if held == key:
            return ""
        return (
            f"position {gsn} holds payload {payload} of shard {shard}, and payload"
            f" {held >> _SHARD_BITS} of shard {held & _SHARD_MASK}"
        )

    def may_be_lost(self, gsn: int) -> bool:
        """Whether a position was reported as lost."""
        shard = self.places[gsn] & _SHARD_MASK
        return any(s == shard and start <= gsn < stop for s, start, stop in self._lost_ranges)


# --- positions of records -----------------------------------------------------------------------


def _acknowledged(judgement: Judgement) -> Iterator[Violation]:
    records = judgement.observed.records
    for index, gsn in enumerate(records.gsn):
        if gsn:
            payload = records.payload[index]
            conflict = judgement.place(gsn, records.shard[index], payload)
            if conflict:
                yield Violation("agreement", conflict, records.source[index], gsn, payload)


def _delivered(judgement: Judgement) -> Iterator[Violation]:
    for subscription in judgement.observed.subscriptions:
        gsns = subscription.gsns
        if any(a >= b for a, b in pairwise(gsns)):
            yield from _order(subscription)
        if gsns and gsns[0] < subscription.start:
            text = f"{gsns[0]} was delivered, and the subscription starts at {subscription.start}"
            yield Violation("order", text, subscription.source, gsns[0])
        if subscription.only:
            yield from _others(subscription)
        start = 0
        for stop, at, source in subscription.batches:
            yield from _sightings(
                judgement,
                zip(
                    gsns[start:stop],
                    subscription.shards[start:stop],
                    subscription.payloads[start:stop],
                    strict=True,
                ),
                at,
                source,
            )
            start = stop


def _order(subscription: Subscription) -> Iterator[Violation]:
    before = 0
    for index, gsn in enumerate(subscription.gsns):
        if gsn <= before:
            source = _batch_of(subscription, index)[1]
            yield Violation("order", f"{gsn} was delivered after {before}", source, gsn)
        before = gsn


def _others(subscription: Subscription) -> Iterator[Violation]:
    """A subscription of some shards delivers records of these shards only."""
    only = subscription.only
    for index, (gsn, shard) in enumerate(zip(subscription.gsns, subscription.shards, strict=True)):
        if shard not in only:
            text = f"{gsn}@{shard} was delivered to a subscription of the shards {sorted(only)}"
            yield Violation("shards", text, _batch_of(subscription, index)[1], gsn)


def _batch_of(subscription: Subscription, index: int) -> tuple[int, int]:
    """Return when record `index` was delivered, and the line that says so."""
    batch = bisect_right(subscription.batches, index, key=lambda batch: batch.stop)
    return subscription.batches[batch].at, subscription.batches[batch].source


def _read(judgement: Judgement) -> Iterator[Violation]:
    for reading in judgement.observed.readings:
        if not isinstance(reading.result, Failed):
            row = (reading.gsn, reading.shard, reading.result)
            yield from _sightings(judgement, [row], reading.at, reading.source)


def _sightings(
    judgement: Judgement, rows: Iterable[tuple[int, int, int]], at: int, source: int
) -> Iterator[Violation]:
    """Record observations with their times: (gsn, shard, payload)."""
    records = judgement.observed.records
    places, index_of, seen = judgement.places, records.index, judgement.seen
    called, state = records.called, records.state
    for gsn, shard, payload in rows:
        key = payload << _SHARD_BITS | shard
        if places.setdefault(gsn, key) != key:
            text = judgement.place(gsn, shard, payload)
            yield Violation("agreement", text, source, gsn, payload)
        index = index_of.get(payload)
        if index is None:
            what = f"payload {payload}, which was never inserted," if payload >= 0 else "a payload"
            damage = ", which is damaged or foreign" if payload == FOREIGN else ""
            yield Violation("phantom", f"{what} is at {gsn}@{shard}{damage}", source, gsn, payload)
            continue
        if called[index] > at:
            text = f"payload {payload} was seen at {gsn}@{shard} before it was inserted"
            yield Violation("phantom", text, source, gsn, payload)
        if judgement.may_be_lost(gsn):
            continue  # A reader may have received it before the loss, and its insert goes on.
        if seen[index] != gsn:
            if seen[index]:
                text = f"payload {payload} is at {gsn}@{shard}, and at {seen[index]}"
                yield Violation("duplicate", text, source, gsn, payload)
            seen[index] = gsn
        if state[index] == NEVER:
            text = f"payload {payload}, which certainly was not inserted, is at {gsn}@{shard}"
            yield Violation("phantom", text, source, gsn, payload)


# --- the order that inserts ask for --------------------------------------------------------------


def _calls_in_order(judgement: Judgement) -> Iterator[Violation]:
    records = judgement.observed.records
    before = first_shard = 0
    for index, gsn in enumerate(judgement.seen):
        if not records.goes_on[index]:
            before, first_shard = 0, -1
        if not gsn:
            continue
        payload, source = records.payload[index], records.source[index]
        if gsn <= records.after[index]:
            text = f"payload {payload} is at {gsn}, and had to come after {records.after[index]}"
            yield Violation("insert-after", text, source, gsn, payload)
        if gsn <= before:
            text = f"payload {payload} is at {gsn}; the one before it in its call at {before}"
            yield Violation("batch-order", text, source, gsn, payload)
        shard = judgement.places[gsn] & _SHARD_MASK
        if first_shard not in {-1, shard}:
            text = f"records of one call are at shards {first_shard} and {shard}"
            yield Violation("batch-order", text, source, gsn, payload)
        before, first_shard = gsn, shard


# --- nothing is missing --------------------------------------------------------------------------


def _acks(judgement: Judgement, only: frozenset[int] = frozenset()) -> Highest:
    """Return the acknowledgements, of all shards (`only` is empty) or of some."""
    records = judgement.observed.records
    columns = zip(records.acked, records.gsn, records.shard, strict=True)
    return Highest((at, gsn) for at, gsn, shard in columns if gsn and (not only or shard in only))


def _complete(judgement: Judgement) -> Iterator[Violation]:
    """A subscription delivers every known record that it passes."""
    acks_of: dict[frozenset[int], Highest] = {}
    for subscription in judgement.observed.subscriptions:
        gsns, only = subscription.gsns, subscription.only
        known = judgement.known
        if only:
            known = [gsn for gsn in known if judgement.places[gsn] & _SHARD_MASK in only]
        if only not in acks_of:
            acks_of[only] = _acks(judgement, only)
        if subscription.start >= 0:
            low = bisect_left(known, subscription.start)
        elif gsns:
            low = bisect_left(known, gsns[0])
        else:
            continue
        end = gsns[-1] if gsns else 0
        if subscription.ended:
            end = max(end, acks_of[only].before(subscription.called))
        expected = known[low : bisect_right(known, end)]
        if expected != gsns.tolist():
            missing = sorted(set(expected).difference(gsns))
            yield from _missing(judgement, subscription, missing)


def _missing(
    judgement: Judgement, subscription: Subscription, missing: Iterable[int]
) -> Iterator[Violation]:
    records = judgement.observed.records
    order = sorted(subscription.gsns)
    for gsn in missing:
        index = bisect_left(order, gsn)
        if index < len(order):
            passed, source = _batch_of(subscription, index)
        else:
            passed, source = subscription.at, subscription.source
        if judgement.may_be_lost(gsn):
            judgement.lost[gsn] = min(passed, judgement.lost.get(gsn, END))
            continue
        payload = judgement.payload_at(gsn)
        record = records.index.get(payload)
        is_acked = record is not None and records.state[record] == ACKED
        rule = "loss" if is_acked else "gap"
        origin = "acknowledged" if is_acked else "seen by others"
        text = f"{judgement.rid(gsn)} (payload {payload}), {origin}, was not delivered"
        yield Violation(rule, text, source, gsn, payload)


def _reads_after(judgement: Judgement) -> Iterator[Violation]:
    """A read returns a record that was known before the read started."""
    there = _there_since(judgement)
    for reading in judgement.observed.readings:
        result, gsn = reading.result, reading.gsn
        if not isinstance(result, Failed) or result.error != "NoSuchRecordError":
            continue
        if gsn not in judgement.places or there(gsn) >= reading.called:
            continue
        if judgement.places[gsn] & _SHARD_MASK != reading.shard:
            continue
        if judgement.may_be_lost(gsn):
            judgement.lost[gsn] = min(reading.at, judgement.lost.get(gsn, END))
            continue
        payload = judgement.payload_at(gsn)
        text = f"{judgement.rid(gsn)} (payload {payload}) was read as no record"
        yield Violation("loss", text, reading.source, gsn, payload)


def _there_since(judgement: Judgement) -> Callable[[int], int]:
    """Return a function from a known position to the earliest time at which a client knew it."""
    times: dict[int, int] = {}
    observed = judgement.observed
    wanted = {
        reading.gsn for reading in observed.readings if isinstance(reading.result, Failed)
    }.intersection(judgement.places)
    for gsn in wanted:
        index = observed.records.index.get(judgement.payload_at(gsn))
        times[gsn] = END if index is None else observed.records.acked[index]
    for reading in observed.readings:
        if reading.gsn in wanted and not isinstance(reading.result, Failed):
            times[reading.gsn] = min(times[reading.gsn], reading.at)
    for subscription in observed.subscriptions if wanted else ():
        for index, gsn in enumerate(subscription.gsns):
            if gsn in wanted:
                times[gsn] = min(times[gsn], _batch_of(subscription, index)[0])
    return times.__getitem__


def _lost_for_good(judgement: Judgement) -> Iterator[Violation]:
    """A record that a reader found to be lost never reappears for a later reader."""
    lost = judgement.lost
    if not lost:
        return
    for reading in judgement.observed.readings:
        if isinstance(reading.result, Failed):
            continue
        if reading.called > lost.get(reading.gsn, END):
            text = f"{judgement.rid(reading.gsn)} was lost, and was read again"
            yield Violation("loss", text, reading.source, reading.gsn, reading.result)
    for subscription in judgement.observed.subscriptions:
        for index, gsn in enumerate(subscription.gsns):
            if gsn in lost and _called(subscription, index) > lost[gsn]:
                text = f"{judgement.rid(gsn)} was lost, and was delivered again"
                payload = subscription.payloads[index]
                yield Violation("loss", text, _batch_of(subscription, index)[1], gsn, payload)


def _called(subscription: Subscription, index: int) -> int:
    """Return when the part of a subscription that delivered record `index` was called."""
    part = bisect_right(subscription.parts, index, key=lambda part: part[1])
    return subscription.parts[part - 1][0]


def _refusals(judgement: Judgement) -> Iterator[Violation]:
    """A position up to one that was acknowledged was given out: inserts may name it."""
    acks = _acks(judgement)
    for refusal in judgement.observed.refusals:
        highest = acks.before(refusal.called)
        if refusal.after <= highest:
            text = f"no record was taken after {refusal.after}, and {highest} was acknowledged"
            yield Violation("refusal", text, refusal.source, refusal.after)


# --- tails, syncs, trims -------------------------------------------------------------------------


def _tails(judgement: Judgement) -> Iterator[Violation]:
    acks = _acks(judgement)
    for tail in judgement.observed.tails:
        highest = acks.before(tail.called)
        trims = judgement.observed.trims
        trimmed = max((t.gsn for t in trims if t.called <= tail.at), default=0)
        if tail.gsn < highest and highest >= trimmed and not judgement.may_be_lost(highest):
            text = f"the tail is {tail.gsn}, and {judgement.rid(highest)} was acknowledged before"
            yield Violation("tail", text, tail.source, highest)


def _syncs(judgement: Judgement) -> Iterator[Violation]:
    """`sync` returns a position at or after all completed inserts of this client.

    A client that has reported a loss does not count the records of that view (`_is_forgotten`).
    """
    observed = judgement.observed
    records = observed.records
    rows = sorted(
        (observed.process_of(source), acked, gsn)
        for source, acked, gsn in zip(records.source, records.acked, records.gsn, strict=True)
        if gsn and observed.syncs
    )
    highest = list(accumulate(rows, lambda a, b: b if a[0] != b[0] else (*b[:2], max(a[2], b[2]))))
    for sync in observed.syncs:
        index = bisect_left(rows, (sync.process, sync.called))
        if not index or highest[index - 1][0] != sync.process or highest[index - 1][2] <= sync.gsn:
            continue
        above = (row for row in rows[:index] if row[0] == sync.process and row[2] > sync.gsn)
        counted = [gsn for _, acked, gsn in above if not _is_forgotten(judgement, gsn, acked, sync)]
        if counted:
            gsn = max(counted)
            text = f"sync returned {sync.gsn}, and {judgement.rid(gsn)} was completed before"
            yield Violation("sync", text, sync.source, gsn)
    yield from _synced_and_lost(judgement)


def _synced_and_lost(judgement: Judgement) -> Iterator[Violation]:
    """Records that a `sync` covers are on stable storage: they are never lost.

    A sync that reports a loss of its shard ends the coverage of later ones. Trimmed records are
    not covered.
    """
    observed = judgement.observed
    records = observed.records
    for gsn in sorted(judgement.lost):
        payload = judgement.payload_at(gsn)
        index = records.index.get(payload)
        if index is None:
            continue
        process, acked = observed.process_of(records.source[index]), records.acked[index]
        covering = (s for s in observed.syncs if s.process == process and s.called > acked)
        sync = next(covering, None)
        if sync is None or any(t.gsn > gsn and t.called <= sync.at for t in observed.trims):
            continue
        if not _is_loss_reported(judgement, gsn, process, acked, sync.called):
            text = f"{judgement.rid(gsn)} (payload {payload}) is lost, and a sync covered it"
            yield Violation("sync", text, sync.source, gsn, payload)


def _is_forgotten(judgement: Judgement, gsn: int, acked: int, sync: TailBound) -> bool:
    """Whether an earlier `sync` reported this record, or a later one of its shard, as lost."""
    shard = judgement.places[gsn] & _SHARD_MASK
    return any(
        report.process == sync.process
        and acked < report.at <= sync.called
        and gsn <= report.gsn
        and judgement.places.get(report.gsn, 0) & _SHARD_MASK == shard
        and judgement.may_be_lost(report.gsn)
        for report in judgement.observed.reported_losses
    )


def _is_loss_reported(judgement: Judgement, gsn: int, process: int, since: int, until: int) -> bool:
    """Whether a `sync` of a process, called until then, raised a loss of the shard since.

    It may have been called before: it also reports records that returned while it waited.
    """
    shard = judgement.places[gsn] & _SHARD_MASK
    return any(
        sync.process == process
        and since < sync.at
        and sync.called <= until
        and judgement.places.get(sync.gsn, 0) & _SHARD_MASK == shard
        for sync in judgement.observed.reported_losses
    )


def _trims(judgement: Judgement) -> Iterator[Violation]:
    observed = judgement.observed
    for reading in observed.readings:
        yield from _trimmed_read(judgement, reading)
    for subscription in observed.subscriptions:
        failed = subscription.failed
        if failed is not None and failed.error == "TrimmedError":
            highest = max((t.gsn for t in observed.trims if t.called <= failed.at), default=0)
            if failed.first > highest:
                text = f"trimmed up to {failed.first}, but no client trimmed above {highest}"
                yield Violation("trim", text, subscription.source, failed.first)
            passed = max([subscription.start, *subscription.gsns[-1:]])
            if failed.first <= passed:
                text = f"trimmed up to {failed.first}, and the subscription was at {passed} already"
                yield Violation("trim", text, subscription.source, failed.first)
        before = max((t.gsn for t in observed.trims if t.at < subscription.parts[0][0]), default=0)
        # There is no position 0: a start at 0 means 1.
        if subscription.start >= 0 and max(subscription.start, 1) < before and subscription.gsns:
            text = f"a subscription from {subscription.start} delivered; {before} was trimmed"
            yield Violation("trim", text, subscription.source, subscription.gsns[0])


def _trimmed_read(judgement: Judgement, reading: Reading) -> Iterator[Violation]:
    trims, gsn = judgement.observed.trims, reading.gsn
    if not isinstance(reading.result, Failed):
        if any(t.at < reading.called and gsn < t.gsn for t in trims):
            text = f"{judgement.rid(gsn)} was trimmed, and was read after that"
            yield Violation("trim", text, reading.source, gsn)
    elif reading.result.error == "TrimmedError" and not any(
        t.called <= reading.at and gsn < t.gsn for t in trims
    ):
        text = f"{gsn}@{reading.shard} was read as trimmed, but no client trimmed it"
        yield Violation("trim", text, reading.source, gsn)


# --- shards that leave ---------------------------------------------------------------------------


def _left(judgement: Judgement) -> Iterator[Violation]:
    """No record is at a shard that had left before its insert was called."""
    records, left = judgement.observed.records, judgement.observed.left
    for index, gsn in enumerate(judgement.seen if left else ()):
        if not gsn:
            continue
        shard = judgement.places[gsn] & _SHARD_MASK
        if records.called[index] > left.get(shard, END):
            payload, source = records.payload[index], records.source[index]
            text = f"payload {payload} is at {judgement.rid(gsn)}, and the shard had left before"
            yield Violation("left", text, source, gsn, payload)
