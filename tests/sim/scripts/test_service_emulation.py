"""The cost of many shards: that it is measured, not how much it is on this machine."""

from metrics.service_emulation import measure


def test_every_server_is_served() -> None:
    found = measure(shards=20, seconds=2.0)
    assert found["heartbeats"] in {79, 80}  # one more or less at the end
    assert 12 <= found["leases"] <= 15
    assert found["commands"] <= 20
    assert found["wire_bytes"] > found["encoded_bytes"] > 0
    assert found["sends"] >= 40 * 12
    assert found["cpu_s"] > 0
    assert found["cpu_share"] == found["cpu_s"] / 2.0
