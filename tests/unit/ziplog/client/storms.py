"""Many inserts over a faulty network while shards join and leave: each is logged at most once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tests.unit.ziplog.client.fakes import MS, ClientHarness, FakeCluster, S, pinned, resolve
from ziplog.client.inserts.insert_calls import UNIT_RECORDS
from ziplog.errors import OutcomeUnknownError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.types import RecordId

Kind = TypeVar("Kind", bound=FakeCluster)


def by_length(payload: bytes, _key: bytes | None, live: Sequence[int]) -> int:
    return live[len(payload) % len(live)]


def in_a_storm(kind: type[Kind], seed: int, loss: float, repetition: float, *, pin: bool) -> Kind:
    """Return a cluster with a client, and a network that loses and duplicates from now on."""
    harness = ClientHarness(pinned if pin else by_length)
    cluster = kind(harness, seed)
    harness.connect(*cluster.placements())
    cluster.loss, cluster.repetition = loss, repetition
    return cluster


def insert_all(
    cluster: FakeCluster,
    timeout: int,
    is_plausible: Callable[[UnavailableError], bool] = lambda _: True,
) -> None:
    """Insert 40 times, a third of them within a second; the log holds each accepted record once."""
    harness = cluster.harness
    calls: dict[int, list[bytes]] = {}
    for number in range(40):
        count = 1 if number % 4 else UNIT_RECORDS + 1
        size = 1 + number % cluster.shards
        records = [b"%d-%d" % (number, part) * size for part in range(count)]
        calls[harness.insert(*records, timeout=timeout if number % 3 else 1 * S)] = records
        end = harness.now + 10 * MS
        cluster.later(10, lambda: None)
        cluster.run(lambda: harness.now >= end)  # noqa: B023 - run at once
    expected: dict[RecordId, bytes] = {}
    for call, records in calls.items():
        rids: Any = cluster.result(call)
        if isinstance(rids, OutcomeUnknownError):
            rids = cluster.result(resolve(harness, rids, 600 * S))
        elif isinstance(rids, UnavailableError):
            assert is_plausible(rids), rids
            rids = rids.results
        assert [rid for rid in rids if rid] == sorted(rid for rid in rids if rid)
        expected |= {rid: one for rid, one in zip(rids, records, strict=False) if rid}
    cluster.run(lambda: not shards_in_flight(harness))
    assert cluster.log == sorted((rid.gsn, payload) for rid, payload in expected.items())


def shards_in_flight(harness: ClientHarness) -> list[int]:
    """Return the shards with units in flight."""
    return [shard for shard, window in harness.core._inserts.windows.items() if window.inflight]
