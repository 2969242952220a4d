"""The command of each application: a local log, a writer, and the application on it."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

from speculation.application import END, WAYS
from ziplog import RID_GENESIS
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import ziplog
    from speculation.application import Application
    from ziplog import Record


def main(
    doc: str | None,
    application: Callable[[], Application],
    records: Callable[[int, int], Iterator[tuple[bytes, int | None]]],
) -> None:
    """Run an application on `--records` records, and print its output."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("way", nargs="?", choices=WAYS, default="speculate")
    parser.add_argument("--records", type=int, default=5000)
    options = parser.parse_args()
    made = application()
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(directory, shards=2, durability="disk") as cluster,
        cluster.connect() as writer,
        cluster.connect() as reader,
    ):
        given = records(options.records, 1)
        feeding = threading.Thread(target=feed, args=(writer, given, (0, 1)))
        feeding.start()
        WAYS[options.way](reader, made, RID_GENESIS, is_end)
        feeding.join()
        withdrawn = reader.stats()["withdrawn"]
    sys.stdout.writelines(f"{line}\n" for line in made.outputs)
    sys.stderr.write(
        f"{len(made.outputs)} of {options.records} records had output;"
        f" {withdrawn} were withdrawn and computed anew\n"
    )


def feed(
    log: ziplog.Log, records: Iterable[tuple[bytes, int | None]], shards: tuple[int, ...]
) -> None:
    """Insert records one after the other, each at the shard of its key, and an end after them."""
    last = RID_GENESIS
    for payload, key in records:
        shard = None if key is None else shards[key % len(shards)]
        last = log.insert_after(payload, last, shard=shard)
    log.insert_after(END, last)


def is_end(record: Record) -> bool:
    """Whether a record is the last one."""
    return record.payload == END
