"""A log in memory for the command line, and the command line's output."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

import ziplog
from ziplog.cli import app
from ziplog.client.bulk.extents import Extent
from ziplog.client.bulk.outline import ShardOutline
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.config_text import dump
from ziplog.core.entries import Unit
from ziplog.errors import ConfigError, NoSuchRecordError, TrimmedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

    from typer.testing import Result

    from ziplog.types import Event
STATUS = {
    "cluster": "demo",
    "durability": "memory",
    "epoch": 812,
    "finalized_epoch": 808,
    "trimmed_before": "0@0",
    "mms": [
        {
            "name": "mms-0",
            "endpoint": "127.0.0.1:7400",
            "pid": 4194304,
            "leader": True,
            "state": "up",
        },
    ],
    "failure_handlers": [
        {"name": "fh-0", "endpoint": "127.0.0.1:5", "pid": 5, "leader": True, "state": "up"},
        {"name": "fh-1", "endpoint": "127.0.0.1:6", "pid": 6, "leader": False, "state": "down"},
    ],
    "losses": [],
    "shards": [
        {
            "id": 0,
            "view": 1,
            "state": "live",
            "rate_per_s": 1200,
            "stable_gsn": 3487,
            "durable_gsn": 3100,
            "replicas": [
                {
                    "name": "shard-0-0",
                    "endpoint": "127.0.0.1:2",
                    "role": "primary",
                    "pid": 3,
                    "state": "up",
                }
            ],
        }
    ],
}


class FakeSubscription(list[ziplog.Record]):
    """Records, all in one fetch."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def fetch(self, *, timeout: float | None = None) -> list[ziplog.Record]:
        del timeout
        fetched = list(self)
        self.clear()
        return fetched


class FakeExtents:
    """Epochs of 100 positions."""

    def __init__(self, trim: int) -> None:
        self.trim = trim
        self.shards: list[Extent] = []

    def epoch_at(self, gsn: int) -> int:
        return gsn // 100

    def epoch_start(self, epoch: int) -> int:
        if epoch > 99:
            raise ConfigError("epoch", epoch, "an epoch of the leases known here, 0 to 99")
        return 1 + 100 * epoch


