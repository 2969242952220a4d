"""Measuring process of `ziplog bench kv`: reads and writes random keys, one after the other."""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

import logdb
from ziplog.bench.measured import Histogram, Measured
from ziplog.core.units import NS_PER_S
from ziplog.errors import ZiplogError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: All keys of the benchmark begin with it.
PREFIX: Final = "ziplog-bench/"


def measure(db: logdb.Database, size: int, seconds: float, keys: int) -> list[Measured]:
    """Read and write random keys, as often the one as the other, and measure each call."""
    value, chance = secrets.token_bytes(size), random.Random()  # noqa: S311 - no secret
    histograms = {"get": Histogram(), "put": Histogram()}
    db.put(f"{PREFIX}0", value)
    began = now = time.monotonic_ns()
    while now < began + seconds * NS_PER_S:
        key = f"{PREFIX}{chance.randrange(keys)}"
        operation = chance.choice(("get", "put"))
        if operation == "get":
            db.get(key)
        else:
            db.put(key, value)
        then, now = now, time.monotonic_ns()
        histograms[operation].record(now - then)
    return [
        Measured(
            operation, one.counts.total(), (now - began) / NS_PER_S, 0.0, dict(one.counts)
        )
        for operation, one in histograms.items()
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the arguments say, and print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--keys", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        with logdb.connect(options.coordinator, timeout=options.timeout) as db:
            found = measure(db, options.size, options.seconds, options.keys)
    except ZiplogError as error:
        sys.exit(f"{error}")
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
