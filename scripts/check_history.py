"""Check what clients saw of a log, and of transactions kept in it.

    python scripts/check_history.py DIRECTORY [FILE ...]

Reads history files (docs/history.md), and prints one line for each violation of a rule, with the
operation, the file and the line, then the other lines that speak of the same record, then a
summary. Exit codes: 0 no rule is broken, 1 one is, 2 bad usage or a file that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from history import events
from history.events import HistoryError
from history.observed import ACKED, NEVER, Observed, gather
from history.rules import Judgement, check
from history.transactions import COMMITTED, IN_DOUBT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from history.observed import Violation

#: Violations of one rule that are printed; the others are counted.
_PRINTED: Final = 20
#: Records of which all lines are looked up, and how many of each.
_TRACED, _LINES = 10, 6
_TEXT: Final = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the histories that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(description="Check what clients saw of a log.")
    parser.add_argument("paths", nargs="+", type=Path, help="directories or files of histories")
    parser.add_argument(
        "--allow-loss",
        action="store_true",
        help="positions that the cluster reported as lost may be missing",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        observed = gather(events.files_of(options.paths))
    except HistoryError as error:
        print(f"check_history: {error}", file=sys.stderr)
        return 2
    judgement = check(observed, allow_loss=options.allow_loss)
    figures = summary(judgement) | {"seconds": round(time.monotonic() - began, 2)}
    if options.json:
        print(json.dumps(figures | {"violations": list(map(_row(observed), judgement.violations))}))
    else:
        _print(judgement, figures)
    return 1 if judgement.violations else 0


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


def _row(observed: Observed) -> Any:
    def row(violation: Violation) -> dict[str, Any]:
        return violation._asdict() | {"source": observed.where(violation.source)}

    return row


def _print(judgement: Judgement, figures: dict[str, Any]) -> None:
    observed = judgement.observed
    printed: Counter[str] = Counter()
    for violation in judgement.violations:
        printed[violation.rule] += 1
        if printed[violation.rule] <= _PRINTED:
            where = observed.where(violation.source)
            print(f"VIOLATION {violation.rule}: {violation.text} [{where}]")
    for rule, count in printed.items():
        if count > _PRINTED:
            print(f"... and {count - _PRINTED} more of {rule}")
    for line in traces(observed, judgement.violations):
        print(line)
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items()))
    print("VIOLATED: " + ", ".join(printed) if printed else "clean: no rule is broken")


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


if __name__ == "__main__":
    sys.exit(main())