class FakeSpeculation:
    """Events, one in each fetch."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = list(events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def fetch(self) -> list[Event]:
        fetched, self.events = self.events[:1], self.events[1:]
        return fetched


class FakeLog:
    """A log in a list; record i has gsn i + 1 and shard 0."""

    def __init__(self) -> None:
        self.trimmed_to = 0
        self.slow = 0
        #: Returns the error of an append at these rids.
        self.append_error: Callable[[list[ziplog.RecordId]], Exception] | None = None
        self.records: list[ziplog.Record] = []
        self.calls: list[tuple[Any, ...]] = []
        #: The events of speculations.
        self.speculated: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def insert_after(
        self, payload: bytes, after: ziplog.RecordId, *, key: bytes | str | None = None
    ) -> ziplog.RecordId:
        return self.insert_many([payload], after, key=key)[0]

    def insert_many(
        self,
        payloads: Sequence[bytes],
        after: ziplog.RecordId,
        *,
        key: bytes | str | None = None,
        shard: int | None = None,
        **_: Any,
    ) -> list[ziplog.RecordId]:
        self.calls.append(("insert", list(payloads), after))
        first = len(self.records)
        for payload in payloads:
            rid = ziplog.RecordId(len(self.records) + 1, shard or 0)
            encoded = key.encode() if isinstance(key, str) else key
            self.records.append(ziplog.Record(rid, payload, encoded, 1_700_000_000_000_000, 7))
        return [record.rid for record in self.records[first:]]

    def append_many(
        self, payloads: Sequence[bytes], after: ziplog.RecordId, **options: Any
    ) -> list[ziplog.RecordId]:
        rids = self.insert_many(payloads, after, **options)
        self.calls[-1] = ("append", *self.calls[-1][1:])
        error = self.append_error(rids) if self.append_error is not None else None
        if error is not None:
            raise error
        return rids

    def read_record(self, rid: ziplog.RecordId) -> ziplog.Record:
        for record in self.records:
            if record.rid == rid:
                return record
        raise NoSuchRecordError(rid, "nothing was inserted there")

    def subscribe(
        self,
        start: ziplog.RecordId,
        *,
        follow: bool,
        shards: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> FakeSubscription:
        self.calls.append(("subscribe", start, follow, timeout))
        if 0 <= start.gsn < self.trimmed_to:
            raise TrimmedError(ziplog.RecordId(self.trimmed_to, 0))
        return FakeSubscription(
            record
            for record in self.records
            if record.rid.gsn >= start.gsn and (shards is None or record.rid.shard in shards)
        )

    def speculate(
        self, start: ziplog.RecordId, *, shards: Sequence[int] | None = None
    ) -> FakeSpeculation:
        self.calls.append(("speculate", start, shards))
        if 0 <= start.gsn < self.trimmed_to:
            raise TrimmedError(ziplog.RecordId(self.trimmed_to, 0))
        return FakeSpeculation(self.speculated)

    def check_tail(self) -> ziplog.RecordId:
        return self.records[-1].rid if self.records else ziplog.RID_GENESIS

    def extents(self, start: int, stop: int | None = None) -> FakeExtents:
        extents = FakeExtents(self.trimmed_to)
        if stop is not None:
            low, size = max(start, extents.trim), stop - max(start, extents.trim)
            extents.shards = [Extent(0, low, low + size // 2), Extent(0, low + size // 2, stop)]
        return extents

    def outline(self, shard: int, start: int, stop: int) -> ShardOutline:
        """Return steps of 10 positions, of 1,000 bytes each."""
        steps = [(min(end + 10, stop), 1000) for end in range(start, stop, 10)]
        return ShardOutline(shard, self.trimmed_to, steps, [], segments=stop // 25)

    def scan(self, shard: int, start: int, stop: int) -> contextlib.nullcontext[Any]:
        del shard
        gsns = [record.rid.gsn for record in self.records if start - 1 <= record.rid.gsn <= stop]
        # The first and the last unit of a scan may exceed its range.
        return contextlib.nullcontext([([Unit(0, [gsn], b"") for gsn in gsns], stop)])

    def stats(self) -> dict[str, int]:
        inserts = sum(call[0] in {"insert", "append"} for call in self.calls)
        return {"fast_path": inserts, "slow_path": self.slow}

    def trim(self, rid: ziplog.RecordId, *, force: bool = False) -> None:
        self.calls.append(("trim", rid, "force") if force else ("trim", rid))

    def add_shard(
        self, shard: int, replicas: dict[str, str], *, regions: dict[str, str], timeout: float
    ) -> None:
        self.calls.append(("add", shard, replicas, regions, timeout))

    def remove_shard(self, shard: int, *, timeout: float) -> None:
        self.calls.append(("remove", shard, timeout))

    def finalize_shard(self, shard: int, *, timeout: float) -> None:
        self.calls.append(("finalize", shard, timeout))

    def finish_upgrade(self, wire: int) -> int:
        self.calls.append(("finish upgrade", wire))
        return wire

    def lose_region(self, name: str) -> None:
        self.calls.append(("lose region", name))

    def restore_region(self, name: str) -> None:
        self.calls.append(("restore region", name))

    def cluster(self, **_: float) -> dict[str, Any]:
        return STATUS


def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Result:
    return CliRunner(env=env).invoke(app, list(arguments), input=stdin, prog_name="ziplog")


def shard(number: int, **fields: Any) -> dict[str, Any]:
    replicas = [
        {
            "name": f"shard-{number}-{index}",
            "endpoint": f"127.0.0.1:{31990 + 2 * number + index}",
            "role": ("primary", "backup")[index],
            "pid": 4194300 + index,
            "state": "suspect",
        }
        for index in range(2)
    ]
    return {
        "id": number, "view": 12, "state": "recovering", "rate_per_s": 123456, "weight": 256,
        "frontier": 10**15, "epoch": 98765432, "holes": 12345678, "is_watched": True,
        "blocks": [], "stable_gsn": 10**15, "durable_gsn": 10**15, "replicas": replicas, **fields,
    }  # fmt: skip


def cluster_file(directory: Path, port: int, **changes: Any) -> Path:
    """Return the cluster file of STATUS, with a shard 0 and a shard 1 that listens at `port`."""
    values: dict[str, Any] = {
        "name": "demo",
        "data_dir": directory,
        "f": 0,
        "mms": (NodeConfig("mms-0", "127.0.0.1", 7400, 7401),),
        "shards": (
            ShardConfig(0, (NodeConfig("shard-0-0", "127.0.0.1", 2),)),
            ShardConfig(1, (NodeConfig("other", "127.0.0.1", port),)),
        ),
    }
    path = directory / "cluster.toml"
    path.write_text(dump(ClusterConfig(**{**values, **changes})))
    return path
