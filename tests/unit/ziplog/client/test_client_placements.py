"""When a client requests the placements (docs/protocol.md, section 4.1)."""

from __future__ import annotations

import pytest

from tests.unit.ziplog.client.fakes import MS, ClientHarness, S, connected, info, placement, sent
from ziplog import wire
from ziplog.core.distance import initial_retransmit_ns


def test_silent_shard_makes_the_client_refresh_the_placements() -> None:
    harness = connected()
    harness.insert(b"x")
    sent(harness)
    harness.pass_time(initial_retransmit_ns(0) + MS)
    assert harness.take(wire.Hello), "silence refreshes the placements at once"


def hellos_within(harness: ClientHarness, seconds: int, latency: int, limits: wire.Limits) -> int:
    """Return how often the client requests the placements, with replies after `latency`."""
    end, count = harness.now + seconds * S, 0
    while harness.now < end:
        harness.pass_time(10 * MS)
        if asked := harness.take(wire.Hello):
            count += 1
            harness.pass_time(latency)
            harness.give(info(asked[-1][1].request, [placement(0)], [], limits))
    return count


@pytest.mark.parametrize(
    ("latency", "rtt_ms", "count"),
    [(0, 0, 12), (120 * MS, 120, 8), (100 * MS, 0, 2)],
    ids=["near", "far", "slow service"],
)
def test_placements_are_requested_often_while_a_shard_is_silent(
    latency: int, rtt_ms: int, count: int
) -> None:
    """The time of a round trip is no sign of a busy service."""
    limits = wire.Limits(rtt_ms=rtt_ms)
    harness = ClientHarness()
    harness.connect(placement(0), limits=limits)
    harness.insert(b"x", timeout=60 * S)
    harness.pass_time(initial_retransmit_ns(rtt_ms) + MS)
    hellos_within(harness, 1, latency, limits)
    assert hellos_within(harness, 3, latency, limits) == pytest.approx(count, abs=1)
