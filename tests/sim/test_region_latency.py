"""Deliveries over regions; and rules whose breach costs time only, each with a clean run."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

import pytest

import mms.leases
import mms.stragglers
from shard.state.round_trips import RoundTrips
from tests.sim.region_latency import Crossing, Way, cross
from tests.simulator.kernel import MS
from ziplog.wire import Echo, decode

if TYPE_CHECKING:
    from tests.sim.cluster import SimCluster

#: One way, in ms: A-B, A-C, B-C. An epoch has 10 ms.
_WAYS: Final = (20, 60, 40)
_EPOCH: Final = 10
#: For a record of shard AB, the time until each region has the epochs of all shards, in ms: the
#: record reaches its backup, as the epochs of BC and CA reach theirs, and the farthest of these the
#: region. Without head starts: the decision of BC or CA reaches its backup, and then that one's
#: entry the region.
_SCHEDULE: Final = (20 + 60, 20 + 40, 20 + 60)
_WITHOUT_HEAD_START: Final = (40 + 60, 40 + 40, 60 + 60)


def crossing(count: int = 30, way: Way | None = None, **options: object) -> Crossing:
    delays_us = tuple(one * 1000 for one in _WAYS)
    return cross(delays_us, way or Way(), count=count, **options)  # type: ignore[arg-type]


def delays_ms(load: Crossing) -> list[float]:
    """Return the median delay of a delivery in each region."""
    return [
        median(delivered[gsn] - called for gsn, called in load.called.items()) / MS
        for delivered in load.delivered
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("has_head_start", "schedule"), [(True, _SCHEDULE), (False, _WITHOUT_HEAD_START)]
)
def test_a_delivery_takes_an_epoch_and_the_ways_of_the_shards(
    has_head_start: bool, schedule: tuple[int, ...]
) -> None:
    load = crossing(way=Way(has_head_start=has_head_start))
    assert 40 <= median(load.inserted.values()) / MS <= 41
    for found, ways in zip(delays_ms(load), schedule, strict=True):
        assert ways - _EPOCH <= found <= ways + _EPOCH
    assert not load.parked
    assert not load.without_lease


@pytest.mark.timeout(300)
def test_leases_that_begin_when_their_announcement_comes_make_readers_wait() -> None:
    assert delays_ms(crossing(way=Way(is_aligned=False)))[0] > _SCHEDULE[0] + _EPOCH


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_stragglers_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lag of 100 ms counts as late, whatever the round trip: shards are parked."""
    monkeypatch.setattr(mms.stragglers, "late_ns", lambda _rtt_ms: 100 * MS)
    assert crossing(count=60).parked


@pytest.mark.timeout(300)
def test_leases_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of 160 ms end before the next announcement comes."""
    far = (110_000, 110_000, 110_000)
    assert not cross(far, Way(), count=20).without_lease
    monkeypatch.setattr(mms.leases, "min_lease_ms", lambda _rtt_ms: 160)
    assert cross(far, Way(), count=20).without_lease


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_old_taken", [False, True])
def test_echo_of_another(monkeypatch: pytest.MonkeyPatch, is_old_taken: bool) -> None:
    """The echoes for the shard of the records are held for 400 ms; half of that is no way.

    Its epochs are 200 ms ahead then, and the other shards wait for its hints.
    """

    def hold(cluster: SimCluster) -> None:
        def delay(_src: str, dst: str, frame: bytes) -> int | None:
            is_held = dst.startswith("shard-0") and type(decode(frame)) is Echo
            return 400 * MS if is_held else None

        cluster.network.on_carry = delay

    def take(self: RoundTrips, node: bytes, sent_us: int, now: int) -> None:
        self._longest_ns = 2**62  # type: ignore[misc]
        on_echo(self, node, sent_us, now)

    on_echo = RoundTrips.on_echo
    if is_old_taken:
        monkeypatch.setattr(RoundTrips, "on_echo", take)
    found = delays_ms(crossing(prepare=hold))[0]
    assert (found > _SCHEDULE[0] + _EPOCH) == is_old_taken
