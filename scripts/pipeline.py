"""A million flight events through the log into Spark, and every answer checked without both.

    python scripts/pipeline.py                    all 1,000,898 events
    python scripts/pipeline.py --events 20000     a short one

Starts a cluster on this machine, inserts the feed, asks Spark, and compares each answer with plain
Python's, made of the file of flights alone. Then a stream keeps sums; it is killed in the middle of
a micro-batch and started again. Prints tables, and "equal" or how they differ (and exits 1).
`--json FILE` and `--picture FILE` keep figures and draw them. See docs/pipeline.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from spark_pipeline import report
from spark_pipeline.run import Plan, run

from ziplog.demo.flights import ALL_EVENTS
from ziplog.errors import ZiplogError


def main() -> None:
    """Run the pipeline and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=ALL_EVENTS, help=f"1,000 to {ALL_EVENTS:,}")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--f", type=int, default=1, help="servers of a shard that may fail")
    parser.add_argument("--clients", type=int, default=2, help="processes that insert")
    parser.add_argument("--cores", type=int, default=2, help="of Spark")
    parser.add_argument("--held-back", type=int, default=1000, help="delay one event in N; 0: none")
    parser.add_argument("--seed", type=int, default=1, help="of what is held back")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw the figures here (with matplotlib)")
    arguments = parser.parse_args()
    if not 1000 <= arguments.events <= ALL_EVENTS:
        parser.error(f"--events must be 1,000 to {ALL_EVENTS}")
    plan = Plan(**{name: getattr(arguments, name) for name in Plan._fields})
    try:
        with tempfile.TemporaryDirectory(prefix="ziplog-pipeline-") as folder:
            outcome = run(Path(folder), plan)
    except ZiplogError as error:
        sys.exit(f"pipeline: {error}")
    for line in report.lines(outcome):
        print(line)
    if arguments.json:
        arguments.json.write_text(report.as_json(outcome))
    if arguments.picture:
        report.draw(outcome, arguments.picture)
    if not outcome.is_equal:
        sys.exit(1)


if __name__ == "__main__":
    main()
