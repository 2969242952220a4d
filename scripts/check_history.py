"""Check what clients saw of a log, and of transactions kept in it.

    python scripts/check_history.py DIRECTORY [FILE ...]

Reads history files (docs/history.md), and prints one line for each violation of a rule, with the
operation, the file and the line, then the other lines that speak of the same record, then a
summary. Exit codes: 0 no rule is broken, 1 one is, 2 bad usage, a file that cannot be read, or no
operation at all: such a history shows nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.history import events, report
from tests.history.events import HistoryError
from tests.history.observed import gather
from tests.history.rules import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.history.observed import Observed
    from tests.history.rules import Judgement
    from tests.history.violation import Violation


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
    if not observed.operations:
        print("check_history: no operation in this history", file=sys.stderr)
        return 2
    judgement = check(observed, allow_loss=options.allow_loss)
    figures = report.summary(judgement) | {"seconds": round(time.monotonic() - began, 2)}
    if options.json:
        print(json.dumps(figures | {"violations": list(map(_row(observed), judgement.violations))}))
    else:
        _print(judgement, figures)
    return 1 if judgement.violations else 0


def _row(observed: Observed) -> Any:
    def row(violation: Violation) -> dict[str, Any]:
        return violation._asdict() | {"source": observed.where(violation.source)}

    return row


def _print(judgement: Judgement, figures: dict[str, Any]) -> None:
    for line in report.violation_lines(judgement):
        print(line)
    for line in report.traces(judgement.observed, judgement.violations):
        print(line)
    print(report.figures_line(figures))
    rules = dict.fromkeys(violation.rule for violation in judgement.violations)
    print("VIOLATED: " + ", ".join(rules) if rules else "clean: no rule is broken")


if __name__ == "__main__":
    sys.exit(main())
