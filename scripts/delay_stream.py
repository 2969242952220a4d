"""Streaming query of the pipeline: sums over all events, until the current end of the log.

    python scripts/delay_stream.py BOOTSTRAP DIRECTORY --batch-bytes 16m

`scripts/pipeline.py` runs it, kills it, and runs it again: the checkpoint is in the directory.
After each micro-batch it writes its answer there, as `answer-N.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from metrics.spark import session
from spark_pipeline.live import follow


def main() -> None:
    """Follow the log to its present end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--batch-bytes", default="16m", help="approximate size of a micro-batch")
    arguments = parser.parse_args()
    with session("delays", cores=2) as spark:
        follow(spark, arguments.bootstrap, arguments.directory, arguments.batch_bytes)


if __name__ == "__main__":
    main()
