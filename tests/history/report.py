"""Report on a checked history: its figures, its violations, and the lines that they are about."""

from __future__ import annotations

import resource
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from tests.history import events
from tests.history.observed import ACKED, NEVER
from tests.history.transactions import COMMITTED, IN_DOUBT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.history.observed import Observed
    from tests.history.rules import Judgement
    from tests.history.violation import Violation

#: Violations of one rule that are reported; the others are counted.
_REPORTED: Final = 20
#: Records of which all lines are looked up, and how many of each.
_TRACED, _LINES = 10, 6
_TEXT: Final = 150


def summary(judgement: Judgement) -> dict[str, Any]:
    """Return the numbers of checked operations."""
    observed = judgement.observed
    states = Counter(observed.records.state)
    delivered: set[int] = set()
    for subscription in observed.subscriptions:
        delivered.update(subscription.gsns)
    acked = {gsn for gsn in observed.records.gsn if gsn}
    return {
        "files": len(observed.files),
        "operations": observed.operations,
        "records": len(observed.records),
        "acknowledged": states[ACKED],
        "certainly_not_inserted": states[NEVER],
        "unknown": len(observed.records) - states[ACKED] - states[NEVER],
        "unknown_but_seen": len(judgement.places) - len(acked & judgement.places.keys()),
        "delivered": sum(len(s.gsns) for s in observed.subscriptions),
        "subscriptions": len(observed.subscriptions),
        "never_delivered": len(acked - delivered),
        "lost_as_reported": len(judgement.lost),
        **_of_transactions(observed),
        "broken": len(judgement.violations),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _of_transactions(observed: Observed) -> dict[str, int]:
    transactions = observed.transactions.all
    if not transactions:
        return {}
    in_doubt = [one for one in transactions if one.state == IN_DOUBT]
    return {
        "transactions": len(transactions),
        "committed": sum(one.state == COMMITTED for one in transactions),
        "in_doubt": len(in_doubt),
        "in_doubt_but_seen": sum(one.is_proven for one in in_doubt),
    }


def figures_line(figures: dict[str, Any]) -> str:
    """Return figures as one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())


def violation_lines(judgement: Judgement) -> Iterator[str]:
    """Yield a line for each violation; of a rule that is broken often, the first ones."""
    observed = judgement.observed
    found: Counter[str] = Counter()
    for violation in judgement.violations:
        found[violation.rule] += 1
        if found[violation.rule] <= _REPORTED:
            where = observed.where(violation.source)
            yield f"VIOLATION {violation.rule}: {violation.text} [{where}]"
    for rule, count in found.items():
        if count > _REPORTED:
            yield f"... and {count - _REPORTED} more of {rule}"


def traces(observed: Observed, violations: Sequence[Violation]) -> list[str]:
    """Return the lines of the history that speak of the records of the first violations."""
    subjects = {(v.gsn, v.payload) for v in violations[: 3 * _TRACED] if v.gsn or v.payload}
    wanted = sorted(subjects)[:_TRACED]
    found: dict[tuple[int, int], list[str]] = {subject: [] for subject in wanted}
    for path in observed.files if wanted else ():
        for number, event in events.read(path):
            for subject in wanted:
                if _mentions(event, *subject) and len(found[subject]) < _LINES:
                    found[subject].append(f"    {path.name}:{number} {_brief(event, *subject)}")
    lines = []
    for (gsn, payload), rows in found.items():
        lines += [f"  lines about position {gsn}, payload {payload}:", *rows]
    return lines


def _mentions(event: events.Event, gsn: int, payload: int) -> bool:
    of_gsn = gsn != 0 and (gsn in getattr(event, "gsns", ()) or gsn == getattr(event, "gsn", 0))
    return of_gsn or (payload != 0 and payload in getattr(event, "payloads", ()))


def _brief(event: events.Event, gsn: int, payload: int) -> str:
    """Return an event as one line; of a delivery only the record that matters."""
    if not isinstance(event, events.Delivered):
        return str(event)[:_TEXT]
    rows = list(zip(event.gsns, event.shards, event.payloads, strict=True))
    index = next(i for i, row in enumerate(rows) if gsn == row[0] or payload == row[2])
    near = ", ".join(f"{g}@{s}={p}" for g, s, p in rows[max(0, index - 1) : index + 2])
    return f"Delivered(op={event.op}, at={event.at}, ... {near} ...)"
